"""Parse the command line and run the command. Each command has a module, which is imported only for this command."""

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
from tpu_ops.cli import examples, output
from tpu_ops.cli.commands import COMMANDS, GROUPS
from tpu_ops.errors import ExitCode, OpsError, UsageError

#: Options that ask for help.
_HELP = ("-h", "--help")
#: Programs that users run. If one is given as TARGET and `--` is missing, the user has forgotten the target. (A node
#: may have the name of a program, but then `--` follows.)
_PROGRAM = re.compile(r"(?:python[0-9.]*|bash|sh|torchrun|accelerate|deepspeed|uv|env)|[^\[\]@]*/.*|.*\.(?:py|sh)")
#: An empty argument, or an option with an empty value.
_EMPTY = re.compile(r"(?:--[a-z-]+=)?")


#: What tpu_ops prints without a command.
_START = """\
tpu_ops COMMAND: fleets of Cloud TPU VMs. `tpu_ops --help` lists all commands. A start, in an empty directory:
  tpu_ops init                                    # write inventory/tpu_vm.yml: your project, zones, key
  tpu_ops create box --type v2-8 --zone us-central1-f
  tpu_ops configure                               # Python, JAX and the launcher
  tpu_ops train box --sync my-code -- python train.py"""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n\n".join(
        "\n".join((f"{title}:", *(f"  {name.ljust(width)}  {text}" for name, (_, text) in group.items())))
        for title, group in GROUPS.items()
    )
    return (
        "usage: tpu_ops COMMAND [OPTION...]\n\n"
        "Fleets of Cloud TPU VMs: discover, configure, train.\n\n"
        f"{commands}\n\n"
        "options:\n  -h, --help  show this help; `tpu_ops COMMAND --help` for one command\n"
        "  --version   show the version\n\n"
        "exit codes: 0 ok, 1 a host or run failed, 2 usage or configuration, 3 cloud API,\n"
        "            4 unreachable, 130 interrupted or detached"
    )


class _Parser(argparse.ArgumentParser):
    """Prints help through `output`, with examples, and turns the errors of argparse into errors like all others."""

    def format_help(self) -> str:
        """Return the help text, which ends with examples."""
        return f"{super().format_help()}\n{examples.of(self.prog.removeprefix('tpu_ops '))}\n"

    def print_help(self, file: object = None) -> None:
        """Print the help text as a result."""
        output.as_it_is(self.format_help().removesuffix("\n"))

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UsageError: Always. It says what is wrong, with advice.
        """
        what, where, fix = message, self.prog, f"`{self.prog} --help` shows the options"
        # argparse calls this method while it handles its own error, which names the argument.
        cause = sys.exc_info()[1]
        if isinstance(cause, argparse.ArgumentError) and cause.argument_name and str(cause) == message:
            where, what = cause.argument_name, cause.message
        elif message.startswith("unrecognized arguments: -"):
            word = message.split()[2].partition("=")[0].removeprefix("--")
            known = [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]
            fix = f"did you mean {close}? {fix}" if (close := _alike(word, known, "--")) else fix
        elif (
            message.startswith("unrecognized arguments: ")
            and " -" not in message
            and any(action.dest == "target" for action in self._actions)
        ):
            fix = "give several nodes or workers as one word, as in a,b"
        raise UsageError(what, where=where, fix=fix)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        output.as_it_is(_START)
        return ExitCode.USAGE
    if argv[0] in {"-h", "--help", "help"}:
        output.as_it_is(_usage())
        return ExitCode.OK
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
        args = _parsed(parser, rest)
        behind = getattr(args, "command", ())
        _refuse_empty(rest[: len(rest) - len(behind)] if isinstance(behind, list) else rest, parser, args)
        return _run(module, args)
    # The words after the first `--` are the command for the workers: argparse must not parse them.
    front = rest[: rest.index("--")] if "--" in rest else rest
    if "--" not in rest and len(bare := [word for word in front if word not in _HELP]) < len(front):
        # If `--` was forgotten, -h is an option of the command for the workers: do not print this command's help.
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


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command, of which a last one that can be left out may come after options.

    In Python 3.11, `parse_args` counts it as left out as soon as an option follows the other ones.
    """
    numbers = [action.nargs for action in parser._actions if not action.option_strings]
    return parser.parse_intermixed_args(words) if numbers[1:] and numbers[-1] == "?" else parser.parse_args(words)


