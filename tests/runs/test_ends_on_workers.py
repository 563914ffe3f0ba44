"""How runs on two real workers end: stopped, failed, killed, left alone. Absence is read past tpu_ops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.runs.conftest import BOTH, SIZE
from tests.support.folded import lines_of
from tests.support.runs import CHIPS, Bench
from tpu_ops.host import stacks as host_stacks

pytestmark = pytest.mark.lab

#: Ignores SIGTERM, and so do its children; one has left the session and holds a chip.
STUBBORN = """
# STUBBORN
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        chip = open("/dev/accel0")
        time.sleep(900)
    os._exit(0)
os.wait()
open("/tmp/libtpu_lockfile", "w").close()
print("settled", flush=True)
time.sleep(900)
"""

#: Stands still, rank 1 at another place than the other; both have a child process and ignore SIGTERM.
STANDS = """
# STANDS
import os, signal, sys, time
def all_reduce(): time.sleep(900)
def next_batch(): time.sleep(900)
def load(): time.sleep(900)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    load()
print("settled", flush=True)
next_batch() if os.environ["TPU_OPS_RANK"] == "1" else all_reduce()
"""

#: Rank 1 starts a program, whose standard input is a FIFO that nobody writes: until the program is executed, the kernel
#: keeps the rank in state D, which is as far as a container gets.
INSIDE_THE_KERNEL = """
import os, time
fifo = os.path.join(os.environ["TPU_OPS_RUN_DIR"], "fifo")
reads = os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0
def all_reduce(): time.sleep(900)
def start_loader(): os.posix_spawn("/bin/true", ["true"], {}, file_actions=[reads])
os.mkfifo(fifo)
start_loader() if os.environ["TPU_OPS_RANK"] == "1" else all_reduce()
"""

#: Opens its shared memory and its named semaphore anew for every line.
SHARING = """
import ctypes, os, time
from multiprocessing import shared_memory
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
shared_memory.SharedMemory("ticks", create=True, size=4096)
assert libc.sem_open(b"/ticks", os.O_CREAT, 0o600, 1)
while True:
    shared_memory.SharedMemory("ticks").close()
    assert libc.sem_open(b"/ticks", 0), os.strerror(ctypes.get_errno())
    print("tick", flush=True)
    time.sleep(0.1)
