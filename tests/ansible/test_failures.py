"""The advice after a playbook has failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.ansible.failures import FULL_SUDO, fix_of
from tpu_ops.ansible.playbook import Outcome, Step


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (["Missing sudo password"] * 2, True),
        (["Task failed: sudo: a password is required"], True),
        (["Missing sudo password", "no disk"], False),
    ],
)
def test_the_right_that_is_missing_is_named_where_that_is_all(messages: list[str], told: bool) -> None:
    failures = [Step("Try", "", f"pod-w{rank}", "failed", message) for rank, message in enumerate(messages)]
    settings: Any = SimpleNamespace(file=Path("x"))
    fix = fix_of(Outcome(code=2, failures=failures), Path("site.yml"), "pod", settings)
    assert (fix == FULL_SUDO) is told
    assert fix
