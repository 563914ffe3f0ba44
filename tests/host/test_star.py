"""Hub and peers on this machine's own network: the barrier, the first failure, stops, heartbeats and losses."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.specs import good, myself
from tests.support.star import LEASE, Star, ended, team
from tpu_ops.host import child, hub, logs, peer, rank_record, supervise
from tpu_ops.host.link import Alone, Networked
from tpu_ops.host.peer import Peer
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec


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


def test_a_clock_that_drifts_is_read_again(star: Callable[..., Star], monkeypatch: pytest.MonkeyPatch) -> None:
    """After hours, the fastest heartbeat of the whole run is outdated for a clock that drifts."""
    made, now = star(2), 100.0
    member: Any = SimpleNamespace(trip=float("inf"), offset=None)

    def beat(trip: float, ahead: float) -> None:
        nonlocal now
        now += 1.0
        made.hub._hear(1, member, {"say": "beat", "echo": now - trip, "at": now - trip / 2 + ahead})

    with monkeypatch.context() as patch:
        patch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: now))
        beat(0.001, 2.0)
        assert member.offset == pytest.approx(2.0)
        beat(0.002, 7.0)
        assert member.offset == pytest.approx(2.0), "the slower one is the less exact one"
        for _ in range(100):
            beat(0.0012, 7.0)
        assert member.offset == pytest.approx(7.0)


def test_a_missing_rank_is_named_and_the_others_do_not_go(star: Callable[..., Star]) -> None:
    made = star(4, barrier=1.5)
    made.hub.start()
    made.add(1)
    made.add(3)
    for each in made.links:
        order = made.await_(each, "abort")
        assert (order["reason"].partition(";")[0], order["ranks"]) == ("not ready within 1.5 s: rank 2 (w2)", [2])
    made.finish()
    assert all(made.look(each, "go") is None for each in made.links)


def test_a_rank_that_cannot_start_is_named_at_once(star: Callable[..., Star]) -> None:
    made = star(3, barrier=60)
    made.hub.start()
    made.add(1)
    made.await_ready({0, 1})
    made.add(2, problem="no such program")
    for each in made.links:
        assert made.await_(each, "abort")["reason"] == "rank 2 (w2): no such program"


@pytest.mark.parametrize(("problem", "ranks"), [("", []), ("no such program", [1])])
def test_a_late_rank_of_an_abandoned_run_ends_at_once_without_blame(
    star: Callable[..., Star], problem: str, ranks: list[int]
) -> None:
    made = star(3, barrier=60)
    made.hub.start()
    made.await_(made.add(2, problem="no such program"), "abort")
    begun = time.monotonic()
    order = made.await_(made.add(1, problem=problem), "abort", 5)
    assert time.monotonic() - begun < 5
    assert order["ranks"] == ranks
    assert (problem or "the run was given up") in order["reason"]


def test_a_rank_with_another_spec_does_not_go(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    made.add(1, digest="other")
    assert made.await_(made.hub, "abort")["ranks"] == [1]


def test_a_rank_without_a_hub_gives_up_by_its_own_deadline(
    star: Callable[..., Star], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that takes the connection and never answers plays it."""
    monkeypatch.setattr(peer, "_BARRIER_MARGIN", 0.1)
    monkeypatch.setattr(peer, "_HANDSHAKE_LIMIT", 0.3)
    made = star(2, barrier=1.0)
    order = made.await_(made.add(1), "abort", 5)
    assert order["reason"].startswith("lost contact with rank 0 (w0")
    assert order["ranks"] == [0]
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

    monkeypatch.setattr("tests.support.star.Peer", Ahead)
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
    intent = {"kind": "stop", "reason": "stopped by ada", "by": "ada", "grace": 500}
    made.links[2].say(say="stop", intent=intent, at=time.monotonic())
    for each in made.links:
        order = made.await_(each, "end", 1)
        assert (order["kind"], order["reason"], order["grace"], order["by"]) == ("stop", "stopped by ada", 500, "ada")
    assert made.hub._ending_limit > 500, "others than the hub may need all of it"
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
    assert "no longer waits for ranks" in made.await_(again, "abort")["reason"]
    assert made.look(made.hub, "end") is None


def test_a_run_of_one_worker_needs_no_network() -> None:
    alone = Alone(team(0, 1), lambda: None)
    alone.start()
    assert alone.take() == {"do": "go"}
    ended(alone, {"signal": 9}, "killed by SIGKILL")
    orders = [order for order in iter(alone.take, None) if order["do"] == "end"]
    assert [order["first"]["cause"] for order in orders] == ["killed by SIGKILL"]
    alone.say(say="done")
    assert alone.take() == {"do": "closed"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("waits")
def test_a_command_that_is_killed_while_it_is_held_is_why_no_rank_goes(
    star: Callable[..., Star], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(supervise, "_TICK", 0.02)
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(spec.check(good(run_id="r1")), myself(), os.getuid(), "")
    supervisor._keep()
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["sleep", "60"], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink.fileno())
    supervisor.child = held
    made = star(3)
    made.hub.start()
    peer_ = made.add(1)
    made.await_ready({0, 1})
    supervisor.link = made.links[rank]
    os.kill(held.pid, signal.SIGKILL)
    assert not supervisor._may_go()
    other = peer_ if rank == 0 else made.hub
    reason = f"rank {rank} (w{rank}): the process that waits to execute its command has ended: killed by SIGKILL"
    assert made.await_(other, "abort")["reason"] == reason
    other.say(say="done")
    supervisor._refused()
    found = supervisor.record
    assert (found["state"], found["reason"], found["blamed"]) == ("refused", reason, [rank])


def test_a_network_thread_that_fails_ends_the_rank_in_order_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Networked):
        def _run(self) -> None:
            self._order(do="go")
            self._wait_for_bell(10)
            raise RuntimeError("out of descriptors")

    monkeypatch.setattr(supervise, "chips_after", lambda _: {"holders": []})
    before = signal.pthread_sigmask(signal.SIG_BLOCK, supervise._AWAITED)
    data = spec.check(good(run_id="r1", grace_failure=5))
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(data, myself(), os.getuid(), "")
    supervisor._keep()
    source, sink = os.pipe()
    supervisor.child = child.Child.fork(["sleep", "60"], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink)
    os.close(sink)
    # A directory plays the control group: this process and the command.
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{supervisor.child.pid}\n")
    supervisor.record["cgroup"] = str(tmp_path)
    supervisor.link = Failing(team(1, 4), supervisor._waker())
    try:
        supervisor.link.start()
        assert supervisor._may_go()
        supervisor.child.go()
        supervisor.link.say(say="anything")
        supervisor._live(data, logs.Logger(source, str(tmp_path)), "")
    finally:
        os.close(source)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    found = supervisor.record
    assert (found["state"], found["exit"], found["intent"]["kind"]) == ("stopped", {"signal": signal.SIGTERM}, "lost")
    assert "the supervisor's network thread failed" in found["reason"]
    assert "out of descriptors" in found["reason"]
    # A record of a rank that ended with 0, and that blames nobody, says that all ranks did.
    assert found["first"] == {"rank": 1, "worker": "w1", "cause": "the supervisor's network thread failed"}
