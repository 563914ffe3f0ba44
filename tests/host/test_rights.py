"""Who may stop a run, and with whose rights its files are opened."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.support.specs import myself
from tpu_ops.host import actions, person
from tpu_ops.host.wire import Refused


class Someone(person.Person):
    """A person of the test's own making."""

    def __init__(self, uid: int, admin: bool) -> None:
        self.uid, self.name, self._admin = uid, f"u{uid}", admin

    @property
    def is_admin(self) -> bool:
        """As told."""
        return self._admin


@pytest.mark.parametrize(
    ("uid", "admin", "force", "allowed"),
    [(7, False, False, True), (8, False, True, False), (8, True, False, False), (8, True, True, True)],
)
def test_a_run_is_its_persons_and_an_insisting_administrators(
    uid: int, admin: bool, force: bool, allowed: bool
) -> None:
    if allowed:
        person.require_control(Someone(uid, admin), 7, "ada", force)
        return
    with pytest.raises(Refused, match="belongs to ada"):
        person.require_control(Someone(uid, admin), 7, "ada", force)


def test_another_grace_than_asked_for_is_never_taken() -> None:
    assert actions._intent({"grace": 5}, Someone(1, False))["grace"] == 5
    assert "grace" not in actions._intent({"grace": None}, Someone(1, False))
    for wrong in (-1, True, "5", float("inf"), float("nan"), 3601, 10**9):
        with pytest.raises(Refused, match="the grace is not within 0 and 3600 s"):
            actions._intent({"grace": wrong}, Someone(1, False))


def test_files_are_opened_with_the_persons_own_rights(tmp_path: Path) -> None:
    somebody = person.Person(pwd.getpwnam("nobody")) if os.geteuid() == 0 else myself()
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with person.acting_as(somebody):
        assert os.geteuid() == somebody.uid
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before
