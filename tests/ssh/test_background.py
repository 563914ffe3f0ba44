"""Tunnels in the background: what is at a port, and the end of the process that keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.ssh import background

KEEP = (
    "import sys, time; from pathlib import Path\n"
    "from tpu_ops.cli import interrupts; from tpu_ops.ssh import background\n"
    "with interrupts.ended_by_signals(), background.kept(Path(sys.argv[1]), 8888, 'jupyter', 'box-w0'):\n"
    "    print('kept', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a process that keeps a tunnel to jupyter on box-w0 at port 8888."""
    command = [sys.executable, "-c", KEEP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "kept\n"
        yield process
        process.kill()


def test_a_tunnel_is_known_until_its_process_is_ended(tmp_path: Path, keeper: subprocess.Popen[str]) -> None:
    tunnel = background.Tunnel(8888, "jupyter", "box-w0", keeper.pid)
    assert background.at(tmp_path, 8888) == tunnel
    assert background.at(tmp_path, 8889) is None
    assert background.leading_to(tmp_path, "jupyter", "box-w0") == [tunnel]
    assert background.leading_to(tmp_path, "jupyter", "box-w1") == []
    background.end(tmp_path, tunnel)
    assert keeper.wait(10)
    assert background.at(tmp_path, 8888) is None
    assert background.leading_to(tmp_path, "jupyter", "box-w0") == []


def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path, keeper: subprocess.Popen[str]) -> None:
    keeper.kill()
    keeper.wait()
    assert json.loads((tmp_path / "tunnels/8888").read_text())["pid"] == keeper.pid
    assert background.at(tmp_path, 8888) is None
    with background.kept(tmp_path, 8888, "tensorboard", "box-w0"):
        found = background.at(tmp_path, 8888)
        assert found == background.Tunnel(8888, "tensorboard", "box-w0", os.getpid())


def test_a_port_has_one_tunnel(tmp_path: Path, keeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOOKING", 0.1)
    with pytest.raises(OpsError, match="port 8888"), background.kept(tmp_path, 8888, "tensorboard", "box-w0"):
        pass
    assert keeper.poll() is None
