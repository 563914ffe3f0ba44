"""The unit of a run, and its supervisor's notifications to systemd."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import live
from tpu_ops.host import ending, proc, unit


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket in the place of systemd's, which reads nothing by itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield found


def heard(systemd: socket.socket) -> list[bytes]:
    found = []
    try:
        while True:
            found.append(systemd.recv(100))
    except BlockingIOError:
        return found


def fill() -> bool:
    """Tell systemd more than it takes without reading; return whether that came to an end."""

    def tell() -> None:
        for _ in range(5000):
            unit.notify("WATCHDOG=1")

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(10)
    return not telling.is_alive()


def test_a_systemd_that_does_not_read_holds_up_no_supervisor(systemd: socket.socket) -> None:
    assert fill(), "it waits for systemd"
    assert set(heard(systemd)) == {b"WATCHDOG=1"}
    unit.notify("STATUS=again")
    assert heard(systemd) == [b"STATUS=again"]


def test_a_notification_waits_until_systemd_reads_again(systemd: socket.socket) -> None:
    assert fill()
    unit.notify("READY=1", limit=0.01)
    assert b"READY=1" not in heard(systemd)
    assert fill()
    telling = threading.Thread(target=unit.notify, args=("READY=1", 10.0), daemon=True)
    telling.start()
    found = []
    while telling.is_alive():
        found += heard(systemd)
    assert (found + heard(systemd))[-1] == b"READY=1"


@pytest.mark.usefixtures("waits")
def test_a_supervisor_that_looks_long_who_holds_the_chips_does_not_hang(
    tmp_path: Path, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[list[bytes]] = []

    def holders(beat: Callable[[], None]) -> list[Any]:
        heard(systemd)
        beat()
        looked.append(heard(systemd))
        return []

    monkeypatch.setattr(proc, "holders", holders)
    monkeypatch.setattr(ending, "LOCKFILES", ())
    live(tmp_path, "exit 0")
    assert looked == [[b"WATCHDOG=1"]]


def test_a_supervisor_that_hangs_is_ended_without_a_core() -> None:
    assert "WatchdogSignal=SIGKILL" in unit.properties("/usr/local/sbin/tpu-host", "r1", 30.0, "0123456789abcdef")
