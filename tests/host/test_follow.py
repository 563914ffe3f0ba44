"""What a follower is told at the end of a log."""

from __future__ import annotations

import os
from pathlib import Path

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