"""


def test_a_stop_ends_a_stubborn_tree_and_frees_the_chips(bench: Bench) -> None:
    bench.started("python", "-c", STUBBORN, name="stubborn")
    for index in BOTH:
        bench.await_log(index, "stubborn", "settled")
        programs = [line for line in bench.left(index) if "STUBBORN" in line]
        assert len(programs) == 2, "the program and its grandchild"
    done = bench.tpu_ops("stop", "stubborn", "--grace", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert {rank["state"] for rank in json.loads(done.stdout)[0]["ranks"]} == {"stopped"}
    for index in BOTH:
        record = bench.record(index, "stubborn")
        assert record["exit"] == {"signal": signal.SIGKILL}
        assert record["intent"]["by"] == "ada"
        assert 1 <= record["ended"] - record["intent"]["at"] < 1 + 2, "the grace, and little more"
        assert (record["stuck"], record["chips"]["holders"]) == ([], [])
        assert record["chips"]["lockfiles_removed"] == ["/tmp/libtpu_lockfile"]
    bench.clean()


def test_stacks_show_places_and_are_kept_of_ranks_that_a_stop_kills(bench: Bench) -> None:
    bench.started("sh", "-c", 'python -c "$0"; true', STANDS, name="stands")
    for index in BOTH:
        bench.await_log(index, "stands", "settled")
    places = [
        "rank 0: all_reduce (<string>:4)",
        "rank 1: next_batch (<string>:5)",
        "ranks 0-1, 1 child process each: load (<string>:6)",
    ]
    done = bench.tpu_ops("stacks", "pod", person="bob")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, places, "")
    done = bench.tpu_ops("stacks", "pod-w1", "--full")
    assert "rank 1, 1 thread: sh, of pid " in done.stdout
    assert "    next_batch (<string>:5)\n    <module> (<string>:11)\n" in done.stdout
    bench.inside(1, "mv /usr/local/lib/tpu_ops/py-spy /root/away")
    done = bench.tpu_ops("stacks", "stands")
    bench.inside(1, "mv /root/away /usr/local/lib/tpu_ops/py-spy")
    assert "rank 0: all_reduce (<string>:4)\nrank 1: python waits in " in done.stdout
    assert "warning: rank 1, 2 processes: py-spy is not installed on this worker" in done.stderr
    asked = bench.tpu_ops("stacks", "stands", "--signal", person="bob")
    assert asked.returncode == 1
    assert "the run belongs to ada" in asked.stderr
    begun = time.monotonic()
    assert bench.tpu_ops("stop", "stands", "--grace", "2").returncode == 0
    assert time.monotonic() - begun < 2 + 3
    assert [bench.record(index, "stands")["exit"] for index in BOTH] == [{"signal": signal.SIGTERM}] * SIZE
    done = bench.tpu_ops("stacks", "stands")
    assert (done.returncode, done.stdout.splitlines()) == (0, places)
    assert "ranks 0-1 stopped; these stacks were taken at 20" in done.stderr
    bench.clean()


def test_a_rank_inside_the_kernel_is_shown_with_its_wait_and_costs_no_other_rank(bench: Bench) -> None:
    bench.started("python", "-c", INSIDE_THE_KERNEL, name="in-kernel")

    def state() -> str:
        return bench.inside(1, f"cut -d ' ' -f 3 /proc/{bench.record(1, 'in-kernel')['pid']}/stat").strip()

    bench.await_(lambda: state() == "D", "rank 1 is in state D")
    place = r"rank 1: start_loader \(<string>:6\), waits in \w+, inside the kernel \(state D\)\n"
    begun = time.monotonic()
    done = bench.tpu_ops("stacks", "in-kernel")
    assert re.match(r"rank 0: all_reduce \(<string>:5\)\n" + place, done.stdout), done.stdout + done.stderr
    assert (done.returncode, time.monotonic() - begun < host_stacks.LIMIT) == (0, True)
    assert (state(), [bench.record(index, "in-kernel")["state"] for index in BOTH]) == ("D", ["running"] * SIZE)
    assert bench.tpu_ops("stop", "in-kernel", "--grace", "3").returncode == 0
    records = [bench.record(index, "in-kernel") for index in BOTH]
    assert [record["exit"] for record in records] == [{"signal": signal.SIGTERM}, {"signal": signal.SIGKILL}]
    assert [(record["state"], record["stuck"]) for record in records] == [("stopped", [])] * SIZE
    assert records[1]["ended"] - records[1]["intent"]["at"] < 3 + 2, "the grace, and little more"
    kept = bench.tpu_ops("stacks", "in-kernel")
    assert re.match(place, kept.stdout), kept.stdout
    assert "no stacks of rank 0: ended, and none were kept" in kept.stderr
    bench.clean()


def test_a_stopped_run_that_exits_with_0_did_not_succeed(bench: Bench) -> None:
    bench.started("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done", name="polite")
    assert bench.tpu_ops("stop", "pod").returncode == 0
    assert [bench.record(index, "polite")["state"] for index in BOTH] == ["stopped"] * SIZE
    assert bench.record(0, "polite")["exit"] == {"code": 0}
    assert bench.tpu_ops("status", "polite").returncode == 1


def test_processes_left_behind_by_a_rank_that_exits_with_0_are_named_at_the_end(bench: Bench) -> None:
    script = 'if [ "$TPU_OPS_RANK" = 1 ]; then sleep 4242 & fi; exit 0'
    done = bench.tpu_ops("train", "pod", "--name", "leaves", "--", "sh", "-c", script)
    assert done.returncode == 0
    (process,) = bench.record(1, "leaves")["left_behind"]
    assert process["command"] == "sleep 4242"
    said = f"pod-w1: processes that the command of rank 1 left behind are ended: pid {process['pid']} (sleep 4242)"
    assert said in done.stderr
    assert "pod-w0: " not in done.stderr
    assert said in bench.tpu_ops("status", "leaves").stderr
    [found] = json.loads(bench.tpu_ops("status", "leaves", "--json").stdout)
    assert [rank["left_behind"] for rank in found["ranks"]] == [[], [process]]
    bench.clean()


def test_a_failing_rank_fails_the_run_and_ends_the_other(bench: Bench) -> None:
    script = 'echo "rank $TPU_OPS_RANK"; [ "$TPU_OPS_RANK" = 0 ] && exec sleep 99; echo MemoryError: last words; exit 7'
    done = bench.tpu_ops("train", "pod", "--name", "seven", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert "rank 1 (pod-w1) failed first: exit code 7" in done.stderr
    assert "[1] MemoryError: last words" in done.stderr
    known = "the worker's memory was full, in the last lines of rank 1 (pod-w1): MemoryError: last words"
    assert known in done.stderr
    status = bench.tpu_ops("status", "seven", "--exit-code", "rank")
    assert (status.returncode, known in status.stderr) == (7, True)
    (listed,) = (row for row in bench.tpu_ops("runs").stdout.splitlines() if row.startswith("seven "))
    assert "7, host memory full" in listed
    records = [bench.record(index, "seven") for index in BOTH]
    assert [(record["state"], record["exit"]) for record in records] == [
        ("stopped", {"signal": signal.SIGTERM}),
        ("failed", {"code": 7}),
    ]
    assert records[0]["intent"]["kind"] == "failed"
    bench.clean()


def test_death_by_a_signal_is_named(bench: Bench) -> None:
    done = bench.tpu_ops("train", "pod", "--json", "--exit-code", "rank", "--", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == 128 + signal.SIGSEGV
    result = json.loads(done.stdout)
    assert result["first_failure"]["cause"] == "killed by SIGSEGV"
    assert result["ranks"][result["first_failure"]["rank"]]["exit"] == {"signal": signal.SIGSEGV}


def test_a_rank_that_raises_and_hangs_at_its_exit_is_told_of_at_once_and_at_the_end(bench: Bench) -> None:
    # As with JAX: rank 1 waits at its exit for rank 0, and rank 0 gives that up some time later.
    script = """
