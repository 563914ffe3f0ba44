"""The end of processes that hold a chip; real processes hold a file in its place."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.specs import myself
from tpu_ops.host import chips, ending, proc
from tpu_ops.host.caller import Caller
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire


@pytest.fixture
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as a chip, on a host without lockfiles whose root runs the tests and asks for themselves."""
    found = tmp_path / "accel0"
    found.touch()
    monkeypatch.setattr(proc, "_CHIP_OR_CONTAINER", re.compile(re.escape(str(found))))
    monkeypatch.setattr(ending, "LOCKFILES", ())
    monkeypatch.setattr(chips, "require_root", lambda: None)
    monkeypatch.setattr(chips, "asking", myself)
    return found


@pytest.fixture
def two(chip: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that hold it."""
    with chip.open() as file:
        held = [subprocess.Popen(["sleep", "60"], stdin=file) for _ in range(2)]
    yield held
    for process in held:
        process.kill()
        process.wait()


def unlock(folder: Path, **request: Any) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        caller = Caller(ours.fileno(), attended=False)
        return chips.unlock({"protocol": wire.PROTOCOL, "grace": 5, **request}, Store(str(folder)), caller)


def named(process: subprocess.Popen[bytes]) -> list[int]:
    return [process.pid, proc.start_time(process.pid)]


def ids(found: list[dict[str, Any]]) -> set[int]:
    return {entry["pid"] for entry in found} - {os.getpid()}


def test_only_the_processes_that_a_person_has_seen_are_ended(
    tmp_path: Path, two: list[subprocess.Popen[bytes]]
) -> None:
    shown, came = two
    answer = unlock(tmp_path, processes=[named(shown), [came.pid, 1]])
    assert (ids(answer["ended"]), ids(answer["left"])) == ({shown.pid}, {came.pid})
    assert ids(unlock(tmp_path, processes=[])["left"]) == {came.pid}


def test_a_controller_that_names_no_processes_means_all_of_a_user_s(
    tmp_path: Path, two: list[subprocess.Popen[bytes]]
) -> None:
    answer = unlock(tmp_path)
    assert (ids(answer["ended"]), answer["left"]) == ({process.pid for process in two}, [])


#: A user id without an account, as processes of containers have them.
NOBODY_S = next(uid for uid in range(61234, 2**16) if proc.person_name(uid) == str(uid))


def admin(monkeypatch: pytest.MonkeyPatch, *, is_admin: bool = True) -> None:
    """Have whoever asks be an administrator, or nobody in particular."""
    asker = SimpleNamespace(name="ada", uid=1001)
    monkeypatch.setattr(chips, "asking", lambda: asker)
    monkeypatch.setattr(chips, "administers", lambda _: is_admin)


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to be somebody else")
def test_an_administrator_ends_processes_of_who_has_no_account(
    tmp_path: Path, chip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chip.open() as file:
        held = subprocess.Popen(["sleep", "60"], stdin=file, user=NOBODY_S)
    admin(monkeypatch)
    (shown,) = chips.described(Store(str(tmp_path)), None)
    answer = unlock(tmp_path, user=shown["user"], processes=[named(held)])
    assert (ids(answer["ended"]), answer["left"]) == ({held.pid}, [])
    assert held.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("user", "is_admin", "why"),
    [
        (str(NOBODY_S), False, "ada is not an administrator"),
        ("0", True, "there is no user 0"),
        ("nobody-at-all", True, "there is no user nobody-at-all"),
        ("٢٠٠٠", True, "there is no user"),
        ("9" * 30, True, "there is no user"),
        (f"0{NOBODY_S}", True, "there is no user"),
    ],
)
def test_unlock_for_an_unknown_user_or_without_rights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, is_admin: bool, why: str
) -> None:
    monkeypatch.setattr(chips, "require_root", lambda: None)
    admin(monkeypatch, is_admin=is_admin)
    with pytest.raises(wire.Refused, match=why) as refused:
        unlock(tmp_path, user=user)
    assert refused.value.fix.startswith("`tpu_ops who` names" if is_admin else f"ask {user} or")


@pytest.fixture
def lockfile(chip: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = chip.with_name("libtpu_lockfile")
    found.touch()
    monkeypatch.setattr(ending, "LOCKFILES", (str(found), str(found) + "-that-is-not-there"))
    return found


@pytest.mark.parametrize("kind", ["lockf", "flock"])
def test_a_lockfile_that_is_locked_is_kept_and_who_has_it_open_is_named(lockfile: Path, kind: str) -> None:
    taking = f"import fcntl, os; fcntl.{kind}(0, fcntl.LOCK_EX); os.set_inheritable(1, False)"
    locked = f"{taking}; os.execlp('sleep', 'sleep', '60')"
    with (
        lockfile.open("r+") as file,
        subprocess.Popen([sys.executable, "-c", locked], stdin=file, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout
        assert process.stdout.read() == b"", "it has not locked the file"
        found = ending.chips_after()
        process.kill()
    assert (found["lockfiles_removed"], found["lockfiles_kept"]) == ([], [str(lockfile)])
    fault = found["lockfile_faults"][str(lockfile)]
    assert fault.startswith("it is locked, and open in pid ")
    assert f"pid {process.pid} of {myself().name} (sleep 60)" in fault
    found = ending.chips_after()
    assert (found["lockfiles_removed"], found["lockfiles_kept"], found["lockfile_faults"]) == ([str(lockfile)], [], {})
    assert not lockfile.exists()


def test_a_lockfile_that_cannot_be_removed_says_why(lockfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tpu_ops.host.ending.os.unlink", refused)
    faults = ending.chips_after()["lockfile_faults"]
    fix = f"`lsattr -d {lockfile}` and `findmnt -T {lockfile}` on this worker show the reason"
    assert faults == {str(lockfile): f"it cannot be removed: Read-only file system; {fix}"}


def test_a_directory_in_place_of_the_lockfile_is_removed_if_empty(lockfile: Path) -> None:
    lockfile.unlink()
    (lockfile / "mine").mkdir(parents=True)
    faults = ending.chips_after()["lockfile_faults"]
    fix = f"`ls -la {lockfile}` on this worker shows its owner, `sudo mv {lockfile} /var/tmp/` removes it"
    assert faults == {str(lockfile): f"it is a directory with something in it, not a lockfile; {fix}"}
    assert [one["fix"] for one in ending.in_the_way()] == [fix]
    (lockfile / "mine").rmdir()
    assert ending.chips_after()["lockfiles_removed"] == [str(lockfile)]
    assert not lockfile.exists()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_an_odd_file_in_place_of_the_lockfile_is_left_alone(
    lockfile: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lockfile.unlink()
    if kind == "FIFO":
        os.mkfifo(lockfile)
    elif kind == "socket":
        # Its path is too long for an address.
        monkeypatch.chdir(lockfile.parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(lockfile.name)
    else:
        # Only root makes one.
        monkeypatch.setattr(ending, "LOCKFILES", ("/dev/null",))
    path = ending.LOCKFILES[0]
    monkeypatch.setattr(ending, "_locked", lambda _: pytest.fail("it is opened"))
    found = ending.chips_after()
    fix = f"`ls -la {path}` on this worker shows its owner, `sudo rm {path}` removes it"
    assert (found["lockfiles_removed"], found["lockfiles_kept"]) == ([], [path])
    assert found["lockfile_faults"] == {path: f"it is a {kind}, not a lockfile; {fix}"}
    assert ending.in_the_way() == [{"path": path, "problem": f"it is a {kind}, not a lockfile", "fix": fix}]
    assert os.path.lexists(path)


@pytest.mark.parametrize("target", ["precious", "gone"])
def test_a_link_in_the_lockfiles_place_goes_and_what_it_leads_to_stays(lockfile: Path, target: str) -> None:
    precious = lockfile.with_name("precious")
    precious.write_text("hers")
    lockfile.unlink()
    lockfile.symlink_to(target)
    assert ending.in_the_way() == []
    assert ending.chips_after()["lockfiles_removed"] == [str(lockfile)]
    assert (os.path.lexists(lockfile), precious.read_text()) == (False, "hers")


def test_a_lockfile_of_whoever_holds_a_chip_is_kept_without_more_words(
    lockfile: Path, two: list[subprocess.Popen[bytes]]
) -> None:
    found = ending.chips_after()
    assert ids(found["holders"]) == {process.pid for process in two}
    assert (found["lockfiles_kept"], found["lockfile_faults"]) == ([str(lockfile)], {})
