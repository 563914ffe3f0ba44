"""A member of a fleet, whose environment this process has."""

from __future__ import annotations

import pytest

from tests.support.published import Member, text


@pytest.fixture
def member(tmp_path, monkeypatch):
    """A person without credentials, whose fleet's file names the projects `lab` and `other`."""
    made = Member(tmp_path / "member", projects=["lab", "other"])
    for name in ("TPU_OPS_ENDPOINT", "TPU_OPS_SNAPSHOT", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.environ().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def file(tmp_path):
    """A published snapshot."""
    path = tmp_path / "snapshot.json"
    path.write_text(text())
    return path