import atexit, os, signal, time
if os.environ["TPU_OPS_RANK"] == "1":
    atexit.register(time.sleep, 600)
    raise KeyError("image")
time.sleep(14)
print("stack of C++", flush=True)
os.kill(os.getpid(), signal.SIGABRT)
"""
    done = bench.tpu_ops("train", "pod", "--name", "raises", "--", "python3", "-c", script)
    assert done.returncode == 1
    noted = r"rank 1 \(pod-w1\) printed a traceback at [0-9:]{8} UTC, nothing in the 10 s after it, and has not ended"
    first = "rank 0 (pod-w0) failed first: killed by SIGABRT"
    cause = r"rank 1 \(pod-w1\) printed a traceback 1[345] s before that, which may be the cause: KeyError: 'image'"
    assert re.search(f"{noted}.*\n(?s:.*){re.escape(first)}\n{cause}", done.stderr), done.stderr
    assert "[1] KeyError: 'image'" in done.stderr
    assert "[1]" not in done.stdout
    [found] = json.loads(bench.tpu_ops("status", "raises", "--json").stdout)
    assert [(rank["traceback"] or {}).get("error") for rank in found["ranks"]] == [None, "KeyError: 'image'"]
    bench.clean()


def test_ranks_that_go_on_after_another_has_ended_are_ended_and_warned_of(bench: Bench) -> None:
    script = '[ "$TPU_OPS_RANK" = 1 ] && date +%s.%N >"$TPU_OPS_RUN_DIR/at" && exit 0; exec sleep 600'
    done = bench.tpu_ops("train", "pod", "--exit-skew", "3", "--name", "early", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert "rank 1 (pod-w1) has exited with code 0; 1 still running, to be ended 3 s after it" in done.stderr
    assert "rank 1 (pod-w1) failed first: exited with code 0 while others kept running for 3 s" in done.stderr
    records = [bench.record(index, "early") for index in BOTH]
    assert [record["state"] for record in records] == ["stopped", "succeeded"]
    assert records[0]["intent"]["kind"] == "skew"
    # The others hear of its end before its own record, which says when it was over.
    at = float(bench.inside(1, "cat /var/lib/tpu_ops/runs/early/files/at"))
    assert at + 3 <= records[0]["ended"] < records[1]["ended"] + 3 + records[0]["grace"]["failure"] + 2
    bench.clean()


def test_a_run_that_stands_still_is_ended_as_failed_and_its_command_learns_why(bench: Bench) -> None:
    # No other process than the shell: one that starts after SIGTERM gets SIGTERM too.
    keep = 'read -r why <$TPU_OPS_REASON_FILE; echo "$why" >$TPU_OPS_RUN_DIR/why'
    script = f"trap '{keep}; exit 0' TERM; echo step; sleep 600 & wait"
    limits = ("--stall-after", "3", "--stall-grace", "1s", "--on-stall", "stop")
    done = bench.tpu_ops("train", "pod", *limits, "--name", "still", "--", "sh", "-c", script)
    assert done.returncode == 1
    sign = r"no output for \d s, no chips in use"
    assert re.search(f"the run stands still: {sign}; .*stacks", done.stderr), done.stderr
    assert re.search(f"the run stalled: {sign}\n", done.stderr), done.stderr
    for index in BOTH:
        record = bench.record(index, "still")
        assert re.fullmatch(f"stalled: {sign}", record["reason"])
        assert record["stall"] == {"after": 3, "grace": 1, "on": "stop", "chosen": True}
        why = json.loads(bench.inside(index, "cat /var/lib/tpu_ops/runs/still/files/why"))
        assert (why["kind"], why["reason"]) == ("stall", record["reason"])
        assert bench.inside(index, "ls /run/tpu-run-secrets 2>/dev/null || true") == ""
    bench.clean()


def test_a_run_whose_chips_wait_in_vain_stands_still(bench: Bench) -> None:
    script = f"exec 3<{CHIPS[0]}; echo step; exec sleep 600"
    bench.started("sh", "-c", script, name="hung", options=("--stall-after", "3", "--stall-grace", "1"))

    def chips() -> set[str]:
        [found] = json.loads(bench.tpu_ops("status", "hung", "--json").stdout)
        return {(rank["watch"] or {}).get("chips", "") for rank in found["ranks"]}

    bench.await_(lambda: chips() == {"busy"}, "the chips are busy")
    bench.set_chips(0, "hung")
    bench.set_chips(1, "idle")
    bench.await_(lambda: bench.record(0, "hung")["notes"], "the stall is noted")
    (note,) = bench.record(0, "hung")["notes"]
    signs = r"chips idle for \d+ s on 1 of 2 ranks, chips wait without using their memory for \d+ s on 1 of 2 ranks"
    assert re.fullmatch(rf"the run stands still: no output for \d+ s, {signs}; the stacks of all ranks are kept", note)
    stacks = json.loads(bench.inside(1, "cat /var/lib/tpu_ops/runs/hung/log/stacks.json"))
    assert "sleep" in [process["command"].split()[0] for process in stacks["processes"]]
    assert "  stands still: no output for " in bench.tpu_ops("status", "hung").stderr
    for index in BOTH:
        bench.set_chips(index, "busy")
    bench.await_(lambda: "stands still:" not in bench.tpu_ops("runs").stderr, "the chips are in use again")
    bench.tpu_ops("stop", "hung", "--grace", "1")
    bench.clean()


def test_a_run_with_one_silent_rank_does_not_stand_still(bench: Bench) -> None:
    script = 'echo step; [ "$TPU_OPS_RANK" = 1 ] && exec sleep 600; while sleep 0.2; do echo step; done'
    bench.started("sh", "-c", script, name="one-is-silent", options=("--stall-after", "1", "--stall-grace", "1"))

    def watches() -> list[dict[str, Any]]:
        [found] = json.loads(bench.tpu_ops("status", "one-is-silent", "--json").stdout)
        return [rank["watch"] or {} for rank in found["ranks"]]

    def silent() -> bool:
        watch = watches()[1]
        return bool(watch) and watch["at"] - watch["last_output"] > 5

    bench.await_(silent, "rank 1 has been silent for five times the limit")
    first, second = watches()
    assert first["at"] - first["last_output"] < 2
    assert [first["stall"], second["stall"], second["chips"]] == [None, None, "none"]
    assert bench.record(0, "one-is-silent")["notes"] == []
    history = bench.inside(0, "cat /var/lib/tpu_ops/runs/one-is-silent/history.jsonl")
    assert json.loads(history.splitlines()[0])["state"] == "none"
    what = "this worker is being preempted"
    notices = "/var/lib/tpu-lab/worker/notices.json"
    bench.inside(1, f"""echo '{{"preempted": "TRUE"}}' >{notices}""")
    bench.await_(lambda: (watches()[1]["maintenance"] or {}).get("kind") == "preempted", "the notice is seen")
    shown = bench.tpu_ops("status", "one-is-silent").stderr
    bench.inside(1, f"rm {notices}")
    assert f"  pod-w1: {what}\n" in shown
    bench.await_(lambda: bench.record(0, "one-is-silent")["notes"] == [f"rank 1 (pod-w1): {what}"], "rank 0 notes it")
    bench.tpu_ops("stop", "one-is-silent", "--grace", "1")
    bench.clean()


def test_if_one_worker_refuses_a_start_the_other_is_stopped(bench: Bench) -> None:
    path = "/home/ada/only-here"
    bench.inside(0, f"printf '#!/bin/sh\\nsleep 600\\n' >{path} && chmod 755 {path}")
    done = bench.tpu_ops("train", "pod", "--name", "half", "--", path)
    assert done.returncode == 1
    assert f"rank 1 (pod-w1): there is no {path} on this worker" in done.stderr
    assert [bench.record(index, "half")["state"] for index in BOTH] == ["refused", "refused"]
    bench.clean()


def test_a_dead_supervisor_leaves_nothing_and_a_final_record(bench: Bench) -> None:
    name = "orphan"
    bench.started("python", "-c", STUBBORN, name=name)
    bench.await_log(0, name, "settled")
    bench.inside(0, f"kill -SEGV {bench.record(0, name)['supervisor']['pid']}")
    bench.await_(lambda: bench.left(0) == [], "nothing left")
    record = bench.record(0, name)
    assert record["state"] == "failed"
    assert "the supervisor ended" in record["reason"]
    assert record["first"]["worker"] == "pod-w0"
    assert record["chips"]["lockfiles_removed"] == ["/tmp/libtpu_lockfile"]
    bench.await_clean(1)
    status = json.loads(bench.tpu_ops("status", name, "--json").stdout)[0]
    assert [rank["state"] for rank in status["ranks"]] == ["failed", "stopped"]
    assert status["first_failure"]["rank"] == 0
    said = bench.tpu_ops("status", name).stderr
    assert "  nodes:  pod is there; pod-w0: the supervisor ended (" in said
    assert "  again:  tpu_ops train pod --name OTHER -- COMMAND\n" in said


def test_a_run_outlives_every_ssh_session_with_its_shared_memory(bench: Bench) -> None:
    bench.started("python", "-c", SHARING, name="ticks")
    for index in BOTH:
        bench.await_log(index, "ticks", "tick")
        subprocess.run(
            ["ssh", "-F", str(bench.ssh_config()), "-O", "exit", f"pod-w{index}"], capture_output=True, check=True
        )
        bench.inside(index, "pkill -u ada sshd", check=False)

    def users() -> str:
        return "".join(bench.inside(index, "loginctl list-users --no-legend") for index in BOTH)

    # With the last of a person's sessions logind forgets her, and would remove what is hers of shared memory.
    bench.await_(lambda: "ada" not in users(), "nobody remembers ada")

    def ticks() -> int:
        return bench.inside(0, "cat /var/lib/tpu_ops/runs/ticks/log/*").count("tick")

    before = ticks()
    bench.await_(lambda: ticks() > before + 3, "the run to go on")
    assert {bench.record(index, "ticks")["state"] for index in BOTH} == {"running"}
    assert bench.tpu_ops("stop", "ticks").returncode == 0
    for index in BOTH:
        bench.inside(index, "rm -f /dev/shm/*ticks")
    bench.clean()


def test_ctrl_c_detaches_and_the_log_is_complete_afterwards(bench: Bench) -> None:
    script = (
        "for i in $(seq 60); do echo line $i; sleep 0.1; done; until [ -e $TPU_OPS_RUN_DIR/end ]; do sleep 0.1; done"
    )
    process = bench.popen("train", "pod", "--name", "left-alone", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] line 1\n"
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "tpu_ops stop left-alone" in said
    assert "Ctrl-C again within 3 s stops the run" in said
    assert "tpu_ops attach left-alone" in said
    assert "Traceback" not in said
    for index in BOTH:
        bench.inside(index, "touch /var/lib/tpu_ops/runs/left-alone/files/end")
    done = bench.tpu_ops("logs", "left-alone", "--follow", "--rank", "all")
    assert done.returncode == 0, done.stderr
    for rank in BOTH:
        assert lines_of(done.stdout, rank) == [f"line {number}" for number in range(1, 61)]
    # Another person's machine has no record of the run and asks the workers.
    assert bench.tpu_ops("logs", "left-alone", person="bob").stdout.count("line") == 60


@pytest.mark.parametrize("command", ["train", "attach"])
def test_a_second_ctrl_c_stops_the_run(bench: Bench, command: str) -> None:
    name, script = f"left-{command}", ("sh", "-c", "echo line; exec sleep 600")
    if command == "train":
        process = bench.popen("train", "pod", "--name", name, "--", *script)
    else:
        bench.started(*script, name=name)
        process = bench.popen("attach", name)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "[0] line\n"
    os.killpg(process.pid, signal.SIGINT)
    said = iter(process.stderr.readline, "")
    assert any("Ctrl-C again" in line for line in said)
    os.killpg(process.pid, signal.SIGINT)
    table, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert table.count("stopped by ada") == SIZE
    assert "Traceback" not in rest
    assert [bench.record(index, name)["intent"]["by"] for index in BOTH] == ["ada"] * SIZE
    bench.clean()


def test_a_unit_that_an_administrator_stops_ends_the_run_as_a_stop_does(bench: Bench) -> None:
    bench.started("sleep", "600", name="by-hand")
    bench.inside(1, "systemctl stop tpu-run.service")
    for index in BOTH:
        bench.await_clean(index)
        record = bench.record(index, "by-hand")
        assert (record["state"], record["first"]) == ("stopped", None)
        assert (record["intent"]["kind"], record["reason"]) == ("stop", "stopped by systemctl on pod-w1")
    assert bench.record(1, "by-hand")["stop_requested_by"] == "an administrator"
    done = bench.tpu_ops("status", "by-hand", "--json")
    assert (done.returncode, json.loads(done.stdout)[0]["first_failure"]) == (1, None)


#: Stands for a data disk: no boot waits for it, and so nothing has it stay until services have ended.
DISK_UNIT = r"/etc/systemd/system/mnt-my\x2ddisk.mount"
DISK = f"""
mkdir -p -m 777 /var/lib/my-disk
printf '[Mount]\\nWhat=/var/lib/my-disk\\nWhere=/mnt/my-disk\\nOptions=bind,nofail\\n' >'{DISK_UNIT}'
systemctl daemon-reload
systemctl start /mnt/my-disk
"""
SAVING = """
trap 'sleep 3; echo saved >/mnt/my-disk/checkpoint; exit' TERM
echo ready
while :; do sleep 0.1; done
"""


def test_a_disk_stays_mounted_until_a_run_has_saved_its_checkpoint_at_a_shutdown(bench: Bench) -> None:
    booted = "cut -d ' ' -f 22 /proc/1/stat"
    before = bench.inside(1, booted)
    bench.inside(1, DISK)
    try:
        bench.started("sh", "-c", SAVING, name="saving")
        bench.await_log(1, "saving", "ready")
        later = bench.inside(1, r"systemctl show --property=Before --value 'mnt-my\x2ddisk.mount'").split()
        assert "tpu-run.service" in later
        bench.inside(1, "systemctl reboot", check=False)
        bench.await_(lambda: bench.inside(1, booted, check=False) not in ("", before), "another boot", 90)
        bench.await_sshd(1)
        assert bench.inside(1, "cat /var/lib/my-disk/checkpoint") == "saved\n"
        record = bench.record(1, "saving")
        assert (record["state"], record["intent"]["kind"]) == ("stopped", "shutdown")
        bench.await_clean(0)
    finally:
        bench.inside(1, f"systemctl stop /mnt/my-disk; rm -rf '{DISK_UNIT}' /var/lib/my-disk; systemctl daemon-reload")
    bench.clean()


def test_remote_helpers_end_with_the_controller(bench: Bench) -> None:
    bench.started("sleep", "600", name="watched")
    process = bench.popen("logs", "watched", "--follow")
    bench.await_(lambda: bench.helpers(0), "a follower")
    process.kill()
    process.communicate(timeout=10)
    bench.await_(lambda: not bench.helpers(0), "no follower")
    bench.tpu_ops("stop", "watched")


def test_a_reboot_is_not_a_running_run(bench: Bench) -> None:
    bench.started("sleep", "600", name="cut-short")
    bench.backend.engine.call("kill", bench.container(1))
    bench.backend.engine.call("start", bench.container(1))
    bench.await_sshd(1)
    bench.await_clean(0)
    done = bench.tpu_ops("status", "cut-short", "--json")
    status = json.loads(done.stdout)[0]
    assert [rank["state"] for rank in status["ranks"]] == ["stopped", "lost"]
    assert "restarted" in status["ranks"][1]["reason"]
    assert status["first_failure"]["host"] == "pod-w1"
    assert done.returncode == 1
    said = bench.tpu_ops("status", "cut-short").stderr
    assert "  nodes:  pod is there; pod-w1: the host was restarted at 20" in said
    assert "  again:  tpu_ops train pod --name OTHER -- COMMAND\n" in said
    follow = bench.tpu_ops("logs", "cut-short", "--rank", "1")
    assert follow.returncode == 0
    bench.clean()
