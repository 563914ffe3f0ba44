"""The built wheel, installed as the documentation says, into an environment without the clone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.fleet import FleetDir
from tests.support.wheel import installed, succeed


@pytest.mark.index
def test_a_tool_that_is_installed_from_the_wheel_begins_a_fleet_and_ansible_reads_it(
    tmp_path: Path, fleet: FleetDir
) -> None:
    home = fleet.private_key.parents[1]
    programs = installed(tmp_path, home)
    there = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "TPU_OPS_ENDPOINT": fleet.api.grpc}
    place = home / "fleet"
    succeed("tpu_ops", "init", place, "--project", fleet.project, cwd=home, **there)
    assert str(tmp_path / "tools") in (place / "ansible.cfg").read_text()
    fleet.create("pod", "v4-16")
    assert "pod-w1" in succeed("tpu_ops", "list", cwd=place, **there)
    assert "pod-w1" in succeed("ansible-inventory", "--graph", cwd=place, **there)
    assert "jax : " in succeed("ansible-playbook", "site.yml", "--list-tasks", cwd=place, **there)
