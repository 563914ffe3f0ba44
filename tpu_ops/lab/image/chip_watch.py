"""Opens the port of libtpu's metrics service on a worker while a process holds a chip, as libtpu does in that process.

Runs inside the worker, as a part of the guest agent. The port costs nothing until somebody connects: the program that
answers (chip_service.py) is started then, and ends when no process holds a chip any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PORT = 8431
#: Device files of chips below /dev.
DEVICES = ("accel[0-9]*", "vfio/[0-9]*")
PROGRAM = Path(__file__).with_name("chip_service.py")
#: File of the lab that says what the chips do; without it they are busy.
STATE = Path("/var/lib/tpu-lab/worker/chips.json")
#: Events of inotify(7): a file was opened, or closed. An event begins with a descriptor, mask, cookie and name length.
_OPENED, _CLOSED = 0x20, 0x08 | 0x10
_EVENTS = 65536


def chips(root: Path = Path("/dev")) -> list[str]:
    """Return the device files of the worker's chips."""
    return sorted(str(path) for pattern in DEVICES for path in root.glob(pattern))


def is_held(devices: Iterable[str]) -> bool:
    """Return whether a process has one of these files open."""
    wanted = set(devices)
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(path) in wanted:  # noqa: PTH115 - Path.readlink is not in Python 3.8
                        return True
    return False


def wants_port(state: Path) -> bool:
    """Return whether the lab lets the port be open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads(state.read_text()).get("state") != "refused")
    return True


class ChipWatch:
    """The port of a worker, and the program that answers on it.

    Args:
        devices: The device files of the chips.
        port: The port.
        state: The lab's file.
    """

    def __init__(self, devices: list[str], port: int = PORT, state: Path = STATE) -> None:
        self._devices = devices
        self._port = port
        self._state = state
        self._watch = _watch(devices)
        self._held = bool(devices) and is_held(devices)
        self._listener: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def wait(self, seconds: float) -> None:
        """Wait for some time, and meanwhile open and close the port and start the program as it is needed."""
        if not self._devices:
            time.sleep(seconds)
            return
        deadline = time.monotonic() + seconds
        while True:
            self._update()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            unserved = -1 if self._listener is None or self._is_served() else self._listener.fileno()
            found, _, _ = select.select([each for each in (self._watch, unserved) if each >= 0], [], [], left)
            if self._watch in found:
                os.read(self._watch, _EVENTS)
            if self._watch in found or self._watch < 0:  # without inotify, if the kernel allows no more instances
                self._held = is_held(self._devices)
            if unserved in found:
                command = [sys.executable, "-I", str(PROGRAM)]
                self._server = subprocess.Popen(command, stdin=unserved, stdout=subprocess.DEVNULL)

    def _is_served(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def _update(self) -> None:
        """Open or close the port."""
        wanted = self._held and wants_port(self._state)
        if wanted and self._listener is None:
            # A program of a user can have the port, which libtpu could not open then either.
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(("::", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
        elif not wanted and self._listener is not None:
            self.close()

    def close(self) -> None:
        """Close the port, and end the program and its connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _watch(devices: list[str]) -> int:
    """Return a descriptor that becomes readable when a process opens or closes one of these files; -1 if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK) if devices else -1
    if descriptor >= 0:
        for path in devices:
            library.inotify_add_watch(descriptor, os.fsencode(path), _OPENED | _CLOSED)
    return int(descriptor)
