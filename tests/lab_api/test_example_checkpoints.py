"""Checkpoints of examples/digits: files of a worker, and objects in a bucket of the lab."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import ROOT


@pytest.fixture(scope="module")
def checkpoints() -> Any:
    """The example's module, which is no part of a package."""
    found = importlib.util.spec_from_file_location("checkpoints", ROOT / "examples/digits/checkpoints.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_file_is_there_whole_or_not_at_all(checkpoints: Any, tmp_path: Path) -> None:
    place = tmp_path / "new" / "digits.npz"
    assert checkpoints.read(str(place)) is None
    for data in (b"first", b"second\0\xff"):
        checkpoints.write(str(place), data)
        assert checkpoints.read(str(place)) == data
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_an_object_in_a_bucket_is_written_again_and_again(checkpoints: Any, bucket: Any) -> None:
    place = f"gs://{bucket.name}/runs/7/digits.npz"
    assert checkpoints.read(place) is None
    for data in (b"first", b"second\0\xff"):
        checkpoints.write(place, data)
        assert checkpoints.read(place) == data
