"""Parses and dispatches: one module per command, imported only when that command is asked for."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

from tpu_ops import __version__, config
from tpu_ops.cli import output
from tpu_ops.cli.commands import COMMANDS
from tpu_ops.errors import ExitCode, OpsError, UsageError

#: Options that ask for help.
_HELP = ("-h", "--help")
#: First words of commands that stand where a target was to stand. A node may be called as some are, but without `--` no
#: command stands behind it.
_PROGRAM = re.compile(r"(?:python[0-9.]*|bash|sh|torchrun|accelerate|deepspeed|uv|env)|[^\[\]@]*/.*|.*\.(?:py|sh)")
#: An argument that says nothing, or an option's.
_EMPTY = re.compile(r"(?:--[a-z-]+=)?")


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: tpu_ops COMMAND [OPTION...]\n\n"
        "Fleets of Cloud TPU VMs: discover, configure, train.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help  show this help; `tpu_ops COMMAND --help` for one command\n"
        "  --version   show the version\n\n"
        "exit codes: 0 ok, 1 a host or run failed, 2 usage or configuration, 3 cloud API,\n"
        "            4 unreachable, 130 interrupted or detached"
    )


class _Misused(SystemExit):
    """Ends a command whose words are wrong, which has been said."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(int(ExitCode.USAGE))
        self.error = UsageError(message, where=command, fix=f"`{command} --help` shows its options")


class _Parser(argparse.ArgumentParser):
    """Prints its help as any other result."""

    def print_help(self, file: object = None) -> None:
        """Print it."""
        output.as_it_is(self.format_help().removesuffix("\n"))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the words, and end."""
        targets = any(action.dest == "target" for action in self._actions)
        if targets and message.startswith("unrecognized arguments: ") and " -" not in message:
            message += "; give several nodes or workers as one word, as in a,b"
        if message.startswith("unrecognized arguments: -"):
            word = message.split()[2].partition("=")[0].removeprefix("--")
            known = [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]
            message += f"; did you mean {close}?" if (close := _alike(word, known, "--")) else ""
        try:
            super().error(message)
        except SystemExit:
            raise _Misused(message, self.prog) from None


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        output.as_it_is(_usage())
        return ExitCode.OK if argv else ExitCode.USAGE
    if argv[0] == "--version":
        output.line(f"tpu_ops {__version__}")
        return ExitCode.OK
    name, *rest = argv
    if name not in COMMANDS:
        close, listed = _alike(name, COMMANDS), "`tpu_ops --help` lists the commands"
        fix = f"did you mean {close}? {listed}" if close else listed
        raise UsageError("unknown command", where=f"tpu_ops {name}", fix=fix)
    module_name, text = COMMANDS[name]
    module = importlib.import_module(f"tpu_ops.cli.{module_name}")
    parser = _Parser(prog=f"tpu_ops {name}", description=f"{text[0].upper()}{text[1:]}.")
    module.add_arguments(parser)
    if not getattr(module, "TAKES_COMMAND", False):
        args = parser.parse_args(rest)
        behind = getattr(args, "command", ())
        _refuse_empty(rest[: len(rest) - len(behind)] if isinstance(behind, list) else rest, parser, args)
        return _run(module, args)
    # What stands behind the first `--` is another program's business: argparse never sees it.
    front = rest[: rest.index("--")] if "--" in rest else rest
    if "--" not in rest and len(bare := [word for word in front if word not in _HELP]) < len(front):
        # Of a command whose `--` was forgotten -h is an option, and no question about this one.
        others = [word for word in bare if not word.startswith("-")]
        if len(others) > 1 and parser.parse_known_args(bare)[1]:
            front = bare
    args, more = parser.parse_known_args(front)
    if "--" not in rest and _PROGRAM.fullmatch(args.target):
        raise _without_target(name, front, args.target)
    if more and ("--" in rest or more[0].startswith("-")):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        command = shlex.join([*rest[: rest.index(more[0])], "--", *rest[rest.index(more[0]) :]])
        raise UsageError("the command must come after `--`", where=shlex.join(more), fix=f"tpu_ops {name} {command}")
    _refuse_empty(front, parser, args)
    args.command = rest[len(front) + 1 :]
    return _run(module, args)


def _alike(word: str, known: Iterable[str], before: str = "") -> str:
    """Return which of the known words are meant, perhaps, with what stands before each; empty where none is like it."""
    return " or ".join(f"{before}{close}" for close in difflib.get_close_matches(word, list(known), n=2))


def _without_target(name: str, words: Sequence[str], program: str) -> UsageError:
    """Return the error of a command that stands where its target was to stand."""
    at = words.index(program)
    command = [*(["python"] if re.fullmatch(r"[^/]*\.py", program) else []), *words[at:]]
    fix = shlex.join(["tpu_ops", name, "TARGET", *words[:at], "--", *command])
    return UsageError("the target is missing: this is a command", where=shlex.join(words[at:]), fix=fix)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    """Run a command; messages name other commands on the same fleet."""
    if hasattr(args, "fleet"):
        output.name_fleet(lambda: _fleet_option(args.fleet))
    return int(module.run(args))


def _fleet_option(fleet: str | None) -> str:
    """Given `--fleet`, return the option that names the fleet; empty if none is needed or no fleet is found."""
    try:
        return config.fleet_option(config.find_file(fleet, os.environ, config.here()))
    except (OpsError, OSError):
        return ""


def _refuse_empty(words: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse empty arguments, which are a script's unset variables: none of them means the default.

    Raises:
        UsageError: There is one.
    """
    for number, (before, word) in enumerate(itertools.pairwise(("", *words)), 1):
        if _EMPTY.fullmatch(word):
            option = word.removesuffix("=") or (before if before.startswith("--") else "")
            where = option or f"{_empty_one(parser, args)}argument {number}"
            raise UsageError("an argument is empty", where=where, fix="give it a value, or leave it out")


def _empty_one(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return what an empty argument is called that no option takes, to be followed by its number."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if isinstance(action, argparse._SubParsersAction) and value in action.choices:
            return _empty_one(action.choices[value], args)
        if not action.option_strings and (value == "" or (isinstance(value, list) and "" in value)):
            return f"{action.metavar or action.dest}, "
    return ""


def _tell_program(failure: OpsError, words: Sequence[str]) -> None:
    """Print an error as the result of a command that was to print JSON, and has not."""
    front = words[: words.index("--")] if "--" in words else words
    if "--json" in front and not output.has_result():
        # That it cannot be written is no reason to fail once more.
        with output.read_or_not(), contextlib.suppress(OpsError):
            output.error_as_json(failure)


def _failed(failure: OpsError, words: Sequence[str]) -> int:
    output.error(failure)
    _tell_program(failure, words)
    return failure.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error a user may meet becomes a message and a code."""
    output.begin()
    output.listen()
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except OpsError as failure:
        return _failed(failure, words)
    except _Misused as misused:
        _tell_program(misused.error, words)
        raise
    except KeyboardInterrupt:
        output.info("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        output.give_up()
        return ExitCode.OK
    except OSError as exc:
        path = exc.filename if isinstance(exc.filename, str) else ""
        fix = "check that it can be read and written (ls -l, df)"
        return _failed(OpsError(exc.strerror or str(exc), where=path, fix=fix), words)
    finally:
        output.end()


if __name__ == "__main__":
    sys.exit(main())
