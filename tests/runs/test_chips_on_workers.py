"""Who holds which chip, freeing it, and the doctor, on real workers whose chips are device files."""

from __future__ import annotations

import json

import pytest

from tests.support.folded import lines_of
from tests.support.runs import CHIPS, Bench

pytestmark = pytest.mark.lab

HOLD = "exec 3<{chip}; exec sleep 600"


def hold(bench: Bench, index: int, person: str, *, ignoring: str = "") -> int:
    """Have a person hold a worker's first chip outside of any run; return the process."""
    script = f"{ignoring} {HOLD.format(chip=CHIPS[0])}"
    bench.inside(index, f"setsid su -s /bin/sh {person} -c '{script}' >/dev/null 2>&1 </dev/null &")

    def pids() -> str:
        return bench.inside(index, f"pgrep -u {person} -x sleep || true").strip()

    bench.await_(pids, f"{person} holds a chip")
    return int(pids().split()[0])


def test_who_names_runs_and_processes_that_no_run_owns(bench: Bench) -> None:
    bench.started("sh", "-c", HOLD.format(chip=CHIPS[1]), name="owned")
    pid = hold(bench, 1, "bob")
    done = bench.tpu_ops("who", person="bob")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[2]: line.split() for line in done.stdout.splitlines()[1:]}
    assert rows["owned"][:2] == ["pod-w[0-1]", "ada"]
    assert rows["none"][:2] == ["pod-w1", "bob"]
    assert str(pid) in rows["none"]
    found = json.loads(bench.tpu_ops("who", "pod-w1", "--json").stdout)
    assert {(holder["user"], holder["run"]) for holder in found["holders"]} == {("ada", "owned"), ("bob", "")}
    assert found["chips"] == {"pod-w1": len(CHIPS)}
    bench.tpu_ops("unlock", "pod", "--yes", person="bob")
    bench.tpu_ops("stop", "owned")
    done = bench.tpu_ops("who", "pod")
    assert (done.stdout, done.stderr) == ("", "free: pod-w[0-1]\n")


def test_unlock_ends_what_is_one_s_own_and_nothing_else(bench: Bench) -> None:
    stray = hold(bench, 0, "ada", ignoring='trap "" TERM;')
    bobs = hold(bench, 1, "bob")
    bench.inside(0, "touch /tmp/libtpu_lockfile")
    bench.inside(1, "touch /tmp/libtpu_lockfile")
    # A program of the same name without a chip is nobody's business.
    bench.inside(0, "setsid su -s /bin/sh ada -c 'exec sleep 601' >/dev/null 2>&1 </dev/null &")
    done = bench.tpu_ops("unlock", "pod", "--yes", "--grace", "1")
    assert done.returncode == 1
    assert f"pod-w0: ended pid {stray} of ada" in done.stderr
    assert "pod-w0: removed /tmp/libtpu_lockfile" in done.stderr
    assert f"pod-w1: still held by pid {bobs} of bob" in done.stderr
    assert "error: chips are still held\n  at:  pod-w1\n  fix: ask bob, or an administrator" in done.stderr
    assert bench.inside(0, "pgrep -u ada -x sleep -a").split()[1:] == ["sleep", "601"]
    assert bench.inside(1, "ls /tmp/libtpu_lockfile").strip() == "/tmp/libtpu_lockfile"
    refused = bench.tpu_ops("unlock", "pod-w1", "--yes", "--force", "--user", "bob")
    assert "ada is no administrator of this host" in refused.stderr
    assert refused.returncode == 1
    done = bench.tpu_ops("unlock", "pod-w1", "--yes", "--force", "--user", "bob", person="tpu")
    assert done.returncode == 0, done.stderr
    assert f"pod-w1: ended pid {bobs} of bob" in done.stderr
    assert bench.inside(1, "ls /tmp/libtpu_lockfile 2>&1 || true").strip().endswith("No such file or directory")


def test_unlock_stops_one_s_own_run_after_asking(bench: Bench) -> None:
    bench.started("sh", "-c", HOLD.format(chip=CHIPS[0]), name="mine")
    asked = bench.tpu_ops("unlock", "pod")
    assert (asked.returncode, "add --yes" in asked.stderr) == (2, True), asked.stderr
    other = bench.tpu_ops("unlock", "pod", "--yes", person="bob")
    assert (other.returncode, "ask ada" in other.stderr) == (1, True), other.stderr
    done = bench.tpu_ops("unlock", "pod", "--yes")
    assert done.returncode == 0, done.stderr
    assert "run mine was stopped" in done.stderr
    bench.clean()


def test_the_doctor_says_what_is_well_and_what_is_not(bench: Bench) -> None:
    well = bench.tpu_ops("doctor", "pod")
    assert well.returncode == 0, well.stdout + well.stderr
    assert all(line.startswith("PASS  ") for line in well.stdout.splitlines())
    bench.inside(1, "touch /tmp/libtpu_lockfile")
    bench.inside(1, "echo LD_PRELOAD=/usr/lib/libtcmalloc.so.4 >>/etc/environment")
    try:
        done = bench.tpu_ops("doctor", "pod")
        assert done.returncode == 1
        lines = done.stdout.splitlines()
        assert "FAIL  no lockfile of libtpu is left behind: not on pod-w1" in lines
        assert "          fix: tpu_ops unlock pod-w1" in lines
        assert "FAIL  no TCMalloc is loaded into every program: not on pod-w1" in lines
        found = json.loads(bench.tpu_ops("doctor", "pod", "--json").stdout)
        assert [entry["check"] for entry in found if not entry["passed"]] == ["lockfile", "preload"]
    finally:
        bench.inside(1, "rm -f /tmp/libtpu_lockfile; sed -i /LD_PRELOAD/d /etc/environment")


def test_the_doctor_names_a_worker_that_does_not_answer(bench: Bench) -> None:
    # The kernel may refuse to freeze a container that is just starting processes.
    pause = ("pause", bench.container(1))
    bench.await_(lambda: bench.backend.engine.call(*pause, check=False).code == 0, "the worker is paused")
    try:
        done = bench.tpu_ops("doctor", "pod", timeout=150)
    finally:
        bench.backend.engine.call("unpause", bench.container(1))
    assert done.returncode == 4, done.stdout
    assert "FAIL  ssh and the launcher answer: not on pod-w1" in done.stdout.splitlines()


def test_attach_shows_a_run_to_its_end(bench: Bench) -> None:
    bench.started("sh", "-c", "sleep 3; echo done", name="attached")
    done = bench.tpu_ops("attach", "attached", "--rank", "all")
    assert done.returncode == 0, done.stderr
    assert [lines_of(done.stdout, rank) for rank in bench.indices] == [["done"]] * 2
    assert "run attached succeeded on all 2 ranks" in done.stderr
    assert "attached" in bench.tpu_ops("runs").stdout


def test_logs_are_fetched_byte_for_byte_and_from_a_time(bench: Bench) -> None:
    bench.started("sh", "-c", r"printf 'a\000b\rc'; sleep 4; echo late", name="kept")
    bench.tpu_ops("attach", "kept")
    folder = bench.folder / "fetched"
    done = bench.tpu_ops("logs", "kept", "--fetch", str(folder))
    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in sorted((folder / "kept").iterdir())] == [b"a\0b\rclate\n"] * 2
    recent = bench.record(0, "kept")["ended"] - 1.5
    stamp = bench.inside(0, f"date --utc --date=@{recent} +%Y-%m-%dT%H:%M:%S+00:00").strip()
    assert bench.tpu_ops("logs", "kept", "--since", stamp).stdout == "[0] late\n"
