"""The link of rank 0: the hub, to which all other ranks are connected, and which decides for all ranks.

The hub listens only until all ranks have begun: no rank joins or rejoins an active run.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from typing import Any, Callable, Dict

from .command import NotReady
from .ending import KILL_LIMIT
from .handshake import Handshake, NotTrusted
from .line import Gone, Line, reset
from .link import BEAT, Networked, Team, judge
from .referee import BARRIER, DECIDED, Referee

#: Seconds in which a socket has to complete the handshake. Maximum number of sockets in the handshake, in addition to
#: two for each rank; when another socket connects, the oldest is closed.
UNPROVED_SECONDS = 5.0
UNPROVED_COUNT = 64
_BACKLOG = 512
#: After each heartbeat, the round trip of the best clock measurement is multiplied by this factor: measurements age.
_AGED = 1.01
#: Seconds that the hub waits for other ranks in addition to the time that they may take to end.
_CLOSING_MARGIN = 5.0


class _Unproved:
    """A connection that has not completed the handshake."""

    def __init__(self, line: Line, handshake: Handshake) -> None:
        self.line = line
        self.handshake = handshake
        self.since = time.monotonic()
        self.challenged = False


class _Member:
    """The connection of a rank that has completed the handshake.

    Attributes:
        offset: Seconds by which the peer's clock is ahead of the hub's.
        trip: Round trip of the measurement of `offset`, increased with each heartbeat. A measurement with a shorter
            round trip replaces both.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.offset: float | None = None
        self.trip = float("inf")
        self.done = False


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: The port cannot be used.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def listen_within(address: str, ports: range) -> socket.socket:
    """Return a listening socket on the first free port of a range.

    Raises:
        NotReady: No port is free.
    """
    fault = OSError()
    for port in ports:
        try:
            return listen(address, port)
        except OSError as exc:
            fault = exc
    what = "no port of {}-{} can be used on {}: {}".format(ports[0], ports[-1], address, fault.strerror)
    fix = (
        "`sudo ss -ltnp` on this worker shows the processes that use the ports; end these, or set other ports in "
        "launcher_ports"
    )
    raise NotReady("{}; {}".format(what, _remedy(fault, address, fix)))


def _remedy(exc: OSError, address: str, fix: str) -> str:
    """Return the fix for a port that cannot be used: the given fix, or another fix if the address is the problem."""
    if exc.errno != errno.EADDRNOTAVAIL:
        return fix
    text = "the API lists {} as this worker's internal address, but the worker does not have it: `tpu_ops refresh`"
    return text.format(address)


