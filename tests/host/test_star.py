"""Hub and peers on this machine's own network: the barrier, heartbeats, losses, and strangers at the door."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tpu_ops.host import hub, link, peer
from tpu_ops.host.child import NotReady
from tpu_ops.host.frames import Reader, Writer
from tpu_ops.host.handshake import Handshake
from tpu_ops.host.hub import Hub
from tpu_ops.host.link import Alone, Link, Team
from tpu_ops.host.peer import Peer

KEY = bytes(32)
HERE = "127.0.0.1"
LEASE = 2.0


def free_ports(count: int) -> range:
    """Return a range of ports below those that the kernel gives away, free a moment ago."""
    for first in range(20000, 30000, count):
        try:
            for port in range(first, first + count):
                socket.create_server((HERE, port)).close()
        except OSError:
            continue
        return range(first, first + count)
    raise AssertionError("no free ports")


def team(rank: int, size: int, *, port: int = 0, **changes: Any) -> Team:
    workers = [f"w{number}" for number in range(size)]
    made = Team("r1", 1, rank, workers, "digest", KEY, HERE, HERE, port, LEASE, barrier=4.0, skew=60.0)
    return made._replace(**changes)


class Star:
    """A hub and its peers, the orders that each has taken, and who has been closed."""

    def __init__(self, size: int, **changes: Any) -> None:
        ports = free_ports(4)
        self.ports, self.coordinator, self.size, self.changes = range(ports[0], ports[3]), ports[3], size, changes
        self.hub = Hub(
            team(0, size, **changes), self.wake, ports=self.ports, coordinator=self.coordinator, ending_limit=1
        )
        self.links: list[Link] = [self.hub]
        self.orders: dict[Link, list[dict[str, Any]]] = {self.hub: []}

    def wake(self) -> None:
        """Nobody sleeps here: the tests look by themselves."""

    def add(self, rank: int, problem: str = "", **changes: Any) -> Peer:
        added = Peer(team(rank, self.size, port=self.hub.port, **{**self.changes, **changes}), self.wake, problem)
        self.links.append(added)
        self.orders[added] = []
        added.start()
        return added

    def running(self) -> Star:
        self.hub.start()
        for rank in range(1, self.size):
            self.add(rank)
        for each in self.links:
            self.await_(each, "go")
        return self

    def look(self, each: Link, what: str) -> dict[str, Any] | None:
        while (order := each.take()) is not None:
            self.orders[each].append(order)
        return next((order for order in self.orders[each] if order["do"] == what), None)

    def await_(self, each: Link, what: str, seconds: float = 10) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (order := self.look(each, what)) is None:
            assert time.monotonic() < deadline, f"no {what} within {seconds} s: {self.orders[each]}"
            time.sleep(0.01)  # polls until the deadline
        return order

    def await_ready(self, ranks: set[int]) -> None:
        deadline = time.monotonic() + 10
        while self.hub._referee._ready != ranks:
            assert time.monotonic() < deadline, f"ready: {self.hub._referee._ready}"
            time.sleep(0.01)  # polls until the deadline

    def finish(self) -> None:
        for each in self.links:
            each.say(say="done")
        for each in self.links:
            self.await_(each, "closed")


@pytest.fixture
def star(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Star]]:
    for module in (hub, peer, link):
        monkeypatch.setattr(module, "BEAT", 0.2)
    monkeypatch.setattr(hub, "UNPROVED_SECONDS", 1.0)
    made: list[Star] = []

    def make(size: int, **changes: Any) -> Star:
        made.append(Star(size, **changes))
        return made[-1]

    yield make
    for each in made:
        each.hub.say(say="stop", intent={"kind": "stop"}, at=0.0)
        for one in each.links:
            one.say(say="done")


def ended(each: Link, ending: dict[str, int], cause: str = "") -> None:
    each.say(say="ended", ending=ending, oom=False, cause=cause, at=time.monotonic())


def test_all_go_together_and_are_over_together(star: Callable[..., Star]) -> None:
    made = star(4)
    made.hub.start()
    for rank in (1, 2):
        made.add(rank)
    made.await_ready({0, 1, 2})
    assert all(made.look(each, "go") is None for each in made.links)
    made.add(3)
    for each in made.links:
        made.await_(each, "go")
    for each in made.links:
        ended(each, {"code": 0})
    assert {made.await_(each, "end")["kind"] for each in made.links} == {"over"}
    made.finish()


def test_nothing_listens_once_all_go_and_the_coordinators_port_is_free(star: Callable[..., Star]) -> None:
    made = star(3)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HERE, made.coordinator))
    made.running()
    for port in (made.hub.port, made.coordinator):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
    # Without reuse: not even a closed connection may stay behind on it.
    with socket.socket() as listener:
        listener.bind((HERE, made.coordinator))
        listener.listen()


def test_a_missing_rank_is_named_and_the_others_do_not_go(star: Callable[..., Star]) -> None:
    made = star(4, barrier=1.5)
    made.hub.start()
    made.add(1)
    made.add(3)
    for each in made.links:
        order = made.await_(each, "abort")
        assert (order["reason"], order["ranks"]) == ("not ready within 1.5 s: rank 2 (w2)", [2])
    made.finish()
    assert all(made.look(each, "go") is None for each in made.links)


def test_a_rank_that_cannot_start_is_named_at_once(star: Callable[..., Star]) -> None:
    made = star(3, barrier=60)
    made.hub.start()
    made.add(1)
    made.add(2, problem="no such program")
    for each in made.links:
        assert made.await_(each, "abort")["reason"] == "rank 2 (w2): no such program"


def test_a_rank_with_another_spec_does_not_go(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    made.add(1, digest="other")
    assert made.await_(made.hub, "abort")["ranks"] == [1]


def test_a_rank_without_a_hub_gives_up_by_its_own_deadline(
    star: Callable[..., Star], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_BARRIER_MARGIN", 0.1)
    made = star(2, barrier=1.0)
    made.hub._listener.close()
    order = made.await_(made.add(1), "abort", 5)
    assert "rank 0 (w0" in order["reason"]
    assert "refused" in order["reason"]
    made.links.remove(made.hub)


def test_the_first_failure_is_told_to_all(star: Callable[..., Star]) -> None:
    made = star(4).running()
    ended(made.links[2], {"signal": 9}, "killed by SIGKILL")
    ended(made.links[3], {"code": 1}, "exit code 1")
    for each in made.links:
        order = made.await_(each, "end")
        assert order["kind"] == "failed"
        assert order["first"] == {"rank": 2, "worker": "w2", "cause": "killed by SIGKILL"}
    assert "rank 2 (w2) failed: killed by SIGKILL" in made.await_(made.hub, "note")["text"]
    made.finish()


def test_clocks_that_differ_do_not_change_who_was_first(
    star: Callable[..., Star], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's clock is two days ahead: what it says happened is corrected by what its heartbeats tell."""
    ahead = 2 * 86400.0

    class Ahead(Peer):
        def _receive(self, line: Any) -> None:
            send = line.send
            line.send = lambda value: send(value | {"at": value["at"] + ahead} if "at" in value else value)
            try:
                super()._receive(line)
            finally:
                del line.send

    monkeypatch.setitem(globals(), "Peer", Ahead)
    made = star(2)
    made.hub.start()
    early = made.add(1)
    for each in made.links:
        made.await_(each, "go")
    deadline = time.monotonic() + 5
    while abs((made.hub._members[1].offset or 0) - ahead) > 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    at = time.monotonic()
    early.say(say="ended", ending={"code": 1}, oom=False, cause="first", at=at + ahead)
    made.hub.say(say="ended", ending={"code": 1}, oom=False, cause="second", at=at + 0.6)
    assert made.await_(made.hub, "end")["first"]["cause"] == "first"


