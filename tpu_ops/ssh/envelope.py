"""The envelope of a command on a worker: a shell that marks its output, reports its exit code, and ends it in time."""

import shlex
from collections.abc import Iterable, Sequence

from tpu_ops.protocol.wire import beginning

#: Seconds between SIGTERM and SIGKILL for a command that took too long.
_KILL_AFTER = 5
#: Runs a command and says in-band where its output begins and how it ended: rc files print before it, and an exit
#: code of 255 is otherwise that of ssh itself. Arguments: the marker, then the command's own vector. `exec` because the
#: command is a program, never what the shell has under its name. Whoever ends it in time sends SIGTERM to all of its
#: process group, and SIGKILL only where this shell is still there: so it stays for those that are deaf to the first.
#: Not so for a command that signals its own group before its time: its exit code is told at once. What shells print
#: when a signal has ended a command is not the command's, and is thrown away.
ENVELOPE = (
    "tpu_ops_asked=; trap tpu_ops_asked=1 TERM; trap : HUP INT QUIT; read tpu_ops_began _ </proc/uptime; "
    'printf "\\n%s\\n" "$0"; printf "\\n%s\\n" "$0" >&2; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); '
    "tpu_ops_code=$?; "
    'if [ "$tpu_ops_asked" ]; then read tpu_ops_ended _ </proc/uptime; '
    "[ $((${tpu_ops_ended%.*}${tpu_ops_ended#*.} - ${tpu_ops_began%.*}${tpu_ops_began#*.})) -lt $tpu_ops_limit ] || "
    f"sleep {2 * _KILL_AFTER}; fi; "
    'printf "\\n%s %d\\n" "$0" "$tpu_ops_code"; exit "$tpu_ops_code"'
)
#: By how many hundredths of a second the envelope's clock, which begins later, may be behind that of its limit.
_BEHIND = 50


#: Bytes of the line before a command's end that are not there by chance.
_PART = 9


def end(marker: str) -> bytes:
    """Return what is printed when a command has ended, before its exit code and the end of the line."""
    return f"\n{marker} ".encode("ascii")


def enveloped(marker: str, argv: Sequence[str], limit: float) -> str:
    """Return the command line that runs a command in the envelope and ends it after so many seconds.

    Whoever waits for it gives up at that time, and closing a multiplexed session ends nothing on the worker.
    """
    ended = ["timeout", f"--kill-after={_KILL_AFTER}", f"{limit:.3f}"]
    script = f"tpu_ops_limit={max(0, round(limit * 100) - _BEHIND)}; {ENVELOPE}"
    return joined([*ended, "/bin/sh", "-c", script, marker, *argv])


def joined(words: Iterable[str]) -> str:
    """Return a command line that any login shell takes apart into these words."""
    # For zsh a word that begins so is the path of a program.
    return " ".join("''" + word if word.startswith("=") else word for word in map(shlex.quote, words))


#: How the envelope's shell begins what it says itself, as shells do where they have no other name.
SHELL_SAYS = b"sh: "


def behind_marker(said: bytes, marker: str) -> bytes:
    """Given what came on standard error, return what the command itself printed there, and why it was not started."""
    _, found, rest = said.partition(beginning(marker))
    # The envelope's shell speaks under the name that it was given, which is another one on each worker.
    return rest.replace(f"{marker}: ".encode("ascii"), SHELL_SAYS) if found else said


def open_envelope(output: bytes, marker: str) -> tuple[bytes, int | None, bool]:
    """Given what a command in the envelope printed, return its output, its exit code, and whether it was started.

    The output includes what the command has left behind and what prints after its end. The code is None where the
    command's end was not seen.
    """
    _, started, rest = output.partition(beginning(marker))
    if not started:
        return b"", None, False
    told = end(marker)
    body, _, behind = rest.rpartition(told)
    number, ended, late = behind.partition(b"\n")
    if ended and number.isdigit():
        return body + late, int(number), True
    # The connection may end in the midst of the marker: nobody but this module prints so much of it.
    cut = rest.rfind(told[:_PART])
    if cut >= 0 and (told.startswith(rest[cut:]) or rest[cut + len(told) :].isdigit()):
        return rest[:cut], None, True
    return rest, None, True
