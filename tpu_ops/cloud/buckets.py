"""Single objects of Cloud Storage, read and written whole.

google-cloud-storage honours STORAGE_EMULATOR_HOST; it is imported only when an object is requested.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.errors import CloudError, UsageError, printable

#: URI of an object: the bucket's name in the form that Cloud Storage allows, and the object's name.
_URI = re.compile(r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(?P<name>[^\r\n]+)")

T = TypeVar("T")


def split(uri: str, where: str = "") -> tuple[str, str]:
    """Split ``gs://BUCKET/OBJECT`` into bucket and object.

    Raises:
        UsageError: The URI has another form.
    """
    match = _URI.fullmatch(uri)
    if match is None or match["name"].endswith("/"):
        raise UsageError(
            f"{uri!r:.80} does not name an object in a bucket", where=where, fix="write it as gs://BUCKET/OBJECT"
        )
    return match["bucket"], match["name"]


def folder(uri: str, where: str = "") -> str:
    """Return ``gs://BUCKET`` or ``gs://BUCKET/PREFIX`` without a slash at its end, after checking its form.

    Raises:
        UsageError: It has another form.
    """
    found = uri.rstrip("/")
    try:
        split(f"{found}/object", where)
    except UsageError as exc:
        exc.what, exc.fix = f"{uri!r:.80} is no place in a bucket", "write it as gs://BUCKET/PREFIX"
        raise
    return found


def read(uri: str, auth: Auth, *, limit: int, timeout: float) -> bytes:
    """Return an object's content.

    Args:
        uri: ``gs://BUCKET/OBJECT``.
        auth: The credentials. If they are missing or not accepted (an expired login, a machine's account), the request
            is sent without credentials: a public object needs none.
        limit: Largest size of the object, in bytes.
        timeout: Seconds for each request, including retries.

    Raises:
        CloudError: The object does not exist, cannot be read, or is larger than the limit.
    """
    with requests(uri, "the object cannot be read"):
        return anonymously_if_refused(auth, lambda client: _content(client, uri, limit, timeout))


def anonymously_if_refused(auth: Auth, call: Callable[[Any], T]) -> T:
    """Call a function with a client of Cloud Storage; if access is refused, call it again without credentials."""
    from google.api_core.exceptions import Forbidden, Unauthorized
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError

    found = client(auth, anonymous=True)
    try:
        return call(found)
    except (Forbidden, Unauthorized, GoogleAuthError):
        if not isinstance(found._credentials, AnonymousCredentials):
            with suppress(Forbidden, Unauthorized):
                return call(found.create_anonymous_client())
        raise


def _content(client: Any, uri: str, limit: int, timeout: float) -> bytes:
    bucket, name = split(uri)
    blob = client.bucket(bucket).blob(name)
    more = {"timeout": timeout, "retry": retry(timeout)}
    blob.reload(**more)
    if (blob.size or 0) > limit:
        raise CloudError(
            f"the object is larger than {limit // 2**20} MiB", where=uri, fix="name the object that was published"
        )
    # Read the generation whose size was checked above: another client might have replaced the object since the check.
    return bytes(blob.download_as_bytes(if_generation_match=blob.generation, raw_download=True, **more))


def write(uri: str, content: bytes, auth: Auth, *, content_type: str, timeout: float) -> None:
    """Replace an object's content atomically; readers get no cached content.

    Args:
        uri: ``gs://BUCKET/OBJECT``.
        content: The new content.
        auth: The credentials.
        content_type: The media type of the content, as in ``application/json``.
        timeout: Seconds for the request, including retries.

    Raises:
        CloudError: There are no credentials, or the object cannot be written.
    """
    bucket, name = split(uri)
    with requests(uri, "the object cannot be written"):
        blob = client(auth, anonymous=False).bucket(bucket).blob(name)
        blob.cache_control = "no-cache"
        blob.upload_from_string(content, content_type=content_type, timeout=timeout, retry=retry(timeout))


def client(auth: Auth, *, anonymous: bool) -> Any:
    """Return a client of Cloud Storage.

    Args:
        auth: The credentials.
        anonymous: Whether to return a client without credentials if there are none.

    Raises:
        CloudError: There are no credentials, and ``anonymous`` is not set.
    """
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        found = storage.Client.create_anonymous_client()
        # An emulator is never reached through a proxy.
        found._http.trust_env = False
        return found
    try:
        return storage.Client(project=None, credentials=credentials(auth))
    except CloudError:
        if not anonymous:
            raise
        return storage.Client.create_anonymous_client()


def retry(timeout: float) -> Any:
    """Return the client's policy for retries, with a limit in seconds."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(timeout)


@contextmanager
def requests(uri: str, what: str) -> Iterator[None]:
    """Convert errors of Cloud Storage in the block to CloudError.

    Args:
        uri: ``gs://BUCKET/OBJECT`` or ``gs://BUCKET``.
        what: What has failed, as the beginning of the message.
    """
    from google.api_core.exceptions import (
        BadRequest,
        Forbidden,
        GoogleAPICallError,
        NotFound,
        RetryError,
        Unauthorized,
    )
    from google.auth.exceptions import GoogleAuthError
    from google.resumable_media import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException, Timeout

    missing = "object or bucket" if "/" in uri.removeprefix("gs://") else "bucket"
    try:
        yield
    except NotFound as exc:
        raise CloudError(f"{what}: there is no such {missing}", where=uri, fix="check its name") from exc
    except (Forbidden, Unauthorized, GoogleAuthError) as exc:
        fix = "log in with another account: gcloud auth application-default login; or have the bucket's owner allow it"
        raise CloudError(f"{what}: no access", where=uri, fix=fix) from exc
    except DataCorruption as exc:
        raise CloudError(f"{what}: the received data differs from the stored data", where=uri, fix="try again") from exc
    except BadRequest as exc:
        raise CloudError(f"{what}: {printable(exc.message):.200}", where=uri, fix="correct the request") from exc
    except (GoogleAPICallError, InvalidResponse, RetryError, RequestException, OSError) as exc:
        late = isinstance(exc.cause if isinstance(exc, RetryError) else exc, Timeout)
        why = "no answer in time" if late else printable(str(exc)) or type(exc).__name__
        raise CloudError(f"{what}: {why:.200}", where=uri, fix="check the network") from exc
