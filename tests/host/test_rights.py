"""The right to stop a run, and the rights with which its files are opened."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.specs import myself
from tpu_ops.host import actions, fitness, person, requests, rights, space
from tpu_ops.host.store import Store
from tpu_ops.protocol.wire import PROTOCOL, Refused, find_answer

MARKER = "0123456789abcdef"
WAIT = "wait for the run (`tpu_ops attach r1` follows it), or "
#: What the group database calls some numbers. 9 has no name.
GROUPS = {5: "users", 7: "tpu-run", 8: "google-sudoers"}


class Someone(person.Person):
    """A person of the test's own making."""

    def __init__(self, uid: int, admin: bool) -> None:
        self.uid, self.name, self._admin = uid, f"u{uid}", admin

    @property
    def is_admin(self) -> bool:
        """As told."""
        return self._admin


@pytest.mark.parametrize(
    ("uid", "by", "force", "allowed"),
    [
        (7, "", False, True),
        (8, "", True, False),
        (8, "group", False, False),
        (8, "group", True, True),
        # With `sudo: full` in users_people, which puts nobody into a group of administrators.
        (8, "sudo", False, False),
        (8, "sudo", True, True),
    ],
)
def test_a_run_is_its_persons_and_an_insisting_administrators(
    uid: int, by: str, force: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rights, "has_full_sudo", lambda _: by == "sudo")
    asker = Someone(uid, by == "group")
    if allowed:
        rights.require_control(asker, 7, "ada", force)
        return
    with pytest.raises(Refused, match="belongs to ada"):
        rights.require_control(asker, 7, "ada", force)


@pytest.mark.parametrize(
    ("uid", "admin", "run", "process"),
    [
        (7, False, WAIT + "`tpu_ops stop r1`", "tpu_ops unlock WORKER"),
        # Who started it as somebody else.
        (8, False, WAIT + "`tpu_ops stop r1`", "ask ada to end it"),
        (9, False, WAIT + "ask ada to end it", "ask ada to end it"),
        (
            9,
            True,
            WAIT + "ask ada to end it, or as an administrator: `tpu_ops stop r1 --force`",
            "ask ada to end it, or as an administrator: `tpu_ops unlock WORKER --force --user ada`",
        ),
    ],
)
def test_advice_about_a_blocking_run_fits_the_rights_of_the_user(uid: int, admin: bool, run: str, process: str) -> None:
    asker, looked = Someone(uid, admin), {"venv": {"path": ""}, "environment_files": {}, "chips": [], "space": {}}
    holder = {"run_id": "r1", "person": "ada", "uid": 7, "asker": "u8", "since": 0.0}
    held = {"uid": 7, "user": "ada", "pid": 1, "command": "python"}
    found = [
        fitness.faults({**looked, "holders": [held], "holder": by}, 0, asker=asker)[0]["fix"] for by in (holder, None)
    ]
    assert found == [run, process]
    assert actions.held(holder, asker).fix == run


def test_another_grace_than_asked_for_is_never_taken() -> None:
    assert actions._intent({"grace": 5}, Someone(1, False))["grace"] == 5
    assert "grace" not in actions._intent({"grace": None}, Someone(1, False))
    for wrong in (-1, float("inf"), float("nan"), 3601, 10**9):
        with pytest.raises(Refused, match="the grace period is not between 0 and 3600 s"):
            actions._intent({"grace": wrong}, Someone(1, False))


def test_files_are_opened_with_the_persons_own_rights(tmp_path: Path) -> None:
    somebody = person.Person(pwd.getpwnam("nobody")) if os.geteuid() == 0 else myself()
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with person.acting_as(somebody):
        assert os.geteuid() == somebody.uid
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before


def answer(store: Store, action: str) -> dict[str, Any]:
    """Return the answer to a request."""
    (source, write), (read, sink) = os.pipe(), os.pipe()
    with os.fdopen(write, "w") as file:
        file.write(json.dumps({"marker": MARKER, "protocol": PROTOCOL, "action": action}) + "\n")
    requests.serve(store, source, sink)
    os.close(source)
    os.close(sink)
    with os.fdopen(read, "rb") as said:
        found: dict[str, Any] = find_answer(said.read(), MARKER)
    return found


