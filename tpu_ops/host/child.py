"""The process that becomes the command: forked early, made the person's, checked, held, and only then executed."""

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

#: Exit code of a child whose command could not be executed; nobody but the supervisor sees it.
NOT_EXECUTED = 127

#: Seconds that the child may take until it is ready: well below what systemd gives the supervisor for its start, and
#: far more than looking for a directory and a program takes where their mounts answer.
LIMIT = 20.0
_POLL = 0.02


def become(person: Person) -> None:
    """Give up root for good: groups, group, user."""
    if os.geteuid() == 0:
        os.initgroups(person.name, person.gid)
        os.setgid(person.gid)
        os.setuid(person.uid)


def output_pipe(person: Person) -> tuple[int, int]:
    """Return both ends of a pipe that takes a command's output: its person may open it, as /dev/stderr for example."""
    source, output = os.pipe()
    if os.geteuid() == 0:
        os.fchown(output, person.uid, person.gid)
    return source, output


class Child:
    """The command of one rank, held until `go`.

    Args:
        pid: The child's process id.
        go: Writing end of the pipe that holds it.
        report: Reading end of the pipe on which it reports; its end means that the command is being executed.
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
        """Fork the child and wait until it is ready to be executed. To be called before any thread is started.

        Args:
            argv: The command.
            env: Its whole environment.
            cwd: Where it starts.
            person: Who it runs as.
            output: Descriptor that standard output and standard error go to.
            commit: The one that the directory is a clone at; empty where it is to be at none.
            copy: What a sync has brought to the directory, if any.

        Raises:
            NotReady: Directory or program are not there for this person, the clone is at another commit, the copy is
                another one, or a mount does not answer.
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
            # Much code takes its time to be read; the child says so.
            unit.starting()
        if message.get("ready"):
            return child
        child.drop()
        if reported:
            os.waitpid(pid, 0)
            raise NotReady(message.get("error") or "the process ended before it was ready")
        _end(pid)
        text = "no answer within {:.0f} s from its working directory {} or where {} is looked for"
        raise NotReady("{}; {}".format(text.format(LIMIT, cwd, argv[0]), mounts.gone(cwd)))

    def go(self) -> str:
        """Let the child execute the command; return why that failed, or the empty string.

        How a child ended that is dead by then, its wait status tells.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"g")
        os.close(self._go)
        error = str(self._read_report().get("error", ""))
        os.close(self._report)
        return error

    def drop(self) -> None:
        """Let the child end without executing anything; nobody else holds it then."""
        os.close(self._go)
        os.close(self._report)

    def _read_report(self) -> Dict[str, Any]:
        """Return the child's next message; an empty one when its end of the pipe was closed by executing."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            if not byte:
                return {}
            line += byte
        message = json.loads(line.decode("ascii"))
        return message if isinstance(message, dict) else {}


def _end(pid: int) -> None:
    """Kill a child; one that waits inside the kernel for good is left to whoever ends the unit."""
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
    """Be the child; returns only when the command was not executed."""

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
            # Its lock goes when the command is executed; by then the supervisor has one too.
            copy.require(lambda: say({"busy": True}))
        words = [encode(word) for word in argv]
        program = find_program(words[0], env.get(b"PATH", b""))
        say({"ready": True})
        if os.read(go, 1) != b"g":
            return  # the supervisor is gone: this run does not happen
        os.execve(program, words, env)  # noqa: S606 - the command is the person's own, as the person
    except NotReady as exc:
        say({"error": str(exc)})
    except OSError as exc:
        say({"error": not_executed(argv[0], exc)})
    except Exception:
        import traceback

        say({"error": traceback.format_exc()})


def _plain_signals() -> None:
    """Undo what Python and the supervisor changed: a command expects the default of every signal."""
    for number in range(1, signal.NSIG):
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
