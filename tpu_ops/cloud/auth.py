"""Credentials for the Cloud TPU API. Their three kinds have the same names as in Ansible's google.cloud collection."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from tpu_ops.errors import CloudError

#: Values of `Auth.kind`; the first value is the default.
KINDS = ("application", "serviceaccount", "accesstoken")

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


class Auth:
    """Credentials in the fleet's settings; repr() leaves out the secrets.

    Args:
        kind: ``application`` (application default credentials), ``serviceaccount`` or ``accesstoken``.
        service_account_file: File with the key of the service account, or None.
        service_account_contents: Key of the service account as JSON text, or empty. The file is not read if this is
            set.
        access_token: OAuth 2.0 access token, or empty.
    """

    __slots__ = ("access_token", "kind", "service_account_contents", "service_account_file")

    def __init__(
        self,
        kind: str = KINDS[0],
        service_account_file: Path | None = None,
        service_account_contents: str = "",
        access_token: str = "",
    ) -> None:
        self.kind, self.service_account_file = kind, service_account_file
        self.service_account_contents, self.access_token = service_account_contents, access_token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Auth) and all(getattr(self, key) == getattr(other, key) for key in self.__slots__)

    def __hash__(self) -> int:
        return hash((self.kind, self.service_account_file))

    def __repr__(self) -> str:
        return f"Auth(kind={self.kind!r}, service_account_file={self.service_account_file!r})"

    @property
    def name(self) -> str:
        """The kind of the credentials, and the key file if there is one; contains no secret."""
        return f"{self.kind} {self.service_account_file}" if self.service_account_file else self.kind


def credentials(auth: Auth) -> Any:
    """Return google.auth credentials for these settings, with access to all of Google Cloud.

    Raises:
        CloudError: The credentials are missing or damaged. The message says where, and never contains the credentials.
    """
    if auth.kind == "accesstoken":
        from google.oauth2.credentials import Credentials

        return Credentials(token=auth.access_token)
    return _service_account(auth) if auth.kind == "serviceaccount" else _application_default()


def _application_default() -> Any:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    # google-auth warns of a missing quota project at each call. If the API requires a quota project, its own error says
    # so.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"google\.auth\._default")
    cause: Exception | None = None
    try:
        return google.auth.default(scopes=_SCOPES)[0]
    except GoogleAuthError as exc:
        cause = exc
        reason = str(exc.args[0]).split(". ")[0].rstrip(".") if exc.args else type(exc).__name__
    except OSError as exc:
        cause = exc
        reason = f"the file cannot be read: {exc.strerror}"
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # google-auth raises these errors for JSON that is not a key file. They are not part of the message, since their
        # text may quote a secret.
        reason = "the file does not hold credentials"
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    raise CloudError(
        f"no credentials for Google Cloud: {reason}",
        where=f"{named} (from GOOGLE_APPLICATION_CREDENTIALS)" if named else "application default credentials",
        fix="run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
        "TPU_OPS_ENDPOINT sets an endpoint that needs no credentials, and `tpu_ops refresh --from` reads a published "
        "snapshot of the fleet",
    ) from cause


def _service_account(auth: Auth) -> Any:
    from google.auth.exceptions import GoogleAuthError
    from google.oauth2.service_account import Credentials

    where = "service_account_contents" if auth.service_account_contents else str(auth.service_account_file)
    try:
        text = auth.service_account_contents
        if not text and auth.service_account_file is not None:
            text = auth.service_account_file.read_text(encoding="utf-8")
        return Credentials.from_service_account_info(json.loads(text), scopes=_SCOPES)
    except OSError as exc:
        raise CloudError(
            f"the service account's key cannot be read: {exc.strerror}",
            where=where,
            fix="check service_account_file in the fleet's file, or GCP_SERVICE_ACCOUNT_FILE",
        ) from exc
    except (GoogleAuthError, ValueError, AttributeError, TypeError, RecursionError):
        # `from None`, since the message of the cause may quote the key.
        raise CloudError(
            "this is not a key of a service account",
            where=where,
            fix="create a key: gcloud iam service-accounts keys create FILE --iam-account ACCOUNT",
        ) from None
