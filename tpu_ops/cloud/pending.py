"""The requests of a recovery that no run uses yet: each is or will be billed, also without the recovery."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tpu_ops import files
from tpu_ops.cloud import bodies, lifecycle, operations
from tpu_ops.cloud import nodes as cloud
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import TAKEN_STATES
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.errors import OpsError
from tpu_ops.files import unwritable

#: Kinds of a request.
CREATE, START = "create", "start"
#: The state of what is not there.
GONE = "gone"
#: Seconds in which something that was asked for may still appear.
APPEARING = 1800.0


@dataclass(frozen=True)
class Request:
    """One request to the API.

    Attributes:
        name: Resource name of the node or the queued resource.
        kind: `CREATE` or `START`.
        since: When it was sent (seconds since 1970).
        state: State of the node or queued resource when it was last seen; empty where it was not seen yet.
        made: The node's id, or when the queued resource was created: another one made later under the same name has
            another.
    """

    name: str
    kind: str
    since: float
    state: str = ""
    made: str = ""

    @property
    def is_node(self) -> bool:
        """Whether it is about a node, and not a queued resource."""
        return "/nodes/" in self.name

    @property
    def in_words(self) -> str:
        """The node or queued resource in words."""
        return node_in_words(self.name) if self.is_node else bodies.queued_in_words(self.name)

    def now(self, state: str, made: str) -> Request | None:
        """Given what is there now, return the request as it is then; None where nothing of it is left to be billed."""
        if state == GONE:
            return None if self.state or time.time() - self.since > APPEARING else self
        if state in (*TAKEN_STATES, "DELETING") or (self.made and made != self.made):
            return None
        return replace(self, state=state, made=made)


def read(path: Path) -> list[Request]:
    """Return the requests that a file keeps; none where there is no file.

    Raises:
        OpsError: It cannot be understood.
    """
    try:
        return [Request(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as exc:
        fix = "look for nodes that nobody uses (`tpu_ops list`), then remove this file"
        raise OpsError(f"this cannot be read: {exc}", where=str(path), fix=fix) from exc


class Requests:
    """The requests of one run's recovery, in a file from before each is sent.

    Args:
        path: The file; None keeps them in memory only.
        warn: Told why the file cannot be read or written; they are then kept in memory.
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
        """Those of which nothing is known to be over."""
        with self._lock:
            return list(self._all.values())

    def send(self, name: str, kind: str, call: Callable[[], str]) -> str:
        """Keep a request, send it and return what the call returns: the operation's name.

        Raises:
            ApiError: The API refused, or its answer was lost.
        """
        before = self._all.get(name)
        self._put(name, Request(name, kind, time.time()))
        try:
            return call()
        except ApiError as exc:
            if exc.status == "ALREADY_EXISTS":
                # It is somebody else's, unless an earlier request of this recovery was taken.
                self._put(name, before)
            elif exc.status not in lifecycle.UNCLEAR:
                self.drop(name)
            raise

    def seen(self, name: str, state: str, made: str) -> None:
        """Keep how a node or queued resource is, if it was requested."""
        if known := self._all.get(name):
            self._put(name, known.now(state, made))

    def drop(self, *names: str) -> None:
        """Forget requests: a run has started on what they made, or nothing of that is left."""
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
            self._warn(f"{unwritable(path, exc)}; what the recovery requests is known to this command only")


def look(tpu: Tpu, request: Request) -> Request | None:
    """Return a request as it is now; None where nothing of it is left.

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
    """Delete what was requested, in whatever state it is, and wait until it is gone.

    Raises:
        CloudError: The API refused, or it was still there when the time was over.
    """
    what = request.in_words
    if request.is_node:
        lifecycle.delete(tpu, request.name, request.made, what=what, wait=True, timeout=timeout, progress=progress)
        return
    operation = bodies.delete_queued(tpu, request.name, str(uuid.uuid4()))
    operations.wait(tpu, operation, what=what, timeout=timeout, progress=progress)
