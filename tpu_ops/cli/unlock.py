"""`tpu_ops unlock`: free the chips of a target: end the runs and processes that hold them, remove stale lockfiles."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from tpu_ops import config, texts
from tpu_ops.cli import faults, options, output, stop, who
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, HostError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.wire import MAX_UNLOCK_GRACE, UNLOCK_GRACE
from tpu_ops.recovery.termination import is_ended
from tpu_ops.runs import control, holders, preparations
from tpu_ops.runs.holders import Holder, Unlocked
from tpu_ops.runs.outcomes import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops unlock`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--user", default="", metavar="NAME", help="whose runs and processes to end (with --force; default: your own)"
    )
    parser.add_argument(
        "--force", action="store_true", help="end runs and processes of --user NAME (administrators only)"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--grace",
        type=options.grace(MAX_UNLOCK_GRACE),
        default=UNLOCK_GRACE,
        metavar="SECONDS",
        help=f"seconds from SIGTERM until SIGKILL (default: {UNLOCK_GRACE:.0f}, at most {MAX_UNLOCK_GRACE:.0f})",
    )
    parser.add_argument("target", help="a node, a worker, a node set or a group")
    parser.epilog = (
        "Ends your own runs on the target and your own processes that hold a chip. Runs and processes of another "
        "person are ended only with --force --user NAME. Processes are found by the chip they have open, never by "
        "their name. --json shows nothing to confirm, so it needs --yes."
    )


def run(args: argparse.Namespace) -> int:
    """Show who holds the chips, ask for confirmation, end the runs and processes, and check the result."""
    if bool(args.user) != args.force:
        what = "--force needs --user NAME, the person whose processes to end" if args.force else "--user needs --force"
        raise UsageError(what, where="--force" if args.force else "--user", fix="add --force --user NAME, or neither")
    fleet, workers = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, workers)
    hosts = [worker.host for worker in workers]
    user = args.user or fleet.settings.user
    seen = holders.of_fleet(fleet, hosts)
    doomed = [holder for holder in seen.holders if holder.user == user]
    answering = [worker for worker in workers if worker.host not in {reply.host for reply in seen.silent}]
    runs = asyncio.run(_runs_of(fleet, answering, doomed))
    if doomed:
        if args.json and not args.yes:
            what = "processes are ended only after they have been shown, and --json does not show them"
            raise UsageError(what, where="--json", fix="add --yes; or leave out --json to be asked")
        if not args.json:
            output.table(who.rows(doomed), who.COLUMNS)
        for run_ in runs:
            if not set(run_.hosts) <= set(hosts):
                output.info(f"run {run_.run_id} will be ended on all its workers: {texts.folded(run_.hosts)}")
        if not args.yes and not options.confirmed(
            f"end these runs and processes on {args.target}?", "ending processes"
        ):
            output.info("nothing was ended")
            return ExitCode.FAILED
    # A worker that did not answer is left out: the user has not seen its processes.
    answered = [host for host in hosts if host in seen.chips]
    ended, unlocked = asyncio.run(_free(fleet, answered, doomed, runs, args))
    if args.json:
        stopped = [run_.run_id for run_, end in ended if not _left(end)]
        silent = faults.of_silent(seen.silent)
        output.as_json({"runs": stopped, "workers": [asdict(result) for result in unlocked], "faults": silent})
    _show_runs(ended)
    kept = [holder for holder in seen.holders if holder.run and holder not in doomed]
    if not args.json:
        _show(unlocked, kept)
    own = fleet.settings.user
    if problem := preparations.problem_of(seen.silent, fleet.settings.state_dir):
        raise problem
    code = exit_code(unlocked, user, doomed, own) or stop.exit_code(
        [outcome for _, end in ended for outcome in end.outcomes]
    )
    if kept and code != ExitCode.UNREACHABLE:
        ends, is_theirs = f"`tpu_ops stop {kept[0].run}` ends it", own in (kept[0].user, kept[0].asker)
        raise HostError(
            f"a run of {kept[0].user} is active: {kept[0].run}",
            where=texts.folded(sorted({holder.host for holder in kept})),
            fix=f"the run is yours: {ends}"
            if is_theirs
            else f"ask {kept[0].user}, or an administrator: --force --user {kept[0].user}",
        )
    return code


async def _runs_of(fleet: Fleet, workers: Sequence[Worker], doomed: Sequence[Holder]) -> list[control.RunRef]:
    """Return the runs that hold chips, given the holders that are to be ended."""
    if not any(holder.run for holder in doomed):
        return []
    found = (await control.running(fleet, contact.fanout(fleet), workers)).runs
    return [run_ for run_ in found if any(one.run == run_.run_id and one.host in run_.hosts for one in doomed)]


async def _free(
    fleet: Fleet,
    hosts: Sequence[str],
    doomed: Sequence[Holder],
    runs: Sequence[control.RunRef],
    args: argparse.Namespace,
) -> tuple[list[tuple[control.RunRef, control.Stopped]], list[Unlocked]]:
    """Stop the runs and end the processes; return the result for each run and for each worker."""
    fanout = contact.fanout(fleet)
    ended = [
        (
            run_,
            await control.stop(fanout, run_, force=args.force, grace=args.grace, reason="unlocked", requested=True),
        )
        for run_ in runs
    ]
    return ended, await holders.unlock(fanout, hosts, doomed, args.user, args.grace)


def _left(ended: control.Stopped) -> list[Outcome]:
    """Return the ranks of a stopped run that may still be active."""
    return [outcome for outcome in ended.outcomes if not is_ended([outcome])]


def _show_runs(ended: Sequence[tuple[control.RunRef, control.Stopped]]) -> None:
    for run_, end in ended:
        left: dict[str, list[str]] = {}
        for outcome in _left(end):
            left.setdefault(outcome.reason or outcome.state, []).append(outcome.host)
        for reason, found in left.items():
            output.warning(f"run {run_.run_id} may still be running on {texts.folded(found)}: {reason}")
        if not left:
            how = "had already ended" if end.already else "was stopped"
            output.info(f"run {run_.run_id} {how} on {texts.folded(run_.hosts)}")


def _show(unlocked: Sequence[Unlocked], kept: Sequence[Holder]) -> None:
    for result in unlocked:
        for holder in result.ended:
            output.info(f"{result.host}: ended pid {holder.pid} of {holder.user}: {holder.command}")
        for path in result.lockfiles:
            output.info(f"{result.host}: removed {path}, which nobody held")
        for holder in result.left:
            output.warning(f"{result.host}: still held by pid {holder.pid} of {holder.user}: {holder.command}")
    problems: dict[str, list[str]] = {}
    for result in unlocked:
        if result.problem:
            said = f"{result.problem}; {output.on_fleet(result.fix)}" if result.fix else result.problem
            problems.setdefault(said, []).append(result.host)
    for said, hosts in problems.items():
        output.warning(f"{texts.folded(hosts)}: {said}")
    # A lockfile on a worker with an active run belongs to the run, so it is not stale.
    taken = {holder.host for holder in kept}
    stale = {result.host: result.kept for result in unlocked if result.kept and result.host not in taken}
    for host, texts_ in stale.items():
        for text in texts_:
            output.warning(f"{host}: {text}")
    busy = taken | stale.keys()
    if free := [one.host for one in unlocked if not one.left and not one.problem and one.host not in busy]:
        output.line(f"free: {texts.folded(free)}")


def exit_code(unlocked: Sequence[Unlocked], user: str, doomed: Sequence[Holder], own: str) -> int:
    """Return the command's exit code.

    Args:
        unlocked: The result for each worker.
        user: The user whose processes were to be ended.
        doomed: The processes that were to be ended.
        own: The user of this command, by the account on the workers.

    Raises:
        HostError: Chips are still held.
    """
    if any(not result.reached for result in unlocked):
        return ExitCode.UNREACHABLE
    held = [holder for result in unlocked for holder in result.left]
    if held:
        others = sorted({holder.user for holder in held} - {user, own})
        mine = sorted({holder.host for holder in held if own == holder.user != user})
        yours = f"end your own processes with `tpu_ops unlock {texts.target(mine)}`" if mine else ""
        asked = f"ask {', '.join(others)}, or an administrator: --force --user {others[0]}" if others else ""
        names = "; ".join(filter(None, (yours, asked)))
        known = {(holder.host, holder.pid, holder.start) for holder in doomed}
        came = [one.pid for one in held if one.user == user and (one.host, one.pid, one.start) not in known]
        again = f"pid {came[0]} took a chip after the list was shown: run this command again" if came else ""
        raise HostError(
            "chips are still held",
            where=texts.folded(sorted({holder.host for holder in held})),
            fix=names
            or again
            or "a process in state D waits inside the kernel: reboot the worker (ps -o stat,pid,cmd)",
        )
    return ExitCode.FAILED if any(result.problem or result.kept for result in unlocked) else ExitCode.OK
