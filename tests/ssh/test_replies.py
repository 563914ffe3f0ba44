"""The part of a too long output that is kept."""

from __future__ import annotations

import random

import pytest

from tpu_ops.protocol import wire
from tpu_ops.ssh import replies
from tpu_ops.ssh.replies import Output, result_of

MARKER = "0123456789abcdef0123456789abcdef"
LONGEST, TAIL = 1000, 100


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "LONGEST", LONGEST)
    monkeypatch.setattr(replies, "_TAIL", TAIL)


def taken(data: bytes, seed: int) -> Output:
    """Return what is kept of bytes that come in pieces of any length."""
    found, drawn = Output(MARKER), random.Random(seed)  # noqa: S311 - lengths, no secrets
    while data:
        size = drawn.choice((1, 7, 64, 500))
        found.add(data[:size])
        data = data[size:]
        assert len(found.data) <= LONGEST + 2 * TAIL + 500 + 50
    return found


@pytest.mark.parametrize("before", [0, 500, *range(940, 1010), 1150, 1200, 1250, 1300, 5000])
@pytest.mark.parametrize("after", [0, 50, 100, 500, 5000])
def test_the_exit_code_is_known_wherever_it_stands(before: int, after: int) -> None:
    said = wire.beginning(MARKER) + before * b"x" + f"\n{MARKER} 137\n".encode() + after * b"y"
    result = result_of("a", MARKER, 0, taken(said, before), Output())
    assert (result.code, result.problem) == (137, "")
    assert result.cut == (len(said) > LONGEST + 2 * TAIL) or abs(len(said) - LONGEST - 2 * TAIL) < 500
    whole = before * b"x" + after * b"y"
    assert whole.startswith(result.stdout)
    assert result.cut or result.stdout == whole
    assert not result.cut or len(result.stdout) >= min(len(whole), LONGEST) - 100


def test_output_of_the_maximum_length_is_not_cut() -> None:
    said = wire.beginning(MARKER) + (LONGEST + TAIL) * b"x" + f"\n{MARKER} 0\n".encode()
    result = result_of("a", MARKER, 0, taken(said, 1), Output())
    assert (result.cut, len(result.stdout)) == (False, LONGEST + TAIL)


def test_a_lost_connection_is_recognized_after_any_output() -> None:
    errors = wire.beginning(MARKER) + 5000 * b"e\n" + b"Connection to a closed by remote host.\n"
    result = result_of("a", MARKER, 255, taken(wire.beginning(MARKER), 1), taken(errors, 2))
    assert result.problem == (
        "the connection was lost after the command had started and before it ended: "
        "Connection to a closed by remote host."
    )
    assert result.cut
