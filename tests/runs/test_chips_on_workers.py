"""Who holds which chip, freeing it, and the doctor, on real workers whose chips are device files."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runs.conftest import BOTH
from tests.support.folded import lines_of
from tests.support.programs import HEADLESS
from tests.support.runs import CHIPS, Bench
from tpu_ops.lab.image import chip_service

pytestmark = pytest.mark.lab

HOLD = "exec 3<{chip}; exec sleep 600"
#: Has a turn as Ansible's modules have theirs (roles/facts/module_utils/turns.py), while it fills an environment.
FILL = """
import fcntl, json, os, time
os.makedirs("/run/tpu_ops-turns", mode=0o700, exist_ok=True)
with open("/run/tpu_ops-turns/Python-environments", "w") as turn:
    fcntl.flock(turn, fcntl.LOCK_EX)
    said = {"who": "bob from 10.1.2.3", "pid": os.getpid(), "since": time.time(), "changing": ["/opt/venvs/jax"]}
    json.dump(said, turn)
    turn.flush()
    time.sleep(600)
"""
#: Whether a program listens on the port of libtpu's metrics.
PROBE = "ss -Hltn 'sport = :8431' | grep -q . && echo open || echo closed"
#: Reads the metrics of the worker that it runs on with tpu-info and with libtpu's own SDK.
JUDGES = """
import json, os
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
from libtpu.sdk import tpumonitoring
from tpu_info import device, metrics
names = ["hbm_capacity_total", "hbm_capacity_usage", "duty_cycle_pct", "runtime_hbm_utilization", "idle_duration"]
print(json.dumps({
    "sdk": {name: tpumonitoring.get_metric(name).data() for name in names},
    "usage": [tuple(chip) for chip in metrics.get_chip_usage(device.TpuChip.V4)],
    "bandwidth": metrics.get_runtime_hbm_utilization(),
    "idle": metrics.get_tensorcore_idle_duration(),
    "states": [
        [core.chip_id, core.global_core_id, core.core_type, core.program_fingerprint, len(core.queued_programs)]
        for core in metrics.get_tpuz_info()
    ],
}))
"""
#: Makes an environment with both in the directory that all workers of all labs share.
JUDGES_MADE = """
set -eu
exec 9>>/var/cache/tpu-lab/judges.lock
flock 9
place=/var/cache/tpu-lab/judges-1
if [ ! -e $place/complete ]; then
    rm -rf $place
    python3 -m venv $place
    export PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1
    $place/bin/pip install --quiet tpu-info==0.14.2 libtpu==0.0.52
    touch $place/complete
