"""Faults that a test asks the API for, and the count of its requests; both are kept in memory only."""

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

#: Longest time that a fault may hold back an answer, in seconds.
LONGEST = 3600.0
#: The method whose answers can leave out a zone.
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
    """What a request is about; empty where it names none."""

    method: str
    project: str
    zone: str


def target_of(method: str, request: Message) -> Target:
    """Return what a request to a method is about, out of the resource name that it carries."""
    node = getattr(request, "node", None)
    name: str = getattr(request, "parent", "") or getattr(request, "name", "") or getattr(node, "name", "")
    parts = [*name.split("/"), "", "", "", ""]
    return Target(method, parts[1], parts[3])


@dataclass
class Fault:
    """One way for requests to go wrong.

    Attributes:
        method: Method that it hits; empty for all.
        project: Likewise.
        zone: Likewise; lists of all zones have the zone ``-``.
        code: What such requests are answered with; None for what they are answered with anyhow.
        message: The error's text.
        times: How many requests it still hits; None for all of them.
        seconds: How long the answer is held back.
        unreachable: Leave out what lists find in the zone, and say that it could not be reached.
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
        """Return whether a request is one that it is meant for."""
        zones = (self.zone, ANY_LOCATION) if self.unreachable else (self.zone,)
        return (
            (not self.method or self.method == target.method)
            and (not self.project or self.project == target.project)
            and (not self.zone or target.zone in zones)
        )

    def json(self) -> Json:
        """Return it in the form that it was asked for in, without what is not set."""
        values = {**vars(self), "code": self.code.name if self.code else None}
        return {key: value for key, value in values.items() if value not in ("", None, 0, False)}


def parse(body: Json, methods: Collection[str]) -> Fault:
    """Return the fault that a request asks for.

    Args:
        body: Its JSON.
        methods: Methods that there are.

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
    """The faults that are asked for, in that order, and how many requests there were."""

    def __init__(self) -> None:
        self.queue: list[Fault] = []
        self._removed = asyncio.Event()
        self._requests: Counter[tuple[str, str]] = Counter()

    async def meet(self, target: Target) -> tuple[str, ...]:
        """Let a request go through what was asked for, and return the locations that it cannot reach.

        The first fault that hits it counts. Where that one takes a zone away, so do the others that take one.

        Raises:
            ApiError: The fault's.
        """
        self._requests[target.project, target.method] += 1
        if not self.queue or not (found := self._take(target)):
            return ()
        if seconds := max(fault.seconds for fault in found):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._removed.wait(), seconds)
        first = found[0]
        if first.code:
            raise ApiError(first.code, first.message or f"the lab was asked to answer {target.method} so")
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
        """Remove all faults; answers that were held back go out at once."""
        self.queue = []
        self._removed.set()
        self._removed = asyncio.Event()

    def forget_requests(self) -> None:
        """Count from nothing again."""
        self._requests.clear()

    def requests(self) -> dict[str, Any]:
        """Return how many requests each method had, in all and by project."""
        methods: Counter[str] = Counter()
        projects: dict[str, dict[str, int]] = {}
        for (project, method), count in sorted(self._requests.items()):
            methods[method] += count
            if project:
                projects.setdefault(project, {})[method] = count
        return {"methods": dict(sorted(methods.items())), "projects": projects}
