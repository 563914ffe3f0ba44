"""`tpu_ops completion`: print the code by which a shell completes command lines. argcomplete answers the shell.

Names of nodes, workers, groups and runs come from files of this machine, so that completion needs no network.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from tpu_ops import config, files
from tpu_ops.cli import inventory, output
from tpu_ops.cli.commands import COMMANDS
from tpu_ops.config import states
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.fleet import view
from tpu_ops.runs import records

SHELLS = ("bash", "zsh", "fish")
#: Words in the metavar or name of an argument that is a file or directory of this machine.
_FILES = ("FILE", "DIR", "PATH")
#: Characters that join the parts of a target.
_JOINS = ",!&^"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops completion`."""
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    parser.epilog = (
        "It completes commands, options, and names of nodes, workers, groups and runs that this machine knows."
    )


def run(args: argparse.Namespace) -> int:
    """Print the code for the start-up file of a shell."""
    output.as_it_is(shellcode(["tpu_ops"], use_defaults=False, shell=args.shell).strip("\n"))
    return ExitCode.OK


def answer() -> None:
    """Answer a shell that asks for completions, and end this process."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    # After a space, the last word is empty.
    parser = _parser([*line.split(), *([""] if line.endswith(" ") else [])])
    # There are many options: offer them only after a dash.
    argcomplete.autocomplete(parser, always_complete_options=False)


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """Return a parser for a command line. Only its command has arguments, since importing all commands is slow."""
    parser = argparse.ArgumentParser("tpu_ops")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (module_name, text) in COMMANDS.items():
        chosen = name in words[1:2]
        module = importlib.import_module(f"tpu_ops.cli.{module_name}") if chosen else None
        of_workers = getattr(module, "TAKES_COMMAND", False) and "--" in words[:-1]
        command = commands.add_parser(name, help=text, add_help=not of_workers)
        if module and not of_workers:
            module.add_arguments(command)
        elif of_workers:
            command.add_argument("command", nargs="*")
        _complete(command)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Set how the arguments of a command and of its subcommands are completed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                _complete(subcommand)
        elif action.choices is None:
            action.completer = _completer(action)  # type: ignore[attr-defined] # read by argcomplete


def _completer(action: argparse.Action) -> Callable[..., Iterable[str]]:
    """Return the function that completes an argument."""
    called = str(action.metavar or action.dest).upper()
    if called in ("TARGET", "NODE", "NODE|PROJECT"):
        return _targets
    if called in ("RUN", "RUN|TARGET"):
        return _runs_and_targets
    if called == "COMMAND" or any(word in called for word in _FILES):
        return FilesCompleter()
    return lambda **_: ()


def _settings(given: argparse.Namespace) -> config.Settings | None:
    """Return the settings of the fleet that the command line uses; None if there is none."""
    try:
        file = config.find_file(getattr(given, "fleet", None), os.environ, config.here())
        return config.load_file(file) if _was_used(file) else None
    except (OpsError, OSError):
        return None


def _was_used(file: Path) -> bool:
    """Return whether this machine has the state of a fleet, so that its user has executed commands for it before.

    Templates in a fleet's file can start programs. Tab must start none in a directory that somebody else wrote.
    """
    endpoint = os.environ.get("TPU_OPS_ENDPOINT") or config.read_file(file).get("endpoint") or ""
    projects, zones = (os.environ.get(name, "").replace(",", " ").split() for name in states.PLACES)
    known = (files.state_root(os.environ) / "fleets").iterdir()
    real = files.resolved(str(file.parent), "the fleet's file") / file.name
    return any(states.shell_of(path.name, real, str(endpoint), projects, zones) is not None for path in known)


def _targets(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return targets: the nodes, workers and groups of the stored fleet, after the parts that are typed already."""
    settings = _settings(parsed_args)
    fleet = view.stored(settings) if settings else None
    if not fleet:
        return []
    last = max(prefix.rfind(join) for join in _JOINS) + 1
    names = {worker.label: None for worker in fleet.workers} | {worker.host: None for worker in fleet.workers}
    # There are many groups: offer them only after `@`.
    groups = [f"@{name}" for name in inventory.groups(fleet, fleet.workers)] if prefix[last:].startswith("@") else []
    return [prefix[:last] + name for name in (*names, *groups)]


def _runs_and_targets(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the runs that this machine has started, newest first, and targets."""
    settings = _settings(parsed_args)
    if not settings:
        return []
    runs = [record.run_id for record in records.recent(settings.state_dir, records.KEPT)]
    return [*runs, *_targets(prefix, parsed_args)]