fi
"""
#: From the grace's end to the final record, in seconds.
MARGIN = 2.0


def test_the_who_command_names_runs_and_processes_without_a_run(bench: Bench) -> None:
    bench.started("sh", "-c", HOLD.format(chip=CHIPS[1]), name="owned")
    pid = bench.hold(1, "bob")
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
    *waited, said = done.stderr.splitlines()
    assert (done.stdout, said) == ("", "free: pod-w[0-1]")
    assert all("silent: waiting for an answer" in line for line in waited)


def test_chip_holders_outside_a_run_are_named_at_its_end_and_kept(bench: Bench) -> None:
    """On one worker `su` opens a session of its own, out of the run's control group; on the other somebody comes."""
    leave = f'trap "" HUP TERM; exec 3<{CHIPS[1]}; setsid sleep 601 >/dev/null 2>&1 </dev/null &'
    script = "touch /tmp/libtpu_lockfile; [ $TPU_OPS_RANK = 0 ] && "
    script += f"sudo -n su -s /bin/sh bob -c {shlex.quote(leave)}; echo left; exec sleep 600"
    bench.inside(0, "umask 0337; echo 'ada ALL=(root) NOPASSWD: /usr/bin/su' >/etc/sudoers.d/aa-su; visudo -cq")
    try:
        bench.started("sh", "-c", script, name="leaky")
        for index in BOTH:
            bench.await_log(index, "leaky", "left")
        bench.await_(lambda: bench.inside(0, "pgrep -u bob -x sleep || true"), "the session")
        pids = [int(bench.inside(0, "pgrep -u bob -x sleep")), bench.hold(1, "bob")]
        assert "tpu-run.service" not in bench.inside(0, f"cat /proc/{pids[0]}/cgroup")
        # The run goes on, whoever holds its chips besides.
        assert [bench.record(index, "leaky")["state"] for index in BOTH] == ["running", "running"]
        done = bench.tpu_ops("stop", "leaky", "--grace", "1")
        assert done.returncode == 0, done.stderr
        for index, pid, seconds in ((0, pids[0], 601), (1, pids[1], 600)):
            held = f"pod-w{index}: the chips are still held by pid {pid} of bob: sleep {seconds}"
            assert held in done.stderr
            record = bench.record(index, "leaky")
            assert record["ended"] - record["intent"]["at"] < 1 + MARGIN
            chips = record["chips"]
            assert [holder["pid"] for holder in chips["holders"]] == [pid]
            assert (chips["lockfiles_kept"], chips["lockfiles_removed"]) == (["/tmp/libtpu_lockfile"], [])
            assert bench.inside(index, f"cat /proc/{pid}/comm; ls /tmp/libtpu_lockfile").split() == [
                "sleep",
                "/tmp/libtpu_lockfile",
            ]
            assert [line for line in bench.left(index) if "sleep 60" not in line and f"/{pid}/" not in line] == []
        refused = bench.tpu_ops("train", "pod", "--", "true")
        assert f"its chips are held by pid {pids[0]} of bob" in refused.stdout
    finally:
        bench.inside(0, "rm /etc/sudoers.d/aa-su")
    freed = bench.tpu_ops("unlock", "pod", "--yes", "--grace", "1", person="bob")
    assert freed.returncode == 0, freed.stderr
    bench.clean()


def test_unlock_ends_what_is_one_s_own_and_nothing_else(bench: Bench) -> None:
    stray = bench.hold(0, "ada", ignoring='trap "" TERM;')
    bobs = bench.hold(1, "bob")
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
    assert "ada is not an administrator of this host" in refused.stderr
    assert refused.returncode == 1
    done = bench.tpu_ops("unlock", "pod-w1", "--yes", "--force", "--user", "bob", person="tpu")
    assert done.returncode == 0, done.stderr
    assert f"pod-w1: ended pid {bobs} of bob" in done.stderr
    assert bench.inside(1, "ls /tmp/libtpu_lockfile 2>&1 || true").strip().endswith("No such file or directory")


def test_a_process_whose_first_thread_has_ended_is_shown_and_ended(bench: Bench) -> None:
    program = shlex.quote(f"exec python3 -c {shlex.quote(HEADLESS)} {CHIPS[0]}")
    bench.inside(0, f"setsid su -s /bin/sh ada -c {program} >/dev/null 2>&1 </dev/null &")
    bench.await_(lambda: "<defunct>" in bench.inside(0, "ps -u ada -o args --no-headers || true"), "its first thread")
    pid = int(bench.inside(0, "pgrep -u ada -x python3"))
    shown = json.loads(bench.tpu_ops("who", "pod", "--json").stdout)["holders"]
    assert [(holder["pid"], holder["user"], holder["devices"]) for holder in shown] == [(pid, "ada", [CHIPS[0]])]
    refused = bench.tpu_ops("train", "pod", "--", "true")
    assert f"its chips are held by pid {pid} of ada" in refused.stderr
    done = bench.tpu_ops("unlock", "pod", "--yes", "--grace", "1")
    assert done.returncode == 0, done.stderr
    assert f"pod-w0: ended pid {pid} of ada: python3 -c # HEADLESS" in done.stderr
    assert done.stdout.splitlines()[-1] == "free: pod-w[0-1]"
    bench.clean()


