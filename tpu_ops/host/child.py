"""The process that becomes the command: it runs as the user, checks the command, and executes it when it is told to."""

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

#: Exit code of a child that could not execute its command; only the supervisor sees this code.
NOT_EXECUTED = 127

#: Seconds in which the child has to be ready or to report progress: well below systemd's timeout for the start of the
#: supervisor, and far more than finding a directory and a program takes on mounts that answer.
LIMIT = 20.0
_POLL = 0.02


def become(person: Person) -> None:
    """Change to the user's groups, group and user id: this process cannot become root again."""
    if os.geteuid() == 0:
        os.initgroups(person.name, person.gid)
        os.setgid(person.gid)
        os.setuid(person.uid)


def output_pipe(person: Person) -> tuple[int, int]:
    """Return both ends of a pipe for a command's output. The user has the right to open it, such as by /dev/stderr."""
    source, output = os.pipe()
    if os.geteuid() == 0:
        os.fchown(output, person.uid, person.gid)
    return source, output


class Child:
    """The process of one rank's command. It waits for `go` before it executes the command.

    Args:
        pid: The child's process id.
        go: Writing end of the pipe that the child waits on.
        report: Reading end of the pipe for the child's messages. The pipe closes when the command is executed.
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
            argv: The command and its arguments.
            env: The command's whole environment.
            cwd: The working directory.
            person: The user that the command runs as.
            output: Descriptor for standard output and standard error.
            commit: The commit that must be checked out in the working directory; empty if that is not checked.
            copy: The synced copy in the working directory, if there is one.

        Raises:
            NotReady: The user cannot enter the directory or execute the program, the clone is at another commit, the
                synced copy has changed, or a mount does not answer.
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
            # The child reports that it is busy while it reads a large copy: extend systemd's timeout.
            unit.starting()
        if message.get("ready"):
            return child
        child.drop()
        if reported:
            os.waitpid(pid, 0)
            raise NotReady(message.get("error") or "the command's process ended before it had checked the command")
        _end(pid)
        text = "no answer within {:.0f} s from the working directory {} or from PATH, where {} is searched"
        raise NotReady("{}; {}".format(text.format(LIMIT, cwd, argv[0]), mounts.gone(cwd)))

    def go(self) -> str:
        """Let the child execute the command; return the error, or the empty string.

        If the child has died, no error is returned: its wait status has the reason.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"g")
        os.close(self._go)
        error = str(self._read_report().get("error", ""))
        os.close(self._report)
        return error

    def drop(self) -> None:
        """Let the child end without executing the command. This fails if another process has the pipe open too."""
        os.close(self._go)
        os.close(self._report)

    def _read_report(self) -> Dict[str, Any]:
        """Return the child's next message; empty if the pipe is closed because the command was executed."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            if not byte:
                return {}
            line += byte
        message = json.loads(line.decode("ascii"))
        return message if isinstance(message, dict) else {}


def _end(pid: int) -> None:
    """Kill a child. If the child waits inside the kernel for more than 1 s, its end is not awaited."""
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
    """Become the command, in the child process; return only if the command was not executed."""

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
            # Executing the command releases the child's lock on the copy. The supervisor has its own lock by then.
            copy.require(lambda: say({"busy": True}))
        words = [encode(word) for word in argv]
        program = find_program(words[0], env.get(b"PATH", b""))
        say({"ready": True})
        if os.read(go, 1) != b"g":
            return  # the supervisor has died: do not execute the command
        os.execve(program, words, env)  # noqa: S606 - the user's own command, run as the user
    except NotReady as exc:
        say({"error": str(exc)})
    except OSError as exc:
        say({"error": not_executed(argv[0], exc)})
    except Exception:
        import traceback

        say({"error": traceback.format_exc()})


def _plain_signals() -> None:
    """Reset the signal handlers of Python and the supervisor: a command expects the default for every signal."""
    for number in range(1, signal.NSIG):
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