def test_a_stop_of_any_rank_stops_all(star: Callable[..., Star]) -> None:
    made = star(3).running()
    intent = {"kind": "stop", "reason": "stopped by ada", "by": "ada", "grace": 5}
    made.links[2].say(say="stop", intent=intent, at=time.monotonic())
    for each in made.links:
        order = made.await_(each, "end", 1)
        assert (order["kind"], order["reason"], order["grace"], order["by"]) == ("stop", "stopped by ada", 5, "ada")
    made.finish()


def test_a_connection_that_breaks_is_a_lost_rank_at_once(star: Callable[..., Star]) -> None:
    made = star(3).running()
    begun = time.monotonic()
    socket_of(made, 2).shutdown(socket.SHUT_RDWR)
    order = made.await_(made.links[1], "end")
    assert (order["first"]["rank"], "lost contact" in order["first"]["cause"]) == (2, True)
    assert time.monotonic() - begun < LEASE
    cut = made.await_(made.links[2], "end")
    assert (cut["kind"], cut["first"]["rank"]) == ("lost", 0)
    assert cut["reason"].startswith("lost contact with rank 0 (w0")


def socket_of(made: Star, rank: int) -> socket.socket:
    return made.hub._members[rank].line._sock


def test_silence_longer_than_the_lease_is_a_loss_on_both_sides(
    star: Callable[..., Star], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = star(3).running()
    begun = time.monotonic()
    line = made.hub._members[2].line
    # Nothing passes in either direction, and the connection stands.
    monkeypatch.setattr(line, "receive", lambda: time.sleep(0.01))  # as slow as an empty wire
    monkeypatch.setattr(line, "send", lambda value: None)
    order = made.await_(made.links[1], "end")
    assert order["first"]["rank"] == 2
    assert "nothing heard for 2 s" in order["first"]["cause"]
    assert LEASE - 0.3 <= time.monotonic() - begun < LEASE + 1 + 1.5
    assert made.await_(made.links[2], "end")["kind"] == "lost"


def test_nobody_comes_back_to_a_run_that_is_on(star: Callable[..., Star]) -> None:
    made = star(2).running()
    again = made.add(1, barrier=0.5)
    assert "refused" in made.await_(again, "abort")["reason"]
    assert made.look(made.hub, "end") is None


# --- strangers at the door ----------------------------------------------------------------------------------


def knock(made: Star, data: bytes = b"") -> socket.socket:
    stranger = socket.create_connection((HERE, made.hub.port), 5)
    stranger.sendall(data)
    return stranger


def is_closed(stranger: socket.socket, seconds: float) -> bool:
    stranger.settimeout(seconds)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def message(value: dict[str, Any]) -> bytes:
    return Writer().frame(value)


def hello(**changes: Any) -> bytes:
    return message(Handshake(KEY, "r1", 1).hello(1) | changes)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2 * 2**30) + b"x" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        hello(attempt=2),
        hello(run_id="other"),
        hello(rank=0),
        hello(rank=7),
        hello(nonce="short"),
        hello() + message({"proof": "00" * 32}),
        message({}),
    ],
    ids=["2 GB", "http", "attempt", "run", "rank 0", "rank 7", "nonce", "proof", "empty"],
)
def test_a_stranger_is_thrown_out_and_takes_no_place(star: Callable[..., Star], data: bytes) -> None:
    made = star(2)
    made.hub.start()
    stranger = knock(made, data)
    if data.startswith(hello()[:4]) and data.endswith(message({"proof": "00" * 32})):
        assert stranger.recv(1)  # the hub's challenge comes first
        while not is_closed(stranger, 3):
            pass
    else:
        assert is_closed(stranger, 3)
    made.add(1)
    for each in made.links:
        made.await_(each, "go")


