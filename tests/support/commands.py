"""How commands end that ran in this process (`tests/cli/conftest.py`)."""

from __future__ import annotations


def failed(result: tuple[int, str, str], code: int, *words: str, printed: bool = False) -> None:
    """Check that a command ended with one error.

    Args:
        result: Its exit code, output and what it said besides.
        code: The exit code.
        words: What the error says, among others.
        printed: Whether there was something to print all the same.
    """
    assert (result[0], result[1] != "") == (code, printed), result
    assert result[2].count("error: ") == 1, result
    assert [word for word in words if word not in result[2]] == []
    assert "Traceback" not in result[2]
