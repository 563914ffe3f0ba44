"""What a run's spec may hold, where it waits for the supervisor, and where its secrets go."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.specs import good, good_net, myself
from tpu_ops.host import record, spec
from tpu_ops.host.store import Store
from tpu_ops.protocol.wire import Refused


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "../x"},
        {"run_id": "Upper"},
        {"run_id": "a b"},
        {"run_id": "x\n"},
        {"rank": 4},
        {"rank": True},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"argv": [1]},
        {"argv": "ls"},
        {"env": {"A=B": "1"}},
        {"env": {"A": None}},
        {"secrets": {"../x": "1"}},
        {"secrets": {"A": 1}},
        {"secrets": {"A": "a\0b"}},
        {"secrets": {"A": "x" * (spec.MAX_SECRET + 1)}},
        {"grace_stop": -1},
        {"grace_stop": float("nan")},
        {"lease": 4},
        {"barrier": float("inf")},
        {"exit_skew": "1"},
        {"workers": ["pod-w0"]},
        {"workers": [0, 1, 2, 3]},
        {"net": None},
        {"world_size": 1, "rank": 0, "workers": ["pod-w0"]},
        {"net": good_net(key="0f")},
        {"net": good_net(address="pod-w1")},
        {"net": good_net(address="::")},
        {"net": good_net(hub="224.0.0.1")},
        {"net": good_net(port=0)},
        {"net": good_net(port=True)},
        {"net": good_net(uid=0)},
        {"rank": 0},
        {"slice": 1},
        {"slices": 0},
        {"slices": 2, "slice": 1},
        {"slices": 3},
        {"slices": 8},
        {"uid": 0},
    ],
)
def test_a_spec_that_cannot_be_carried_out_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        spec.check(good(**changes))


def test_a_spec_is_readable_by_root_alone_and_gone_when_discarded(tmp_path: Path) -> None:
    spec.put(str(tmp_path), good(), 1000, 1001, "m1")
    path = Path(spec.path_of(str(tmp_path), "digits-1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(Refused, match="being started"):
        spec.put(str(tmp_path), good(), 1000, 1001, "m2")
    assert spec.read(str(tmp_path), "digits-1") == (good(), 1000, 1001, "m1")
    assert list(path.parent.iterdir()) == [path]
    spec.discard(str(tmp_path), "digits-1", "m2")
    assert path.exists(), "another start's stays"
    spec.discard(str(tmp_path), "digits-1", "m1")
    assert not path.exists()


def test_specs_of_dead_starters_are_swept(tmp_path: Path) -> None:
    spec.put(str(tmp_path), good(), 0, 0, "")
    spec.sweep(str(tmp_path), time.time() + spec.STALE_AFTER - 5)
    assert Path(spec.path_of(str(tmp_path), "digits-1")).exists()
    spec.sweep(str(tmp_path), time.time() + spec.STALE_AFTER + 5)
    assert not Path(spec.path_of(str(tmp_path), "digits-1")).exists()


def test_all_ranks_of_a_run_have_one_digest() -> None:
    assert spec.digest(good()) == spec.digest(good(rank=2, worker="pod-w2", net=None))
    assert spec.digest(good()) != spec.digest(good(argv=["other"]))


def test_nothing_that_stays_follows_from_the_value_of_a_secret() -> None:
    other = good(secrets={"S": "other"})
    assert spec.digest(good()) == spec.digest(other) != spec.digest(good(secrets={}))
    assert record.new_record(good(), myself(), 0, "")["secret_names"] == ["S"]
    assert "hush" not in json.dumps(record.new_record(good(), myself(), 0, ""))


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
