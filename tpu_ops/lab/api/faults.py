"""Faults that a test injects into the API, and the counts of its requests; both are kept in memory only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tpu_ops.lab.api.catalogue import ZONES
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.names import ANY_LOCATION
from tpu_ops.lab.api.wire import Json, Message

#: Maximum delay of an answer, in seconds.
LONGEST = 3600.0
#: The method that supports `unreachable`.
LISTS = "ListNodes"

_KINDS: dict[str, tuple[type, ...]] = {
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
    """The subject of a request; fields that it does not name are empty."""

    method: str
    project: str
    zone: str


def target_of(method: str, request: Message) -> Target:
    """Return the subject of a request, from the resource name in it."""
    node = getattr(request, "node", None)
    name: str = getattr(request, "parent", "") or getattr(request, "name", "") or getattr(node, "name", "")
    parts = [*name.split("/"), "", "", "", ""]
    return Target(method, parts[1], parts[3])


@dataclass
class Fault:
    """A fault of requests.

    Attributes:
        method: Method that it affects; empty for all.
        project: Project that it affects; empty for all.
        zone: Zone that it affects; empty for all. Lists of all zones have the zone ``-``.
        code: The error code of the answer; None keeps the normal answer.
        message: The error's text.
        times: Number of requests that it still affects; None for all.
        seconds: Delay of the answer.
        unreachable: Omit the zone's nodes from lists, and report the zone as unreachable.
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
        """Return the fault in the form of a request's JSON, without unset fields."""
        values = {**vars(self), "code": self.code.name if self.code else None}
        return {key: value for key, value in values.items() if value not in ("", None, 0, False)}


def parse(body: Json, methods: Collection[str]) -> Fault:
    """Return the fault in a request.

    Args:
        body: The request's JSON.
        methods: The existing methods.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    for key, value in body.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise invalid(f"{key}: a fault has no such field; it has {', '.join(_KINDS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise invalid(f"{key}: {value!r} is not of type {' or '.join(kind.__name__ for kind in kinds)}")
    fault = Fault(**{**body, "code": _code(body["code"]) if body.get("code") else None})
    if fault.unreachable:
        fault.method = fault.method or LISTS
    if fault.method and fault.method not in methods:
        raise invalid(f"method: {fault.method!r} is not a method of the API; {', '.join(sorted(methods))} are")
    if fault.zone not in ("", ANY_LOCATION, *ZONES):
        raise invalid(f"zone: {fault.zone!r} is not a zone of the lab; {', '.join(sorted(ZONES))} are")
    if fault.times is not None and fault.times < 1:
        raise invalid(f"times: {fault.times} must be 1 or more")
    if not 0 <= fault.seconds <= LONGEST:
        raise invalid(f"seconds: {fault.seconds} must be between 0 and {LONGEST:.0f}")
    if not (fault.code or fault.seconds or fault.unreachable):
        raise invalid("code, seconds, unreachable: a fault needs one of them")
    if fault.message and not fault.code:
        raise invalid("message: goes with a code only")
    if fault.unreachable and (fault.code or fault.method != LISTS or fault.zone in ("", ANY_LOCATION)):
        raise invalid(f"unreachable: needs a zone, goes without code, and only {LISTS} has it")
    return fault


def _code(name: str) -> Code:
    if name not in Code.__members__:
        raise invalid(f"code: {name!r} is not a status code; {', '.join(Code.__members__)} are")
    return Code[name]


class Faults:
    """The injected faults in their order, and the counts of requests."""

    def __init__(self) -> None:
        self.queue: list[Fault] = []
        self._removed = asyncio.Event()
        self._requests: Counter[tuple[str, str]] = Counter()

    async def meet(self, target: Target) -> tuple[str, ...]:
        """Apply the faults to a request; return the locations to report as unreachable.

        The first matching fault is used. If it is an `unreachable` one, all other matching ones of that kind are as
        well.

        Raises:
            ApiError: The error of the fault.
        """
        self._requests[target.project, target.method] += 1
        if not self.queue or not (found := self._take(target)):
            return ()
        if seconds := max(fault.seconds for fault in found):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._removed.wait(), seconds)
        first = found[0]
        if first.code:
            raise ApiError(first.code, first.message or f"the lab was told to answer {target.method} with this error")
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
        """Remove all faults; delayed answers are sent at once."""
        self.queue = []
        self._removed.set()
        self._removed = asyncio.Event()

    def forget_requests(self) -> None:
        """Reset the counts."""
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
