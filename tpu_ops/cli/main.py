"""Parses and dispatches: one module per command, imported only when that command is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tpu_ops import __version__
from tpu_ops.cli import output
from tpu_ops.errors import ExitCode, OpsError, UsageError

#: Command -> (module of tpu_ops.cli, one line of help). `--help` reads only this table.
COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("list", "list the workers of the fleet"),
    "refresh": ("refresh", "ask the API, show what changed, rewrite ssh config and known_hosts"),
    "create": ("create", "create a TPU node and wait until it is ready"),
    "delete": ("delete", "delete a TPU node"),
    "ssh": ("ssh", "log in on a worker"),
    "run": ("run", "run a command on all workers of a target at once"),
    "train": ("train", "start a training run on all workers of a node"),
    "stop": ("stop", "stop a training run"),
    "status": ("status", "show how a training run is, rank by rank"),
    "logs": ("logs", "show the lines of a training run"),
    "lab": ("lab", "the local lab: a Cloud TPU API whose workers are containers"),
}


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


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        output.line(_usage())
        return ExitCode.OK if argv else ExitCode.USAGE
    if argv[0] == "--version":
        output.line(f"tpu_ops {__version__}")
        return ExitCode.OK
    name, *rest = argv
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}", fix="`tpu_ops --help` lists the commands")
    module_name, text = COMMANDS[name]
    module = importlib.import_module(f"tpu_ops.cli.{module_name}")
    parser = argparse.ArgumentParser(prog=f"tpu_ops {name}", description=text.capitalize() + ".")
    module.add_arguments(parser)
    if not getattr(module, "TAKES_COMMAND", False):
        return int(module.run(parser.parse_args(rest)))
    # What stands behind the first `--` is another program's business: argparse never sees it.
    front = rest[: rest.index("--")] if "--" in rest else rest
    args = parser.parse_args(front)
    args.command = rest[len(front) + 1 :]
    return int(module.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error a user may meet becomes a message and a code."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except OpsError as failure:
        output.error(failure)
        return failure.exit_code
    except KeyboardInterrupt:
        output.info("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away; keep the interpreter from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
