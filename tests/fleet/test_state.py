"""The files of a fleet: whole, locked, and read only as the answer to the same question."""

from __future__ import annotations

import dataclasses
import json
import math
import threading

import pytest

from tests.support.nodes import node
from tpu_ops.errors import OpsError
from tpu_ops.fleet.state import Files, Scope, Snapshot, replace

SCOPE = Scope(("lab",), (), "127.0.0.1:1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 99, "scope": {}, "nodes": []}',
        '{"version": 1, "nodes": 7}',
        "[" * 100_000,
    ],
)
def test_a_damaged_snapshot_is_no_snapshot(tmp_path, text):
    files = Files(tmp_path)
    files.snapshot.write_text(text)
    assert files.read_snapshot(SCOPE) is None


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("asked_at", [10**400, math.nan, math.inf, None, "1", True, []]),
        ("scope", [None, 5, []]),
        ("source", [5, []]),
        ("nodes", [None, {}, "pod", [None], [5], [[]], ["pod"]]),
        ("name", [5, None, "\ud800"]),
        ("node_id", [5]),
        ("state", [None, 7]),
        ("chips", ["1", None, 1.5]),
        ("internal_ips", [5, None, "10.0.0.1", {}, [5], [None, "10.0.0.1"], [[]]]),
        ("labels", [None, [], ["team"], {"team": 5}, {"team": None}]),
        ("symptoms", [[{}], [1], {}, [{"worker_id": 0, "type": "", "details": "", "create_time": ""}]]),
        ("data_disks", [[{}], [[]], [{"source": "x", "mode": None}]]),
    ],
)
def test_a_snapshot_with_one_damaged_part_is_no_snapshot(tmp_path, part, values):
    files = Files(tmp_path)
    files.write_snapshot(SCOPE, Snapshot(1.0, (node(),)))
    whole = files.snapshot.read_text()
    for value in values:
        data = json.loads(whole)
        (data if part in data else data["nodes"][0])[part] = value
        files.snapshot.write_text(json.dumps(data))
        assert files.read() is None, value
    files.snapshot.write_text(whole)
    assert files.read_snapshot(SCOPE) == Snapshot(1.0, (node(),))


def test_a_snapshot_answers_only_its_own_question(tmp_path):
    files = Files(tmp_path)
    files.write_snapshot(SCOPE, Snapshot(1.0, (node(),)))
    assert files.read_snapshot(SCOPE) == Snapshot(1.0, (node(),))
    assert files.read_snapshot(dataclasses.replace(SCOPE, projects=("other",))) is None
    assert files.read_snapshot(dataclasses.replace(SCOPE, zones=("us-west4-a",))) is None
    assert files.snapshot.stat().st_mode & 0o777 == 0o600


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 100_000]
    replace(path, texts[0], 0o600)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                replace(path, text, 0o600)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        assert {path.read_text() in texts for _ in range(200)} == {True}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_held_lock_is_waited_for_and_then_named(tmp_path):
    files = Files(tmp_path / "new")
    with files.lock(), pytest.raises(OpsError, match="another process"), files.lock(timeout=0.1):
        pass
    with files.lock(timeout=0.1):
        assert files.directory.stat().st_mode & 0o777 == 0o700
