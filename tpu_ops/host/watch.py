"""Watches an active rank in a thread of its own: its output, its chips, and notices of its host.

The thread writes ``watch.json`` (`protocol.watch`) and ``history.jsonl`` beside the rank's log. The supervisor's main
thread passes the thread's samples on to the hub, and the hub's orders to the thread; neither ever waits for the other.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import threading
import time
import traceback

from . import TYPE_CHECKING
from .notices import Notices
from .stalls import Chips, Rules, cores_of, state_of
from .store import HISTORY, WATCH

if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, Mapping, Sequence

#: Seconds between two lines of the history.
HISTORY_EVERY = 60.0
#: Maximum size of the history in bytes. Beyond it, every other line is dropped, except those of the last hour.
HISTORY_LIMIT, _KEPT_WHOLE = 2 * 1024 * 1024, 3600.0
#: Maximum number of cores in a line of the history.
_CORES = 64
#: The thread waits at least this many times as long as its last samples took of a core: it uses less than 0.4 % of it,
#: however many files the processes of a run have open.
_REST = 250
_CORE_KEYS = ("id", "hbm_used", "hbm_total", "duty", "hbm_bandwidth", "idle")


class Facts:
    """What the thread can ask about its rank. Tests give other functions.

    Args:
        output: Returns the number of bytes of output so far, and when the last ones came: monotonic seconds and seconds
            since 1970, or None.
        holders: Returns the processes of the run that hold chips (see `proc.holders`).
        services: Returns the answers of these processes' metrics services.
        stacks: Writes the stacks of the run's processes beside the log; returns the error, or "".
        notices: The notices of this host; None if nobody asks for them.
    """

    def __init__(
        self,
        output: Callable[[], tuple[int, tuple[float, float] | None]],
        holders: Callable[[], list[Dict[str, Any]]],
        services: Callable[[list[Dict[str, Any]]], Sequence[Mapping[str, Any]]],
        stacks: Callable[[], str],
        notices: Notices | None = None,
    ) -> None:
        self.output, self.holders, self.services, self.stacks = output, holders, services, stacks
        self.notices = notices or Notices(lambda name: None)


class Watch(threading.Thread):
    """Samples a rank until it is told to stop.

    Args:
        place: The directory of the files.
        facts: What can be asked about the rank.
        rules: When the run counts as standing still.
        first: Whether this is rank 0, which notes for all ranks that the run stands still.
    """

    def __init__(self, place: str, facts: Facts, rules: Rules, *, first: bool) -> None:
        super().__init__(name="watch", daemon=True)
        self._place, self._facts, self._rules, self._first = place, facts, rules, first
        self._chips = Chips()
        self._began = time.monotonic()
        self._first_output: float | None = None
        self._orders: queue.SimpleQueue[Dict[str, Any]] = queue.SimpleQueue()
        #: Events for the hub, and notes for the record, as (kind, value).
        self._found: Deque[tuple[str, Any]] = collections.deque()
        self._quiet = self._torn = False
        self._stall: Dict[str, Any] | None = None
        self._faulty, self._over, self._fresh = False, False, True
        self._spent, self._sampled, self._written = 0.0, float("-inf"), float("-inf")
        self._looked = threading.Event()

    # --- the main thread's side ---------------------------------------------------------------------------------

    def take(self) -> list[tuple[str, Any]]:
        """Return what was found since the last call: ``say`` with an event for the link, ``note`` with a text."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def order(self, order: Dict[str, Any]) -> None:
        """Pass the hub's order ``stall`` on."""
        self._orders.put(order)

    def stop(self) -> None:
        """End the thread. It may still be writing for a moment."""
        self._orders.put({"do": "stop"})

    def look(self) -> None:
        """Ask for notices now; `notice` waits for the answer."""
        self._looked.clear()
        self._orders.put({"do": "look"})

    def notice(self, limit: float = 0.0) -> Dict[str, Any] | None:
        """Return the newest notice of this host; wait up to ``limit`` seconds for the end of a `look`."""
        self._looked.wait(limit)
        return self._facts.notices.newest

    # --- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take samples and carry out orders until the end."""
        while not self._over:
            begun = time.thread_time()
            try:
                self._round(time.monotonic())
            except Exception:
                # A watch that fails must not end the run: note the first fault, and go on.
                if not self._faulty:
                    self._faulty = True
                    self._found.append(("note", "this rank cannot be watched: " + traceback.format_exc(limit=-3)))
            # The first samples import modules.
            self._spent = 0.0 if self._fresh else time.thread_time() - begun
            self._fresh = False
            with contextlib.suppress(queue.Empty):
                self._carry_out(self._orders.get(timeout=self._pause()))
        with contextlib.suppress(Exception):
            # What the last sample said of the output is out of date, in a short run completely.
            self._write(self._noted(time.monotonic(), time.time(), self._facts.output()[1]))

    def _pause(self) -> float:
        now = time.monotonic()
        due = min(self._sampled + self._rules.period, self._facts.notices.due)
        return max(0.05, self._spent * _REST, min(due - now, 60.0))

    def _carry_out(self, order: Dict[str, Any]) -> None:
        if order["do"] == "stop":
            self._over = True
        elif order["do"] == "look":
            self._facts.notices.ask(time.monotonic(), time.time())
            self._looked.set()
        elif not order["sign"]:
            self._stall, self._sampled = None, float("-inf")
        else:
            self._stands_still(order["sign"])

    def _stands_still(self, sign: str) -> None:
        """Write the stacks of a run that stands still; then tell the hub and, on rank 0, the user."""
        try:
            fault = self._facts.stacks()
        except Exception as exc:
            fault = str(exc) or type(exc).__name__
        text = "stacks could not be kept: {}".format(fault) if fault else "the stacks of all ranks are kept"
        self._stall = {"at": time.time(), "sign": sign}
        if self._first:
            self._found.append(("note", "the run stands still: {}; {}".format(sign, text)))
        self._found.append(("say", {"say": "dumped"}))
        # Take the next sample at once: it writes the stall to the disk.
        self._sampled = float("-inf")

    def _round(self, now: float) -> None:
        notices = self._facts.notices
        if now >= notices.due:
            before = notices.newest
            notices.ask(now, time.time())
            if notices.newest != before:
                self._sampled = float("-inf")
                if notices.newest:
                    self._found.append(("say", {"say": "notice", "what": notices.newest["what"]}))
        if now - self._sampled >= self._rules.period:
            self._sampled = now
            self._sample(now, time.time())

    def _sample(self, now: float, wall: float) -> None:
        services = self._facts.services(self._facts.holders())
        self._chips.see(services, now)
        size, heard = self._facts.output()
        self._report(now, heard)
        self._write(self._noted(now, wall, heard))
        if now - self._written >= HISTORY_EVERY:
            self._written = now
            cores = [[_short(core.get(key)) for key in _CORE_KEYS] for core in cores_of(services)[:_CORES]]
            self._append({"t": round(wall, 1), "out": size, "cores": cores, "state": state_of(services)}, wall)

    def _report(self, now: float, heard: tuple[float, float] | None) -> None:
        """Send a sample to the hub while the rank is silent, and None once it writes again."""
        silent = now - (heard[0] if heard else self._began)
        if self._rules.after and silent >= self._rules.after:
            chips = self._chips
            begun = [at for at in (self._spoke_first(heard), chips.used) if at is not None]
            found = {
                "silent": silent,
                "began": now - min(begun) if begun else None,
                "used": chips.used is not None,
                "chips": chips.state,
                "rests": now - chips.since if chips.since is not None else 0.0,
                "sign": chips.sign,
            }
            self._found.append(("say", {"say": "quiet", "sample": found}))
            self._quiet = True
        elif self._quiet:
            self._quiet = False
            self._found.append(("say", {"say": "quiet", "sample": None}))
        else:
            self._spoke_first(heard)

    def _spoke_first(self, heard: tuple[float, float] | None) -> float | None:
        """Return when the first output came, as far as samples have shown it."""
        if self._first_output is None and heard is not None:
            self._first_output = heard[0]
        return self._first_output

    def _noted(self, now: float, wall: float, heard: tuple[float, float] | None) -> Dict[str, Any]:
        since = self._chips.since
        return {
            "at": wall,
            "last_output": heard[1] if heard else None,
            "chips": self._chips.state,
            "idle_since": wall - (now - since) if since is not None else None,
            "stall": self._stall,
            "maintenance": self._facts.notices.newest,
        }

    # --- files: a full or missing disk is harmless ---------------------------------------------------------------

    def _write(self, data: Dict[str, Any]) -> None:
        path = os.path.join(self._place, WATCH)
        with contextlib.suppress(OSError):
            _replace(path, json.dumps(data, sort_keys=True).encode("ascii"))

    def _append(self, line: Dict[str, Any], wall: float) -> None:
        path = os.path.join(self._place, HISTORY)
        data = (b"\n" if self._torn else b"") + json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            try:
                # A full disk can cut a line off: readers skip it, and the next line begins on a line of its own.
                self._torn = os.write(descriptor, data) < len(data)
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > HISTORY_LIMIT:
                with open(path, "rb") as file:
                    kept = thinned(file.read().splitlines(True), wall - _KEPT_WHOLE)
                _replace(path, b"".join(kept))


def thinned(lines: list[bytes], since: float) -> list[bytes]:
    """Return the lines of a history without every other line before a time, and without lines that were cut off."""
    old: list[bytes] = []
    new: list[bytes] = []
    for line in lines:
        try:
            (new if json.loads(line.decode("ascii"))["t"] >= since else old).append(line)
        except (ValueError, KeyError, TypeError):
            continue
    # If the last hour alone is too large, its lines are thinned too.
    return old[1::2] + (new if sum(map(len, new)) < HISTORY_LIMIT // 2 else new[1::2])


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def _replace(path: str, data: bytes) -> None:
    """Replace a file atomically, without waiting until the disk has it.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = "{}.{}".format(path, os.getpid())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
