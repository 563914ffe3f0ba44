"""The client of the Cloud TPU API: endpoint, credentials, retries, a timeout for every call, errors in words.

google-cloud-tpu is imported only when a client is created: the import takes half a second.
"""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.errors import CloudError

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")

#: Status codes after which the same call can succeed later. The client library reports transport errors as UNAVAILABLE.
#: The service itself returns DEADLINE_EXCEEDED if its own deadline, which is shorter, has passed.
RETRIED = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED")

#: Seconds before the second attempt of a call; doubled before each further attempt, up to the longest delay.
FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0

#: Seconds of retries if no server, or no gRPC server, listens at the endpoint: waiting longer rarely helps.
REFUSED_PATIENCE = 3.0

#: Seconds without an answer after which a message says that the command is waiting.
TELL_AFTER = 4.0

#: Seconds between two checks for a signal while several calls are in flight. A signal that arrives just before Python
#: waits for a lock does not interrupt the wait.
SIGNAL_LOOK = 1.0

#: Maximum number of requests that are in flight at the same time.
CONCURRENCY = 16

#: Name of the service in errors, unless an endpoint replaces it.
REAL_SERVICE = "tpu.googleapis.com"

#: Prefix of gRPC's UNAVAILABLE error if google-auth has no token for a call (grpc/_plugin_wrapping.py).
_WITHOUT_ACCESS = "Getting metadata from plugin failed with error: "

#: Reasons in gRPC's error for a missing token that are not a refusal: connection errors of requests, and answers that
#: google-auth treats as temporary (google/oauth2/_client.py, google/auth/compute_engine/_metadata.py).
_NO_REFUSAL = (
    "ConnectionPool(",
    "Connection aborted",
    "Connection broken",
    "Metadata server unavailable",
    "internal_failure",
    "server_error",
    "temporarily_unavailable",
)

#: google-auth's form of an answer of the token endpoint: its message, then the raw answer.
_ANSWERED = re.compile(r"""\(['"](.+?)['"], \{""", re.S)

#: gRPC's UNAVAILABLE error if a port answers with plain HTTP or another protocol.
_OTHER_PROTOCOL = "Failed parsing HTTP/2"
_NO_GRPC = "this is not a gRPC port: another service listens there"

_ENDPOINT_FIX = "start the service at the endpoint (TPU_OPS_ENDPOINT), or unset it to reach the real service"

_log = logging.getLogger(__name__)

_FIXES = {
    "UNAUTHENTICATED": "log in: gcloud auth application-default login; with auth_kind, renew the key or the token",
    "PERMISSION_DENIED": "check the project's name, that the Cloud TPU API is enabled in it, and that your account "
    "has the role TPU Viewer (TPU Admin for changes)",
    "NOT_FOUND": "check the project's and zone's names",
    "RESOURCE_EXHAUSTED": "wait, or ask for more quota of this accelerator type in this zone",
    "ABORTED": "wait a moment: another request is changing it",
    "INTERNAL": "wait a moment: this is an error of the service itself",
    "UNKNOWN": "wait a moment: this is an error of the service itself",
}

_SET_QUOTA_PROJECT = "gcloud auth application-default set-quota-project PROJECT"

#: Patterns of the API's refusals, with any status code -> the fix. Public programs quote these texts of Cloud TPU and
#: Compute Engine. The first pattern that matches determines the fix.
_MEANT = {
    "IN_USE_ADDRESSES|vmExternalIpAccess": "each worker needs an external address: ask for more of them in this "
    "region, or create the node with --internal-only (docs/nodes.md)",
    "referenced (sub)?network resource cannot be found": "name a network of the project: --network and --subnetwork",
    "global/networks/.* was not found": "name a network of the project with --network",
    "per minute": "too many requests for now: wait a minute",
    "no more capacity|[Ii]nsufficient (reserved )?capacity": "try another zone, or try again later; a queued resource "
    "(`tpu_ops create --queued`) waits until there is capacity (docs/nodes.md)",
    "Quota .*TPU.*(exceeded|exhausted)": "ask for more quota of this accelerator type in this zone; spot and on-demand "
    "TPUs have quotas of their own, and a queued resource that is SUSPENDED or FAILED uses quota until it is deleted",
    "Quota .*(exceeded|exhausted)": "ask for more of the quota that the message names",
    "requires a quota project": f"set one for your login: {_SET_QUOTA_PROJECT}",
    "serviceUsageConsumer": f"choose a quota project for your login that you may use: {_SET_QUOTA_PROJECT}",
    "insufficient authentication scopes": "this machine's service account may not use the scope cloud-platform: log in "
    "(gcloud auth application-default login), or give the machine that scope",
    "Cloud TPU API has not been used in project": "enable it: gcloud services enable tpu.googleapis.com --project "
    f"PROJECT; if the project in the message is not yours, your login has no quota project: {_SET_QUOTA_PROJECT}",
    "has not been used in project": "enable the API in the message for that project: gcloud services enable",
}


