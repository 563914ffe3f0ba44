"""Runs whose nodes are taken, that stand still, or whose recovery is killed, at the worst moments."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import ZONE, Desk, Lab
from tests.support.recovery import begun, launcher_lab, lines_until
from tpu_ops.errors import ExitCode

pytestmark = pytest.mark.lab

#: Notes each attempt where a later one finds it: a node that was not taken keeps its disk.
NOTED = 'echo "$TPU_OPS_ATTEMPT" >>~/began-"$TPU_OPS_RUN_ID"; echo "attempt $TPU_OPS_ATTEMPT is on"'
CONFIGURING = "configuring x-w0 (site.yml)"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab has two nodes of one worker each, `x` and `y`."""
    with launcher_lab("faults", tmp_path_factory.mktemp("faults")) as shell:
        for name in ("x", "y"):
            shell.do("tpu_ops", "create", name, "--type", "v4-8", "--zone", "us-central2-b", "--spot")
        shell.do("tpu_ops", "configure", "x,y")
        yield shell


def machine_like(desk: Desk, state: Path) -> Desk:
    """Return a shell on another machine, which has a copy of what the first one knows, as with a home on NFS."""
    here = Path(desk.environ["TPU_OPS_STATE"])
    shutil.copytree(here / "fleets", state / "fleets", ignore=shutil.ignore_patterns("lock"))
    return replace(desk, environ=desk.environ | {"TPU_OPS_STATE": str(state)})


def attempts(desk: Desk, host: str, run_id: str) -> list[str]:
    """Return the attempts of a run that were begun on a worker, in their order."""
    return Lab(desk).inside(host, "sh", "-c", f"cat /home/*/began-{run_id}").split()


def told(out: str) -> tuple[str, int, int, int]:
    """Return state, attempt, preemptions and failures of what --json has printed."""
    found = json.loads(out)
    return found["state"], found["attempt"], found["preemptions"], found["failures"]


def test_a_node_that_is_taken_under_the_start_under_site_yml_and_in_training_is_brought_back_each_time(
    desk: Desk,
) -> None:
    """Then whoever recovers the run is killed while site.yml runs, and another shell goes on."""
    seen = ""
    line = f'{NOTED}; [ "$TPU_OPS_ATTEMPT" = 3 ] || exec sleep 600'
    train = ("tpu_ops", "train", "x", "--recover", "--json", "--name", "often", "--shell", "--", line)
    lab = Lab(desk)
    lab.forget_requests()
    lab.fault(method="GetNode", seconds=5, times=1)
    with begun(desk, *train) as first:
        lines_until(first, "checking whether site.yml")
        # All that is left to ask before the start is what makes the node again; attempt 1 is asked for in vain.
        deadline = time.monotonic() + desk.patience
        while not lab.requests().get("GetNode"):
            assert time.monotonic() < deadline, lab.requests()
            time.sleep(0.1)  # polls until the deadline
        desk.do("tpu_ops", "lab", "preempt", "x")
        seen += lines_until(first, CONFIGURING)
        desk.do("tpu_ops", "lab", "preempt", "x")
        seen += lines_until(first, "attempt 2 is on")
        # The worker looks for notices every 5 s.
        desk.do("tpu_ops", "lab", "preempt", "x", "--notice", "8s")
        seen += lines_until(first, CONFIGURING)
        assert "rank 0 (x-w0): this worker is being preempted" in seen
        first.kill()
    with begun(desk, "tpu_ops", "attach", "often", "--recover", "--json") as second:
        out, rest = second.communicate(timeout=desk.patience)
    assert second.returncode == 0, rest
    assert told(out) == ("succeeded", 3, 3, 0), seen + rest
    assert attempts(desk, "x-w0", "often") == ["3"]
    kept = next(Path(desk.environ["TPU_OPS_STATE"]).glob("fleets/*/runs/often"))
    assert not (kept / "recovery.json").exists()
    logs = {path.parent.name: path.read_text() for path in kept.glob("attempt-*/rank-0.log")}
    assert logs == {f"attempt-{number}": f"attempt {number} is on\n" for number in (2, 3)}


