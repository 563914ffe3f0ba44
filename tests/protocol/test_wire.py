"""Requests, answers and frames arrive as they were sent; a line that is no request is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tpu_ops.protocol import wire


def test_a_request_arrives_as_it_was_sent() -> None:
    values = {"spec": {"argv": ["\udcff\n'", "", "$x"], "n": 1}}
    line = wire.request("0123456789abcdef", "start", values)
    assert line.count(b"\n") == 1
    assert wire.parse_request(line[:-1]) == {
        "marker": "0123456789abcdef",
        "protocol": wire.PROTOCOL,
        "action": "start",
        "attended": True,
        **values,
    }


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b'{"marker": "short", "action": "probe"}',
        b'{"marker": "with\\nnewline", "action": "probe"}',
        b'{"marker": "0123456789"}',
        b'{"marker": "0123456789", "action": 1}',
    ],
)
def test_an_invalid_request_is_refused(line: bytes) -> None:
    with pytest.raises(wire.Refused) as refused:
        wire.parse_request(line)
    assert refused.value.to_json()["error"]["kind"] == "invalid"


def test_a_request_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_REQUEST", 1000)
    with Path("/dev/zero").open("rb") as endless, pytest.raises(wire.Refused, match="longer than 1000"):
        wire.read_request(endless.fileno())


def test_an_answer_is_found_behind_what_shells_print() -> None:
    source, sink = os.pipe()
    wire.answer(sink, "0123456789abcdef", {"ok": True, "text": "ü\n"})
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        said = b"noise 0123456789abcdef without a line end" + file.read() + b"more noise\n"
    assert wire.find_answer(said, "0123456789abcdef") == {"ok": True, "text": "ü\n"}


@pytest.mark.parametrize(
    "said", [b"", b"noise\n", b"\n0123456789abcdef\n", b'\n0123456789abcdef\n{"half": ', b"\n0123456789abcdef\nx\n"]
)
def test_half_an_answer_is_none(said: bytes) -> None:
    assert wire.find_answer(said, "0123456789abcdef") is None


def test_a_frame_is_read_as_it_was_written() -> None:
    data = wire.frame(wire.DATA, 2**40, b"\0\n")
    assert wire.FRAME.unpack(data[: wire.FRAME.size]) == (wire.DATA, 2**40, 2)
    assert data[wire.FRAME.size :] == b"\0\n"


def test_a_refusal_keeps_its_facts() -> None:
    refused = wire.Refused("held", "taken", "wait", holder={"person": "ada"})
    assert json.loads(json.dumps(refused.to_json())) == {
        "ok": False,
        "error": {"kind": "held", "message": "taken", "fix": "wait", "holder": {"person": "ada"}},
    }
