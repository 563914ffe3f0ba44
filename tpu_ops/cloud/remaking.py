"""Brings the nodes of a run back: waits for nodes that return by themselves, and recreates nodes that are gone.

A recovery of the same run can be active on another machine at the same time. The two do not conflict: a node's name is
unique, and the request id of a queued resource is derived from the run and its attempt.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tpu_ops.cloud import bodies, operations
from tpu_ops.cloud import nodes as cloud
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.lifecycle import ON_THE_WAY
from tpu_ops.cloud.node import SERVING_STATES, Json
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.pending import CREATE, GONE, START, Requests
from tpu_ops.errors import CloudError, UsageError

#: Maximum seconds until a node in maintenance or repair is READY again, and until a new node is READY.
COMING_BACK = 3600.0
MAKING = 1800.0
#: Seconds before a retry if the API refuses temporarily; doubled for each further retry, up to the longest pause.
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0
#: Seconds between two checks of a queued resource.
LOOK = 5.0

#: Status codes after which the same request can succeed later: missing capacity or quota, or an error of the service.
_LATER = (
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "INTERNAL",
    "UNKNOWN",
    "CANCELLED",
    "FAILED_PRECONDITION",
)
#: Status codes of a FAILED queued resource after which the same request would fail again.
_FINAL = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "NOT_FOUND")
#: Status codes after which the current state is checked again: another client has created or deleted the node first.
_FASTER = ("ALREADY_EXISTS", "NOT_FOUND")
#: States of a node whose machine is gone, and states that the node leaves by itself.
_TAKEN_AWAY = ("PREEMPTED", "TERMINATED")
_PASSING = ("STOPPING", "DELETING")
#: States of a queued resource that becomes ACTIVE by itself.
_QUEUED_ON_THE_WAY = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")


@dataclass(frozen=True)
class Made:
    """One node of a run, and the request that recreates it.

    Attributes:
        name: The node's resource name.
        node_id: The node's id in the API; a later node of the same name has another id.
        body: The request that recreates the node (`tpu_ops.cloud.bodies`); values of its metadata may be secret.
        queued: Resource name of the queued resource that created the node, or empty.
    """

    name: str
    node_id: str
    body: Json = field(repr=False)
    queued: str = ""

    @property
    def short(self) -> str:
        """The node's short name."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True)
class Plan:
    """The nodes of a run, and the requests that recreate them.

    Attributes:
        nodes: The nodes.
        queued: Resource name of each queued resource of the nodes -> the request that recreates the queued resource.
    """

    nodes: tuple[Made, ...]
    queued: Mapping[str, Json] = field(default_factory=dict, repr=False)

    def to_json(self) -> Json:
        """Return the plan as a dictionary of JSON types."""
        return {"nodes": [asdict(made) for made in self.nodes], "queued": dict(self.queued)}

    @classmethod
    def from_json(cls, data: Json) -> Plan:
        """Return the plan, given the result of `to_json`."""
        return cls(tuple(Made(**made) for made in data["nodes"]), dict(data["queued"]))

    def now(self, seen: Mapping[str, Seen], order: Iterable[str]) -> Plan:
        """Return the plan with the current ids of its nodes, and its nodes in the given order of resource names."""
        made = {one.name: replace(one, node_id=seen[one.name].node_id) for one in self.nodes}
        return replace(self, nodes=tuple(made[name] for name in dict.fromkeys(order)))


@dataclass(frozen=True)
class Seen:
    """The current state of a node.

    Attributes:
        state: Name of google.cloud.tpu.v2.Node.State, or ``gone``.
        node_id: The node's id, or empty.
    """

    state: str
    node_id: str = ""


def remember(tpu: Tpu, names: Iterable[str], lacks: Callable[[str], object] = lambda _: None) -> Plan:
    """Return the plan that recreates some nodes.

    Args:
        tpu: The client.
        names: Resource names of the nodes.
        lacks: Called with each node or queued resource, in words, that has fields which this version of tpu_ops does
            not know. A recreated one might lack these fields.

    Raises:
        ApiError: A node does not exist, or the API refused.
        UsageError: Recreating one of the nodes would delete other nodes.
    """
    made, queued = [], {}
    for name in names:
        body, node_id, source, more = bodies.node_body(tpu, name)
        if source and source not in queued:
            found = bodies.queued(tpu, source)
            if found is None:
                source = ""
            else:
                queued[source] = found
                if found.lacks:
                    lacks(f"queued resource {source.rpartition('/')[2]}")
        # A node of a queued resource is recreated from the queued resource's own request.
        if more and not source:
            lacks(f"node {name.rpartition('/')[2]}")
        made.append(Made(name, node_id, body, source))
    mine = {one.name for one in made}
    for source, found in queued.items():
        if others := sorted(name.rpartition("/")[2] for name in set(found.nodes) - mine):
            raise UsageError(
                "the nodes of this queued resource can only be recreated together, and it also created "
                f"{', '.join(others)}, which the target does not name",
                where=f"queued resource {source.rpartition('/')[2]}",
                fix="name all of its nodes, or leave out --recover",
            )
    now = {one.name: one.body for one in made}
    return Plan(tuple(made), {source: bodies.as_updated(source, found.body, now) for source, found in queued.items()})


