"""The results from one worker: how a command ended on the worker, or what the launcher answered."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tpu_ops.protocol.wire import UNKNOWN_ACTION
from tpu_ops.ssh import envelope, openssh

#: ssh's exit code if ssh itself fails. A remote command can end with the same code.
SSH_FAILED = 255
#: Beginnings of the problem of a command that took too long, and of a command that perhaps has not started.
LATE, MUTE = "did not end within", "did not answer within"
#: How many bytes of a worker's output are kept from the beginning, and about how many more from the end.
LONGEST, _TAIL = 64 * 2**20, 64 * 2**10


class Output:
    """The output of a worker on one stream. Of long output only the beginning, the end, and the end marker are kept.

    Args:
        marker: The envelope's marker; empty if the stream has no end marker.

    Attributes:
        data: The bytes that are kept.
        cut: Whether bytes were dropped.
    """

    def __init__(self, marker: str = "") -> None:
        self.data, self.cut = bytearray(), False
        self._told = envelope.end(marker) if marker else b""
        self._kept = LONGEST

    def add(self, piece: bytes) -> None:
        """Add received bytes."""
        self.data += piece
        if len(self.data) > self._kept + 2 * _TAIL:
            self._drop()

    def shown(self, body: bytes) -> bytes:
        """Return the command's output up to the first dropped byte. ``body`` is the kept output of the command."""
        return body[: max(0, len(body) - len(self.data) + LONGEST)] if self.cut else body

    def _drop(self) -> None:
        """Drop the bytes between the beginning and the end of the output, except for the end marker."""
        self.cut = True
        if self._told:
            line = len(self._told) + len("255\n")
            at = self.data.find(self._told, self._kept - line + 1)
            if 0 <= at < len(self.data) - _TAIL:
                # Background processes of the command printed more than _TAIL after the end marker.
                del self.data[self._kept : at]
                self._kept = min(self._kept, at) + line
        del self.data[self._kept : -_TAIL]


class Result(NamedTuple):
    """How a command ended on one worker.

    Attributes:
        host: The worker.
        code: The command's own exit code (128 + n for signal n); None if its end marker did not arrive.
        stdout: The command's output, without text that the login shell printed before.
        stderr: The error output of the command and the login shell.
        problem: Why there is no exit code; empty if the exit code is known.
        reached: Whether the worker was reached.
        cut: Whether the output was too long, so that bytes were dropped.
    """

    host: str
    code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    problem: str = ""
    reached: bool = True
    cut: bool = False

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.code == 0


def result_of(host: str, marker: str, code: int | None, stdout: Output, stderr: Output) -> Result:
    """Return the result of a command in the envelope, given its streams and the exit code of the local process."""
    body, own, started = envelope.open_envelope(bytes(stdout.data), marker)
    errors, cut = envelope.behind_marker(bytes(stderr.data), marker), stdout.cut or stderr.cut
    said = "" if own is not None else openssh.reason(errors.decode(errors="replace"), code)
    body, errors = stdout.shown(body), stderr.shown(errors)
    if own is not None:
        return Result(host, own, body, errors, cut=cut)
    if not started:
        return Result(host, None, body, errors, said, reached=code != SSH_FAILED, cut=cut)
    return Result(
        host,
        None,
        body,
        errors,
        f"the connection was lost after the command had started and before it ended: {said}",
        cut=cut,
    )


def late(found: Result, limit: str, *, begun: bool) -> Result:
    """Return the result of a command that exceeded its time limit.

    The command itself can have ended while a background process keeps the session open. If the beginning marker has not
    arrived, the command can still start, or can have started without this being noticed.

    Args:
        found: The result when the time limit was exceeded.
        limit: The time limit, in words.
        begun: Whether the command is known to have started.
    """
    return found._replace(code=None, problem=f"{LATE if begun else MUTE} {limit}", reached=begun)


class Reply(NamedTuple):
    """The answer of the launcher on one worker.

    Attributes:
        host: The worker.
        value: The launcher's answer; empty if the launcher did not answer.
        kind: Empty for success; else ``unreachable``, ``no-launcher``, ``old``, ``timeout``, or the error kind in the
            answer.
        problem: What went wrong, for the user.
        fix: The fix, for the user; can be empty.
    """

    host: str
    value: Mapping[str, Any]
    kind: str = ""
    problem: str = ""
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether the launcher carried out the request."""
        return not self.kind

    @property
    def reached(self) -> bool:
        """Whether the worker was reached."""
        return self.kind != "unreachable"

    @property
    def is_old(self) -> bool:
        """Whether the launcher is of an older version, which does not have the action."""
        return self.kind == "old"


def reply_of(host: str, answer: Any, stderr: str, code: int | None) -> Reply:
    """Return the reply of a worker. Without an answer (None), the error output tells the problem."""
    if isinstance(answer, dict):
        return Reply(host, answer) if answer.get("ok") else _refusal(host, answer.get("error") or {})
    said = openssh.reason(stderr, code)
    if code == SSH_FAILED:
        return Reply(host, {}, "unreachable", said)
    configure = f"tpu_ops configure {host}"
    if "password is required" in stderr or "not allowed" in stderr or "not in the sudoers" in stderr:
        fix = (
            f"set `sudo: launcher` in your users_people entry, or ask an administrator to set it; `{configure}` "
            "then applies it"
        )
        return Reply(host, {}, "denied", "sudo does not let you use the launcher on this worker", fix)
    if "not found" in stderr or "No such file" in stderr:
        return Reply(host, {}, "no-launcher", "the launcher is not installed", configure)
    return Reply(host, {}, "failed", f"the launcher did not answer: {said}", configure)


def _refusal(host: str, error: Mapping[str, Any]) -> Reply:
    """Return the reply of a worker whose launcher refused the request."""
    kind, message = str(error.get("kind", "failed")), str(error.get("message", ""))
    if kind == "invalid" and message.startswith(UNKNOWN_ACTION):
        fix = f"`tpu_ops configure {host}` brings the launcher of this version"
        return Reply(host, error, "old", "the worker's launcher is too old for this", fix)
    return Reply(host, error, kind, message, str(error.get("fix", "")))
