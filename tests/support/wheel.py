"""The built wheel, installed as the documentation says, into an environment without the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.environments import UV
from tests.support.fleet import ROOT


def succeed(*argv: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command that must succeed, without the variables of this shell that lead to the clone."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHON", "TPU_OPS_"))
    }
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def installed(folder: Path, home: Path) -> Path:
    """Build the wheel and install it with uv; return the directory of its programs.

    Args:
        folder: Where everything goes.
        home: The directory in which the commands are run, outside of the clone.
    """
    succeed(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    programs = folder / "bin"
    places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(programs)}
    options = ("--constraints", ROOT / "requirements.lock", "--with-executables-from", "ansible-core")
    succeed(UV, "tool", "install", "--python", sys.executable, *options, wheel, cwd=home, **places)
    return programs
