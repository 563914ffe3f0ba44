"""Starts a run: rank 0 first, lock and meeting point of all; then worker 0 of each other slice; then the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.runs import advice
from tpu_ops.runs.outcomes import GIVEN_UP
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer beyond the barrier's own, a cold connection included.
MARGIN = 45.0


class NotStarted(OpsError):
    """The run is on no worker: at least one refused it, or its answer was lost.

    Args:
        refused: The answers.
        doubtful: Workers on which it may wait for the others.
        barrier: Seconds for which it does.
        may_be_on: Whether it may have begun all the same.
    """

    def __init__(
        self, refused: Sequence[Reply], doubtful: Sequence[str] = (), barrier: float = 0.0, *, may_be_on: bool = False
    ) -> None:
        first = refused[0]
        fix = first.fix
        if doubtful:
            fix = f"{fix}; " if fix else ""
            began = f"what was started on {texts.folded(doubtful)}"
            fix += f"{began} may run: `tpu_ops who`" if may_be_on else f"{began} ends by itself within {barrier:.0f} s"
        super().__init__(
            f"the run was not started: {first.problem}", where=texts.folded([reply.host for reply in refused]), fix=fix
        )
        self.refused = tuple(refused)
        self.may_be_on = may_be_on
        if all(not reply.reached for reply in refused):
            self.exit_code = ExitCode.UNREACHABLE


class Interrupted(asyncio.CancelledError):
    """The start was cancelled, and rank 0 told to give the run up.

    Args:
        may_be_on: Whether that could not be done, and the run may begin all the same.
    """

    def __init__(self, *, may_be_on: bool) -> None:
        super().__init__()
        self.may_be_on = may_be_on


async def start(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> None:
    """Start a run on these workers, whose order is the order of the ranks; return once the command runs on all.

    Raises:
        NotStarted: A worker refused or did not answer; the command was executed nowhere.
        UsageError: The workers cannot reach each other.
        Interrupted: It was cancelled.
        OSError: This machine failed, as where it has no more processes; the command may have been executed.
    """
    if len(workers) > 1 and (bare := [worker.host for worker in workers if not worker.internal_ip]):
        what = f"the API lists no internal address for {bare[0]}"
        raise UsageError(what, where=texts.folded(bare), fix="`tpu_ops refresh`")
    # Where ranks wait for others that nobody has asked yet, none can go.
    all_asked = len(workers) == 1
    try:
        port = await _reserve(fanout, spec, workers)
        if len(workers) > 1:
            all_asked = True
            await _start_others(fanout, spec, workers, port)
    except asyncio.CancelledError:
        deaf = True
        # Whoever interrupts that too knows no more than that it may be on.
        with contextlib.suppress(asyncio.CancelledError):
            deaf = _is_deaf(await _give_up(fanout, spec, workers[0].host, "its start was interrupted"))
        raise Interrupted(may_be_on=all_asked and deaf) from None
    except OSError:
        # This machine can no more, as where it may start no further ssh; whom it still reaches is not left waiting.
        with contextlib.suppress(OSError):
            await _give_up(fanout, spec, workers[0].host, "the command that started it failed")
        raise


def _leaders(workers: Sequence[Worker]) -> list[int]:
    """Return the ranks that are each slice's worker 0 and its lock, in the order in which they are asked.

    All starters ask in the order of node ids, which is that of ranks: whoever has the first slice that two runs have in
    common gets the others too, so that one of two starters wins. Where all slices are of one worker the last one is no
    leader but the rest.
    """
    found = [rank for rank, worker in enumerate(workers) if worker.index == 0]
    return found[:-1] if len(found) == len(workers) > 1 else found


async def _reserve(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> int:
    """Let the leaders wait for all others, one after the other, or start the only rank; return the port of rank 0.

    Raises:
        NotStarted: One of them refused; the others have been told.
    """
    first, port = workers[0].host, 0
    for rank in _leaders(workers):
        host = workers[rank].host
        request = {"spec": spec.for_rank(workers, rank, port), "reserve": len(workers) > 1}
        reply = (await _call(fanout, spec, {host: request}))[host]
        if not reply.ok:
            # A worker that did not answer in time may have begun to wait for the others all the same.
            silent, doubtful, stopped = _is_silent(reply), list[str](), None
            if rank > 0 or silent:
                reason = f"{host}: {reply.problem}" if rank > 0 else "the command that started it got no answer"
                told = await _give_up(fanout, spec, first, reason)
                doubtful = [first] if _is_deaf(told) else []
                stopped = _stopped(spec.run_id, told)
            if rank > 0 and silent:
                doubtful.append(host)
            alone = len(workers) == 1 and bool(doubtful)
            raise NotStarted(stopped or _at_fault([reply], workers), doubtful, spec.barrier, may_be_on=alone)
        port = port or int(reply.value["record"]["port"])
    return port


async def _start_others(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker], port: int) -> None:
    """Start all ranks that do not wait yet; the first one that cannot be started makes rank 0 give the run up.

    Raises:
        NotStarted: As of `start`.
    """
    first, leaders = workers[0].host, _leaders(workers)
    requests = {
        worker.host: {"spec": spec.for_rank(workers, rank, port)}
        for rank, worker in enumerate(workers)
        if rank not in leaders
    }
    replies: dict[str, Reply] = {}
    giving_up: list[asyncio.Task[Reply]] = []

    def has_begun(reply: Reply) -> bool:
        """Return whether a worker that fell silent was ready all the same: whoever answers has heard that all were."""
        return _is_silent(reply) and any(other.ok for other in replies.values())

    def came(reply: Reply) -> None:
        replies[reply.host] = reply
        # Rank 0 may know already; then this waits until its worker is free again.
        if not reply.ok and not giving_up and not has_begun(reply):
            giving_up.append(asyncio.create_task(_give_up(fanout, spec, first, f"{reply.host}: {reply.problem}")))

    await _call(fanout, spec, requests, done=came)
    told = [await task for task in giving_up]
    doubtful = [reply.host for reply in told if _is_deaf(reply)]
    refused = [replies[host] for host in requests if not replies[host].ok]
    if refused and (giving_up or not all(map(has_begun, refused))):
        doubtful += [reply.host for reply in refused if _is_silent(reply)]
        # An answer that was lost may have been that all ranks go, and rank 0 could not be told to end them.
        lost = first in doubtful and any(map(_is_silent, refused))
        stopped = _stopped(spec.run_id, told[0]) if told else None
        raise NotStarted(stopped or _at_fault(refused, workers), doubtful, spec.barrier, may_be_on=lost)


async def _call(
    fanout: Fanout,
    spec: RunSpec,
    requests: Mapping[str, Mapping[str, Any]],
    done: Callable[[Reply], None] | None = None,
) -> dict[str, Reply]:
    return await fanout.call(requests, "start", limit=spec.barrier + MARGIN, done=done)


def _is_silent(reply: Reply) -> bool:
    return reply.kind in {"timeout", "unreachable"}


def _at_fault(refused: Sequence[Reply], workers: Sequence[Worker]) -> list[Reply]:
    """Given all refusals, return those of the workers at fault; the others only tell of them."""
    own = [reply for reply in refused if "blamed" not in reply.value]
    if own:
        return own
    blamed: dict[str, Reply] = {}
    for reply in refused:
        for host in (workers[rank].host for rank in reply.value["blamed"] if rank < len(workers)):
            # Who blames itself knows best; who came too late blames nobody.
            if host == reply.host or host not in blamed:
                blamed[host] = reply._replace(host=host)
    return [blamed[host] for host in sorted(blamed, key=texts.natural)] or list(refused)


def _stopped(run_id: str, told: Reply) -> list[Reply] | None:
    """Return the refusal of all workers where somebody has stopped the run; else None.

    A worker that came too late only knows that rank 0 no longer listens, as behind a firewall.

    Args:
        run_id: The run.
        told: The answer of rank 0 when it was asked to give the run up: its record has who stopped it.
    """
    who = (told.value.get("record") or {}).get("stop_requested_by") if told.ok else ""
    if not who:
        return None
    return [told._replace(kind="failed", problem=f"run {run_id} was stopped by {who}", fix=advice.STOPPED)]


def _is_deaf(told: Reply) -> bool:
    """Return whether rank 0 could not give the run up: its answer when it was asked to is given."""
    return not told.ok and told.kind != "missing"


async def _give_up(fanout: Fanout, spec: RunSpec, first: str, reason: str) -> Reply:
    """Let rank 0 give up a run that has not begun; return its answer."""
    # Of an earlier attempt it knows already that it has ended.
    request = {"run_id": spec.run_id, "attempt": spec.attempt, "reason": GIVEN_UP + reason, "grace": spec.grace_failure}
    limit = spec.grace_failure + MARGIN
    return (await fanout.call({first: request}, "stop", limit=limit))[first]