def queued(desk: Desk, **more: object) -> str:
    """Ask for a node `q` like `y` by a queued resource, configure it, and return the queued resource's path."""
    lab = Lab(desk)
    like = lab.call("GET", f"v2/{ZONE}/nodes/y")[1]
    node = {key: like[key] for key in ("acceleratorType", "runtimeVersion", "metadata")}
    spec = {"tpu": {"nodeSpec": [{"parent": ZONE, "nodeId": "q", "node": node}]}, "spot": {}, **more}
    spring = f"v2/{ZONE}/queuedResources/spring"
    lab.done("POST", f"v2/{ZONE}/queuedResources?queuedResourceId=spring", spec)
    deadline = time.monotonic() + desk.patience
    while (state := lab.call("GET", spring)[1]["state"]["state"]) != "ACTIVE":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)  # polls until the deadline
    desk.do("tpu_ops", "configure", "q")
    return spring


def test_a_queued_resource_that_is_lost_in_every_way_is_asked_for_again(desk: Desk) -> None:
    """Preempted, in maintenance, and deleted by somebody with all that it made."""
    lab, spring = Lab(desk), queued(desk)
    line = f'{NOTED}; [ "$TPU_OPS_ATTEMPT" = 4 ] || exec sleep 600'
    with begun(
        desk, "tpu_ops", "train", "q", "--recover", "--json", "--name", "spring", "--shell", "--", line
    ) as train:
        lines_until(train, "attempt 1 is on")
        desk.do("tpu_ops", "lab", "preempt", "q")
        lines_until(train, "configuring q-w0 (site.yml)")
        lines_until(train, "attempt 2 is on")
        desk.do("tpu_ops", "lab", "maintenance", "q")
        lines_until(train, "attempt 3 is on")
        assert attempts(desk, "q-w0", "spring") == ["2", "3"], "the node is the same"
        lab.done("DELETE", f"{spring}?force=true")
        out, rest = train.communicate(timeout=desk.patience)
    assert train.returncode == 0, rest
    assert told(out) == ("succeeded", 4, 3, 0), rest
    assert attempts(desk, "q-w0", "spring") == ["4"]
    lab.done("DELETE", f"{spring}?force=true")


def test_a_node_that_somebody_deletes_or_makes_anew_is_taken_as_it_is_then(desk: Desk) -> None:
    lab = Lab(desk)
    line = f'{NOTED}; [ "$TPU_OPS_ATTEMPT" = 3 ] || exec sleep 600'
    with begun(desk, "tpu_ops", "train", "x", "--recover", "--json", "--name", "anew", "--shell", "--", line) as train:
        lines_until(train, "attempt 1 is on")
        lab.done("DELETE", f"v2/{ZONE}/nodes/x")
        lines_until(train, "attempt 2 is on")
        # Else it would create the node itself as soon as that is deleted.
        train.send_signal(signal.SIGSTOP)
        lab.done("DELETE", f"v2/{ZONE}/nodes/x")
        made = desk.try_("tpu_ops", "create", "x", "--type", "v4-8", "--zone", "us-central2-b", "--spot")
        train.send_signal(signal.SIGCONT)
        out, rest = train.communicate(timeout=desk.patience)
    assert train.returncode == 0, rest
    assert told(out) == ("succeeded", 3, 2, 0), rest
    assert attempts(desk, "x-w0", "anew") == ["3"]
    assert made.returncode == 0, made.stderr
    assert "creating it as it was" not in rest


def test_two_machines_that_recover_one_run_start_each_attempt_once(desk: Desk, tmp_path: Path) -> None:
    line = f'{NOTED}; [ "$TPU_OPS_ATTEMPT" = 2 ] || exec sleep 600; sleep 20'
    train = ("tpu_ops", "train", "x,y", "--recover", "--json", "--name", "both", "--shell", "--", line)
    with begun(desk, *train) as first:
        lines_until(first, "attempt 1 is on")
        there = machine_like(desk, tmp_path / "state")
        with begun(there, "tpu_ops", "attach", "both", "--recover", "--json") as second:
            lines_until(second, "logs of all ranks go to")
            desk.do("tpu_ops", "lab", "preempt", "x")
            ends = [process.communicate(timeout=desk.patience) for process in (first, second)]
    said = "\n".join(err for _, err in ends)
    assert [process.returncode for process in (first, second)] == [0, 0], said
    assert [told(out)[:2] for out, _ in ends] == [("succeeded", 2)] * 2, said
    assert attempts(desk, "x-w0", "both") == ["2"]
    assert attempts(desk, "y-w0", "both") == ["1", "2"]


