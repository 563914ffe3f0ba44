"""`tpu_ops ssh-config`: let ssh, scp, sftp, rsync, mosh and VS Code find the workers by their names."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from tpu_ops import config, files
from tpu_ops.cli import options, output
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import selection, view
from tpu_ops.fleet.state import Files
from tpu_ops.ssh import include, openssh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops ssh-config`."""
    options.add_fleet(parser)
    options.add_json(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print the configuration instead of its path")
    what.add_argument("--install", action="store_true", help="include the configuration in your own ssh config")
    what.add_argument("--uninstall", action="store_true", help="remove the line that --install has added")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="your own ssh config, if ssh reads another one (default: ~/.ssh/config)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be done to your ssh config; write nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Show the fleet's ssh config, or add or remove its Include line in the user's own ssh config."""
    settings = config.load(args.fleet)
    fragment = selection.ssh_config(settings)
    if args.install or args.uninstall:
        return _change(args, settings, fragment)
    if args.dry_run or args.file:
        raise UsageError(
            "this option goes with --install or --uninstall only",
            where="--dry-run, --file",
            fix="add --install or --uninstall",
        )
    text = Files(settings.state_dir).text(view.current(settings).ssh_config) if args.print else ""
    if args.json:
        output.as_json({"ssh_config": str(fragment)} | ({"text": text} if args.print else {}))
    elif args.print:
        output.as_it_is(text.removesuffix("\n"))
    else:
        output.as_it_is(str(fragment))
        output.info(f"once: ssh -F {shlex.quote(str(fragment))} HOST")
        output.info("always: `tpu_ops ssh-config --install` puts this line at the top of your ssh config:")
        output.info(f"  {os.fsdecode(include.line_of(fragment))}")
    return ExitCode.OK


def _change(args: argparse.Namespace, settings: Settings, fragment: Path) -> int:
    file = Path.cwd() / files.expanded(args.file, "--file") if args.file else _own_config()
    if args.uninstall:
        outcome = include.uninstall(file, fragment, dry_run=args.dry_run)
        problem = ""
    else:
        # Refresh the fleet first, so that the included file exists; a dry run writes nothing and needs no refresh.
        fleet = None if args.dry_run else view.current(settings)
        outcome = include.install(file, fragment, dry_run=args.dry_run)
        problem = include.unseen(file, fleet.workers[:1]) if fleet else ""
    for text in (*outcome.warnings, *([problem] if problem else [])):
        output.warning(text)
    if args.json:
        output.as_json(
            {
                "file": str(file),
                "ssh_config": str(fragment),
                "outcome": outcome.word,
                "dry_run": args.dry_run,
                "warnings": [*outcome.warnings, *([problem] if problem else [])],
            }
        )
    else:
        would = "would be " if args.dry_run and outcome.word in {"installed", "removed"} else ""
        output.line(f"{file}: {would}{outcome.word}")
    return ExitCode.FAILED if problem else ExitCode.OK


def _own_config() -> Path:
    """Return the path of the configuration file that ssh reads for this user."""
    home = openssh.home()
    said = os.environ.get("HOME")
    if said and Path(said).absolute() != home.absolute():
        output.info(f"HOME is {said}, but ssh uses {home}, your home in the password database")
    return home / ".ssh" / "config"
