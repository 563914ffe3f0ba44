"""Single objects of Cloud Storage, read and written whole.

google-cloud-storage honours STORAGE_EMULATOR_HOST, and is imported only when an object is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.errors import CloudError, UsageError, printable

#: Where an object lies: a bucket's name as Cloud Storage allows it, and what is in it.
_URI = re.compile(r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(?P<name>[^\r\n]+)")


def split(uri: str, where: str = "") -> tuple[str, str]:
    """Given ``gs://BUCKET/OBJECT``, return bucket and object.

    Raises:
        UsageError: It has another form.
    """
    match = _URI.fullmatch(uri)
    if match is None or match["name"].endswith("/"):
        raise UsageError(
            f"{uri!r:.80} does not name an object in a bucket", where=where, fix="write it as gs://BUCKET/OBJECT"
        )
    return match["bucket"], match["name"]


def read(uri: str, auth: Auth, *, limit: int, timeout: float) -> bytes:
    """Return an object's content.

    Args:
        uri: ``gs://BUCKET/OBJECT``.
        auth: Who asks; where there are no credentials, or they do not help (a login that has expired, a machine's
            account), nobody in particular does: a public object needs none.
        limit: Bytes that it may have.
        timeout: Seconds that each request may take, its retries included.

    Raises:
        CloudError: It is not there, not to be read, or larger.
    """
    from google.api_core.exceptions import Forbidden, Unauthorized
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError

    with _requests(uri, "read"):
        client = _client(auth, anonymous=True)
        try:
            return _content(client, uri, limit, timeout)
        except (Forbidden, Unauthorized, GoogleAuthError):
            if not isinstance(client._credentials, AnonymousCredentials):
                with suppress(Forbidden, Unauthorized):
                    return _content(client.create_anonymous_client(), uri, limit, timeout)
            raise


def _content(client: Any, uri: str, limit: int, timeout: float) -> bytes:
    bucket, name = split(uri)
    blob = client.bucket(bucket).blob(name)
    more = {"timeout": timeout, "retry": _retry(timeout)}
    blob.reload(**more)
    if (blob.size or 0) > limit:
        raise CloudError(
            f"the object has more than {limit // 2**20} MiB", where=uri, fix="name the object that was published"
        )
    # The generation whose size was looked at: another may have been written since.
    return bytes(blob.download_as_bytes(if_generation_match=blob.generation, raw_download=True, **more))


def write(uri: str, content: bytes, auth: Auth, *, content_type: str, timeout: float) -> None:
    """Replace an object's content at once; readers get no cached one.

    Args:
        uri: ``gs://BUCKET/OBJECT``.
        content: What it is to hold.
        auth: Who writes.
        content_type: What it is, as in ``application/json``.
        timeout: Seconds that the request may take, its retries included.

    Raises:
        CloudError: There are no credentials, or it cannot be written.
    """
    bucket, name = split(uri)
    with _requests(uri, "written"):
        blob = _client(auth, anonymous=False).bucket(bucket).blob(name)
        blob.cache_control = "no-cache"
        blob.upload_from_string(content, content_type=content_type, timeout=timeout, retry=_retry(timeout))


def _client(auth: Auth, *, anonymous: bool) -> Any:
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        client = storage.Client.create_anonymous_client()
        # Proxy variables are for the way out, never for what takes the place of the service.
        client._http.trust_env = False
        return client
    try:
        return storage.Client(project=None, credentials=credentials(auth))
    except CloudError:
        if not anonymous:
            raise
        return storage.Client.create_anonymous_client()


def _retry(timeout: float) -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(timeout)


@contextmanager
def _requests(uri: str, done: str) -> Iterator[None]:
    """Say in words what Cloud Storage refuses."""
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, NotFound, RetryError, Unauthorized
    from google.auth.exceptions import GoogleAuthError
    from google.resumable_media import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException

    what = f"the object cannot be {done}"
    try:
        yield
    except NotFound as exc:
        raise CloudError(f"{what}: there is no such object or bucket", where=uri, fix="check its name") from exc
    except (Forbidden, Unauthorized, GoogleAuthError) as exc:
        fix = "log in with another account: gcloud auth application-default login; or have the bucket's owner allow it"
        raise CloudError(f"{what}: no access", where=uri, fix=fix) from exc
    except DataCorruption as exc:
        raise CloudError(f"{what}: what arrived is not what is stored there", where=uri, fix="try again") from exc
    except (GoogleAPICallError, InvalidResponse, RetryError, RequestException, OSError) as exc:
        why = printable(str(exc)) or type(exc).__name__
        raise CloudError(f"{what}: {why:.200}", where=uri, fix="check the network") from exc