def test_a_stop_from_another_machine_between_two_attempts_is_heard_of_a_node_that_is_left(
    desk: Desk, tmp_path: Path
) -> None:
    train = ("tpu_ops", "train", "x,y", "--recover", "--json", "--name", "halfway", "--shell", "--")
    there = replace(desk, environ=desk.environ | {"TPU_OPS_STATE": str(tmp_path / "state")})
    with begun(desk, *train, f"{NOTED}; exec sleep 600") as process:
        lines_until(process, "attempt 1 is on")
        desk.do("tpu_ops", "lab", "preempt", "x")
        lines_until(process, CONFIGURING)
        stopped = there.try_("tpu_ops", "stop", "halfway")
        out, rest = process.communicate(timeout=desk.patience)
    assert process.returncode == ExitCode.FAILED, f"{rest}\nstop: {stopped.stderr}"
    assert "attempt 2: started" not in rest
    assert told(out)[1] == 1
    assert attempts(desk, "y-w0", "halfway") == ["1"]


def test_a_recovery_killed_at_any_moment_repeats_nothing(desk: Desk) -> None:
    """A command fails at once; what recovers it is killed again and again, a little later each time."""
    last, kills = 6, 0
    line = f'{NOTED}; [ "$TPU_OPS_ATTEMPT" -ge {last} ] || exit 3'
    argv = ["train", "y", "--recover", "--json", "--name", "killed", "--max-failures", "9", "--shell", "--", line]
    out = ""
    for moment in (*(number * 0.25 for number in range(9)), 600.0):
        with begun(desk, "tpu_ops", *argv) as process:
            if argv[0] == "train":
                lines_until(process, "logs of all ranks go to")
            deadline = time.monotonic() + moment + 0.3
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)  # these are the moments at which it is killed
            if process.poll() is not None:
                out, err = process.communicate()
                # The one before was killed after the run's end, and before its own.
                late = process.returncode == ExitCode.USAGE and "this machine has no recovery state" in err
                assert late or process.returncode == 0, err
                out = "" if late else out
                break
            kills += 1
        argv = ["attach", "killed", "--recover", "--json"]
    assert kills > 3
    # An attempt whose start was cut off never began: it is no failure, and its number is not used again.
    begun_ = [int(number) for number in attempts(desk, "y-w0", "killed")]
    assert begun_ == sorted(set(begun_))
    assert begun_[0] == 1
    assert [number for number in begun_ if number >= last] == [begun_[-1]]
    (seen,) = desk.json("tpu_ops", "status", "killed", "--json")
    assert (seen["state"], seen["attempt"]) == ("succeeded", begun_[-1])
    assert not out or told(out) == ("succeeded", begun_[-1], 0, len(begun_) - 1)
    assert re.search(r"^killed .* succeeded ", desk.do("tpu_ops", "runs"), re.MULTILINE)


def test_a_queued_resource_that_starts_later_is_named_at_ctrl_c_and_deleted_by_stop(desk: Desk) -> None:
    lab, spring = Lab(desk), queued(desk, queueingPolicy={"validAfterDuration": "12s"})
    with begun(desk, "tpu_ops", "train", "q", "--recover", "--name", "later", "--", "sleep", "600") as train:
        lines_until(train, "started on 1 worker")
        desk.do("tpu_ops", "lab", "preempt", "q")
        lines_until(train, "asking for its resources again")
        lines_until(train, "; waiting until it is ACTIVE")
        train.send_signal(signal.SIGINT)
        _, said = train.communicate(timeout=desk.patience)
    assert train.returncode == ExitCode.INTERRUPTED
    assert "its recovery requested queued resource spring" in said
    assert "it is billed once it is ACTIVE; `tpu_ops stop later --delete-requested` deletes it" in said
    assert lab.call("GET", spring)[0] == 200
    (stopped,) = desk.json("tpu_ops", "stop", "later", "--delete-requested", "--json")
    assert [one["deleted"] for one in stopped["requested"]] == [True]
    assert lab.call("GET", spring)[0] == 404
    assert "q" not in {worker["node"] for worker in desk.json("tpu_ops", "list", "--json")}


def test_a_node_that_is_being_made_is_named_by_stop_while_the_api_answers_late(desk: Desk) -> None:
    lab = Lab(desk)
    with begun(desk, "tpu_ops", "train", "x", "--recover", "--name", "late", "--", "sleep", "600") as train:
        lines_until(train, "started on 1 worker")
        desk.do("tpu_ops", "lab", "preempt", "x")
        lines_until(train, "creating it as it was")
        lab.fault(method="GetOperation", seconds=60)
        stopped = desk.succeed("tpu_ops", "stop", "late")
        _, said = train.communicate(timeout=desk.patience)
    lab.clear_faults()
    assert train.returncode == ExitCode.FAILED
    for text in (said, stopped.stderr):
        assert "its recovery requested node x, zone us-central2-b, project lab" in text
        assert "`tpu_ops delete x --zone us-central2-b --project lab` deletes it" in text
        assert "CANCELLED" not in text
    deleted = desk.try_("tpu_ops", "stop", "late", "--delete-requested")
    assert "deleted node x" in deleted.stderr
    # On a busy machine the node may be READY by now. Its run is unknown then.
    assert deleted.returncode == 0 or "the launcher is not installed" in deleted.stdout, deleted.stderr
    assert lab.call("GET", f"v2/{ZONE}/nodes/x")[0] == 404


