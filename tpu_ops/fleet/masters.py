"""Ends ssh master connections to addresses that are no longer a worker's."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: Seconds that one ssh may take to tell its master.
TIMEOUT = 3.0


def end(addresses: Iterable[str], *, user: str, mux: Path) -> None:
    """Tell the masters of these addresses to exit, as far as there are any; failures are passed over.

    A master that cannot be told ends by itself when its keep-alive is not answered.
    """
    addresses = sorted(set(addresses))
    # ControlPath's name is a digest, so that ssh itself has to look for the socket; none at all is seen at once.
    if not addresses or not mux.is_dir() or not any(mux.iterdir()):
        return
    with ThreadPoolExecutor(min(16, len(addresses))) as pool:
        list(pool.map(lambda address: _end(address, user, mux), addresses))


def _end(address: str, user: str, mux: Path) -> None:
    command = ["ssh", "-F", "none", "-o", f"ControlPath={mux}/%C", "-O", "exit", "-l", user, address]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, timeout=TIMEOUT, capture_output=True, check=False, stdin=subprocess.DEVNULL)