def look(tpu: Tpu, plan: Plan) -> dict[str, Seen]:
    """Return the current state of each node of a plan, by its resource name.

    Raises:
        ApiError: The API refused or did not answer.
    """
    return {made.name: _seen(tpu, made.name) for made in plan.nodes}


def lost(plan: Plan, seen: Mapping[str, Seen]) -> dict[str, str]:
    """Return the lost nodes of a plan by resource name, each with its loss in words: gone, recreated or not serving."""
    found = {}
    for made in plan.nodes:
        now = seen[made.name]
        if now.state == GONE:
            found[made.name] = f"node {made.short} is gone"
        elif now.node_id != made.node_id:
            found[made.name] = f"node {made.short} was recreated, state {now.state}"
        elif now.state not in SERVING_STATES:
            found[made.name] = f"node {made.short} is {now.state}"
    return found


def fresh(plan: Plan, seen: Mapping[str, Seen]) -> set[str]:
    """Return the resource names of the nodes that were recreated since the plan was made."""
    return {made.name for made in plan.nodes if seen[made.name].node_id != made.node_id}


def bring_back(
    tpu: Tpu,
    plan: Plan,
    request: str,
    told: Callable[[str], None],
    asked: Requests | None = None,
    *,
    used: Callable[[Collection[str]], str] = lambda _: "",
    allow: Callable[[], object] = lambda: None,
) -> dict[str, Seen]:
    """Bring all nodes of a plan to READY; return their states.

    If the API lacks capacity, the requests are repeated with growing pauses. A node that is READY is not changed.

    Args:
        tpu: The client; closing it ends the wait.
        plan: The nodes.
        request: Text from which request ids are derived: equal for all commands that prepare the same attempt of the
            run.
        told: Called with a message on each action, from several threads.
        asked: Records each request before it is sent; None records nothing.
        used: Given resource names of READY nodes, returns in words which run of another user is active there. Called
            before a queued resource is deleted together with these nodes.
        allow: Called before each request that creates something; raises an error if that is not allowed any more.

    Raises:
        CloudError: The API refused permanently, a node did not come back in time, or a node that would be deleted has
            an active run.
    """
    asked = asked or Requests()
    work: list[Callable[[], None]] = [
        _Queue(tpu, plan, name, request, told, asked=asked, used=used, allow=allow).bring for name in plan.queued
    ]
    work += [_Single(tpu, made, told, asked, allow).bring for made in plan.nodes if not made.queued]
    # One thread per task, so that no task waits for another.
    tpu.concurrently(lambda bring: bring(), work, at_once=max(1, len(work)))
    return look(tpu, plan)


def passes(exc: Exception) -> bool:
    """Return whether an error of the API is temporary, so that the same request can succeed later."""
    return isinstance(exc, ApiError) and (exc.status in _LATER or operations.was_preempted(exc))


def _seen(tpu: Tpu, name: str) -> Seen:
    try:
        node = cloud.get_node(tpu, name)
    except ApiError as exc:
        if exc.status != "NOT_FOUND":
            raise
        return Seen(GONE)
    return Seen(node.state, node.node_id)


def _left_alone(where: str, state: str) -> CloudError:
    """Return the error for a node or queued resource in a state in which a recovery does not delete it."""
    fix = "delete this resource or make it READY by hand; then `tpu_ops attach RUN --recover` resumes the run"
    return CloudError(
        f"recovery does not change a node or queued resource in this state: {state}", where=where, fix=fix
    )


def _late(exc: operations.Late, where: str) -> CloudError:
    """Return the error for a wait that timed out, with the fix for a recovery."""
    return CloudError(exc.what, where=where, fix="`tpu_ops attach RUN --recover` waits for it again")


