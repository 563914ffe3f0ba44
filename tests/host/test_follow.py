"""What a follower is told at the end of a log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.host import follow, wire
from tpu_ops.host.store import Store


def test_bytes_that_are_missing_at_the_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full to the end of a run leaves no byte behind the hole."""
    monkeypatch.setattr(follow, "require_root", lambda: None)
    store = Store(str(tmp_path))
    store.prepare("r1", os.getuid(), os.getgid())
    facts = {"bytes": 3, "dropped": 40, "rotated": 0, "fault": "No space left on device"}
    store.write({"run_id": "r1", "attempt": 1, "state": "succeeded", "cgroup": "", "notes": [], "log": facts})
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"abc")
    source, sink = os.pipe()
    other, said = os.pipe()
    request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1"}
    follow.follow(request, store, wire.Caller(source, attended=True), said)
    os.close(said)
    with os.fdopen(other, "rb") as file:
        answer, found = file.read(), []
    rest = answer.split(b"\n", 3)[3]
    while rest:
        kind, offset, size = wire.FRAME.unpack_from(rest)
        found.append((kind, offset, rest[wire.FRAME.size :][:size] if kind == wire.DATA else b""))
        rest = rest[wire.FRAME.size + size :]
    os.close(source)
    os.close(sink)
    assert found == [(wire.DATA, 0, b"abc"), (wire.GAP, 43, b""), (wire.END, 43, b"")]


def test_frames_end_without_an_end_where_another_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is another one: what stands there at the old offset is nothing that the peer is missing."""
    monkeypatch.setattr(follow, "require_root", lambda: None)
    store = Store(str(tmp_path))
    known: dict[str, Any] = {"run_id": "r1", "state": "failed", "cgroup": "", "notes": [], "log": None}
    attempts = iter([1, 1, 2, 2, 2])
    monkeypatch.setattr(store, "observe", lambda run_id: {**known, "attempt": next(attempts)})
    Path(store.logs("r1")).mkdir(parents=True)
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"abc")
    with (tmp_path / "said").open("wb") as said, Path(os.devnull).open("rb") as source:
        request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1"}
        follow.follow(request, store, wire.Caller(source.fileno(), attended=False), said.fileno())
    frames = (tmp_path / "said").read_bytes().split(b"\n", 3)[3]
    assert frames == wire.frame(wire.DATA, 0, b"abc")