class ApiError(CloudError):
    """The API answered with an error, or did not answer.

    Attributes:
        status: Name of the gRPC status code, for example ``NOT_FOUND``.
    """

    def __init__(self, what: str, *, status: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix or _fix(status, what))
        self.status = status


def _fix(status: str, what: str) -> str:
    """Return the fix for an error of the API: by the error's text, or else by its status code."""
    said = (fix for words, fix in _MEANT.items() if re.search(words, what))
    return next(said, _FIXES.get(status, ""))


class Abandoned(CloudError):
    """This process closed the client before the API answered: the result is unknown, but no longer needed."""


@dataclass(frozen=True)
class Tpu:
    """An open client.

    Attributes:
        client: The google.cloud.tpu_v2.TpuClient.
        endpoint: Name of the service in errors.
        timeout: Seconds for one call, including retries.
        closed: Set when the answers of the API are no longer needed; retries then end.
        until: Monotonic time in seconds after which no more calls are made.
    """

    client: Any
    endpoint: str
    timeout: float
    closed: threading.Event
    until: float = math.inf

    def within(self, seconds: float) -> Tpu:
        """Return a copy of this client that makes no more calls after the given number of seconds."""
        return replace(self, until=time.monotonic() + seconds)

    def close(self) -> None:
        """Close the client and end all its calls, including calls in flight; safe to call twice."""
        self.closed.set()
        self.client.transport.close()

    def concurrently(
        self, function: Callable[[Thing], Answer], things: Sequence[Thing], at_once: int = CONCURRENCY
    ) -> list[Answer]:
        """Call a function that uses this client for each argument, in several threads; return the results in order.

        The first exception, or an interrupt, ends all calls without waiting for their timeouts.

        Args:
            function: The function, which takes one argument.
            things: The arguments, one for each call.
            at_once: Maximum number of threads, at least 1.
        """
        with ThreadPoolExecutor(at_once) as pool:
            futures = []
            try:
                for thing in things:
                    futures.append(pool.submit(function, thing))
                pending = True
                while pending:
                    done, left = wait(futures, SIGNAL_LOOK, return_when=FIRST_EXCEPTION)
                    pending = bool(left) and not any(future.exception() for future in done)
                # If a call has not ended here, another call has failed: result() raises the exception of that call.
                return [future.result() for future in futures if future.done()]
            except BaseException:
                for future in futures:
                    future.cancel()
                self.close()
                raise

    def call(self, method: str, request: dict[str, Any], where: str, *, repeat: bool = True) -> Any:
        """Call a method of the API and return its answer.

        Args:
            method: Name of a method of TpuClient's transport-level interface, for example ``get_node``.
            request: The request of the method as a dictionary.
            where: Subject of the request, for an error.
            repeat: Whether the call can be sent again after a failure: False if a second call would have another
                effect, or if RESOURCE_EXHAUSTED means a quota and not too many requests.

        Raises:
            ApiError: The API refused or did not answer. The status is DEADLINE_EXCEEDED if no time was left for the
                call.
            Abandoned: Another thread closed the client during the call, as `concurrently` does on an interrupt.
        """
        if time.monotonic() > self.until:
            what, fix = (
                "the API was not asked: the requests before this one took too long",
                "raise request_timeout in inventory/tpu_vm.yml",
            )
            raise ApiError(what, status="DEADLINE_EXCEEDED", where=where, fix=fix)
        function = getattr(self.client, method)
        at_endpoint = self.endpoint != REAL_SERVICE
        try:
            with told(f"waiting for an answer from {self.endpoint} ({where}), at most {self.timeout:g} s"):
                return attempt(
                    lambda left: function(request=request, timeout=left, retry=None),
                    where=f"{where} ({self.endpoint})" if at_endpoint else where,
                    timeout=self.timeout,
                    retried=RETRIED if repeat else (),
                    at_endpoint=at_endpoint,
                    pause=self.closed.wait,
                )
        except (ApiError, ValueError) as exc:
            # gRPC can end a call in flight only by closing its channel, and rejects calls on a closed channel.
            if self.closed.is_set():
                raise Abandoned("no longer waited for", where=where) from exc
            raise