def _alike(word: str, known: Iterable[str], before: str = "") -> str:
    """Return up to two known words that are similar to a word, each after the prefix ``before``; empty if none is."""
    return " or ".join(f"{before}{close}" for close in difflib.get_close_matches(word, list(known), n=2))


def _without_target(name: str, words: Sequence[str], program: str) -> UsageError:
    """Return the error for a command line that has a program in the place of the target."""
    at = words.index(program)
    command = [*(["python"] if re.fullmatch(r"[^/]*\.py", program) else []), *words[at:]]
    fix = shlex.join(["tpu_ops", name, "TARGET", *words[:at], "--", *command])
    return UsageError("the target is missing: this is a command", where=shlex.join(words[at:]), fix=fix)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    """Run a command; the commands in its messages get the option --fleet if they need it."""
    if hasattr(args, "fleet"):
        output.name_fleet(lambda: _fleet_option(args.fleet))
    return int(module.run(args))


def _fleet_option(fleet: str | None) -> str:
    """Return the option --fleet for commands in messages; empty if it is not needed or no fleet is found."""
    try:
        return config.fleet_option(config.find_file(fleet, os.environ, config.here()))
    except (OpsError, OSError):
        return ""


def _refuse_empty(words: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse empty arguments: they come from unset variables of a script and must not mean the default.

    Raises:
        UsageError: An argument is empty.
    """
    for number, (before, word) in enumerate(itertools.pairwise(("", *words)), 1):
        if _EMPTY.fullmatch(word):
            option = word.removesuffix("=") or (before if before.startswith("--") else "")
            where = option or f"{_empty_one(parser, args)}argument {number}"
            raise UsageError("an argument is empty", where=where, fix="give it a value, or leave it out")


def _empty_one(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the name of the positional argument that is empty, and a comma; an empty text if there is none."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if isinstance(action, argparse._SubParsersAction) and value in action.choices:
            return _empty_one(action.choices[value], args)
        if not action.option_strings and (value == "" or (isinstance(value, list) and "" in value)):
            return f"{action.metavar or action.dest}, "
    return ""


def _tell_program(failure: OpsError, words: Sequence[str]) -> None:
    """Print an error as JSON if the command has --json and has printed no result yet."""
    front = words[: words.index("--")] if "--" in words else words
    if "--json" in front and not output.has_result():
        # The error itself was printed already: ignore a failure to write the JSON.
        with output.read_or_not(), contextlib.suppress(OpsError):
            output.error_as_json(failure)


def _failed(failure: OpsError, words: Sequence[str]) -> int:
    output.error(failure)
    _tell_program(failure, words)
    return failure.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every expected error becomes a message and an exit code."""
    output.begin()
    output.listen()
    words = sys.argv[1:] if argv is None else argv
    try:
        if "_ARGCOMPLETE" in os.environ:
            importlib.import_module("tpu_ops.cli.completion").answer()
        return _dispatch(words)
    except OpsError as failure:
        return _failed(failure, words)
    except KeyboardInterrupt:
        output.info("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        output.give_up()
        return ExitCode.OK
    except OSError as exc:
        path = exc.filename if isinstance(exc.filename, str) else ""
        fix = "check that this file or directory can be read and written (ls -l, df)"
        return _failed(OpsError(exc.strerror or str(exc), where=path, fix=fix), words)
    finally:
        output.end()


if __name__ == "__main__":
    sys.exit(main())
