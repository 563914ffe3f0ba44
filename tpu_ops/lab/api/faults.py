"""Faults that a test injects into the API, and counts of the API's requests; both are kept in memory only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.lab_requests import Kinds, check_fields, check_zone
from tpu_ops.lab.api.names import ANY_LOCATION
from tpu_ops.lab.api.wire import Json, Message

#: Maximum number of seconds by which a fault can delay an answer.
LONGEST = 3600.0
#: The only API method for which a fault can set `unreachable`.
LISTS = "ListNodes"

_KINDS: Kinds = {
    "method": (str,),
    "project": (str,),
    "zone": (str,),
    "code": (str,),
    "message": (str,),
    "times": (int,),
    "seconds": (int, float),
    "unreachable": (bool,),
}


@dataclass(frozen=True)
class Target:
    """The method, project and zone of a request; project and zone are empty if the request does not name them."""

    method: str
    project: str
    zone: str


def target_of(method: str, request: Message) -> Target:
    """Return the method, project and zone of a request, from the resource name in the request."""
    node = getattr(request, "node", None)
    name: str = getattr(request, "parent", "") or getattr(request, "name", "") or getattr(node, "name", "")
    parts = [*name.split("/"), "", "", "", ""]
    return Target(method, parts[1], parts[3])


@dataclass
class Fault:
    """A fault that the API applies to matching requests.

    Attributes:
        method: The API method whose requests are affected; empty for all methods.
        project: The project whose requests are affected; empty for all projects.
        zone: The zone whose requests are affected; empty for all zones. A request that lists all zones has the zone
            ``-``.
        code: The error code of the answer; None means that the request is answered normally.
        message: The text of the error.
        times: Number of requests that the fault will still affect; None for no limit.
        seconds: Delay of the answer in seconds.
        unreachable: Whether lists omit the nodes of the zone and report the zone as unreachable.
    """

    method: str = ""
    project: str = ""
    zone: str = ""
    code: Code | None = None
    message: str = ""
    times: int | None = None
    seconds: float = 0.0
    unreachable: bool = False

    def hits(self, target: Target) -> bool:
        """Return whether the fault affects a request."""
        zones = (self.zone, ANY_LOCATION) if self.unreachable else (self.zone,)
        return (
            (not self.method or self.method == target.method)
            and (not self.project or self.project == target.project)
            and (not self.zone or target.zone in zones)
        )

    def json(self) -> Json:
        """Return the fault as the JSON of the request that injects it; unset fields are left out."""
        values = {**vars(self), "code": self.code.name if self.code else None}
        return {key: value for key, value in values.items() if value not in ("", None, 0, False)}


def parse(body: Json, methods: Collection[str]) -> Fault:
    """Return the fault that a request's JSON describes.

    Args:
        body: The request's JSON.
        methods: Names of the existing API methods.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    check_fields(body, _KINDS, "a fault")
    fault = Fault(**{**body, "code": _code(body["code"]) if body.get("code") else None})
    if fault.unreachable:
        fault.method = fault.method or LISTS
    if fault.method and fault.method not in methods:
        raise invalid(
            f"method: {fault.method!r} is not a method of the API; the methods are {', '.join(sorted(methods))}"
        )
    check_zone(fault.zone, "", ANY_LOCATION)
    if fault.times is not None and fault.times < 1:
        raise invalid(f"times: {fault.times} must be 1 or more")
    if not 0 <= fault.seconds <= LONGEST:
        raise invalid(f"seconds: {fault.seconds} must be between 0 and {LONGEST:.0f}")
    if not (fault.code or fault.seconds or fault.unreachable):
        raise invalid("code, seconds, unreachable: a fault needs one of these fields")
    if fault.message and not fault.code:
        raise invalid("message: allowed only together with code")
    if fault.unreachable and (fault.code or fault.method != LISTS or fault.zone in ("", ANY_LOCATION)):
        raise invalid(f"unreachable: allowed only for the method {LISTS}, with a zone and without code")
    return fault


def _code(name: str) -> Code:
    if name not in Code.__members__:
        raise invalid(f"code: {name!r} is not a status code; the codes are {', '.join(Code.__members__)}")
    return Code[name]


class Faults:
    """The injected faults, in the order of their injection, and the counts of requests."""

    def __init__(self) -> None:
        self.queue: list[Fault] = []
        self._removed = asyncio.Event()
        self._requests: Counter[tuple[str, str]] = Counter()

    async def meet(self, target: Target) -> tuple[str, ...]:
        """Count a request and apply the matching fault to it; return the locations to report as unreachable.

        Only the first matching fault is applied. If this fault sets `unreachable`, the other matching faults that set
        `unreachable` are applied too.

        Raises:
            ApiError: The error that the fault describes.
        """
        self._requests[target.project, target.method] += 1
        if not self.queue or not (found := self._take(target)):
            return ()
        if seconds := max(fault.seconds for fault in found):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._removed.wait(), seconds)
        first = found[0]
        if first.code:
            raise ApiError(first.code, first.message or f"an injected fault makes {target.method} fail with this error")
        return tuple(f"projects/{target.project}/locations/{fault.zone}" for fault in found if fault.unreachable)

    def _take(self, target: Target) -> list[Fault]:
        found = [fault for fault in self.queue if fault.hits(target)]
        found = [fault for fault in found if fault.unreachable] if found and found[0].unreachable else found[:1]
        for fault in found:
            if fault.times is not None:
                fault.times -= 1
        self.queue = [fault for fault in self.queue if fault.times != 0]
        return found

    def remove(self) -> None:
        """Remove all faults; answers that a fault delays are sent at once."""
        self.queue = []
        self._removed.set()
        self._removed = asyncio.Event()

    def forget_requests(self) -> None:
        """Reset the counts of requests to zero."""
        self._requests.clear()

    def requests(self) -> dict[str, Any]:
        """Return the number of requests of each method, in total and by project."""
        methods: Counter[str] = Counter()
        projects: dict[str, dict[str, int]] = {}
        for (project, method), count in sorted(self._requests.items()):
            methods[method] += count
            if project:
                projects.setdefault(project, {})[method] = count
        return {"methods": dict(sorted(methods.items())), "projects": projects}
