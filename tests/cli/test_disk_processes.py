"""`tpu_ops disk` as processes: on two machines at once, and killed in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.support.fleet import ZONE

#: Seconds that a process may take on a busy machine.
LIMIT = 60.0


def create(fleet, *names):
    for name in names:
        zone = f"compute/v1/projects/{fleet.project}/zones/{ZONE}"
        assert fleet.api.call("POST", f"{zone}/disks", {"name": name, "sizeGb": "10"})[0] == 200


def begin(fleet, state, *argv):
    """Begin a subcommand with a directory of its own for its state, as on a machine of its own."""
    environ = {**os.environ, "TPU_OPS_STATE": str(state), "TPU_OPS_REST_ENDPOINT": fleet.api.rest}
    return subprocess.Popen([sys.executable, "-m", "tpu_ops.cli.main", "disk", *argv], env=environ)


def attached(fleet):
    disks = fleet.api.node("box", fleet.location()).get("dataDisks", [])
    return sorted(one["sourceDisk"].rpartition("/")[2] for one in disks)


def test_two_machines_that_attach_disks_at_once_both_succeed(slow_fleet, tmp_path):
    names = ("one", "two")
    slow_fleet.create("box")
    create(slow_fleet, *names)
    machines = [begin(slow_fleet, tmp_path / name, "attach", name, "box") for name in names]
    assert [machine.wait(LIMIT) for machine in machines] == [0, 0]
    assert attached(slow_fleet) == ["one", "two"]
    # Each looked for changes of the other that were not done yet.
    assert slow_fleet.api.requests(slow_fleet.project)["ListOperations"] >= 2


def test_a_command_that_was_killed_continues_when_it_is_run_again(slow_fleet, tmp_path):
    slow_fleet.create("box")
    create(slow_fleet, "data")
    command = begin(slow_fleet, tmp_path / "state", "attach", "data", "box")
    deadline = time.monotonic() + LIMIT
    while "UpdateNode" not in slow_fleet.api.requests(slow_fleet.project):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls until the deadline
    command.kill()
    command.wait(LIMIT)
    assert begin(slow_fleet, tmp_path / "state", "attach", "data", "box").wait(LIMIT) == 0
    assert attached(slow_fleet) == ["data"]
