"""The two sides of the protocol held against each other, and requests that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tpu_ops.host import wire as host
from tpu_ops.remote import wire as controller


def test_both_sides_agree_on_the_constants() -> None:
    for name in ("PROTOCOL", "DATA", "GAP", "NOTE", "END"):
        assert getattr(host, name) == getattr(controller, name)
    assert host.FRAME.format == controller.FRAME.format
    assert set(controller.KINDS) == {host.DATA, host.GAP, host.NOTE, host.END}


def test_a_request_arrives_as_it_was_sent() -> None:
    values = {"spec": {"argv": ["\udcff\n'", "", "$x"], "n": 1}}
    line = controller.request("0123456789abcdef", "start", values)
    assert line.count(b"\n") == 1
    assert host.parse_request(line[:-1]) == {
        "marker": "0123456789abcdef",
        "protocol": controller.PROTOCOL,
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
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(host.Refused) as refused:
        host.parse_request(line)
    assert refused.value.to_json()["error"]["kind"] == "invalid"


def test_a_request_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_REQUEST", 1000)
    with Path("/dev/zero").open("rb") as endless, pytest.raises(host.Refused, match="longer than 1000"):
        host.read_request(endless.fileno())


def test_an_answer_is_found_behind_what_shells_print() -> None:
    source, sink = os.pipe()
    host.answer(sink, "0123456789abcdef", {"ok": True, "text": "ü\n"})
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        said = b"noise 0123456789abcdef without a line end" + file.read() + b"more noise\n"
    assert controller.find_answer(said, "0123456789abcdef") == {"ok": True, "text": "ü\n"}


@pytest.mark.parametrize(
    "said", [b"", b"noise\n", b"\n0123456789abcdef\n", b'\n0123456789abcdef\n{"half": ', b"\n0123456789abcdef\nx\n"]
)
def test_half_an_answer_is_none(said: bytes) -> None:
    assert controller.find_answer(said, "0123456789abcdef") is None


def test_a_frame_is_read_as_it_was_written() -> None:
    data = host.frame(host.DATA, 2**40, b"\0\n")
    assert controller.FRAME.unpack(data[: controller.FRAME.size]) == (controller.DATA, 2**40, 2)
    assert data[controller.FRAME.size :] == b"\0\n"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"noise\nMARK\nout\n\nMARK 0\n", (b"out\n", 0, True)),
        (b"\nMARK\n\nMARK 255\n", (b"", 255, True)),
        (b"\nMARK\nout\nMARK x\nmore", (b"out\nMARK x\nmore", None, True)),
        (b"\nMARK\nhalf", (b"half", None, True)),
        (b"Permission denied\n", (b"", None, False)),
        # What the command has left behind prints after its end.
        (b"\nMARK\nnow\n\nMARK 7\nlate\n", (b"now\nlate\n", 7, True)),
        (b"\nMARK\n\nMARK 0\nlate\n\nmore", (b"late\n\nmore", 0, True)),
    ],
)
def test_the_envelope_tells_output_code_and_whether_it_began(said: bytes, found: object) -> None:
    assert controller.open_envelope(said, "MARK") == found


def test_half_of_a_command_s_end_is_neither_a_code_nor_shown() -> None:
    marker = controller.new_marker()
    said = f"\n{marker}\nout\n\n{marker} 137".encode()
    for kept in range(len(said) - 1, len(said) - 24, -1):
        assert controller.open_envelope(said[:kept], marker) == (b"out\n", None, True)


def test_a_refusal_keeps_its_facts() -> None:
    refused = host.Refused("held", "taken", "wait", holder={"person": "ada"})
    assert json.loads(json.dumps(refused.to_json())) == {
        "ok": False,
        "error": {"kind": "held", "message": "taken", "fix": "wait", "holder": {"person": "ada"}},
    }