class Hub(Networked):
    """The link of rank 0.

    Args:
        team: The run.
        wake: Called from any thread when there is an order for the main thread; see `Link`.
        ports: The range of ports; the hub listens on the first free port.
        coordinator: Port on which the command's own coordinator will listen; reserved until all ranks have begun.
        ending_limit: Seconds that a rank may take to end.

    Raises:
        NotReady: A port cannot be used.
    """

    def __init__(
        self, team: Team, wake: Callable[[], None], *, ports: range, coordinator: int, ending_limit: float
    ) -> None:
        super().__init__(team, wake)
        self._coordinator = coordinator
        self._ending_limit = ending_limit + KILL_LIMIT + _CLOSING_MARGIN
        # Take the coordinator's port first: the range for the hub may contain it.
        try:
            self._held = listen(team.address, coordinator)
        except OSError as exc:
            what = "port {}, where the coordinator is to listen, cannot be used: {}"
            fix = "`sudo ss -ltnp` on this worker shows the process; --env JAX_COORDINATOR_PORT=PORT sets another port"
            fix = _remedy(exc, team.address, fix)
            raise NotReady("{}; {}".format(what.format(coordinator, exc.strerror or exc), fix)) from exc
        try:
            self._listener = listen_within(team.address, ports)
        except NotReady:
            self._held.close()
            raise
        self.port = int(self._listener.getsockname()[1])
        self._referee = Referee(team.workers, team.barrier, team.skew, time.monotonic(), team.stall)
        self._selector = selectors.DefaultSelector()
        self._unproved: list[_Unproved] = []
        self._members: Dict[int, _Member] = {}
        self._next_beat = 0.0
        self._decided_at = 0.0
        self._done = False

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ, self._heard_bell)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._held, selectors.EVENT_READ, self._greet)
        self._referee.ready(0)
        while not self._over():
            for key, events in self._selector.select(self._patience()):
                if events & selectors.EVENT_READ:
                    key.data()
            now = time.monotonic()
            while self._said:
                event = self._said.popleft()
                self._done = self._done or event["say"] == "done"
                judge(self._referee, 0, event, event.get("at", now), now)
            if now >= self._next_beat:
                self._next_beat = now + BEAT
                self._broadcast({"do": "beat", "at": now})
            self._look_after(now)
            self._referee.tick(now, self._silent(now))
            self._carry_out()
        for rank in list(self._members):
            self._forget(rank).line.close()

    def _over(self) -> bool:
        """Return whether the run's end is decided, and all ranks have ended or the time limit for that has passed."""
        if self._referee.phase != DECIDED or not self._done:
            return False
        waited = time.monotonic() - self._decided_at
        return all(member.done for member in self._members.values()) or waited > self._ending_limit

    def _patience(self) -> float:
        now = time.monotonic()
        return max(0.0, min(self._next_beat - now, self._referee.deadline - now, BEAT / 4))

    # --- sockets before and during the handshake -------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            line = Line(self._listener.accept()[0], self.team.lease)
        except OSError:
            return  # the client has closed the connection already
        if len(self._unproved) >= UNPROVED_COUNT + 2 * len(self.team.workers):
            self._refuse(self._unproved[0])
        unproved = _Unproved(line, Handshake(self.team.key, self.team.run_id, self.team.attempt))
        self._unproved.append(unproved)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._shake_hands(unproved))

    def _greet(self) -> None:
        """Accept and reset a connection to the coordinator's port, so that no connection stays on the port."""
        try:
            reset(self._held.accept()[0])
        except OSError:
            return

    def _refuse(self, unproved: _Unproved) -> None:
        self._unproved.remove(unproved)
        self._selector.unregister(unproved.line)
        unproved.line.reset()

    def _shake_hands(self, unproved: _Unproved) -> None:
        if unproved not in self._unproved:
            return  # this socket was closed to make room for another one
        try:
            unproved.line.receive()
            value = unproved.line.take()
            if value is None:
                return
            if not unproved.challenged:
                unproved.line.send(unproved.handshake.challenge(value, len(self.team.workers)))
                unproved.challenged = True
                return
            unproved.handshake.confirm(value)
            self._admit(unproved)
        except (Gone, NotTrusted):
            self._refuse(unproved)

    def _admit(self, unproved: _Unproved) -> None:
        rank, line = unproved.handshake.rank, unproved.line
        if rank in self._members:
            raise NotTrusted("another connection of this rank exists")
        keys = unproved.handshake.keys()
        line.writer.seal(keys.to_peer)
        line.reader.seal(keys.to_hub)
        line.send({"do": "welcome", "coordinator": self._coordinator})
        line.send({"do": "beat", "at": time.monotonic()})
        self._unproved.remove(unproved)
        self._members[rank] = _Member(line)
        self._selector.modify(line, selectors.EVENT_READ, lambda: self._receive(rank))

    # --- ranks ----------------------------------------------------------------------------------------------

    def _receive(self, rank: int) -> None:
        member = self._members.get(rank)
        if member is None:
            return
        try:
            member.line.receive()
            value = member.line.take()
            while value is not None:
                self._hear(rank, member, value)
                value = member.line.take()
        except Gone as exc:
            self._lose(rank, str(exc), time.monotonic())

    def _hear(self, rank: int, member: _Member, value: Dict[str, Any]) -> None:
        now = time.monotonic()
        if value.get("say") == "beat":
            trip = now - float(value["echo"])
            # Clocks drift: a new measurement is better than an old one with a slightly shorter round trip.
            member.trip *= _AGED
            if trip < member.trip:
                member.trip, member.offset = trip, float(value["at"]) - (float(value["echo"]) + trip / 2)
        elif value.get("say") == "done":
            member.done = True
        elif value.get("say") == "ready" and value.get("digest") != self.team.digest:
            self._referee.refused(rank, "this rank was given a different spec than rank 0")
        else:
            at = now
            if member.offset is not None and "at" in value:
                at = min(now, float(value["at"]) - member.offset)
            judge(self._referee, rank, value, at, now)

    def _lose(self, rank: int, why: str, at: float) -> None:
        member = self._forget(rank)
        member.line.reset()
        if not member.done:
            self._referee.lost(rank, at, time.monotonic(), "lost contact: {}".format(why))

    def _forget(self, rank: int) -> _Member:
        member = self._members.pop(rank)
        self._selector.unregister(member.line)
        return member

    def _broadcast(self, value: Dict[str, Any]) -> None:
        for rank, member in list(self._members.items()):
            try:
                member.line.send(value)
            except Gone as exc:
                self._lose(rank, str(exc), time.monotonic())

    def _look_after(self, now: float) -> None:
        """Send waiting data; close slow handshakes and connections on which nothing was received for too long."""
        for unproved in [one for one in self._unproved if now - one.since > UNPROVED_SECONDS]:
            self._refuse(unproved)
        for rank, member in list(self._members.items()):
            try:
                member.line.flush()
            except Gone as exc:
                self._lose(rank, str(exc), now)
                continue
            if now - member.line.heard > self.team.lease:
                self._lose(rank, "nothing heard for {:g} s".format(self.team.lease), member.line.heard)

    def _silent(self, now: float) -> Dict[int, float]:
        """Return rank -> seconds since data was received from it, for the ranks that have missed two heartbeats."""
        heard = {rank: now - member.line.heard for rank, member in self._members.items()}
        return {rank: seconds for rank, seconds in heard.items() if seconds > 2.5 * BEAT}

    # --- orders ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Carry out the referee's orders. Carrying out an order can lose a connection, which adds more orders."""
        orders = self._referee.take()
        while orders:
            for order in orders:
                if self._referee.phase != BARRIER:
                    self._stop_listening()
                if order["do"] in ("abort", "end"):
                    self._decided_at = time.monotonic()
                    asked = float(order.get("grace") or 0)
                    self._ending_limit = max(self._ending_limit, asked + KILL_LIMIT + _CLOSING_MARGIN)
                if order["do"] != "note":
                    self._broadcast(order)
                self._order(**order)
            orders = self._referee.take()

    def _stop_listening(self) -> None:
        if self._listener.fileno() < 0:
            return
        for unproved in list(self._unproved):
            self._refuse(unproved)
        for listener in (self._listener, self._held):
            self._selector.unregister(listener)
            listener.close()
