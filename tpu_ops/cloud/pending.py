"""A recovery's requests for nodes that no run uses yet. These nodes are billed even if the recovery ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tpu_ops import files
from tpu_ops.cloud import bodies, deletion, lifecycle
from tpu_ops.cloud import nodes as cloud
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import TAKEN_STATES
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.errors import OpsError
from tpu_ops.files import unwritable

#: Kinds of requests to the API: create a node or queued resource, or start a stopped node.
CREATE, START = "create", "start"
#: State of a node or queued resource that does not exist.
GONE = "gone"
#: Seconds after a request until which the requested node or queued resource can still appear.
APPEARING = 1800.0


@dataclass(frozen=True)
class Request:
    """One request to the API for a node or a queued resource.

    Attributes:
        name: Resource name of the node or the queued resource.
        kind: `CREATE` or `START`.
        since: When the request was sent, in seconds since 1970.
        state: Last known state of the node or queued resource; empty if it was never seen.
        made: The node's id, or the creation time of the queued resource; a later one of the same name has another
            value.
    """

    name: str
    kind: str
    since: float
    state: str = ""
    made: str = ""

    @property
    def is_node(self) -> bool:
        """Whether the request is for a node and not for a queued resource."""
        return "/nodes/" in self.name

    @property
    def in_words(self) -> str:
        """The node or queued resource as words for a message."""
        return node_in_words(self.name) if self.is_node else bodies.queued_in_words(self.name)

    def now(self, state: str, made: str) -> Request | None:
        """Return the request with this state of its node or queued resource; None if that can no longer cause costs."""
        if state == GONE:
            return None if self.state or time.time() - self.since > APPEARING else self
        if state in (*TAKEN_STATES, "DELETING") or (self.made and made != self.made):
            return None
        return replace(self, state=state, made=made)


def read(path: Path) -> list[Request]:
    """Return the requests that a file contains; empty if the file does not exist.

    Raises:
        OpsError: The file is invalid.
    """
    try:
        return [Request(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as exc:
        fix = "look for unused nodes (`tpu_ops list`), then remove this file"
        raise OpsError(f"this cannot be read: {exc}", where=str(path), fix=fix) from exc


class Requests:
    """The requests of one run's recovery. Each request is written to a file before it is sent.

    Args:
        path: The file; None keeps the requests in memory only.
        warn: Called with a warning if the file cannot be read or written; the requests are then kept in memory.
    """

    def __init__(self, path: Path | None = None, warn: Callable[[str], object] = lambda _: None) -> None:
        self._path, self._warn = path, warn
        self._lock = threading.Lock()
        self._all: dict[str, Request] = {}
        try:
            self._all = {request.name: request for request in (read(path) if path else ())}
        except OpsError as exc:
            warn(str(exc))

    @property
    def all(self) -> list[Request]:
        """Return the requests for nodes that are billed or might be."""
        with self._lock:
            return list(self._all.values())

    def send(self, name: str, kind: str, call: Callable[[], str]) -> str:
        """Record a request, send the request to the API and return the operation's name.

        Args:
            name: Resource name of the node or queued resource.
            kind: `CREATE` or `START`.
            call: Sends the request.

        Raises:
            ApiError: The API refused, or its answer was lost.
        """
        before = self._all.get(name)
        self._put(name, Request(name, kind, time.time()))
        try:
            return call()
        except ApiError as exc:
            if exc.status == "ALREADY_EXISTS":
                # If no earlier request of this recovery created the existing node or queued resource, it belongs to
                # other users.
                self._put(name, before)
            elif exc.status not in lifecycle.UNCLEAR:
                self.drop(name)
            raise

    def seen(self, name: str, state: str, made: str) -> None:
        """Record the current state of a node or queued resource that this recovery has requested; ignore all others."""
        if known := self._all.get(name):
            self._put(name, known.now(state, made))

    def drop(self, *names: str) -> None:
        """Forget the requests for some nodes or queued resources: a run uses them now, or they no longer exist."""
        for name in names:
            self._put(name, None)

    def _put(self, name: str, request: Request | None) -> None:
        with self._lock:
            if self._all.get(name) == request:
                return
            self._all.pop(name, None)
            if request:
                self._all[name] = request
            if self._path:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        try:
            if not self._all:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(path, json.dumps([asdict(request) for request in self._all.values()]) + "\n", 0o600)
        except OSError as exc:
            self._warn(f"{unwritable(path, exc)}; only this command knows what the recovery has requested")


def look(tpu: Tpu, request: Request) -> Request | None:
    """Ask the API for the current state of a requested node or queued resource; return None as `Request.now` does.

    Raises:
        ApiError: The API refused or did not answer.
    """
    if not request.is_node:
        found = bodies.queued(tpu, request.name)
        return request.now(found.state, found.created) if found else request.now(GONE, "")
    try:
        node = cloud.get_node(tpu, request.name)
    except ApiError as exc:
        if exc.status != "NOT_FOUND":
            raise
        return request.now(GONE, "")
    return request.now(node.state, node.node_id)


def delete(tpu: Tpu, request: Request, *, timeout: float, progress: Progress) -> None:
    """Delete the requested node or queued resource in any state, and wait until it is gone.

    Raises:
        CloudError: The API refused, another one of its name exists now, or it still existed after the timeout.
    """
    name, made = request.name, request.made
    if request.is_node:
        what = request.in_words
        lifecycle.delete(tpu, name, made, what=what, wait=True, timeout=timeout, progress=progress)
    else:
        deletion.delete_queued(tpu, name, made, wait=True, timeout=timeout, progress=progress)