def test_a_run_whose_first_thread_has_ended_is_stopped_by_sigkill_alone(bench: Bench) -> None:
    bench.started("python", "-c", HEADLESS, CHIPS[0], name="headless")
    for index in BOTH:
        bench.await_log(index, "headless", "settled")
    bench.await_(lambda: all("<defunct>" in " ".join(bench.left(index)) for index in BOTH), "their first threads")
    done = bench.tpu_ops("stop", "headless", "--grace", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert [rank["state"] for rank in json.loads(done.stdout)[0]["ranks"]] == ["stopped"] * 2
    for index in BOTH:
        record = bench.record(index, "headless")
        assert record["exit"] == {"signal": signal.SIGKILL}
        assert 1 <= record["ended"] - record["intent"]["at"] < 1 + MARGIN, "the grace, and little more"
        assert (record["stuck"], record["chips"]["holders"]) == ([], [])
    bench.clean()


def test_a_lockfile_that_somebody_has_locked_without_a_chip_is_told(bench: Bench) -> None:
    # A start that came after it would be refused.
    bench.started("sleep", "600", name="beside")
    # As libtpu does it.
    lock = 'import fcntl, os; fcntl.lockf(3, fcntl.LOCK_EX); os.execlp("sleep", "sleep", "600")'
    bench.inside(0, f"printf %s '{lock}' >/tmp/locks.py")
    locks = "exec 3>/tmp/libtpu_lockfile; exec python3 /tmp/locks.py"
    bench.inside(0, f"setsid su -s /bin/sh bob -c '{locks}' >/dev/null 2>&1 </dev/null &")
    bench.await_(lambda: bench.inside(0, "pgrep -u bob -x sleep || true"), "the lock")
    pid = int(bench.inside(0, "pgrep -u bob -x sleep"))
    kept = f"pod-w0: /tmp/libtpu_lockfile was not removed: it is locked, and open in pid {pid} of bob (sleep 600)"
    stopped = bench.tpu_ops("stop", "beside", "--grace", "1")
    assert (stopped.returncode, kept in stopped.stderr) == (0, True), stopped.stderr
    done = bench.tpu_ops("unlock", "pod", "--yes")
    assert (done.returncode, done.stdout, kept in done.stderr) == (1, "free: pod-w1\n", True), done.stderr
    refused = bench.tpu_ops("train", "pod", "--", "true")
    gives_up = f"/tmp/libtpu_lockfile would make libtpu fail: it is locked, and open in pid {pid} of bob (sleep 600)"
    assert (refused.returncode, gives_up in refused.stdout + refused.stderr) == (1, True), refused.stderr
    bench.inside(0, f"kill {pid}")
    done = bench.tpu_ops("unlock", "pod", "--yes")
    assert (done.returncode, "pod-w0: removed /tmp/libtpu_lockfile" in done.stderr) == (0, True), done.stderr
    bench.clean()


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
        assert "FAIL  no stale lockfile of libtpu exists: failed on pod-w1" in lines
        assert "          fix: tpu_ops unlock pod-w1" in lines
        assert "FAIL  TCMalloc is not loaded into every program: failed on pod-w1" in lines
        found = json.loads(bench.tpu_ops("doctor", "pod", "--json").stdout)
        assert [entry["check"] for entry in found if not entry["passed"]] == ["lockfile", "preload"]
    finally:
        bench.inside(1, "rm -f /tmp/libtpu_lockfile; sed -i /LD_PRELOAD/d /etc/environment")


def test_attach_shows_a_run_to_its_end(bench: Bench) -> None:
    bench.started("sh", "-c", "sleep 3; echo done", name="attached")
    done = bench.tpu_ops("attach", "attached", "--rank", "all")
    assert done.returncode == 0, done.stderr
    assert [lines_of(done.stdout, rank) for rank in bench.indices] == [["done"]] * 2
    assert "run attached succeeded on all 2 ranks" in done.stderr
    assert "attached" in bench.tpu_ops("runs").stdout


def test_logs_are_fetched_byte_for_byte_and_from_a_time(bench: Bench) -> None:
    bench.started("sh", "-c", r"printf 'a\000b\rc'; sleep 6; echo late", name="kept")
    bench.tpu_ops("attach", "kept")
    folder = bench.folder / "fetched"
    done = bench.tpu_ops("logs", "kept", "--fetch", str(folder))
    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in sorted((folder / "kept").iterdir())] == [b"a\0b\rclate\n"] * 2
    recent = bench.record(0, "kept")["ended"] - 1.5
    stamp = bench.inside(0, f"date --utc --date=@{recent} +%Y-%m-%dT%H:%M:%S+00:00").strip()
    assert bench.tpu_ops("logs", "kept", "--since", stamp).stdout == "[0] late\n"


