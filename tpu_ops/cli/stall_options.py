"""Options of `tpu_ops train` for runs that stand still."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from tpu_ops.cli import options
from tpu_ops.errors import UsageError
from tpu_ops.protocol import watch

_OFF = re.compile(r"off|0+[a-z]?")


def add_arguments(parser: options.Options) -> None:
    """Declare the options."""
    parser.add_argument(
        "--stall-after",
        type=_time,
        metavar="TIME",
        help="tell that the run stands still when all ranks have written nothing and all chips have been idle or "
        "unreadable for this long, as in 90s or 20m; `off` never does (default: "
        f"{watch.in_minutes(watch.STALL_AFTER)}). If it is given, silence is enough in a run that uses no chips",
    )
    parser.add_argument(
        "--stall-grace",
        type=_time,
        metavar="TIME",
        help="how long after the first output or the first use of chips a run cannot stand still, for the compilation "
        f"(default: {watch.in_minutes(watch.STALL_GRACE)})",
    )
    parser.add_argument(
        "--on-stall",
        choices=watch.STALL_ACTIONS,
        default=watch.TELL,
        help="when the run stands still: tell (default); stop it as failed; or restart it, with --recover, as one of "
        "--max-failures. The stacks of all ranks are kept first",
    )


def _time(text: str) -> float:
    return 0.0 if _OFF.fullmatch(text) else options.duration(text)


def chosen(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the value of `RunSpec.stall`; None if no option was given.

    Raises:
        UsageError: Options are given that cannot be combined.
    """
    if args.on_stall == watch.RESTART and not args.recover:
        what = "only --recover starts a run again"
        raise UsageError(what, where="--on-stall restart", fix="add --recover, or use --on-stall stop")
    if args.on_stall == watch.RESTART and not args.max_failures:
        what = "a run that stands still counts as a failure, and --max-failures allows none"
        raise UsageError(what, where="--on-stall restart", fix="add --max-failures N, or use --on-stall stop")
    if args.stall_after == 0 and args.on_stall != watch.TELL:
        what = "a run that never stands still is never ended for it"
        raise UsageError(what, where="--stall-after off and --on-stall", fix="leave out one of the two options")
    if args.stall_after is None and args.stall_grace is None and args.on_stall == watch.TELL:
        return None
    after = watch.STALL_AFTER if args.stall_after is None else args.stall_after
    grace = watch.STALL_GRACE if args.stall_grace is None else args.stall_grace
    return {"after": after, "grace": grace, "on": args.on_stall}
