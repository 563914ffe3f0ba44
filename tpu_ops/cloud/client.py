"""One way to call the Cloud TPU API: endpoint, credentials, retries, a time-out on everything, errors in words.

google-cloud-tpu is imported only when a client is made: its import costs half a second.
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

#: Status codes after which the same call may succeed; transport errors arrive as UNAVAILABLE. DEADLINE_EXCEEDED comes
#: from the service as well, of a deadline of its own that is sooner.
RETRIED = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED")

#: Seconds before the second attempt; doubled for each further one, up to the longest.
FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0

#: Seconds of retries where nothing, or no gRPC, listens at the endpoint: that rarely changes.
REFUSED_PATIENCE = 3.0

#: Seconds of waiting for an answer after which that is said.
TELL_AFTER = 4.0

#: Seconds between two looks of who waits for several calls whether a signal came: one that comes in the moment before
#: Python waits for a lock does not end that wait.
SIGNAL_LOOK = 1.0

#: Requests in flight at once.
CONCURRENCY = 16

#: What errors call the service that no endpoint replaces.
REAL_SERVICE = "tpu.googleapis.com"

#: What gRPC says, as UNAVAILABLE, before the reason why google-auth has no token for a call (grpc/_plugin_wrapping.py).
_WITHOUT_ACCESS = "Getting metadata from plugin failed with error: "

#: What such a reason holds where nobody refused: requests' errors of connections, and answers that google-auth itself
#: takes for passing ones (google/oauth2/_client.py, google/auth/compute_engine/_metadata.py).
_NO_REFUSAL = (
    "ConnectionPool(",
    "Connection aborted",
    "Connection broken",
    "Metadata server unavailable",
    "internal_failure",
    "server_error",
    "temporarily_unavailable",
)

#: How google-auth prints what the token endpoint answered: in words, and as it came.
_ANSWERED = re.compile(r"""\(['"](.+?)['"], \{""", re.S)

#: What gRPC says, as UNAVAILABLE, where a port answers that speaks plain HTTP or something else.
_OTHER_PROTOCOL = "Failed parsing HTTP/2"
_NO_GRPC = "this is not a gRPC port: something else listens there"

_ENDPOINT_FIX = "start what serves the endpoint (TPU_OPS_ENDPOINT), or unset it to reach the real service"

_log = logging.getLogger(__name__)

_FIXES = {
    "UNAUTHENTICATED": "log in: gcloud auth application-default login; with auth_kind, renew the key or the token",
    "PERMISSION_DENIED": "check the project's name, that the Cloud TPU API is enabled in it, and that your account "
    "has the role TPU Viewer (TPU Admin for changes)",
    "NOT_FOUND": "check the project's and zone's names",
    "RESOURCE_EXHAUSTED": "wait, or ask for more quota of this accelerator type in this zone",
    "ABORTED": "wait a moment: something else is changing it",
    "INTERNAL": "wait a moment: this is an error of the service itself",
    "UNKNOWN": "wait a moment: this is an error of the service itself",
}

_SET_QUOTA_PROJECT = "gcloud auth application-default set-quota-project PROJECT"

#: What refusals say, whatever their status (public programs quote Cloud TPU so, and Compute Engine behind it), and what
#: to do then; the first that is found holds.
_MEANT = {
    "IN_USE_ADDRESSES|vmExternalIpAccess": "each worker needs an external address: ask for more of them in this "
    "region, or make the node with gcloud and --internal-ips (docs/inventory.md, Making nodes)",
    "referenced (sub)?network resource cannot be found": "make the node with gcloud, --network and --subnetwork "
    "(docs/inventory.md, Making nodes)",
    "per minute": "too many requests for now: wait a minute",
    "no more capacity|[Ii]nsufficient (reserved )?capacity": "try another zone, or again later; a queued resource "
    "waits until there is some (docs/inventory.md, Making nodes)",
    "Quota .*TPU.*(exceeded|exhausted)": "ask for more quota of this accelerator type in this zone; spot and on-demand "
    "TPUs have quotas of their own, and a queued resource that is SUSPENDED or FAILED uses some until it is deleted",
    "Quota .*(exceeded|exhausted)": "ask for more of the quota that is named",
    "requires a quota project": f"set one for your login: {_SET_QUOTA_PROJECT}",
    "serviceUsageConsumer": f"choose a quota project for your login that you may use: {_SET_QUOTA_PROJECT}",
    "insufficient authentication scopes": "this machine's service account may not use the scope cloud-platform: log in "
    "(gcloud auth application-default login), or give the machine that scope",
    "Cloud TPU API has not been used in project": "enable it: gcloud services enable tpu.googleapis.com --project "
    f"PROJECT; if the project that is named is not yours, your login has no quota project: {_SET_QUOTA_PROJECT}",
    "has not been used in project": "enable the API that is named in that project: gcloud services enable",
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
    """Return what to do about an error of the API, by what it says, or else by its status."""
    said = (fix for words, fix in _MEANT.items() if re.search(words, what))
    return next(said, _FIXES.get(status, ""))


class Abandoned(CloudError):
    """This process closed the client before the API answered: nothing is known of the request, and nobody waits."""


@dataclass(frozen=True)
class Tpu:
    """An open client.

    Attributes:
        client: The google.cloud.tpu_v2.TpuClient.
        endpoint: What errors call the service.
        timeout: Seconds that one call may take, its retries included.
        closed: Set when nobody waits for answers any more, so that retries end.
        until: Monotonic time in seconds after which nothing more is asked.
    """

    client: Any
    endpoint: str
    timeout: float
    closed: threading.Event
    until: float = math.inf

    def within(self, seconds: float) -> Tpu:
        """Return the same client, which asks nothing more after these seconds."""
        return replace(self, until=time.monotonic() + seconds)

    def close(self) -> None:
        """End all calls, those in flight, too; a second time it does nothing."""
        self.closed.set()
        self.client.transport.close()

    def concurrently(
        self, function: Callable[[Thing], Answer], things: Sequence[Thing], at_once: int = CONCURRENCY
    ) -> list[Answer]:
        """Return what a function that makes calls returns for each of several things, in their order.

        Whichever exception of it comes first, or an interrupt, ends all calls: nobody waits for their time-outs.

        Args:
            function: Called in several threads.
            things: What it is called with.
            at_once: Number of threads at most, at least 1.
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
                # Where some have not ended, one of the others has failed.
                return [future.result() for future in futures if future.done()]
            except BaseException:
                for future in futures:
                    future.cancel()
                self.close()
                raise

    def call(self, method: str, request: dict[str, Any], where: str, *, repeat: bool = True) -> Any:
        """Call a method and return its answer.

        Args:
            method: Name of a method of TpuClient's transport-level interface, for example ``get_node``.
            request: Its request as a dictionary.
            where: What is asked about, for an error.
            repeat: Whether the call may be sent again after a failure: not where a second one would mean more,
                or where RESOURCE_EXHAUSTED speaks of quota and not of too many requests.

        Raises:
            ApiError: With the status that the API answered, or DEADLINE_EXCEEDED where it is too late to ask.
            Abandoned: The client was closed meanwhile; another thread does that, as `concurrently` on an interrupt.
        """
        if time.monotonic() > self.until:
            what, fix = (
                "not asked: the requests before it took too long",
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
            # gRPC has no other way to end a call in flight than its channel, and takes no call on a closed one.
            if self.closed.is_set():
                raise Abandoned("no longer waited for", where=where) from exc
            raise


@contextmanager
def told(text: str) -> Iterator[None]:
    """Log a text where the block lasts longer than a moment."""
    timer = threading.Timer(TELL_AFTER, _log.info, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def connect(endpoint: str = "", timeout: float = 60.0, auth: Auth | None = None) -> Iterator[Tpu]:
    """Open a client for as long as the block lasts.

    Args:
        endpoint: ``host:port`` on loopback, spoken to in plaintext without credentials; empty means the real
            service.
        timeout: Seconds that one call may take, its retries included.
        auth: Credentials for the real service; application default credentials where it is None.

    Raises:
        CloudError: There are no credentials for the real service.
    """
    from google.cloud.tpu_v2.services.tpu import TpuClient
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

    if endpoint:
        import grpc

        options = [
            # Proxy variables are for the way out, never for loopback.
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
        send: Given the seconds left, sends the request once and returns its answer.
        where: What is asked about, for an error.
        timeout: Seconds that all attempts together may take.
        retried: Status codes after which it is sent again.
        at_endpoint: Whether it goes to an endpoint that was set, and not to the real service.
        pause: Waits between attempts; a true answer means that nobody wants the answer any more.
        clock: Monotonic time in seconds.

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
        # Delays differ a little, so that many clients do not come back at the same moment.
        wait = delay * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        if failure.status not in retried or clock() - start + wait > min(patience, timeout) or pause(wait):
            raise failure
        delay = min(delay * 2, LONGEST_DELAY)


def _refused(failure: ApiError) -> bool:
    return failure.status == "UNAVAILABLE" and (failure.what == _NO_GRPC or "onnection refused" in failure.what)


def api_error(exc: Any, where: str, *, timeout: float, at_endpoint: bool = False) -> ApiError:
    """Return an error of the API's client in words.

    Args:
        exc: The google.api_core.exceptions.GoogleAPICallError.
        where: What was asked about.
        timeout: Seconds that the call could take.
        at_endpoint: Whether it went to an endpoint that was set, and not to the real service.
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