def test_nothing_starts_while_an_environment_is_filled_and_what_a_killed_fill_left_is_in_nobodys_way(
    bench: Bench,
) -> None:
    bench.inside(1, f"systemd-run --quiet --unit=fill --collect python3 -c {shlex.quote(FILL)}")
    try:
        bench.await_(lambda: bench.inside(1, "grep -l changing /run/tpu_ops-turns/* 2>/dev/null || true"), "the fill")
        refused = bench.tpu_ops("train", "pod", "--force", "--", "true")
        assert refused.returncode != 0
        assert "bob from 10.1.2.3 has been changing /opt/venvs/jax since" in refused.stderr
        assert "  at:  pod-w1\n" in refused.stderr
        assert "wait until the change has ended" in refused.stderr
        checked = bench.tpu_ops("doctor", "pod")
        assert checked.returncode != 0
        assert "has been changing /opt/venvs/jax" in checked.stdout
    finally:
        bench.inside(1, "systemctl kill --signal=KILL fill")
    bench.await_(lambda: bench.inside(1, "systemctl is-active fill || true").strip() != "active", "its end")
    done = bench.tpu_ops("train", "pod", "--", "true")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def busy(bench: Bench) -> Iterator[int]:
    """A process of bob's holds a chip of the first worker; its pid."""
    yield bench.hold(0, "bob")
    bench.inside(0, "pkill -KILL -u bob,ada sleep; rm -f /var/lib/tpu-lab/worker/chips.json", check=False)


def service_of(bench: Bench) -> dict[str, Any]:
    (service,) = bench.usage(0)["services"]
    return dict(service)


def settled(bench: Bench, *, late: bool) -> dict[str, Any]:
    """Return the service of the only holder; a machine that is busy with other tests can answer late, a few times."""
    found = [service_of(bench)]
    while late and found[-1]["state"] == "silent" and len(found) < 10:
        found.append(service_of(bench))
    return found[-1]


def test_the_metrics_of_held_chips_come_and_go_and_change(bench: Bench, busy: int) -> None:
    bench.await_(lambda: service_of(bench)["state"] == "ok", "metrics")
    found = bench.usage(0)
    assert ([holder["pid"] for holder in found["holders"]], found["run"], found["chips"]) == ([busy], None, [*CHIPS])
    seen = {}
    for state in ("busy", "hung", "idle", "halted", "not-found", "warming", "silent", "broken"):
        bench.set_chips(0, state, first_id=8)
        service = settled(bench, late=state != "silent")
        assert (service["pid"], service["port"]) == (busy, 8431)
        first = [[core[key] for key in ("id", "duty", "hbm_bandwidth")] for core in service["cores"][:1]]
        states = service["core_states"]
        told = None if states is None else (len(states), states[0]["queue"], states[0]["error"])
        seen[state] = (service["state"], first[0] if first else None, told)
        assert all(0 <= (core["idle"] or 0) < 60 for core in service["cores"])
    assert seen == {
        "busy": ("ok", [8, 97.5, 43.25], (8, 2, "")),
        "hung": ("ok", [8, 100.0, 0.0], (8, 1, "")),
        "idle": ("ok", [8, 0.0, 0.0], (8, 0, "")),
        "halted": ("ok", [8, 0.0, 0.0], (8, 1, chip_service.HALTED)),
        "not-found": ("ok", [8, 97.5, None], None),
        "warming": ("warming", None, (4, 2, "")),
        "silent": ("silent", None, None),
        "broken": ("broken", None, None),
    }
    # The process holds one of four chips; the service reports all.
    bench.set_chips(0, "busy", two_cores=True)
    service = settled(bench, late=True)
    assert (service["state"], [core["chip"] for core in service["cores"]]) == ("ok", [0, 0, 1, 1, 2, 2, 3, 3])
    bench.set_chips(0, "refused")
    bench.await_(lambda: service_of(bench)["state"] == "none", "no port")
    bench.set_chips(0, "busy")
    bench.await_(lambda: service_of(bench)["state"] == "ok", "metrics again")
    bench.inside(0, f"kill -KILL {busy}")
    bench.await_(lambda: bench.inside(0, PROBE).strip() == "closed", "no port without a holder")
    assert (bench.usage(0)["services"], bench.usage(0)["holders"]) == ([], [])
    bench.await_(lambda: "chip_service" not in bench.inside(0, "ps -eo args"), "no program without a holder")


