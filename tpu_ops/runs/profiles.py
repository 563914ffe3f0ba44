"""Records profiles of all ranks of a run at the same time, and brings them to this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_ops import files, texts
from tpu_ops.errors import HostError, OpsError, UnreachableError
from tpu_ops.protocol.record import ON
from tpu_ops.runs import control, preflight, ranks, results, rsync
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.results import Source
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: What a program needs, so that its profile can be recorded.
LINE = "jax.profiler.start_server(9999)"
#: A launcher records a profile up to three times, takes at most these seconds beside that, and has these to answer.
_TRIES, _BESIDE, _ANSWER = 3, 130.0, 50.0
_REMOVE_LIMIT = 30.0


@dataclass(frozen=True)
class Profile:
    """The profiles of one rank.

    Attributes:
        rank: The rank.
        host: Its worker.
        user: The account that recorded them; empty for the login user.
        ports: The ports of the profilers.
        files: The files on this machine.
        size: Their size in bytes.
        kind: ``server`` if the rank has no profiler, ``package`` if its environment cannot record, ``denied`` if the
            user who asks may not run commands as the run's user, ``unreachable``, or for other problems
            another word; empty if there is none.
        problem: What failed, in words; empty if nothing did.
        fix: The fix, if the launcher has said one; else empty.
    """

    rank: int
    host: str
    user: str = ""
    ports: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    size: int = 0
    kind: str = ""
    problem: str = ""
    fix: str = ""


async def collect(
    fanout: Fanout,
    run: RunRef,
    chosen: Sequence[int],
    into: Path,
    *,
    seconds: float,
    port: int | None,
    login: str,
    moved: rsync.Moved | None = None,
) -> list[Profile]:
    """Record and fetch the profiles of some ranks, all at the same time; return them in the order of the ranks.

    Args:
        fanout: Reaches the workers.
        run: The run.
        chosen: The ranks.
        into: The directory; the files go into one session in it, as TensorBoard and xprof expect them.
        seconds: How long the profiles are.
        port: The port of the profiler on each worker; None means to look for it.
        login: The account that this machine logs in as.
        moved: Called with the progress of each worker's copy.

    Raises:
        OpsError: No rank is active, or the directory cannot be written.
    """
    outcomes = await control.outcomes(fanout, run)
    active = [outcomes[rank] for rank in chosen if outcomes[rank].state in ON]
    if not active:
        raise _none_active(run, [outcomes[rank] for rank in chosen])
    owner = next(str(one.record["person"]["name"]) for one in active if one.record)
    user = "" if owner == login else owner
    replies = await _recorded(fanout, run, active, seconds, port)
    found = {one.rank: _profile(one, user, replies[one.host]) for one in active}
    recorded = [one for one in found.values() if one.ports]
    folders = {one.host: str(replies[one.host].value["folder"]) for one in recorded}
    try:
        fetched = await _fetch(fanout, recorded, folders, into, moved)
    finally:
        await _remove(fanout, folders, user)
    found |= {one.rank: one for one in fetched}
    for rank in chosen:
        if rank not in found:
            outcome = outcomes[rank]
            kind = "unreachable" if outcome.state == "unreachable" else "failed"
            why = outcome.reason or f"its state is {outcome.state}"
            found[rank] = Profile(rank, outcome.host, kind=kind, problem=f"the rank is not active: {why}")
    return [found[rank] for rank in chosen]


def _none_active(run: RunRef, outcomes: Sequence[Outcome]) -> OpsError:
    lost = next((one for one in outcomes if one.state == "unreachable"), None)
    if lost:
        fix = f"`tpu_ops status {run.run_id}` shows all ranks"
        return UnreachableError(lost.reason, where=f"rank {lost.rank} ({lost.host}) of {run.run_id}", fix=fix)
    states = texts.some(sorted({one.state for one in outcomes}))
    fix = "only an active run has a profile; `tpu_ops runs` lists them"
    return HostError(f"no rank is active ({states})", where=f"run {run.run_id}", fix=fix)


async def _recorded(
    fanout: Fanout, run: RunRef, active: Sequence[Outcome], seconds: float, port: int | None
) -> dict[str, Reply]:
    """Have the launchers record, all at once; return their replies by worker."""
    request = {"run_id": run.run_id, "milliseconds": round(seconds * 1000), "port": port}
    quiet = _TRIES * seconds + _BESIDE
    return await fanout.call({one.host: request for one in active}, "profile", limit=quiet + _ANSWER, quiet=quiet)


def _profile(outcome: Outcome, user: str, reply: Reply) -> Profile:
    """Return what a launcher has recorded."""
    made = Profile(outcome.rank, outcome.host, user)
    if not reply.ok:
        kind = "unreachable" if control.is_lost(reply) else reply.kind
        return replace(made, kind=kind, problem=reply.problem, fix=reply.fix)
    told = reply.value
    return replace(made, ports=tuple(map(int, told["ports"])), kind=told["kind"], problem=told["problem"])


async def _fetch(
    fanout: Fanout, recorded: Sequence[Profile], folders: Mapping[str, str], into: Path, moved: rsync.Moved | None
) -> list[Profile]:
    if not recorded:
        return []
    session = into / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S", time.gmtime())
    beside = into / f".tpu_ops-profile-{os.urandom(8).hex()}"
    sources = [Source(one.host, beside / str(one.rank), one.user, folders[one.host]) for one in recorded]
    try:
        copied = await results.fetch(fanout, sources, ".", moved)
        found = []
        for one, copy in zip(recorded, copied, strict=True):
            if copy.problem:
                found.append(replace(one, kind="failed" if copy.reached else "unreachable", problem=copy.problem))
            else:
                found.append(_moved(one, copy.source.into, session))
        return found
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _moved(one: Profile, place: Path, session: Path) -> Profile:
    """Move the files of a rank into the session, under names that differ by worker."""
    names, size = [], 0
    try:
        session.mkdir(parents=True, exist_ok=True)
        for port in one.ports:
            target = session / (f"{one.host}.xplane.pb" if len(one.ports) == 1 else f"{one.host}_{port}.xplane.pb")
            shutil.move(place / f"{port}.xplane.pb", target)
            names.append(str(target))
            size += target.stat().st_size
    except FileNotFoundError:
        return replace(one, kind="failed", problem="its profile did not arrive", files=tuple(names), size=size)
    except OSError as exc:
        raise files.unwritable(session, exc) from exc
    return replace(one, files=tuple(names), size=size)


async def _remove(fanout: Fanout, folders: Mapping[str, str], user: str) -> None:
    """Remove the folders on the workers; a worker that does not answer keeps its own until its /tmp is emptied."""
    command = [*results.as_user(user), "rm", "-rf", "--"]
    with contextlib.suppress(OpsError):
        await asyncio.gather(
            *(fanout.run([host], [*command, folder], limit=_REMOVE_LIMIT) for host, folder in folders.items())
        )


def error(run_id: str, found: Sequence[Profile]) -> OpsError | None:
    """Return the error for the ranks without a profile; None if all have one."""
    failed = [one for one in found if one.problem]
    if not failed:
        return None
    worst = next((one for one in failed if one.kind == "unreachable"), failed[0])
    same = [one.rank for one in failed if (one.kind, one.problem) == (worst.kind, worst.problem)]
    where = f"{ranks.named([one.rank for one in failed])} of {run_id}"
    what = f"no profile of {texts.count(len(failed), 'rank')}: {worst.problem}"
    if len(same) < len(failed):
        what += f" ({ranks.named(same)})"
    fix = preflight.first_fix([(one.fix, one.host) for one in failed if one.rank in same]) or _fix(run_id, worst)
    kind = UnreachableError if worst.kind == "unreachable" else HostError
    return kind(what, where=where, fix=fix)


def _fix(run_id: str, worst: Profile) -> str:
    """Return what to do about a problem for which a launcher has said no fix."""
    if worst.kind == "unreachable":
        return f"`tpu_ops status {run_id}` shows all ranks"
    if worst.kind == "server":
        return (
            f"add the line {LINE} to the program, before its first step, and start the run again, or name its port "
            "with --port; the port is open to all who reach the worker, so let no firewall rule open it"
        )
    if worst.kind == "package":
        return "the run's environment needs the packages jax and xprof: add jax[xprof] to its packages"
    return f"run the same command again; `tpu_ops logs {run_id} --rank {worst.rank}` shows what the rank does"
