"""The envelope of a remote command: a shell script that marks its output, reports its exit code and limits its time."""

import shlex
from collections.abc import Iterable, Sequence

from tpu_ops.protocol.wire import beginning

#: Seconds between SIGTERM and SIGKILL for a command that took too long.
_KILL_AFTER = 5
#: Script that prints a marker before a command's output, and the marker with the exit code after it. Shell startup
#: files print before the command does, and without the second marker exit code 255 would look like a failure of ssh.
#: Arguments: the marker, then the command's argv. `exec` makes sure that the command is a program, not a shell function
#: or builtin. At the time limit, `timeout` sends SIGTERM to the process group, but SIGKILL only if this shell is still
#: running: the shell therefore stays, so that a command that ignores SIGTERM is killed. If the command signals its own
#: group before the limit, its exit code is reported at once. The shell's own messages about signals are discarded.
ENVELOPE = (
    "tpu_ops_asked=; trap tpu_ops_asked=1 TERM; trap : HUP INT QUIT; read tpu_ops_began _ </proc/uptime; "
    'printf "\\n%s\\n" "$0"; printf "\\n%s\\n" "$0" >&2; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); '
    "tpu_ops_code=$?; "
    'if [ "$tpu_ops_asked" ]; then read tpu_ops_ended _ </proc/uptime; '
    "[ $((${tpu_ops_ended%.*}${tpu_ops_ended#*.} - ${tpu_ops_began%.*}${tpu_ops_began#*.})) -lt $tpu_ops_limit ] || "
    f"sleep {2 * _KILL_AFTER}; fi; "
    'printf "\\n%s %d\\n" "$0" "$tpu_ops_code"; exit "$tpu_ops_code"'
)
#: Hundredths of a second by which the envelope's clock, which starts later, may lag behind the clock of `timeout`.
_BEHIND = 50


#: Shortest part of an end marker, in bytes, that is recognised: shorter ones may be ordinary output.
_PART = 9


def end(marker: str) -> bytes:
    """Return the end marker, which precedes a command's exit code and a newline."""
    return f"\n{marker} ".encode("ascii")


def enveloped(marker: str, argv: Sequence[str], limit: float) -> str:
    """Return the command line that runs a command in the envelope and ends it after ``limit`` seconds.

    The worker itself enforces the limit, since closing a multiplexed session ends nothing there.
    """
    ended = ["timeout", f"--kill-after={_KILL_AFTER}", f"{limit:.3f}"]
    script = f"tpu_ops_limit={max(0, round(limit * 100) - _BEHIND)}; {ENVELOPE}"
    return joined([*ended, "/bin/sh", "-c", script, marker, *argv])


def joined(words: Iterable[str]) -> str:
    """Return a command line that any login shell splits into these words."""
    # zsh replaces an unquoted word that begins with = by the path of a program.
    return " ".join("''" + word if word.startswith("=") else word for word in map(shlex.quote, words))


#: Prefix of the envelope's own shell messages, as a shell without another name prints them.
SHELL_SAYS = b"sh: "


def behind_marker(said: bytes, marker: str) -> bytes:
    """Given standard error of an envelope, return what was printed after the marker: by the command or by its shell."""
    _, found, rest = said.partition(beginning(marker))
    # The envelope's shell is named after the marker, which differs on each worker.
    return rest.replace(f"{marker}: ".encode("ascii"), SHELL_SAYS) if found else said


def open_envelope(output: bytes, marker: str) -> tuple[bytes, int | None, bool]:
    """Given the output of an envelope, return the command's output, its exit code, and whether the command started.

    The output includes what background processes of the command printed after its end. The exit code is None if the end
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
    # The connection may have ended in the middle of the end marker.
    cut = rest.rfind(told[:_PART])
    if cut >= 0 and (told.startswith(rest[cut:]) or rest[cut + len(told) :].isdigit()):
        return rest[:cut], None, True
    return rest, None, True
