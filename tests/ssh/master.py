"""A stand-in for the master of an OpenSSH connection, whose worker is this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpu_ops.ssh import envelope


def worker_runs(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have workers run a script in place of every command, without what would end it in time; $0 is the marker."""
    monkeypatch.setattr(envelope, "enveloped", lambda marker, *_: shlex.join(["/bin/sh", "-c", script, marker]))


class Master:
    """Listens on a control socket as PROTOCOL.mux of OpenSSH 9 has it, and runs each session with sh.

    Attributes:
        path: Of the socket.
        version: What it says that it speaks.
        refuses: Whether it opens no session, as with all those open that the server allows.
        mute: Whether it does not say a word.
        cut: Whether the sessions' ends are not told.
        agents: For each session, whether it asked for the ssh agent.
        environments: For each session, what it sent of its environment.
        hung_up: Set once a session was ended from outside.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.refuses, self.mute, self.cut = 4, False, False, False
        self.agents: list[bool] = []
        self.environments: list[list[bytes]] = []
        self.hung_up = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        with contextlib.suppress(OSError), self._listener:
            # To close it does not end an accept() of another thread.
            self._listener.shutdown(socket.SHUT_RDWR)

    def rest(self) -> None:
        """Return when nothing is connected any more."""
        for thread in [*self._threads]:
            thread.join(5)
            assert not thread.is_alive()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                control, _ = self._listener.accept()
                self._start(self._serve, control)

    def _serve(self, control: socket.socket) -> None:
        with control, contextlib.suppress(OSError, EOFError):
            if not self.mute:
                _send(control, 1, self.version)
            while True:
                kind, body = _message(control)
                if kind == 0x10000004:
                    _send(control, 0x80000005, _number(body), os.getpid())
                elif kind == 0x10000002:
                    self._session(control, body)
                    return

    def _session(self, control: socket.socket, body: bytes) -> None:
        request, _, terminal, x11, agent, subsystem, _ = struct.unpack(">7I", body[:28])
        _, command, *environment = _strings(body[28:])
        assert (terminal, x11, subsystem) == (0, 0, 0)
        files = [_received(control) for _ in range(3)]
        self.agents.append(bool(agent))
        self.environments.append(environment)
        if self.refuses:
            for file in files:
                os.close(file)
            said = b"Session open refused by peer"
            _send(control, 0x80000003, request, len(said), end=said)
        else:
            child = subprocess.Popen(
                ["sh", "-c", command], stdin=files[0], stdout=files[1], stderr=files[2], process_group=0
            )
            for file in files:
                os.close(file)
            _send(control, 0x80000006, request, 1)
            self._start(self._watch, control, child)
            code = child.wait()
            if code >= 0 and not self.cut:
                _send(control, 0x80000004, 1, code)
            control.shutdown(socket.SHUT_RDWR)

    def _watch(self, control: socket.socket, child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            if not control.recv(1) and child.poll() is None:
                self.hung_up.set()
                os.killpg(child.pid, 9)


def _send(control: socket.socket, *numbers: int, end: bytes = b"") -> None:
    body = struct.pack(f">{len(numbers)}I", *numbers) + end
    control.sendall(struct.pack(">I", len(body)) + body)


def _number(data: bytes) -> int:
    return int.from_bytes(data[:4], "big")


def _exactly(control: socket.socket, size: int) -> bytes:
    """Read no byte too many: those that come with files behind them would be lost."""
    data = b""
    while len(data) < size:
        if not (piece := control.recv(size - len(data))):
            raise EOFError
        data += piece
    return data


def _message(control: socket.socket) -> tuple[int, bytes]:
    body = _exactly(control, _number(_exactly(control, 4)))
    return _number(body), body[4:]


def _strings(data: bytes) -> Iterator[bytes]:
    while data:
        end = 4 + _number(data)
        yield data[4:end]
        data = data[end:]


def _received(control: socket.socket) -> int:
    data, files, _, _ = socket.recv_fds(control, 1, 1)
    assert (len(data), len(files)) == (1, 1)
    return files[0]
