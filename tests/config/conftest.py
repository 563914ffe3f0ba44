"""A place for a fleet's file, and settings read as from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops import config


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with an empty home."""
    return {"HOME": str(tmp_path / "home"), "TPU_OPS_STATE": str(tmp_path / "state")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the fleet's file would be."""
    return tmp_path / "fleet" / "inventory" / "tpu_vm.yml"


@pytest.fixture
def read(file, environ):
    """Read settings as from a file of the usual keys and some options, and an environment with some variables."""

    def from_options(variables=None, **options):
        usual = {"plugin": "tpu_vm", "projects": ["lab"], "user": "ada"}
        return config.from_data({**usual, **options}, file, {**environ, **(variables or {})})

    return from_options
