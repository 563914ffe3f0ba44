"""The envelope of a remote command: a shell script that marks its output, reports its exit code and limits its time."""

import shlex
from collections.abc import Iterable, Sequence

from tpu_ops.protocol.wire import beginning

#: Seconds between SIGTERM and SIGKILL for a command that has exceeded its time limit.
_KILL_AFTER = 5
#: Script that prints a marker before a command's output, and the marker with the exit code after the output. The first
#: marker separates the output from what shell startup files print; without the second marker, exit code 255 of the
#: command would look like a failure of ssh. Arguments: the marker, then the command and its arguments. `exec` ensures
#: that the command is a program, not a shell function or builtin. At the time limit, `timeout` sends SIGTERM to the
#: process group, but SIGKILL only if this shell is still running: the shell therefore waits, so that a command that
#: ignores SIGTERM is killed. If the command sends a signal to its own group before the limit, the exit code is printed
#: at once. The shell's own messages about signals are discarded.
ENVELOPE = (
    "tpu_ops_asked=; trap tpu_ops_asked=1 TERM; trap : HUP INT QUIT; read tpu_ops_began _ </proc/uptime; "
    'printf "\\n%s\\n" "$0"; printf "\\n%s\\n" "$0" >&2; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); '
    "tpu_ops_code=$?; "
    'if [ "$tpu_ops_asked" ]; then read tpu_ops_ended _ </proc/uptime; '
    "[ $((${tpu_ops_ended%.*}${tpu_ops_ended#*.} - ${tpu_ops_began%.*}${tpu_ops_began#*.})) -lt $tpu_ops_limit ] || "
    f"sleep {2 * _KILL_AFTER}; fi; "
    'printf "\\n%s %d\\n" "$0" "$tpu_ops_code"; exit "$tpu_ops_code"'
)
#: Hundredths of a second by which the script, which starts later than `timeout`, can measure less time.
_BEHIND = 50


#: Minimum length, in bytes, of an incomplete end marker that is recognised: a shorter part can be ordinary output.
_PART = 9


def end(marker: str) -> bytes:
    """Return the end marker, which precedes a command's exit code and a newline."""
    return f"\n{marker} ".encode("ascii")


def enveloped(marker: str, argv: Sequence[str], limit: float) -> str:
    """Return the command line that runs a command in the envelope and ends it after ``limit`` seconds.

    The limit is enforced on the worker, since closing a multiplexed session does not end the command on the worker.
    """
    ended = ["timeout", f"--kill-after={_KILL_AFTER}", f"{limit:.3f}"]
    script = f"tpu_ops_limit={max(0, round(limit * 100) - _BEHIND)}; {ENVELOPE}"
    return joined([*ended, "/bin/sh", "-c", script, marker, *argv])


def joined(words: Iterable[str]) -> str:
    """Return a command line that any login shell splits into these words."""
    # Put empty quotes before a word that begins with =: zsh would replace the word by the path of a program.
    return " ".join("''" + word if word.startswith("=") else word for word in map(shlex.quote, words))


#: Prefix of the error messages of the envelope's shell, as a shell prints it that is called `sh`.
SHELL_SAYS = b"sh: "


def behind_marker(said: bytes, marker: str) -> bytes:
    """Return the part after the marker of an envelope's standard error: from the command or the envelope's shell."""
    _, found, rest = said.partition(beginning(marker))
    # The shell's messages begin with the marker, which differs on each worker: replace it by a common prefix.
    return rest.replace(f"{marker}: ".encode("ascii"), SHELL_SAYS) if found else said


def open_envelope(output: bytes, marker: str) -> tuple[bytes, int | None, bool]:
    """Given the output of an envelope, return the command's output, its exit code, and whether the command started.

    The command's output includes the output of its background processes after its end. The exit code is None if the end
    marker did not arrive.
    """
    _, started, rest = output.partition(beginning(marker))
    if not started:
        return b"", None, False
    told = end(marker)
    body, _, behind = rest.rpartition(told)
    number, ended, late = behind.partition(b"\n")
    if ended and number.isdigit():
        return body + late, int(number), True
    # Remove an incomplete end marker: the connection can end in the middle of it.
    cut = rest.rfind(told[:_PART])
    if cut >= 0 and (told.startswith(rest[cut:]) or rest[cut + len(told) :].isdigit()):
        return rest[:cut], None, True
    return rest, None, True
