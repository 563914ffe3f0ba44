"""The process that becomes the command: forked early, run as the user, checked, held, and then executed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time

from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING, clone, mounts, unit
from .command import NotReady, enter, find_program, not_executed
from .person import Person

if TYPE_CHECKING:
    from typing import Any, Dict

    from .code import Copy

#: Exit code of a child that could not execute its command; only the supervisor sees it.
NOT_EXECUTED = 127

#: Seconds until the child has to be ready. This is well below systemd's timeout for the supervisor's start, and far
#: more than finding a directory and a program takes on mounts that answer.
LIMIT = 20.0
_POLL = 0.02


def become(person: Person) -> None:
    """Give up root for good: groups, group, user."""
    if os.geteuid() == 0:
        os.initgroups(person.name, person.gid)
        os.setgid(person.gid)
        os.setuid(person.uid)


def output_pipe(person: Person) -> tuple[int, int]:
    """Return both ends of a pipe for a command's output. The user may open it, for example as /dev/stderr."""
    source, output = os.pipe()
    if os.geteuid() == 0:
        os.fchown(output, person.uid, person.gid)
    return source, output


class Child:
    """The command of one rank, held until `go`.

    Args:
        pid: The child's process id.
        go: Writing end of the pipe that holds it.
        report: Reading end of the pipe for the child's messages; its end means that the command is being executed.
    """

    def __init__(self, pid: int, go: int, report: int) -> None:
        self.pid = pid
        self._go = go
        self._report = report

    @classmethod
    def fork(
        cls,
        argv: list[str],
        env: Dict[bytes, bytes],
        cwd: str,
        person: Person,
        output: int,
        *,
        commit: str = "",
        copy: Copy | None = None,
    ) -> Child:
        """Fork the child and wait until it is ready. Call this before any thread is started.

        Args:
            argv: The command.
            env: Its whole environment.
            cwd: The working directory.
            person: The user that it runs as.
            output: Descriptor for standard output and standard error.
            commit: The commit that the clone in the directory has to be at; empty if it is not checked.
            copy: The synced copy in the directory, if any.

        Raises:
            NotReady: The user cannot enter the directory or execute the program, the clone is at another commit, the
                copy differs, or a mount does not answer.
        """
        go_read, go_write = os.pipe()
        report_read, report_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_write)
                os.close(report_read)
                _live(argv, env, cwd, commit, copy, person=person, output=output, go=go_read, report=report_write)
            finally:
                os._exit(NOT_EXECUTED)
        os.close(go_read)
        os.close(report_write)
        child = cls(pid, go_write, report_read)
        while True:
            reported = bool(select.select([report_read], [], [], LIMIT)[0])
            message = child._read_report() if reported else {}
            if not message.get("busy"):
                break
            # Reading a large copy takes long; the child reports that it is still busy.
            unit.starting()
        if message.get("ready"):
            return child
        child.drop()
        if reported:
            os.waitpid(pid, 0)
            raise NotReady(message.get("error") or "the process ended before it was ready")
        _end(pid)
        text = "no answer within {:.0f} s from its working directory {} or from PATH, where {} is looked for"
        raise NotReady("{}; {}".format(text.format(LIMIT, cwd, argv[0]), mounts.gone(cwd)))

    def go(self) -> str:
        """Let the child execute the command; return the error, or the empty string.

        If the child is dead already, its wait status has the reason.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"g")
        os.close(self._go)
        error = str(self._read_report().get("error", ""))
        os.close(self._report)
        return error

    def drop(self) -> None:
        """Let the child end without executing the command. No other process may have the pipe open."""
        os.close(self._go)
        os.close(self._report)

    def _read_report(self) -> Dict[str, Any]:
        """Return the child's next message; empty if executing the command has closed the pipe."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            if not byte:
                return {}
            line += byte
        message = json.loads(line.decode("ascii"))
        return message if isinstance(message, dict) else {}


def _end(pid: int) -> None:
    """Kill a child. One that waits inside the kernel forever is left to the end of the unit."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 1
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(_POLL)


def _live(
    argv: list[str],
    env: Dict[bytes, bytes],
    cwd: str,
    commit: str,
    copy: Copy | None,
    *,
    person: Person,
    output: int,
    go: int,
    report: int,
) -> None:
    """Run in the child; return only if the command was not executed."""

    def say(message: Dict[str, Any]) -> None:
        os.write(report, json.dumps(message).encode("ascii") + b"\n")

    try:
        os.setsid()
        _plain_signals()
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("0")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        become(person)
        os.umask(0o022)
        enter(cwd, person)
        if commit:
            clone.require(cwd, commit)
        if copy:
            # This lock is released when the command is executed; the supervisor holds one too by then.
            copy.require(lambda: say({"busy": True}))
        words = [encode(word) for word in argv]
        program = find_program(words[0], env.get(b"PATH", b""))
        say({"ready": True})
        if os.read(go, 1) != b"g":
            return  # the supervisor has died: do not start
        os.execve(program, words, env)  # noqa: S606 - the user's own command, run as the user
    except NotReady as exc:
        say({"error": str(exc)})
    except OSError as exc:
        say({"error": not_executed(argv[0], exc)})
    except Exception:
        import traceback

        say({"error": traceback.format_exc()})


def _plain_signals() -> None:
    """Reset the signals that Python and the supervisor changed: a command expects the default of every signal."""
    for number in range(1, signal.NSIG):
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
