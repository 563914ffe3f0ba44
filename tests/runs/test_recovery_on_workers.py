"""A run whose node is preempted in its midst goes on from its checkpoint, on a node made anew, as attempt 2."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import Desk, Lab, lab_up
from tests.support.fleet import ROOT
from tests.support.proxy import Proxy

pytestmark = pytest.mark.lab

STEPS = 300
#: Writes its step to a bucket as a training loop writes checkpoints, and begins behind the one that is there.
LOOP = f"""
import os, time, urllib.request
rank, attempt = int(os.environ["TPU_OPS_RANK"]), os.environ["TPU_OPS_ATTEMPT"]
host = os.environ["STORAGE_EMULATOR_HOST"]
with urllib.request.urlopen(host + "/storage/v1/b/checkpoints/o/step?alt=media", timeout=20) as answer:
    step = int(answer.read())
print("attempt", attempt, "rank", rank, "begins behind step", step, flush=True)
while step < {STEPS}:
    step += 1
    time.sleep(0.1)
    if rank == 0 and step % 5 == 0:
        url = host + "/upload/storage/v1/b/checkpoints/o?uploadType=media&name=step"
        urllib.request.urlopen(urllib.request.Request(url, data=str(step).encode(), method="POST"), timeout=20).close()
        print("attempt", attempt, "saved step", step, flush=True)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet whose site.yml has the launcher alone: what a run needs, and quickly there on a new worker."""
    folder = tmp_path_factory.mktemp("recover") / "fleet"
    (folder / "inventory" / "group_vars").mkdir(parents=True)
    (folder / "inventory" / "tpu_vm.yml").write_text("plugin: tpu_vm\n")
    (folder / "inventory" / "group_vars" / "all.yml").write_text('launcher_venv: ""\n')
    (folder / "playbooks").mkdir()
    for name in ("library", "action_plugins", "filter_plugins"):
        (folder / "playbooks" / name).symlink_to(ROOT / "playbooks" / name)
    (folder / "site.yml").write_text("- import_playbook: playbooks/launcher.yml\n")
    play = {"hosts": "all", "become": True, "gather_facts": False, "roles": ["launcher"]}
    (folder / "playbooks" / "launcher.yml").write_text(json.dumps([play]))
    return folder


@pytest.fixture(scope="module")
def desk(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab is up, with a node of two workers."""
    with lab_up("recover", tmp_path_factory.mktemp("state"), TPU_OPS_FLEET=str(fleet)) as shell:
        shell.do("tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b", "--spot")
        shell.do("tpu_ops", "configure", "pod")
        yield shell


@contextlib.contextmanager
def begun(desk: Desk, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, which is killed at the end of the block."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        argv, cwd=ROOT, env=desk.environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Return what a command says up to the line that holds a text."""
    assert process.stderr is not None
    found = []
    for line in process.stderr:
        found.append(line)
        if text in line:
            return found
    raise AssertionError(f"{text!r} was never said: {''.join(found)}")


def workers(desk: Desk) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = desk.json("tpu_ops", "list", "--json")
    return found


def test_a_preempted_run_goes_on_from_its_checkpoint_and_can_be_taken_over(desk: Desk) -> None:
    lab = Lab(desk)
    before = workers(desk)
    # Workers do not reach the loopback address that the API serves on.
    gateway = str(ipaddress.ip_network(lab.call("GET", "lab/info")[1]["networks"]["internal"])[1])
    assert lab.call("POST", "storage/v1/b?project=lab", {"name": "checkpoints"})[0] == 200
    assert lab.call("POST", "upload/storage/v1/b/checkpoints/o?uploadType=media&name=step", 0)[0] == 200
    with Proxy(lab.rest.removeprefix("http://"), gateway) as storage:
        train = ("tpu_ops", "train", "pod", "--recover", "--json", "--name", "loop", "--max-preemptions", "1")
        env = ("--env", f"STORAGE_EMULATOR_HOST=http://{storage.address}")
        with begun(desk, *train, *env, "--", "python3", "-c", LOOP) as first:
            lines_until(first, "attempt 1 saved step 20")
            # Whoever started it leaves; another shell takes it over.
            first.send_signal(signal.SIGINT)
            assert "attach loop --recover" in "".join(lines_until(first, "recover:"))
            assert first.wait(60) == 130
        with begun(desk, "tpu_ops", "attach", "loop", "--recover", "--json") as second:
            lines_until(second, "attempt 1 saved step 40")
            desk.do("tpu_ops", "lab", "preempt", "pod")
            said = lines_until(second, f"attempt 2 saved step {STEPS}")
            out, rest = second.communicate(timeout=120)
            assert second.returncode == 0, rest
    told = json.loads(out)
    assert (told["state"], told["attempt"], told["preemptions"], told["failures"]) == ("succeeded", 2, 1, 0)
    assert told["events"] == [{"attempt": 1, "what": "node pod is PREEMPTED", "then": "bringing its nodes back"}]
    begins = next(line for line in said if "attempt 2 rank 0 begins" in line)
    assert 40 <= int(begins.split()[-1]) < STEPS
    # A node of its own, that site.yml was run on, and its workers know of no other attempt.
    after = workers(desk)
    assert {row["node_id"] for row in after}.isdisjoint(row["node_id"] for row in before)
    for index in range(2):
        record = json.loads(lab.inside(f"pod-w{index}", "cat", "/var/lib/tpu_ops/runs/loop/record.json"))
        assert (record["attempt"], record["state"], record["rank"]) == (2, "succeeded", index)
    # The log of the first attempt outlived its disk.
    kept = next(Path(desk.environ["TPU_OPS_STATE"]).glob("fleets/*/runs/loop"))
    assert "attempt 1 saved step 40" in (kept / "attempt-1" / "rank-0.log").read_text()
    assert "attempt 1 rank 1 begins behind step 0" in (kept / "attempt-1" / "rank-1.log").read_text()
    assert not (kept / "recovery.json").exists()
    status = desk.succeed("tpu_ops", "status", "loop")
    assert "run loop, attempt 2: succeeded" in status.stderr


def test_a_failing_command_is_started_again_on_the_same_workers_as_often_as_is_allowed(desk: Desk) -> None:
    command = """
        cd "$TPU_OPS_RUN_DIR"
        echo "of attempt $TPU_OPS_ATTEMPT" >>kept
        [ "$TPU_OPS_ATTEMPT" = 2 ] || exit 3
        cat kept
    """
    done = desk.succeed("tpu_ops", "train", "pod", "--recover", "--max-failures", "1", "--shell", "--", command)
    assert done.stdout.splitlines() == ["[0] of attempt 1", "[0] of attempt 2"]
    assert "exit code 3; bringing its nodes back" in done.stderr