def silence(desk: Desk, run_id: str, seconds: float) -> dict[str, Any]:
    """Wait until the only rank of a run has written nothing for some time; return what its supervisor has noted."""
    deadline = time.monotonic() + desk.patience
    while True:
        (found,) = desk.json("tpu_ops", "status", run_id, "--json")
        watch: dict[str, Any] | None = found["ranks"][0]["watch"]
        if watch and watch["last_output"] and watch["at"] - watch["last_output"] > seconds:
            return watch
        assert time.monotonic() < deadline, found
        time.sleep(0.1)  # polls until the deadline


def test_a_run_that_is_silent_is_started_again_once_its_chips_are_idle_too(desk: Desk) -> None:
    after = 2
    limits = ("--stall-after", f"{after}", "--stall-grace", "5s", "--on-stall", "restart", "--max-failures", "1")
    line = f'{NOTED}; exec 3</dev/accel0; [ "$TPU_OPS_ATTEMPT" = 2 ] || exec sleep 600'
    train = ("tpu_ops", "train", "y", "--recover", "--json", "--name", "stalls", *limits, "--shell", "--", line)
    try:
        with begun(desk, *train) as process:
            lines_until(process, "attempt 1 is on")
            watch = silence(desk, "stalls", after)
            assert (watch["chips"], watch["stall"]) == ("busy", None)
            desk.do("tpu_ops", "lab", "chips", "y", "idle")
            out, said = process.communicate(timeout=desk.patience)
    finally:
        desk.do("tpu_ops", "lab", "chips", "y", "busy")
    assert process.returncode == 0, said
    assert told(out) == ("succeeded", 2, 0, 1), said
    sign = r"stalled: no output for \d+ s, chips idle for \d+ s"
    assert re.search(f"the run {sign}; starting the run again", said), said
    assert "the stacks of all ranks are kept" in said
    assert attempts(desk, "y-w0", "stalls") == ["1", "2"]
    kept = desk.do("tpu_ops", "stacks", "stalls", "--attempt", "1")
    assert re.fullmatch(r"rank 0: sleep waits in \w+\n", kept), kept


def test_a_preemption_with_notice_is_shown_and_the_command_learns_of_it(desk: Desk, tmp_path: Path) -> None:
    what, notice = "this worker is being preempted", 15
    # No other process than the shell: one that starts after SIGTERM gets SIGTERM too.
    keep = 'read -r why <"$TPU_OPS_REASON_FILE"; echo "$why" >"$TPU_OPS_RUN_DIR/why"'
    line = f"trap '{keep}; exit 0' TERM; sleep 600 & wait"
    desk.do("tpu_ops", "train", "y", "--detach", "--name", "announced", "--shell", "--", line)
    lab = Lab(desk)
    worker = lab.containers["y-w0"]
    with begun(desk, "tpu_ops", "lab", "preempt", "y", "--notice", f"{notice}s") as event:
        # The supervisor asks for notices every 5 s.
        while f"  y-w0: {what}\n" not in (said := desk.try_("tpu_ops", "status", "announced").stderr):
            assert event.poll() is None, said
        assert f"run announced: y-w0: {what}\n" in desk.try_("tpu_ops", "runs").stderr
        # Compute Engine asks the guest to shut down when it has announced a preemption.
        desk.do(*lab.engine, "stop", "-t", f"{notice}", worker)
        assert event.poll() is None, "it was not killed before"
        assert event.wait(desk.patience) == 0
    assert {row["state"] for row in desk.json("tpu_ops", "list", "--json") if row["node"] == "y"} == {"PREEMPTED"}
    for name in ("record.json", "files/why"):
        desk.do(*lab.engine, "cp", f"{worker}:/var/lib/tpu_ops/runs/announced/{name}", str(tmp_path))
    why, record = (json.loads((tmp_path / name).read_text()) for name in ("why", "record.json"))
    assert (why["kind"], why["reason"]) == ("preempted", f"host shuts down: {what}")
    assert (record["state"], record["reason"]) == ("stopped", why["reason"])
    assert record["intent"]["notice"] == "preempted"
