"""A client of the Compute Engine API: JSON over HTTPS, by the requests and credentials that google-auth brings.

google-cloud-compute is not used: its import takes a second and 150 MB, and the waits of its operations ignore an
endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from tpu_ops.cloud import client, operations
from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.pages import pages

#: Name of the service in errors, unless an endpoint replaces it.
REAL_SERVICE = "compute.googleapis.com"
#: HTTP status -> name of the gRPC status code, as Google's APIs pair them.
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
#: The field `reason` of an error with HTTP status 403 that is no missing right -> name of the gRPC status code.
_LIMITS = {"rateLimitExceeded": "RESOURCE_EXHAUSTED", "quotaExceeded": "RESOURCE_EXHAUSTED"}
_FIXES = {
    "PERMISSION_DENIED": "check the project's name, that the Compute Engine API is enabled in it, and that your "
    "account has the role Compute Viewer (for changes: Compute Storage Admin for disks, Compute Security Admin for "
    "firewall rules, Compute Instance Admin for a project's metadata)",
    "RESOURCE_EXHAUSTED": "wait, or ask for more quota of what the message names",
}


class Page(NamedTuple):
    """One page of a list, and the token of the next page; the token is empty on the last page."""

    body: Json
    next_page_token: str


@dataclass(frozen=True)
class Compute:
    """An open client.

    Attributes:
        session: The requests.Session, which adds the credentials.
        base: Beginning of all URLs, with a slash at the end.
        endpoint: The service's name in errors.
        timeout: Seconds for one call, including retries.
    """

    session: Any
    base: str
    endpoint: str
    timeout: float

    def call(
        self, verb: str, path: str, where: str, *, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        """Send a request until it is answered, and return the answer.

        A request that changes something has a request id, so that the service recognizes a repetition.

        Args:
            verb: The HTTP method.
            path: The path below the API's version, as in ``projects/P/zones/Z/disks``.
            where: Subject of the request, for an error.
            query: Parameters of the query.
            body: The JSON of the request.

        Raises:
            ApiError: The API refused or did not answer.
        """
        from google.auth.exceptions import GoogleAuthError

        parameters = dict(query or {}) | ({} if verb == "GET" else {"requestId": str(uuid4())})
        at_endpoint = self.endpoint != REAL_SERVICE
        where = f"{where} ({self.endpoint})" if at_endpoint else where
        try:
            with client.told(f"waiting for an answer from {self.endpoint} ({where}), at most {self.timeout:g} s"):
                return client.attempt(
                    lambda left: self._send(verb, path, parameters, body, left),
                    where=where,
                    timeout=self.timeout,
                    at_endpoint=at_endpoint,
                )
        except GoogleAuthError as exc:
            raise ApiError(f"no access: {exc}", status="UNAUTHENTICATED", where=where) from exc
        except ApiError as exc:
            raise ApiError(
                exc.what, status=exc.status, where=exc.where, fix=_FIXES.get(exc.status, exc.fix)
            ) from exc.__cause__

    def _send(self, verb: str, path: str, query: Mapping[str, str], body: Json | None, left: float) -> Json:
        """Send a request once.

        Raises:
            GoogleAPICallError: The API refused or did not answer.
        """
        import grpc
        from google.api_core import exceptions
        from requests.exceptions import RequestException, Timeout

        try:
            answer = self.session.request(verb, self.base + path, params=query, json=body, timeout=left)
        except Timeout as exc:
            raise exceptions.DeadlineExceeded(str(exc)) from exc
        except RequestException as exc:
            raise exceptions.ServiceUnavailable(str(exc)) from exc
        try:
            found = answer.json() if answer.content else {}
        except ValueError:
            found = None
        if answer.ok and isinstance(found, dict):
            return found
        error = found.get("error", {}) if isinstance(found, dict) else {}
        first = (error.get("errors") or [{}])[0]
        status = _STATUS.get(answer.status_code, "UNKNOWN")
        if answer.status_code == 403:
            status = _LIMITS.get(str(first.get("reason")), status)
        message = error.get("message") or f"HTTP status {answer.status_code}, and no JSON"
        raise exceptions.from_grpc_status(grpc.StatusCode[status], message)

    def list(self, path: str, where: str, query: Mapping[str, str] | None = None) -> Iterator[Json]:
        """Yield the pages of a list.

        Raises:
            ApiError: The API refused or did not answer.
        """

        def ask(token: str) -> Page:
            more = {"pageToken": token} if token else {}
            body = self.call("GET", path, where, query={"maxResults": "500", **(query or {}), **more})
            return Page(body, str(body.get("nextPageToken") or ""))

        return (page.body for page in pages(ask, where=where, timeout=self.timeout))

    def wait(self, operation: Json, place: str, where: str, *, timeout: float, progress: Progress) -> None:
        """Wait until an operation is done.

        Args:
            operation: The operation as the API returned it.
            place: Path of its zone, as in ``projects/P/zones/Z``, or ``projects/P/global``.
            where: Subject of errors.
            timeout: Seconds to wait.
            progress: Called while waiting.

        Raises:
            Failed: The operation ended with an error.
            ApiError: The API did not return the state of the operation.
            Late: The operation was not done in time.
        """

        def look() -> bool:
            found = self.call("GET", f"{place}/operations/{operation['name']}", where)
            if found.get("status") != "DONE":
                return False
            if errors := found.get("error", {}).get("errors"):
                status = _STATUS.get(found.get("httpErrorStatusCode", 0), "UNKNOWN")
                said = str(errors[0].get("message") or errors[0].get("code"))
                raise operations.Failed(said, status=status, where=where, fix=_FIXES.get(status, ""))
            return True

        operations.until(look, what=where, timeout=timeout, progress=lambda elapsed: progress(elapsed, "working"))


@contextmanager
def connect(endpoint: str = "", timeout: float = 60.0, auth: Auth | None = None) -> Iterator[Compute]:
    """Open a client of the API; it is closed at the end of the block.

    Args:
        endpoint: Plaintext URL on loopback, used without credentials; empty means the real service.
        timeout: Seconds for one call, including retries.
        auth: Credentials for the real service; None means application default credentials.

    Raises:
        CloudError: There are no credentials for the real service.
    """
    if endpoint:
        import requests

        session = requests.Session()
        # Loopback is never reached through a proxy.
        session.trust_env = False
    else:
        from google.auth.transport.requests import AuthorizedSession

        with client.told("looking for credentials for Google Cloud"):
            session = AuthorizedSession(credentials(auth or Auth()))
    base = f"{endpoint or f'https://{REAL_SERVICE}'}/compute/v1/"
    with session:
        yield Compute(session, base, endpoint.removeprefix("http://") or REAL_SERVICE, timeout)
