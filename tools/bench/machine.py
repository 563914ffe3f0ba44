"""The machine and the commit of a benchmark."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, str]:
    """Return the machine's properties as text, without its name and paths."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": str(os.cpu_count()),
        "CPU": " ".join(model[1].split()) if model else platform.machine(),
        "memory": f"{memory:.0f} GB",
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "Python": platform.python_version(),
        "ansible-core": version("ansible-core"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def commit(root: Path) -> str:
    """Return the name of the current commit, with -dirty if files differ from it.

    Raises:
        OSError, subprocess.CalledProcessError: git is not installed, or this is not a repository.
    """
    argv = ("git", "describe", "--always", "--dirty")
    return subprocess.run(argv, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