@contextmanager
def told(text: str) -> Iterator[None]:
    """Log a text if the block takes longer than TELL_AFTER seconds."""
    timer = threading.Timer(TELL_AFTER, _log.info, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def connect(endpoint: str = "", timeout: float = 60.0, auth: Auth | None = None) -> Iterator[Tpu]:
    """Open a client of the API; it is closed at the end of the block.

    Args:
        endpoint: ``host:port`` on loopback, used in plaintext without credentials; empty means the real service.
        timeout: Seconds for one call, including retries.
        auth: Credentials for the real service; None means application default credentials.

    Raises:
        CloudError: There are no credentials for the real service.
    """
    from google.cloud.tpu_v2.services.tpu import TpuClient
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

    if endpoint:
        import grpc

        options = [
            # Loopback is never reached through a proxy.
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        channel = grpc.insecure_channel(endpoint, options=options)
        client = TpuClient(transport=TpuGrpcTransport(channel=channel))
    else:
        with told("looking for credentials for Google Cloud"):
            found = credentials(auth or Auth())
        client = TpuClient(credentials=found)
    tpu = Tpu(client, endpoint or REAL_SERVICE, timeout, threading.Event())
    try:
        yield tpu
    finally:
        tpu.close()


def attempt(
    send: Callable[[float], Answer],
    *,
    where: str,
    timeout: float,
    retried: tuple[str, ...] = RETRIED,
    at_endpoint: bool = False,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Send a request until it is answered, with growing delays between attempts.

    Args:
        send: Sends the request once and returns the answer; its argument is the number of seconds left.
        where: Subject of the request, for an error.
        timeout: Seconds for all attempts together.
        retried: Status codes after which the request is sent again.
        at_endpoint: Whether the request goes to a configured endpoint instead of the real service.
        pause: Waits between two attempts, for a number of seconds; returns true if the answer is no longer needed.
        clock: Returns the monotonic time in seconds.

    Raises:
        ApiError: The last attempt's error.
    """
    from google.api_core.exceptions import GoogleAPICallError

    start, delay = clock(), FIRST_DELAY
    while True:
        try:
            return send(max(0.1, timeout - (clock() - start)))
        except GoogleAPICallError as exc:
            failure = api_error(exc, where, timeout=timeout, at_endpoint=at_endpoint)
            patience = REFUSED_PATIENCE if _refused(failure) else timeout
        # Random delays keep many clients from retrying at the same moment.
        wait = delay * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        if failure.status not in retried or clock() - start + wait > min(patience, timeout) or pause(wait):
            raise failure
        delay = min(delay * 2, LONGEST_DELAY)


def _refused(failure: ApiError) -> bool:
    return failure.status == "UNAVAILABLE" and (failure.what == _NO_GRPC or "onnection refused" in failure.what)


def api_error(exc: Any, where: str, *, timeout: float, at_endpoint: bool = False) -> ApiError:
    """Convert an error of the API's client library to an `ApiError`, in words.

    Args:
        exc: The google.api_core.exceptions.GoogleAPICallError.
        where: Subject of the request.
        timeout: The timeout of the call in seconds.
        at_endpoint: Whether the request went to a configured endpoint instead of the real service.
    """
    status = exc.grpc_status_code.name if getattr(exc, "grpc_status_code", None) is not None else "UNKNOWN"
    message = str(getattr(exc, "message", "") or exc).strip()
    what, fix = f"{message} ({status})", ""
    _, no_token, reason = message.partition(_WITHOUT_ACCESS)
    if no_token and not any(text in reason for text in _NO_REFUSAL):
        answered = _ANSWERED.match(reason)
        what, status = f"no access: {answered[1] if answered else reason}", "UNAUTHENTICATED"
    elif no_token:
        what, fix = f"no access token: {reason}", "check the network"
    elif status == "UNAVAILABLE":
        refused = "onnection refused" in message
        what = "nothing listens there: Connection refused" if refused else f"the API did not answer: {message}"
        if _OTHER_PROTOCOL in message:
            what = _NO_GRPC
        fix = _ENDPOINT_FIX if at_endpoint else "check the network"
    elif status == "DEADLINE_EXCEEDED":
        what = f"no answer within {timeout:g} s"
        fix = "try again, or raise request_timeout in inventory/tpu_vm.yml"
        fix += "; check that the endpoint (TPU_OPS_ENDPOINT) is being served" if at_endpoint else ""
    return ApiError(what, status=status, where=where, fix=fix)