@pytest.mark.parametrize(
    ("error", "is_full", "where"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), True, "/run/x"),
        (OSError(errno.ENOSPC, "No space left on device"), True, "{0}/run/tpu_ops"),
        (OSError(errno.EROFS, "Read-only file system"), False, "{0}/run/tpu_ops or {0}/var/lib/tpu_ops/runs"),
    ],
    ids=["named", "full", "another"],
)
def test_a_file_system_that_takes_nothing_is_named_with_what_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, is_full: bool, where: str
) -> None:
    def refused(*_: object) -> None:
        raise error

    monkeypatch.setitem(requests._ACTIONS, "status", refused)
    monkeypatch.setattr(space, "is_full", lambda path: is_full and path.endswith("run/tpu_ops"))
    monkeypatch.setattr(space, "facts", lambda _: {"free": 2**19, "total": 2**27, "files": 0})
    found = answer(Store(str(tmp_path)), "status")["error"]
    place = where.format(tmp_path)
    room = " has 0.5 of 128.0 MiB free and no inodes left)" if error.errno == errno.ENOSPC else ""
    begins = f"the launcher cannot write to {place}: {error.strerror}"
    assert (found["kind"], found["message"].startswith(begins)) == ("failed", True)
    assert found["message"].removeprefix(begins).endswith(room)
    assert ("sudo du -xh" in found["fix"], "sudo dmesg" in found["fix"]) == (bool(room), not room)
    assert place.partition(" or ")[0] in found["fix"]


@pytest.mark.parametrize(
    ("gids", "listed", "allowed"),
    [
        ([5, 7], None, True),
        ([9, 7], None, True),
        ([8], None, True),
        # A rule of somebody else's names the person.
        ([5], True, True),
        ([5, 9], False, False),
    ],
)
def test_a_right_that_was_taken_away_is_gone_from_sessions_that_are_open_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gids: list[int], listed: bool | None, allowed: bool
) -> None:
    """sudo allows the call each time, since it uses the groups of the open session."""
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getgrouplist", lambda *_: gids)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=GROUPS[gid]))
    monkeypatch.setattr("sys.argv", ["/usr/local/sbin/tpu-host"])
    monkeypatch.setenv("SUDO_COMMAND", "/usr/local/sbin/tpu-host")

    def run(words: list[str], **_: Any) -> Any:
        assert listed is not None, "who is in a group is not kept waiting"
        assert words == ["sudo", "-n", "-l", "-U", "nobody", "--", "/usr/local/sbin/tpu-host"]
        return SimpleNamespace(returncode=0 if listed else 1)

    monkeypatch.setattr(subprocess, "run", run)
    store = Store(str(tmp_path))
    if allowed:
        assert answer(store, "status")["records"] == []
        return
    for action in ("probe", "status", "holders", "start", "stop", "unlock", "follow"):
        error = answer(store, action)["error"]
        assert error["kind"] == "denied"
        assert "nobody is no longer allowed to use this worker's launcher" in error["message"]
        assert "sudo: launcher" in error["fix"]


def test_root_and_whoever_has_no_rights_anyway_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("sudo is asked"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    rights.require_right(person.Person(pwd.getpwuid(0)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    rights.require_right(person.Person(pwd.getpwnam("nobody")))
    # Root by `sudo bash`.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_COMMAND", "/usr/bin/bash -c 'tpu-host <request'")
    rights.require_right(person.Person(pwd.getpwnam("nobody")))


def test_free_space_of_a_missing_path_is_that_of_its_nearest_directory(tmp_path: Path) -> None:
    missing = str(tmp_path / "no/such/directory")
    assert space.left(missing).startswith(f"{tmp_path} has ")
    quota, broken = OSError(errno.EDQUOT, "Disk quota exceeded"), OSError(errno.EIO, "Input/output error")
    assert space.why(quota, [missing]).startswith(f"Disk quota exceeded ({tmp_path} has ")
    assert space.fix(quota, [missing]) == "`sudo repquota -a` on this worker shows which quota is used up"
    assert space.why(broken, [missing]) == "Input/output error"
    assert "sudo dmesg" in space.fix(broken, [missing])


def test_a_user_id_without_an_account_is_refused_with_a_fix() -> None:
    with pytest.raises(Refused, match="user id 4000000000 has no entry in the password database") as refused:
        person.by_uid(4_000_000_000)
    assert refused.value.fix.startswith("`getent passwd 4000000000` on this worker finds nothing")
