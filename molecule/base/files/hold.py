"""Holds apt's lock as another installation does, until one has waited for it for some seconds, or for ten minutes."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

#: Made once somebody has waited.
WAITED = Path("/run/molecule-waited")


def installing() -> bool:
    """Return whether somebody installs packages; check mode simulates it, and takes no lock."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"apt-get") and b"install" in words and b"--simulate" not in words:
            return True
    return False


WAITED.unlink(missing_ok=True)
with Path("/var/lib/dpkg/lock-frontend").open("a") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    deadline = time.monotonic() + 600
    while not installing() and time.monotonic() < deadline:
        time.sleep(0.2)  # polls for the installation until the deadline
    time.sleep(3)  # long enough that one which does not wait has failed
    if installing():
        WAITED.touch()
