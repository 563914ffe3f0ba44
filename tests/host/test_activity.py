"""What a worker tells of its last uses, from its files of logins and its records of runs."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.host import activity, proc
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire

BOOT, USER, ENDED = 2, 7, 8


def entry(kind: int, line: str, user: str, at: int) -> bytes:
    """Return an entry of wtmp as `struct utmp` has it on x86-64."""
    text = struct.pack("<hxxi32s4s32s256s", kind, 4711, line.encode(), b"ts/0", user.encode(), b"host")
    return text + struct.pack("<hhiii", 0, 0, 0, at, 500_000) + bytes(36)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host that keeps a record of logins, without any."""
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/wtmp").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "dev/pts").mkdir(parents=True)
    return tmp_path


def last(root: Path) -> tuple[str, str, float] | None:
    found = activity.last_login(str(root))
    assert found is not None
    return (found[0]["who"], found[0]["what"], found[0]["at"]) if found else None


def test_the_entry_is_that_of_glibc() -> None:
    assert len(entry(USER, "pts/0", "ada", 1)) == 384


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], None),
        ([(BOOT, "~", "reboot", 900)], None),
        ([(USER, "pts/0", "ada", 100), (USER, "pts/1", "bob", 200)], ("bob", "pts/1", 200.5)),
        ([(USER, "pts/0", "ada", 100), (ENDED, "pts/0", "", 300)], ("ada", "pts/0", 300.5)),
        # The end of what was no login, or of a login before a reboot, is no use.
        ([(USER, "pts/0", "ada", 100), (ENDED, "tty1", "", 300)], ("ada", "pts/0", 100.5)),
        ([(USER, "pts/0", "ada", 100), (BOOT, "~", "reboot", 200), (ENDED, "pts/0", "", 300)], ("ada", "pts/0", 100.5)),
    ],
)
def test_the_last_login_in_wtmp(root: Path, entries: list[Any], found: tuple[str, str, float] | None) -> None:
    (root / "var/log/wtmp").write_bytes(b"".join(entry(*each) for each in entries))
    assert last(root) == found


def test_a_rotated_and_an_incomplete_file_are_read(root: Path) -> None:
    (root / "var/log/wtmp.1").write_bytes(entry(USER, "pts/3", "eve", 50) + b"incomplete")
    assert last(root) == ("eve", "pts/3", 50.5)


def test_only_the_end_of_a_huge_file_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_MOST", 384 * 2 + 10)
    data = [entry(USER, f"pts/{index}", "ada", 1000 - index) for index in range(5)]
    (root / "var/log/wtmp").write_bytes(b"".join(data))
    assert last(root) == ("ada", "pts/3", 997.5)


def test_an_open_login_is_used_as_its_terminal_is(root: Path) -> None:
    (root / "run/utmp").write_bytes(entry(USER, "pts/0", "ada", 100) + entry(USER, "pts/9", "gone", 900))
    terminal = root / "dev/pts/0"
    terminal.touch()
    os.utime(terminal, (400, 300))
    assert last(root) == ("ada", "pts/0", 400.0)


def test_a_host_without_wtmp_cannot_tell_logins(tmp_path: Path) -> None:
    assert activity.last_login(str(tmp_path)) is None


def test_the_end_of_a_lost_run_is_the_latest_that_is_possible(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(root))
    record = {"run_id": "exp", "state": "failed", "since": 100.0, "began": 110.0, "exited": 300.0, "ended": 310.0}
    assert activity.end_of(record, store) == 310.0
    folder = Path(store.directory("exp"))
    folder.mkdir(parents=True)
    (folder / "log").touch()
    os.utime(folder / "log", (500, 500))
    lost = {**record, "state": "lost", "exited": None, "ended": None, "boot_id": "another", "init_start": 1}
    monkeypatch.setattr(proc, "started_at", lambda pid: 400.0)
    assert activity.end_of(lost, store) == 500.0
    os.utime(folder / "log", (200, 200))
    assert activity.end_of(lost, store) == 400.0


def test_the_answer_has_signs_of_all_kinds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "require_root", lambda: None)
    monkeypatch.setattr(activity, "last_login", lambda: None)
    held = {"pid": 1, "uid": 1, "user": "bob", "command": "python x.py", "devices": ["/dev/accel0"]}
    monkeypatch.setattr(proc, "holders", lambda: [held])
    before = time.time()
    answer = activity.activity({"protocol": wire.PROTOCOL}, Store(str(root)))
    (sign,) = answer["signs"]
    assert (sign["kind"], sign["who"], sign["what"], sign["now"]) == ("chip", "bob", "python x.py", True)
    assert before <= answer["clock"] <= time.time()
    assert answer["unknown"] == ["it keeps no record of logins (/var/log/wtmp)"]
