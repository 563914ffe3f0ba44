"""`tpu_ops disk` on two machines at once: each has its own state, so no lock of one keeps the other out."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.fleet import ZONE


def test_two_machines_that_attach_disks_at_once_both_succeed(slow_fleet, tmp_path):
    names = ("one", "two")
    slow_fleet.create("box")
    for name in names:
        zone = f"compute/v1/projects/{slow_fleet.project}/zones/{ZONE}"
        assert slow_fleet.api.call("POST", f"{zone}/disks", {"name": name, "sizeGb": "10"})[0] == 200
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "tpu_ops.cli.main", "disk", "attach", name, "box"],
            env={**os.environ, "TPU_OPS_STATE": str(tmp_path / name), "TPU_OPS_REST_ENDPOINT": slow_fleet.api.rest},
        )
        for name in names
    ]
    assert [machine.wait(60) for machine in machines] == [0, 0]
    assert sorted(
        one["sourceDisk"].rpartition("/")[2] for one in slow_fleet.api.node("box", slow_fleet.location())["dataDisks"]
    ) == ["one", "two"]
    # Each looked for changes of the other that were not done yet.
    assert slow_fleet.api.requests(slow_fleet.project)["ListOperations"] >= 2