def test_top_and_who_show_what_the_chips_of_a_run_do(bench: Bench) -> None:
    bench.started("sh", "-c", HOLD.format(chip=CHIPS[1]), name="measured")

    def rows() -> list[dict[str, Any]]:
        found = json.loads(bench.tpu_ops("top", "pod", "--json").stdout)
        assert found["faults"] == []
        return list(found["rows"])

    try:
        bench.await_(lambda: all(row["state"] == "ok" for row in rows()), "metrics")
        seen = [(row["worker"], row["core"], row["run"], row["person"], row["duty"]) for row in rows()]
        assert seen == [
            (f"pod-w{index}", core, "measured", "ada", 97.5) for index in BOTH for core in range(len(CHIPS))
        ]
        bench.set_chips(0, "idle")
        done = bench.tpu_ops("top", "pod", "--once")
        assert done.stderr.splitlines()[-1] == "2 workers: 2 in use"
        lines = {line.split()[0]: " ".join(line.split()[1:8]) for line in done.stdout.splitlines()[1:]}
        assert lines == {"pod-w0": "4 24/32 GiB 0 % 0 %", "pod-w1": "4 24/32 GiB 98 % 43 %"}
        assert "HBM 24/32 GiB, duty 0..98 %" in bench.tpu_ops("who", "pod").stdout
        uses = [row["use"] for row in json.loads(bench.tpu_ops("list", "--use", "--cached", "--json").stdout)]
        assert uses == [f"measured of ada: HBM 24/32 GiB, duty {duty} %" for duty in (0, 98)]
        bench.set_chips(0, "halted")
        done = bench.tpu_ops("top", "pod", "--once")
        assert f"core 0: {chip_service.HALTED}" in done.stdout
    finally:
        bench.inside(0, "rm -f /var/lib/tpu-lab/worker/chips.json")
        bench.tpu_ops("stop", "measured")


def test_a_metrics_port_of_another_person_is_not_asked(bench: Bench) -> None:
    listen = (
        "import socket, time; made = socket.create_server((chr(58) * 2, 8431), family=socket.AF_INET6); time.sleep(600)"
    )
    bench.inside(1, f"setsid su -s /bin/sh ada -c 'exec python3 -c \"{listen}\"' >/dev/null 2>&1 </dev/null &")
    bench.await_(lambda: bench.inside(1, PROBE).strip() == "open", "ada's port")
    pid = bench.hold(1, "bob")
    try:
        (service,) = bench.usage(1)["services"]
        assert (service["pid"], service["state"], service["cores"]) == (pid, "none", [])
    finally:
        bench.inside(1, "pkill -KILL -u ada python3; pkill -KILL -u bob sleep", check=False)


@pytest.mark.index
def test_tpu_info_and_libtpus_own_sdk_read_the_lab_s_metrics(bench: Bench, busy: int) -> None:
    bench.inside(0, JUDGES_MADE)
    bench.await_(lambda: service_of(bench)["state"] == "ok", "metrics")
    found = json.loads(bench.inside(0, f"/var/cache/tpu-lab/judges-1/bin/python -c {shlex.quote(JUDGES)}"))
    total, used = 32 * 2**30, 24 * 2**30
    assert found == {
        "sdk": {
            "hbm_capacity_total": [str(total)] * 4,
            "hbm_capacity_usage": [str(used)] * 4,
            "duty_cycle_pct": ["97.50"] * 4,
            "runtime_hbm_utilization": ["43.25"] * 4,
            "idle_duration": ["0.00"] * 4,
        },
        "usage": [[chip, used, total, 97.5] for chip in range(4)],
        "bandwidth": [[chip, 43.25] for chip in range(4)],
        "idle": [[chip, 0.0] for chip in range(4)],
        "states": [[core // 2, core, "TPU_CORE_TYPE_TENSOR_CORE", chip_service.PROGRAM.hex(), 2] for core in range(8)],
    }
