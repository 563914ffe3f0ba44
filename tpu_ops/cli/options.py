"""Options, confirmation and progress messages that several commands share."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.errors import UsageError
from tpu_ops.options import duration as parsed_duration

#: Seconds between two progress messages of a command that waits.
PATIENCE = 10.0
#: Examples of values that a fleet may name, for messages.
_EXAMPLES = {"project": "my-project", "zone": "us-central2-b", "region": "us-central2"}


#: A parser, or a group of its options.
Options = argparse._ActionsContainer


def add_fleet(parser: Options) -> None:
    """Declare --fleet."""
    parser.add_argument(
        "--fleet",
        metavar="PATH",
        help="the fleet directory, or a file ending in tpu_vm.yml (default: TPU_OPS_FLEET, else this directory or the "
        "nearest one above it that has inventory/tpu_vm.yml)",
    )


def add_json(parser: Options) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_waiting(parser: Options, limit: int) -> None:
    """Declare --no-wait, and --timeout with its default in seconds."""
    parser.add_argument("--no-wait", action="store_true", help="return when the API has accepted the request")
    parser.add_argument(
        "--timeout", type=seconds, default=limit, metavar="SECONDS", help=f"wait at most this long (default: {limit})"
    )


def add_exit_code(parser: Options, first: str = "the rank that failed first") -> None:
    """Declare --exit-code.

    Args:
        parser: The parser of the command, or a group of its options.
        first: The rank or worker whose exit code ``--exit-code rank`` returns, as words for the help.
    """
    parser.add_argument(
        "--exit-code",
        choices=("1", "rank"),
        default="1",
        help=f"exit code of a failure: 1 (default), or `rank`: the code of {first}, 128 + N if signal N ended it",
    )


def seconds(text: str) -> float:
    """Return a positive number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: give a number of seconds") from None
    if not 0 < value < 10 * 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0 and below {10 * 86400}")
    return value


def duration(text: str) -> float:
    """Return a duration such as ``90m``, ``12h`` or ``7d`` in seconds, for argparse; a bare number is in seconds."""
    try:
        return parsed_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def grace(most: float) -> Callable[[str], float]:
    """Return a function for argparse that reads the seconds from SIGTERM until SIGKILL.

    Args:
        most: The maximum that workers accept.
    """

    def read(text: str) -> float:
        value = seconds(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most:.0f} seconds, the most that a worker allows")
        return value

    return read


def only(name: str, given: str | None, known: Sequence[str]) -> str:
    """Return the value of an option, or the fleet's only one.

    Args:
        name: ``project``, ``zone`` or ``region``: the option without its dashes.
        given: The value of the option; None if it is not given.
        known: The values that the fleet has.

    Raises:
        UsageError: The option is not given, and the fleet has not exactly one.
    """
    if given is not None:
        return given
    if len(known) == 1:
        return known[0]
    has = f"several {name}s: {texts.some(known)}" if known else f"no {name}"
    fix = f"add --{name}, for example {known[0] if known else _EXAMPLES[name]}"
    raise UsageError(f"no {name} is given, and the fleet has {has}", where=f"--{name}", fix=fix)


def can_ask() -> bool:
    """Return whether standard input is a terminal, so that the user can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirmed(question: str, doing: str) -> bool:
    """Ask the user at the terminal, and return whether the answer is yes.

    Args:
        question: The question.
        doing: The action that needs confirmation, as the beginning of a sentence.

    Raises:
        UsageError: Standard input is not a terminal.
    """
    if not can_ask():
        what = f"{doing} needs confirmation, and there is nobody to ask"
        raise UsageError(what, where="standard input, which is not a terminal", fix="add --yes")
    output.info(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Waiting:
    """Prints progress while a command waits: a new state at once, the same one at intervals or on the last line."""

    def __init__(self, what: str) -> None:
        self._what, self._state, self._said = what, "", 0.0

    def __call__(self, elapsed: float, state: str) -> None:
        """Print the state if it is new or enough time has passed; ``elapsed`` is in seconds since the beginning."""
        text = f"{self._what}: {state}, {elapsed:.0f} s"
        if state == self._state and output.shows_progress():
            output.progress(text)
        elif state != self._state or elapsed - self._said >= PATIENCE:
            self._state, self._said = state, elapsed
            output.info(text)


class _WaitingForSeveral:
    """Prints progress while a command waits for several things: one line, every few seconds, or a terminal's last line.

    Args:
        whats: The things in words.
        noun: What they are.
    """

    def __init__(self, whats: Sequence[str], noun: str) -> None:
        self._lock, self._states = threading.Lock(), dict[str, str]()
        self._count = texts.count(len(whats), noun)
        self._began = self._said = time.monotonic()

    def of(self, what: str) -> Callable[[float, str], None]:
        """Return the function that is called with the seconds and the state of one thing."""

        def told(_elapsed: float, state: str) -> None:
            with self._lock:
                self._states[what] = state
                now, show = time.monotonic(), output.progress if output.shows_progress() else output.info
                if now - self._said < PATIENCE and show == output.info:
                    return
                self._said = now
                groups: dict[str, list[str]] = {}
                for name, its in self._states.items():
                    groups.setdefault(its, []).append(name)
                words = "; ".join(f"{its}: {texts.some(sorted(names), 3)}" for its, names in groups.items())
                show(f"{self._count}, {now - self._began:.0f} s: {words}")

        return told


def waiting_for(whats: Sequence[str], noun: str = "node") -> Callable[[str], Callable[[float, str], None]]:
    """Return a function that returns, for one of several things, the function that prints the progress of a wait.

    Args:
        whats: The things in words.
        noun: What they are; a single node is given by its name.
    """
    if len(whats) == 1:
        return lambda name: Waiting(f"node {name}" if noun == "node" else name)
    return _WaitingForSeveral(whats, noun).of
