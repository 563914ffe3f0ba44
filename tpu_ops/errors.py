"""The one table of exit codes, the errors that carry them, and how text of others is shown in one.

Every error that a user may meet says what failed, where, and what to do. The command line prints these three
parts and ends with the error's exit code; nothing else decides an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the process tells its caller."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CLOUD = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Return text of others in one line, without what a terminal takes for orders.

    Ends of lines become spaces, all else that cannot be printed is escaped as in Python.
    """
    if text.isprintable():
        return text
    line = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


class OpsError(Exception):
    """An error that a user can act on. Text of others in it becomes printable.

    Args:
        what: What failed, one sentence without a full stop.
        where: The node, worker, file and key, or address it failed at.
        fix: What to do about it, as an instruction.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = printable(what), printable(where), printable(fix)
        #: What --json tells beside the error.
        self.facts: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the error for --json, with what is told beside it."""
        error = {"problem": self.what, "where": self.where, "fix": self.fix, "code": int(self.exit_code)}
        return {**self.facts, "error": error}

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        # A fix may be a command and nothing else; within a message it stands in backticks, as all do.
        fix = f"`{self.fix}`" if self.fix.startswith("tpu_ops ") else self.fix
        return f"{text} ({fix})" if fix else text


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
    """A worker answered, and does not let this person in."""


class HostError(OpsError):
    """A worker answered, and what it was asked to do failed."""

    exit_code = ExitCode.FAILED
