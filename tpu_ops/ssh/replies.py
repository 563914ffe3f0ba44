"""What comes back from one worker: how a command ended there, or what the host program answered."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tpu_ops.ssh import envelope, openssh

#: What ssh itself ends with when it fails; a remote command may end with the same.
SSH_FAILED = 255
#: How the problem of a command begins that took too long, and of one that is not known to have begun by then.
LATE, MUTE = "did not end within", "did not answer within"
#: Bytes that are kept of what one stream of one worker brings, and about as many of its end as are kept besides.
LONGEST, _TAIL = 64 * 2**20, 64 * 2**10


class Output:
    """What one stream of a worker brings; of what is too long the beginning, the end, and how the command ended.

    Args:
        marker: Of the envelope; empty where the stream does not tell how a command ended.

    Attributes:
        data: What is kept.
        cut: Whether something was dropped.
    """

    def __init__(self, marker: str = "") -> None:
        self.data, self.cut = bytearray(), False
        self._told = envelope.end(marker) if marker else b""
        self._kept = LONGEST

    def add(self, piece: bytes) -> None:
        """Take more."""
        self.data += piece
        if len(self.data) > self._kept + 2 * _TAIL:
            self._drop()

    def shown(self, body: bytes) -> bytes:
        """Given what of it is a command's own, return that without what stands behind the cut."""
        return body[: max(0, len(body) - len(self.data) + LONGEST)] if self.cut else body

    def _drop(self) -> None:
        """Drop all between the beginning and the end, but for the line that tells how the command ended."""
        self.cut = True
        if self._told:
            line = len(self._told) + len("255\n")
            at = self.data.find(self._told, self._kept - line + 1)
            if 0 <= at < len(self.data) - _TAIL:
                # What the command has left behind prints so much after it.
                del self.data[self._kept : at]
                self._kept = min(self._kept, at) + line
        del self.data[self._kept : -_TAIL]


class Result(NamedTuple):
    """How a command ended on one worker.

    Attributes:
        host: The worker.
        code: The command's own exit code (128 + n for signal n); None where its end was not seen.
        stdout: What it printed, without what the login shell printed before it.
        stderr: What it and the login shell printed there.
        problem: Why there is no exit code; empty where there is one.
        reached: Whether the worker was reached at all.
        cut: Whether it printed more than is kept.
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
        """Whether the command ended with 0."""
        return self.code == 0


def result_of(host: str, marker: str, code: int | None, stdout: Output, stderr: Output) -> Result:
    """Given what came of a command in the envelope, and the code of what ran it from here, return its result."""
    body, own, started = envelope.open_envelope(bytes(stdout.data), marker)
    errors, cut = envelope.behind_marker(bytes(stderr.data), marker), stdout.cut or stderr.cut
    said = "" if own is not None else openssh.reason(errors.decode(errors="replace"), code)
    body, errors = stdout.shown(body), stderr.shown(errors)
    if own is not None:
        return Result(host, own, body, errors, cut=cut)
    if not started:
        return Result(host, None, body, errors, said, reached=code != SSH_FAILED, cut=cut)
    return Result(host, None, body, errors, f"the connection ended before the command: {said}", cut=cut)


def late(found: Result, limit: str, *, begun: bool) -> Result:
    """Given what came of a command until its time was over, return its result.

    It may have ended, and what it has left behind holds the session open; and one that is not known to have begun may
    begin yet, or have begun unheard.

    Args:
        found: What came of it.
        limit: The time, in words.
        begun: Whether it is known to have begun.
    """
    return found._replace(code=None, problem=f"{LATE if begun else MUTE} {limit}", reached=begun)


class Reply(NamedTuple):
    """What the host program of one worker answered.

    Attributes:
        host: The worker.
        value: The answer; empty where there is none.
        kind: Empty for success; else ``unreachable``, ``no-launcher``, ``timeout``, or the refusal's own kind.
        problem: What went wrong, for people.
        fix: What to do about it; may be empty.
    """

    host: str
    value: Mapping[str, Any]
    kind: str = ""
    problem: str = ""
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether the request was carried out."""
        return not self.kind

    @property
    def reached(self) -> bool:
        """Whether the worker was reached at all."""
        return self.kind != "unreachable"


def reply_of(host: str, answer: Any, stderr: str, code: int | None) -> Reply:
    """Given the host program's answer, or None and what was said instead, return the reply."""
    if isinstance(answer, dict):
        if answer.get("ok"):
            return Reply(host, answer)
        error = answer.get("error") or {}
        return Reply(
            host, error, str(error.get("kind", "failed")), str(error.get("message", "")), str(error.get("fix", ""))
        )
    said = openssh.reason(stderr, code)
    if code == SSH_FAILED:
        return Reply(host, {}, "unreachable", said)
    configure = f"tpu_ops configure {host}"
    if "password is required" in stderr or "not allowed" in stderr or "not in the sudoers" in stderr:
        fix = f"set `sudo: launcher` in your users_people entry, or have it set; `{configure}` then applies it"
        return Reply(host, {}, "denied", "sudo does not let you use the launcher there", fix)
    if "not found" in stderr or "No such file" in stderr:
        return Reply(host, {}, "no-launcher", "the launcher is not installed", configure)
    return Reply(host, {}, "failed", f"the launcher did not answer: {said}", configure)