class _Pauses:
    """The pauses between retries, each longer than the one before. Closing the client ends a pause."""

    def __init__(self, tpu: Tpu, told: Callable[[str], None]) -> None:
        self._tpu, self._told, self._seconds = tpu, told, FIRST_PAUSE
        self._before: object = None

    def wait(self, failure: ApiError, seen: object) -> None:
        """Report a refusal of the API and pause. If another client was faster, pause only for a moment.

        Args:
            failure: The refusal.
            seen: The state before the request. If the state and the refusal are the same as last time, no client was
                faster.

        Raises:
            ApiError: The refusal is permanent, or the client was closed.
        """
        again, self._before = (failure.status, seen) == self._before, (failure.status, seen)
        if failure.status in _FASTER and not again:
            if self._tpu.closed.wait(operations.FIRST_LOOK):
                raise failure
            return
        # The name stays reserved for a while after deletion: retry.
        if not (passes(failure) or failure.status == "ALREADY_EXISTS"):
            raise failure
        self._told(f"{failure.where}: {failure.what}; next try in {self._seconds:g} s")
        if self._tpu.closed.wait(self._seconds):
            raise failure
        self._seconds = min(self._seconds * 2, LONGEST_PAUSE)


class _Single:
    """One node that was created without a queued resource."""

    def __init__(
        self, tpu: Tpu, made: Made, told: Callable[[str], None], asked: Requests, allow: Callable[[], object]
    ) -> None:
        self._tpu, self._made, self._told, self._asked, self._allow = tpu, made, told, asked, allow
        self._where = node_in_words(made.name)

    def bring(self) -> None:
        """Check the state and do the next step until the node is READY."""
        pauses, now = _Pauses(self._tpu, self._told), Seen(GONE)
        while True:
            try:
                now = _seen(self._tpu, self._made.name)
                self._asked.seen(self._made.name, now.state, now.node_id)
                if now.state in SERVING_STATES:
                    return
                self._next(now)
            except ApiError as exc:
                pauses.wait(exc, now)
            except operations.Late as exc:
                raise _late(exc, self._where) from exc

    def _next(self, now: Seen) -> None:
        same = now.node_id == self._made.node_id
        if now.state in ON_THE_WAY:
            self._told(f"{self._where}: {now.state}; waiting for at most {COMING_BACK:g} s until it is READY")
            self._wait(ON_THE_WAY, COMING_BACK)
        elif now.state in _PASSING:
            self._wait(_PASSING, MAKING)
        elif now.state == "STOPPED" and same:
            self._told(f"{self._where}: starting it")
            self._finish(self._send(START, lambda: cloud.start_node(self._tpu, self._made.name)))
        elif now.state == GONE:
            self._allow()
            self._told(f"{self._where}: creating it as it was")
            self._finish(self._send(CREATE, lambda: bodies.create(self._tpu, self._made.name, self._made.body)))
        elif now.state in _TAKEN_AWAY:
            self._told(f"{self._where}: {now.state}; deleting what is left of it")
            # The next check of the state shows the result. It might also find a node that another client has just
            # created.
            self._finish(cloud.delete_node(self._tpu, self._made.name))
        else:
            raise _left_alone(self._where, now.state if same else f"{now.state} and not the run's own node")

    def _wait(self, through: tuple[str, ...], timeout: float) -> None:
        operations.wait_for_state(
            self._tpu, self._made.name, through=through, what=self._where, timeout=timeout, progress=self._progress
        )

    def _send(self, kind: str, call: Callable[[], str]) -> str:
        return self._asked.send(self._made.name, kind, call)

    def _finish(self, operation: str) -> None:
        try:
            operations.wait(self._tpu, operation, what=self._where, timeout=MAKING, progress=self._progress)
        except operations.Failed:
            self._asked.drop(self._made.name)
            raise

    def _progress(self, elapsed: float, state: str) -> None:
        """Report nothing: the message at the beginning of the wait is enough."""


