"""The built wheel, installed as the documentation says, into an environment without the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import UV
from tests.support.fleet import ROOT, FleetDir


def succeed(*argv: str | Path, cwd: Path, **environ: str) -> str:
    """Run a command that must succeed; return what it printed."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHON", "TPU_OPS_"))
    }
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, env=kept | environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.index
def test_a_tool_that_is_installed_from_the_wheel_begins_a_fleet_and_ansible_reads_it(
    tmp_path: Path, fleet: FleetDir
) -> None:
    succeed(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    programs, home = tmp_path / "bin", fleet.private_key.parents[1]
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(programs)}
    options = ("--constraints", ROOT / "requirements.lock", "--with-executables-from", "ansible-core")
    succeed(UV, "tool", "install", "--python", sys.executable, *options, wheel, cwd=home, **places)
    there = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "TPU_OPS_ENDPOINT": fleet.api.grpc}
    place = home / "fleet"
    succeed("tpu_ops", "init", place, "--project", fleet.project, cwd=home, **there)
    assert str(tmp_path / "tools") in (place / "ansible.cfg").read_text()
    fleet.create("pod", "v4-16")
    assert "pod-w1" in succeed("tpu_ops", "list", cwd=place, **there)
    assert "pod-w1" in succeed("ansible-inventory", "--graph", cwd=place, **there)
    assert "jax : " in succeed("ansible-playbook", "site.yml", "--list-tasks", cwd=place, **there)
