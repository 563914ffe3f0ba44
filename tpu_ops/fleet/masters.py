"""Ends ssh master connections to addresses that are no longer a worker's."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tpu_ops.remote import openssh

#: Seconds that one ssh may take to tell its master.
TIMEOUT = 3.0


def end(left: Iterable[tuple[str, str]], *, user: str, mux: Path) -> None:
    """Tell the masters of workers at addresses that they left to exit, as far as there are any.

    Failures are passed over: a master that cannot be told ends by itself when its keep-alive is not answered.

    Args:
        left: Addresses, each with the worker's ControlPath.
        user: Login name on the workers.
        mux: The directory of the control sockets.
    """
    left = sorted(set(left))
    # A socket's name is a digest, so that ssh itself has to look for it; none at all is seen at once.
    if not left or not mux.is_dir() or not any(mux.iterdir()):
        return
    commands = [openssh.control_left(control, user, address, "exit") for address, control in left]
    with ThreadPoolExecutor(min(16, len(commands))) as pool:
        list(pool.map(_run, commands))


def _run(command: list[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, timeout=TIMEOUT, capture_output=True, check=False, stdin=subprocess.DEVNULL)