class _Queue:
    """All nodes of one queued resource: they are created and deleted together."""

    def __init__(
        self,
        tpu: Tpu,
        plan: Plan,
        name: str,
        request: str,
        told: Callable[[str], None],
        *,
        asked: Requests,
        used: Callable[[Collection[str]], str],
        allow: Callable[[], object],
    ) -> None:
        self._tpu, self._name, self._request, self._told = tpu, name, request, told
        self._requests, self._used, self._allow = asked, used, allow
        self._body: Any = plan.queued[name]
        self._nodes = [made.name for made in plan.nodes if made.queued == name]
        self._where = f"queued resource {name.rpartition('/')[2]}"
        self._said, self._asked, self._tries, self._undeleted = "", "", 0, 0
        #: The failed queued resource and the number of requests after which this object has already paused.
        self._paused: object = None

    def bring(self) -> None:
        """Check the state and do the next step until the queued resource is ACTIVE and its nodes are READY."""
        pauses = _Pauses(self._tpu, self._told)
        found: bodies.Queued | None = None
        while True:
            try:
                # Check the queued resource before its nodes: once it is ACTIVE, its nodes exist.
                found = bodies.queued(self._tpu, self._name)
                self._requests.seen(self._name, *((found.state, found.created) if found else (GONE, "")))
                states = {name: _seen(self._tpu, name).state for name in self._nodes}
                if found and found.state == "ACTIVE" and set(states.values()) <= set(SERVING_STATES):
                    return
                self._next(found, states)
            except ApiError as exc:
                pauses.wait(exc, found)
            except operations.Late as exc:
                raise _late(exc, self._where) from exc
            if self._tpu.closed.wait(LOOK):
                raise CloudError("the recovery was ended while it waited for this queued resource", where=self._where)

    def _next(self, found: bodies.Queued | None, states: Mapping[str, str]) -> None:
        there = set(states.values())
        if found is None:
            self._ask()
            return
        self._asked = ""
        if found.state in _QUEUED_ON_THE_WAY:
            self._tell(f"{found.state}; waiting until it is ACTIVE")
        elif found.state in ("DELETING", "SUSPENDING"):
            self._tell(f"{found.state}; waiting for that to end")
        elif found.state in ("SUSPENDED", "FAILED") or (found.state == "ACTIVE" and there & {GONE, *_TAKEN_AWAY}):
            # After a pause the state is checked again before anything is deleted.
            if found.state == "FAILED" and self._tries and self._paused != (found.created, self._tries):
                self._paused = (found.created, self._tries)
                raise self._failed(found)
            serving = [name for name, state in states.items() if state in SERVING_STATES]
            if serving and (use := self._used(serving)):
                what = f"recovery would delete all of its nodes, and {use}"
                fix = "wait until that run has ended, or stop it; then `tpu_ops attach RUN --recover` resumes this run"
                raise CloudError(what, where=self._where, fix=fix)
            self._tell(f"{found.state}, nodes {', '.join(sorted(there))}; deleting what is left of it")
            self._delete(found)
        elif found.state == "ACTIVE" and there <= {*SERVING_STATES, *ON_THE_WAY, *_PASSING, "STOPPED"}:
            self._tell("the nodes are coming back; waiting until all are READY")
            for name in (name for name, state in states.items() if state == "STOPPED"):
                operation = self._requests.send(name, START, functools.partial(cloud.start_node, self._tpu, name))
                operations.wait(self._tpu, operation, what=self._where, timeout=MAKING, progress=lambda *_: None)
        else:
            raise _left_alone(self._where, f"{found.state}, nodes {', '.join(sorted(there))}")

    def _ask(self) -> None:
        """Request the queued resource; if it was requested but does not exist yet, check whether that failed."""
        if not self._asked:
            self._tell("asking for its resources again; this may take a while in the queue")
            self._allow()
            request = self._id("create", self._tries)
            self._asked = self._requests.send(
                self._name, CREATE, lambda: bodies.create_queued(self._tpu, self._name, self._body, request)
            )
            self._tries += 1
            return
        try:
            if operations.is_done(self._tpu, self._asked, what=self._where):
                self._asked = ""
        except ApiError as exc:
            if not isinstance(exc, operations.Failed) and exc.status != "NOT_FOUND":
                raise
            self._asked = ""
            self._requests.drop(self._name)
            self._refused(exc, self._tries)

    def _failed(self, found: bodies.Queued) -> CloudError:
        """Return the error for a queued resource that failed again; an ApiError if a later request can succeed."""
        why = ApiError(found.error or "it failed", status=found.status or "RESOURCE_EXHAUSTED", where=self._where)
        if why.status in _FINAL and not passes(why):
            return CloudError(why.what, where=why.where, fix=why.fix)
        return ApiError(why.what, status="RESOURCE_EXHAUSTED", where=why.where, fix=why.fix)

    def _delete(self, found: bodies.Queued) -> None:
        """Delete this queued resource, but not a later one of the same name; a failed deletion is requested again.

        Unlike `deletion.delete_queued`, this sends a request id that all clients of the run's recovery share, so that
        the API deletes only once.
        """
        request = self._id(f"delete {found.created or self._tries}", self._undeleted)
        operation = bodies.delete_queued(self._tpu, self._name, request)
        # No error for a slow deletion: the next check finds the queued resource in state DELETING.
        with contextlib.suppress(operations.Late):
            try:
                operations.wait(self._tpu, operation, what=self._where, timeout=MAKING, progress=lambda *_: None)
            except ApiError as exc:
                self._undeleted += 1
                if not isinstance(exc, operations.Failed):
                    raise
                self._refused(exc, self._undeleted)

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._told(f"{self._where}: {text}")

    def _id(self, what: str, failed: int) -> str:
        """Return a request id. The first one is equal for all clients, so that the API executes only one request."""
        if failed:
            return str(uuid.uuid4())
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"tpu_ops/{self._request}/{self._name}/{what}"))

    def _refused(self, failure: ApiError, tries: int) -> None:
        """Raise the error of an operation unless it is the first: that might be the answer to an earlier command."""
        if tries > 1:
            raise failure
        self._tell(f"{failure.what}; asking once more, since this error may be the answer to an earlier command")
