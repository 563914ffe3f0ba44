"""Exit codes of commands, the exceptions that determine them, and the conversion of external text to printable text.

Every error for the user says what failed, where, and how to fix it. The command line prints these three parts and ends
with the error's exit code; nothing else decides an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit code of a command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CLOUD = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Return external text in one line, without control sequences for the terminal.

    Newlines become spaces; other characters that cannot be printed are escaped as in Python.
    """
    if text.isprintable():
        return text
    line = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


class OpsError(Exception):
    """An error that a user can act on. Characters of its texts that cannot be printed are replaced.

    Args:
        what: What failed, one sentence without a full stop.
        where: Where it failed: the node, worker, file and key, or address.
        fix: The fix, as an instruction.
        details: One sentence for each part of an error that has several, such as each fault of a file.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, where: str = "", fix: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what, self.where, self.fix = printable(what), printable(where), printable(fix)
        self.details = tuple(map(printable, details))
        #: Further values that --json prints beside the error.
        self.facts: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the error for --json, with its further values."""
        error: dict[str, Any] = {
            "problem": self.what,
            "where": self.where,
            "fix": self.fix,
            "code": int(self.exit_code),
        }
        if self.details:
            error["details"] = list(self.details)
        return {**self.facts, "error": error}

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        text += f": {'; '.join(self.details)}" if self.details else ""
        return f"{text} ({within(self.fix)})" if self.fix else text


def within(fix: str) -> str:
    """Return a fix for use within a message: one that is only a command gets the backticks that every command has."""
    return f"`{fix}`" if fix.startswith("tpu_ops ") else fix


class UsageError(OpsError):
    """Wrong arguments or wrong configuration."""

    exit_code = ExitCode.USAGE


class CloudError(OpsError):
    """The Cloud TPU API refused or did not answer."""

    exit_code = ExitCode.CLOUD


class UnreachableError(OpsError):
    """A worker did not answer over ssh."""

    exit_code = ExitCode.UNREACHABLE


class RefusedError(UnreachableError):
    """A worker answered, but refused the user's login."""


class HostError(OpsError):
    """A worker answered, but the requested action failed there."""

    exit_code = ExitCode.FAILED
