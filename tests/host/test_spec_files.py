"""Where the spec of a run waits for its supervisor, and where the values of its secrets go."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from tests.support.specs import good, myself
from tpu_ops.host import rank_record, spec_files
from tpu_ops.host.store import Store
from tpu_ops.protocol.wire import Refused


def test_a_spec_is_readable_by_root_alone_and_gone_when_discarded(tmp_path: Path) -> None:
    spec_files.put(str(tmp_path), good(), 1000, 1001, "m1")
    path = Path(spec_files.path_of(str(tmp_path), "digits-1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(Refused, match="being started"):
        spec_files.put(str(tmp_path), good(), 1000, 1001, "m2")
    assert spec_files.read(str(tmp_path), "digits-1") == (good(), 1000, 1001, "m1")
    assert list(path.parent.iterdir()) == [path]
    spec_files.discard(str(tmp_path), "digits-1", "m2")
    assert path.exists(), "another start's stays"
    spec_files.discard(str(tmp_path), "digits-1", "m1")
    assert not path.exists()


def test_specs_of_dead_starters_are_swept(tmp_path: Path) -> None:
    spec_files.put(str(tmp_path), good(), 0, 0, "")
    spec_files.sweep(str(tmp_path), time.time() + spec_files.STALE_AFTER - 5)
    assert Path(spec_files.path_of(str(tmp_path), "digits-1")).exists()
    spec_files.sweep(str(tmp_path), time.time() + spec_files.STALE_AFTER + 5)
    assert not Path(spec_files.path_of(str(tmp_path), "digits-1")).exists()


def test_secrets_are_files_of_the_person_until_they_are_dropped(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.drop_secrets()
    store.put_secrets({"OLD": "left behind"}, myself())
    folder = Path(store.secrets_dir)
    told = {"S": "\udcff\n", "S_FILE": str(folder / "S")}
    assert store.put_secrets({"S": "\udcff\n"}, myself()) == told
    assert [path.name for path in folder.iterdir()] == ["S"]
    assert (folder / "S").read_bytes() == b"\xff\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "S")] == [0o711, 0o600]
    assert (folder / "S").stat().st_uid == os.getuid()
    store.drop_secrets()
    assert list(folder.iterdir()) == []


def test_a_record_names_secrets_without_their_values() -> None:
    assert rank_record.new_record(good(), myself(), 0, "")["secret_names"] == ["S"]
    assert "hush" not in json.dumps(rank_record.new_record(good(), myself(), 0, ""))
