"""Records profiles of all ranks of a run at the same time, and brings them to this machine."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import files, texts
from tpu_ops.errors import HostError, OpsError, UnreachableError
from tpu_ops.protocol.record import ON
from tpu_ops.protocol.spec import TAKEN_PORTS
from tpu_ops.runs import control, profile_capture, ranks, results, rsync
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.results import Source
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Result

#: What a program needs, so that its profile can be recorded.
LINE = "jax.profiler.start_server(9999)"
#: Seconds for a worker beside those of the profile, which might be recorded three times.
_MARGIN = 180.0
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
            user who asks may not run commands as the run's user, ``failed`` or ``unreachable`` for other problems;
            empty if there is none.
        problem: What failed, in words; empty if nothing did.
    """

    rank: int
    host: str
    user: str = ""
    ports: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    size: int = 0
    kind: str = ""
    problem: str = ""


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
    folder = f"{profile_capture.PREFIX}{os.urandom(8).hex()}"
    found = {one.rank: one for one in await _record(fanout, active, folder, seconds=seconds, port=port, login=login)}
    try:
        fetched = await _fetch(fanout, [one for one in found.values() if one.ports], folder, into, moved)
    finally:
        await _remove(fanout, [*found.values()], folder)
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


def _as(user: str, login: str) -> list[str]:
    return ["sudo", "-n", "-H", "-u", user] if user != login else []


def command(user: str, login: str) -> list[str]:
    """Return the command that records or removes profiles on a worker, as the user of the run."""
    return [*_as(user, login), "/usr/bin/python3", "-IS", "-c", inspect.getsource(profile_capture)]


def _place(folder: str, rank: int) -> str:
    """Return the directory of a rank's profiles on its worker."""
    return f"{folder}-{rank}"


async def _record(
    fanout: Fanout, active: Sequence[Outcome], folder: str, *, seconds: float, port: int | None, login: str
) -> list[Profile]:
    records = {one.host: one.record or {} for one in active}
    user = str(next(iter(records.values()))["person"]["name"])
    requests = {
        host: json.dumps(
            {
                "folder": _place(folder, record["rank"]),
                "cgroup": record["cgroup"],
                "venv": record["venv"],
                "milliseconds": round(seconds * 1000),
                "port": port,
                "skip": TAKEN_PORTS,
            }
        ).encode()
        for host, record in records.items()
    }
    limit = 3 * seconds + _MARGIN
    results_ = await fanout.run([*requests], command(user, login), limit=limit, stdin=requests)
    own = "" if user == login else user
    return [_profile(one, results_[one.host], own) for one in active]


def _profile(outcome: Outcome, result: Result, user: str) -> Profile:
    """Return what was recorded on a worker, given the result of `command` there."""
    made = Profile(outcome.rank, outcome.host, user)
    try:
        told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        ports = tuple(int(port) for port in told["ports"])
        return replace(made, ports=ports, kind=str(told["kind"]), problem=str(told["problem"])[:1000])
    except (ValueError, KeyError, TypeError, IndexError):
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = result.problem or last or f"exit code {result.code}"
        kind = "failed" if result.reached else "unreachable"
        return replace(made, kind="denied" if user and last.startswith("sudo:") else kind, problem=why)


async def _fetch(
    fanout: Fanout, recorded: Sequence[Profile], folder: str, into: Path, moved: rsync.Moved | None
) -> list[Profile]:
    if not recorded:
        return []
    session = into / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S", time.gmtime())
    beside = into / f".{Path(folder).name}"
    sources = [Source(one.host, beside / str(one.rank), one.user, _place(folder, one.rank)) for one in recorded]
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


async def _remove(fanout: Fanout, found: Sequence[Profile], folder: str) -> None:
    """Remove the folder on the workers; a worker that does not answer keeps it until its /tmp is emptied."""
    made = [one for one in found if one.kind not in ("unreachable", "server")]
    asked = {one.host: json.dumps({"remove": _place(folder, one.rank)}).encode() for one in made}
    with contextlib.suppress(OpsError):
        await fanout.run([*asked], command(found[0].user, ""), limit=_REMOVE_LIMIT, stdin=asked)


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
    if worst.kind == "unreachable":
        return UnreachableError(what, where=where, fix=f"`tpu_ops status {run_id}` shows all ranks")
    if worst.kind == "server":
        fix = (
            f"add the line {LINE} to the program, before its first step, and start the run again, or name its port "
            "with --port; the port is open to all who reach the worker, so let no firewall rule open it"
        )
    elif worst.kind == "denied":
        fix = f"ask {worst.user} to record the profile: this needs the right to run commands as {worst.user} by sudo"
    elif worst.kind == "package":
        fix = "the run's environment needs the packages jax and xprof: add jax[xprof] to its packages"
    else:
        fix = f"run the same command again; `tpu_ops logs {run_id} --rank {worst.rank}` shows what the rank does"
    return HostError(what, where=where, fix=fix)