def test_strangers_who_only_wait_keep_nobody_out(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    crowd = [knock(made, hello()[:7]) for _ in range(hub.UNPROVED_COUNT + 40)]
    made.add(1)
    for each in made.links:
        made.await_(each, "go")
    assert all(is_closed(one, 3) for one in crowd)


def test_strangers_who_talk_while_others_make_room_for_them_break_nothing(star: Callable[..., Star]) -> None:
    """Many sockets are ready in one moment, and the first to be served takes the place of others."""
    made = star(2)
    crowd = [knock(made, message({})) for _ in range(3 * hub.UNPROVED_COUNT)]  # the hub does not serve yet
    made.hub.start()
    late = [knock(made, message({})) for _ in range(hub.UNPROVED_COUNT)]
    made.add(1)
    for each in made.links:
        made.await_(each, "go")
    assert all(is_closed(one, 3) for one in crowd + late)


def test_an_event_of_a_socket_that_is_gone_is_no_event(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub._selector.register(made.hub._listener, 1, None)
    stranger = knock(made, message({}))
    made.hub._accept()
    gone = made.hub._unproved[0]
    made.hub._refuse(gone)
    made.hub._shake_hands(gone)
    assert is_closed(stranger, 3)
    made.hub._selector.unregister(made.hub._listener)


def test_a_slow_stranger_has_a_few_seconds(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    stranger = knock(made, b"\0")
    begun = time.monotonic()
    assert is_closed(stranger, 5)
    assert 0.5 < time.monotonic() - begun < 3


def test_a_place_is_given_once(star: Callable[..., Star]) -> None:
    made = star(3)
    made.hub.start()
    made.add(1)
    made.await_ready({0, 1})
    handshake = Handshake(KEY, "r1", 1)
    second = knock(made, message(handshake.hello(1)))
    reader = Reader()
    while (challenge := reader.take()) is None:
        reader.feed(second.recv(4096))
    second.sendall(message(handshake.answer(challenge)))
    assert is_closed(second, 3)
    made.add(2)
    for each in made.links:
        made.await_(each, "go")


# --- ports --------------------------------------------------------------------------------------------------


def test_a_taken_port_is_passed_over_and_none_is_an_error() -> None:
    ports = free_ports(2)
    with socket.create_server((HERE, ports[0])):
        listener = hub.listen_within(HERE, ports)
        assert listener.getsockname() == (HERE, ports[1])
        with pytest.raises(NotReady, match=rf"no port of {ports[0]}-{ports[1]} can be used on 127\.0\.0\.1"):
            hub.listen_within(HERE, ports)
        listener.close()


def test_a_coordinators_port_that_is_taken_is_said() -> None:
    ports = free_ports(3)
    with (
        socket.create_server((HERE, ports[2])),
        pytest.raises(NotReady, match=f"port {ports[2]}, where the coordinator is to listen, cannot be used"),
    ):
        Hub(team(0, 2), lambda: None, ports=ports[:2], coordinator=ports[2], ending_limit=1)
    socket.create_server((HERE, ports[0])).close()  # given back


def test_a_coordinators_port_that_cannot_be_reached_is_said(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub._coordinator += 1000  # what it tells the peers; nobody listens there
    made.hub.start()
    made.add(1)
    reason = made.await_(made.hub, "abort")["reason"]
    assert f"port {made.coordinator + 1000} of w0, where the coordinator will listen, cannot be reached" in reason


# --- one worker ---------------------------------------------------------------------------------------------


def test_a_run_of_one_worker_needs_no_network() -> None:
    alone = Alone(team(0, 1), lambda: None)
    alone.start()
    assert alone.take() == {"do": "go"}
    ended(alone, {"signal": 9}, "killed by SIGKILL")
    orders = [order for order in iter(alone.take, None) if order["do"] == "end"]
    assert [order["first"]["cause"] for order in orders] == ["killed by SIGKILL"]
    alone.say(say="done")
    assert alone.take() == {"do": "closed"}
