"""The files of a fleet: whole, locked, and read only as the answer to the same question."""

from __future__ import annotations

import json
import math
import os
import threading

import pytest

from tests.support.nodes import node
from tpu_ops.errors import OpsError
from tpu_ops.fleet import view
from tpu_ops.fleet.state import Files, Question, Snapshot
from tpu_ops.ssh.fleet_files import replace

QUESTION = Question(("lab",), (), "127.0.0.1:1")


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
    assert files.read_snapshot(QUESTION) is None


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("asked_at", [10**400, 1e300, -1e300, 10**12, -1, math.nan, math.inf, None, "1", True, []]),
        ("scope", [None, 5, []]),
        ("source", [5, []]),
        ("warnings", [None, 5, "x", {}, [5], [None], ["\ud800"]]),
        ("nodes", [None, {}, "pod", [None], [5], [[]], ["pod"]]),
        ("name", [5, None, "\ud800", "-oProxyCommand=id", "a\nb", "../../x"]),
        ("node_id", [5, "1 *"]),
        ("state", [None, 7, "READY\x1b[2J"]),
        ("chips", ["1", None, 1.5, True, -1]),
        ("internal_ips", [5, None, "10.0.0.1", {}, [5], [None, "10.0.0.1"], [[]], ["evil.example.com", "10.0.0.1"]]),
        ("external_ips", [[f"-oProxyCommand=id{end}", "34.0.1.1"] for end in ("", ";", "\n34.0.1.1")]),
        ("external_ips", [["34.0.1.1"], ["34.0.1.1", "034.0.1.1"], ["34.0.1.1", "34.0.1.256"], ["34.0.1.1", "34.1\0"]]),
        ("zone", ["-", "a b", "us-central2-b\n"]),
        ("project", ["-oProxyCommand=id", ""]),
        ("accelerator_type", ["v4-8\x1b[2J"]),
        ("instance_names", [["-oProxyCommand=id", ""], ["t1v", "a; id"]]),
        ("labels", [None, [], ["team"], {"team": 5}, {"team": None}]),
        ("symptoms", [[{}], [1], {}, [{"worker_id": 0, "type": "", "details": "", "create_time": ""}]]),
        ("data_disks", [[{}], [[]], [{"source": "x", "mode": None}]]),
    ],
)
def test_a_snapshot_with_one_damaged_part_is_no_snapshot(tmp_path, part, values):
    files = Files(tmp_path)
    snapshot = Snapshot(1.0, (node(),), warnings=("project other: not listed",))
    files.write_snapshot(QUESTION, snapshot)
    whole = files.snapshot.read_text()
    for value in values:
        data = json.loads(whole)
        (data if part in data else data["nodes"][0])[part] = value
        files.snapshot.write_text(json.dumps(data))
        assert files.read() is None, value
    files.snapshot.write_text(whole)
    assert files.read_snapshot(QUESTION) == snapshot
    # As it was written before there were any.
    data = json.loads(whole)
    del data["warnings"]
    files.snapshot.write_text(json.dumps(data))
    assert files.read_snapshot(QUESTION) == snapshot._replace(warnings=())


def test_a_snapshot_answers_only_its_own_question(tmp_path):
    files = Files(tmp_path)
    files.write_snapshot(QUESTION, Snapshot(1.0, (node(),)))
    assert files.read_snapshot(QUESTION) == Snapshot(1.0, (node(),))
    assert files.read_snapshot(QUESTION._replace(projects=("other",))) is None
    assert files.read_snapshot(QUESTION._replace(zones=("us-west4-a",))) is None
    assert files.snapshot.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["snapshot.json", "known_hosts"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    files = Files(tmp_path)
    os.mkfifo(tmp_path / name)
    assert files.read() is None
    if name == "known_hosts":
        with pytest.raises(OpsError, match=r"known_hosts: .*not a regular file.*move the file away"):
            files.host_keys()
    with pytest.raises(OpsError, match="not a regular file"):
        replace(tmp_path / name, "", 0o600)


def test_a_state_directory_that_is_none_is_named_and_not_to_be_moved_away(fleet, monkeypatch):
    monkeypatch.setenv("TPU_OPS_STATE", os.devnull)
    with pytest.raises(OpsError, match=r"/dev/null/.*Not a directory \(set TPU_OPS_STATE to a directory\)"):
        view.current(fleet.settings())


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


def test_the_next_writer_removes_only_the_files_of_a_killed_one(tmp_path):
    files = Files(tmp_path)
    left = [
        ".known_hosts.a1b2c3d4",
        ".snapshot.json.x_y",
        ".shown.json.x_y",
        ".ssh_config.12345678",
        ".jump_config.12345678",
    ]
    kept = [".known_hosts", ".other.12345678", "known_hosts", "lock", "runs"]
    for name in (*left, *kept):
        (tmp_path / name).write_text(name)
    with files.lock():
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
