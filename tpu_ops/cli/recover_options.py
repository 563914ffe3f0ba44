"""Options of `tpu_ops train` and `attach` for starting a run again after a preemption or a failure."""

from __future__ import annotations

import argparse

from tpu_ops.cli import options
from tpu_ops.errors import UsageError


def add_arguments(parser: options.Options) -> None:
    """Declare --recover."""
    parser.add_argument(
        "--recover",
        action="store_true",
        help="start the run again with its next attempt when a node is preempted, deleted, stopped or in maintenance",
    )
    parser.add_argument(
        "--outside-grant",
        action="store_true",
        help="with --recover: create nodes again also if grant.yml does not cover them: they are billed",
    )


def add_budgets(parser: options.Options) -> None:
    """Declare the options that limit how often a run is started again."""
    parser.add_argument(
        "--max-preemptions",
        type=_count,
        metavar="N",
        help="with --recover: start again after at most N preemptions (default: no limit)",
    )
    parser.add_argument(
        "--max-failures",
        type=_count,
        metavar="N",
        help="with --recover: start again after at most N failures of the command itself (default: 0)",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 999999")
    return int(text)


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be combined.

    Raises:
        UsageError: Such options are given.
    """
    for option, value in (("--max-preemptions", args.max_preemptions), ("--max-failures", args.max_failures)):
        if value is not None and not args.recover:
            raise UsageError("this option goes with --recover only", where=option, fix="add --recover")
    only_with_recover(args)
    if args.recover and args.detach:
        what = "recovery needs this command to keep running"
        fix = "leave out --detach; after a Ctrl-C, `tpu_ops attach RUN --recover` resumes it from any shell"
        raise UsageError(what, where="--recover and --detach", fix=fix)


def only_with_recover(args: argparse.Namespace) -> None:
    """Refuse --outside-grant without --recover.

    Raises:
        UsageError: It is given so.
    """
    if args.outside_grant and not args.recover:
        raise UsageError("this option goes with --recover only", where="--outside-grant", fix="add --recover")
