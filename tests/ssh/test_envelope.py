"""The envelope tells a command's output and exit code from all that shells print."""

from __future__ import annotations

import pytest

from tpu_ops.protocol.wire import new_marker
from tpu_ops.ssh.envelope import open_envelope


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
    assert open_envelope(said, "MARK") == found


def test_half_of_a_command_s_end_is_neither_a_code_nor_shown() -> None:
    marker = new_marker()
    said = f"\n{marker}\nout\n\n{marker} 137".encode()
    for kept in range(len(said) - 1, len(said) - 24, -1):
        assert open_envelope(said[:kept], marker) == (b"out\n", None, True)
