"""The link of each rank except rank 0: one connection to the hub, which is the supervisor of rank 0."""

from __future__ import annotations

import select
import socket
import time
from typing import Any, Callable, Dict

from .handshake import Handshake, NotTrusted
from .line import Gone, Line, reset
from .link import BEAT, Networked, Team

#: Seconds between two attempts to connect to the hub, and seconds that one attempt may take.
_RETRY = 0.2
_CONNECT_LIMIT = 3.0
#: Seconds that the handshake, and then the test of the coordinator's port, may take.
_HANDSHAKE_LIMIT = 5.0
#: Seconds in which a rank that cannot start tries to tell the hub.
_REFUSAL_LIMIT = 10.0
#: Maximum length of a problem that is reported to the hub, in characters, since the size of frames is limited.
_LONGEST_REASON = 2000
#: Seconds that a peer waits for the hub's decision after the barrier's time is over.
_BARRIER_MARGIN = 2.0
#: The fix for a TCP port that cannot be reached.
_FIREWALL = "firewalls have to let the workers reach each other's internal addresses at TCP port {}"


class _Over(Exception):
    """The link has nothing left to do."""


class _TurnedAway(Exception):
    """The hub refuses connections: it listened before this rank was started, but no longer does."""


class Peer(Networked):
    """The link of one rank except rank 0.

    Args:
        team: The run.
        wake: Called from any thread when there is an order for the main thread; see `Link`.
        problem: Why this rank cannot start; empty if its command is ready and waits for ``go``.
    """

    def __init__(self, team: Team, wake: Callable[[], None], problem: str = "") -> None:
        super().__init__(team, wake)
        self._problem = problem
        limit = min(team.barrier, _REFUSAL_LIMIT) if problem else team.barrier + _BARRIER_MARGIN
        self._deadline = time.monotonic() + limit
        self._going = self._decided = self._done = False

    def _run(self) -> None:
        try:
            self._serve(self._joined())
        except _Over:
            return
        except _TurnedAway:
            text = "{} no longer waits for ranks: the run was given up, or a firewall is in the way; {}"
            text = text.format(self._hub, _FIREWALL.format(self.team.port))
            self._order(do="abort", reason=self._problem or text, ranks=self._own_fault)
        except Gone as exc:
            self._lost(str(exc))

    @property
    def _hub(self) -> str:
        return "rank 0 ({}, {}:{})".format(self.team.workers[0], self.team.hub, self.team.port)

    def _lost(self, why: str) -> None:
        """Order the end of this rank, or the end of its start: it cannot continue without the hub."""
        if self._decided:
            return
        reason = "lost contact with {}: {}".format(self._hub, why)
        if self._going:
            first = {"rank": 0, "worker": self.team.workers[0], "cause": "lost contact: {}".format(why)}
            self._order(do="end", kind="lost", reason=reason, first=first, grace=None, by=None)
        else:
            self._order(do="abort", reason=self._problem or reason, ranks=self._own_fault or [0])

    @property
    def _own_fault(self) -> list[int]:
        return [self.team.rank] if self._problem else []

    # --- joining --------------------------------------------------------------------------------------------

    def _joined(self) -> Line:
        """Connect to the hub, complete the handshake, and return the connection.

        Raises:
            Gone: The hub could not be reached before the deadline.
            _TurnedAway: The hub no longer listens.
            _Over: The run was stopped before the connection was complete.
        """
        why = "no connection was tried"
        while time.monotonic() < self._deadline:
            try:
                line = self._connected()
            except ConnectionRefusedError:
                raise _TurnedAway from None
            except OSError as exc:
                why = exc.strerror or str(exc)
            else:
                try:
                    self._shake_hands(line)
                except (Gone, NotTrusted) as exc:
                    line.reset()
                    why = str(exc)
                else:
                    return line
            self._wait_for_bell(_RETRY)
            self._give_up_if_stopped()
        raise Gone("{} within {:g} s; {}".format(why, self.team.barrier, _FIREWALL.format(self.team.port)))

    def _give_up_if_stopped(self) -> None:
        for event in self._said:
            if event["say"] == "stop":
                self._order(do="abort", reason=event["intent"].get("reason", ""), ranks=[])
                raise _Over

    def _connected(self) -> Line:
        left = max(0.1, self._deadline - time.monotonic())
        sock = socket.create_connection(
            (self.team.hub, self.team.port), min(_CONNECT_LIMIT, left), source_address=(self.team.address, 0)
        )
        return Line(sock, self.team.lease)

    def _shake_hands(self, line: Line) -> None:
        handshake = Handshake(self.team.key, self.team.run_id, self.team.attempt)
        deadline = time.monotonic() + _HANDSHAKE_LIMIT
        line.send(handshake.hello(self.team.rank))
        line.send(handshake.answer(self._next(line, deadline)))
        keys = handshake.keys()
        line.writer.seal(keys.to_hub)
        line.reader.seal(keys.to_peer)
        welcome = self._next(line, deadline)
        if not self._problem:
            self._look_at_coordinator(int(welcome.get("coordinator", 0)))
        if self._problem:
            line.send({"say": "refused", "reason": self._problem[:_LONGEST_REASON]})
        else:
            line.send({"say": "ready", "digest": self.team.digest})

    @staticmethod
    def _next(line: Line, deadline: float) -> Dict[str, Any]:
        """Wait for the next message of the hub, up to the deadline."""
        while True:
            value = line.take()
            if value is not None:
                return value
            if not select.select([line], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Gone("the hub does not answer")
            line.receive()

    def _look_at_coordinator(self, port: int) -> None:
        """Test whether JAX's coordinator port can be reached; the hub listens on it until all ranks have begun."""
        try:
            reset(socket.create_connection((self.team.hub, port), _HANDSHAKE_LIMIT, (self.team.address, 0)))
        except ConnectionResetError:
            return  # the port can be reached: the hub resets such a connection at once
        except OSError as exc:
            text = "port {} of {}, where the coordinator will listen, cannot be reached: {}; {}"
            self._problem = text.format(port, self.team.workers[0], exc.strerror or exc, _FIREWALL.format(port))

    # --- serving --------------------------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        """Exchange messages until the hub has closed the connection or is lost."""
        while True:
            writable = [line.fileno()] if line.pending else []
            readable, _, _ = select.select([line.fileno(), self._bell], writable, [], BEAT / 4)
            if line.fileno() in readable:
                self._receive(line)
            self._heard_bell()
            while self._said:
                event = self._said.popleft()
                self._done = self._done or event["say"] == "done"
                line.send(event)
            line.flush()
            now = time.monotonic()
            if self._done and not line.pending:
                line.close()
                raise _Over
            if now - line.heard > self.team.lease:
                line.reset()
                raise Gone("nothing heard for {:g} s".format(self.team.lease))
            if not self._going and not self._decided and now > self._deadline:
                line.reset()
                raise Gone("no order to start within {:g} s".format(self.team.barrier))

    def _receive(self, line: Line) -> None:
        line.receive()
        value = line.take()
        while value is not None:
            if value.get("do") == "beat":
                line.send({"say": "beat", "echo": value.get("at"), "at": time.monotonic()})
            elif value.get("do") == "stall":
                self._order(do="stall", sign=str(value.get("sign", "")))
            elif value.get("do") in ("go", "abort", "end"):
                self._going = self._going or value["do"] == "go"
                self._decided = self._decided or value["do"] != "go"
                self._order(**value)
            value = line.take()
