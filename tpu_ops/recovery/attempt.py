"""Follows one attempt of a recovered run to its end. The loss of a node also ends the attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud import remaking
from tpu_ops.cloud.node import Worker, label_of
from tpu_ops.errors import OpsError, UnreachableError
from tpu_ops.protocol.record import ON
from tpu_ops.recovery import decide
from tpu_ops.recovery.services import Printer, Services
from tpu_ops.runs import control, copies, endings, records, spec
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread

#: Seconds from a check of the nodes that found nothing to the next one, and until the first check, while a rank does
#: not answer.
LOOK, FIRST_LOOK = 10.0, 1.0
#: Seconds to wait for the last lines of the ranks on the remaining nodes, after a node was lost and these ranks ended.
ENDS = 5.0
#: Seconds for a worker of a node that is lost, as announced, to report that its rank is still active.
LIVES = 3.0
#: Number of requests, answered by a worker with an error, after which the attempt is no longer followed.
CANNOT_TELL = 5


class Renamed(UnreachableError):
    """Workers of the followed run have new names, because other nodes of the same name were created or deleted."""


class CannotTell(OpsError):
    """A reachable worker cannot report the state of the run, for example because its launcher was replaced."""


def lost_of(services: Services, plan: remaking.Plan) -> dict[str, str]:
    """Return the lost nodes of a plan, each with a description of its loss. The call blocks.

    Raises:
        CloudError: The API refused or did not answer.
    """
    return remaking.lost(plan, services.look(plan))


def names_of(known: records.RunRecord, plan: remaking.Plan, workers: Iterable[Worker]) -> dict[str, str]:
    """Return the current names of a run's workers by rank, each with the resource name of its node.

    Args:
        known: The run.
        plan: The nodes of the run.
        workers: All workers of the fleet.
    """
    nodes = dict(zip(known.nodes, (made.name for made in plan.nodes), strict=True))
    hosts = records.hosts_now(known, workers)
    return {host: nodes[label_of(before)] for host, before in zip(hosts, known.hosts, strict=True)}


class Attempt:
    """Follows one attempt of a run on its workers.

    Args:
        directory: Directory for the logs of all attempts of the run.
        kept: The recovery state of the run.
        fanout: Reaches the workers.
        run: The run and its workers.
        names: The resource name of the node of each worker.
        services: The API, the workers and the clock.
        printer: The terminal.
        losing: Called when a node is lost, before the ranks on the remaining nodes are ended.

    Attributes:
        lost: The lost nodes, each with a description of its loss.
        announced: Kind of the event that a worker has announced, see `protocol.watch.announced`; empty if none.
        newest: Number of the latest attempt that a worker has reported; at least that of the followed attempt.
    """

    def __init__(
        self,
        directory: Path,
        kept: Recovery,
        fanout: Fanout,
        run: control.RunRef,
        *,
        names: Mapping[str, str],
        services: Services,
        printer: Printer,
        losing: Callable[[], object],
    ) -> None:
        self.fanout, self.run = fanout, run
        self.lost: Mapping[str, str] = {}
        self.announced = ""
        self.newest = kept.attempt
        self._directory, self._kept, self._names, self._losing = directory, kept, names, losing
        self._services, self._printer = services, printer
        #: Outcomes of ranks that have ended in this attempt. They stay valid if the nodes are lost later.
        self._told: dict[int, Outcome] = {}

    async def to_its_end(self) -> list[Outcome]:
        """Follow the attempt, copy its logs and return the ranks' outcomes. The loss of a node ends it at once."""
        place = self._directory / f"attempt-{self._kept.attempt}"
        with contextlib.closing(copies.Logs(place, len(self.run.hosts), self._printer.warning)) as logs:
            self._printer.info(f"run {self.run.run_id}, attempt {self._kept.attempt}: logs of all ranks go to {place}")
            while True:
                outcomes = await self._once(logs)
                silent = [outcome.rank for outcome in outcomes if outcome.record is None]
                if self.lost or not silent or endings.is_over(outcomes):
                    return outcomes
                # The contact to these ranks was lost, but the ranks might be active.
                outcomes = await self.heard(silent)
                if self.lost:
                    return await self.without_lost()
                if not any(outcomes[rank].record for rank in silent):
                    return outcomes
                await asyncio.sleep(LOOK)

    async def _once(self, logs: copies.Logs) -> list[Outcome]:
        """Follow the attempt once, until its ranks have ended or do not answer, or a node is lost."""
        follower = self._printer.follower(self.fanout, self.run, logs)
        following, watching = asyncio.ensure_future(follower.run()), asyncio.ensure_future(self._watch(follower))
        try:
            await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
            self.hear(follower.outcomes.values())
            self.announced = follower.announced
            if not following.done():
                self.lost = watching.result()
                outcomes = await self.without_lost()
                await self._until_read(follower, following)
                self.hear(follower.outcomes.values())
                return self._as_told(outcomes)
            outcomes = endings.of_attempt(following.result(), self._kept.attempt)
            known = self._as_told(outcomes)
            done = all(outcome.state == "succeeded" for outcome in known)
            self.lost = {} if done else await self._look()
            return known if done or self.lost else outcomes
        finally:
            for task in (following, watching):
                task.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)

    async def _until_read(self, follower: Follower, following: asyncio.Future[Any]) -> None:
        """Wait up to ENDS seconds until the logs of the ranks on the remaining nodes are read to their end."""
        left = [rank for rank, host in enumerate(self.run.hosts) if self._names[host] not in self.lost]
        reading = asyncio.ensure_future(follower.until(left))
        await asyncio.wait({following, reading}, timeout=ENDS, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()

    def hear(self, outcomes: Iterable[Outcome]) -> None:
        """Keep the outcomes of ranks that have ended in this attempt. They stay valid if the nodes are lost later."""
        own = endings.of_attempt(list(outcomes), self._kept.attempt)
        self._told |= {outcome.rank: outcome for outcome in own if outcome.record and outcome.state not in ON}

    def _as_told(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Replace outcomes without a worker's record by the outcomes that the workers reported earlier."""
        return endings.as_told([one if one.record else self._told.get(one.rank, one) for one in outcomes])

    async def heard(self, ranks: Sequence[int]) -> list[Outcome]:
        """Wait for the workers of some ranks; return all outcomes.

        The wait ends when the worker of one of these ranks has a record of this attempt, when all their workers have
        answered, or when any node is lost.

        Raises:
            Renamed: A worker does not answer, and the fleet no longer has a worker of its name.
            CannotTell: A worker has repeatedly answered with an error.
        """
        said, refusals = False, 0
        while True:
            found = await control.outcomes(self.fanout, self.run)
            self.newest = max(self.newest, *(int(one.record["attempt"]) for one in found if one.record), 0)
            outcomes = endings.of_attempt(found, self._kept.attempt)
            self.hear(found)
            self.lost = await self._look()
            asked = [outcomes[rank] for rank in ranks]
            silent = [outcome.host for outcome in asked if outcome.state == "unreachable"]
            refusing = [outcome for outcome in asked if outcome.state == "unknown"]
            if self.lost or not (silent or refusing) or any(outcome.record for outcome in asked):
                return outcomes
            refusals += bool(refusing)
            if refusals == CANNOT_TELL:
                what = f"cannot tell whether the run is active: {refusing[0].reason}"
                where = texts.folded([outcome.host for outcome in refusing])
                fix = "`tpu_ops doctor` shows what is wrong on these workers; the run was not changed"
                raise CannotTell(what, where=where, fix=fix)
            known = self._services.hosts()
            if gone := [host for host in silent if known is not None and host not in known]:
                what, fix = (
                    "the fleet no longer has workers of these names",
                    "`tpu_ops list` shows the workers that the fleet has",
                )
                raise Renamed(what, where=texts.folded(gone), fix=fix)
            if not said:
                why = f": {refusing[0].reason}" if refusing else ""
                hosts = silent + [outcome.host for outcome in refusing]
                what = f"no answer from {texts.folded(hosts)}, although the node exists{why}"
                self._printer.info(f"run {self.run.run_id}: {what}; asking every {LOOK:g} s")
                said = True
            for host in silent:
                await self.fanout.masters.drop(host)
            await asyncio.sleep(LOOK)

    async def _watch(self, follower: Follower) -> Mapping[str, str]:
        """Return the lost nodes as soon as a node is lost; `decide.next_look` says when the nodes are checked."""
        while True:
            await asyncio.sleep(min(FIRST_LOOK, LOOK))
            pause = decide.next_look(follower.announced, LOOK, silent=follower.silent)
            if pause is None:
                continue
            lost = await self._look()
            if lost and (follower.silent or not await self._is_active(lost)):
                return lost
            await asyncio.sleep(pause)

    async def _is_active(self, lost: Mapping[str, str]) -> bool:
        """Return whether a worker of a lost node reports that its rank is active: it might be saving a checkpoint."""
        requests = {host: {"run_id": self.run.run_id} for host in self.run.hosts if self._names[host] in lost}
        try:
            replies = await self.fanout.call(requests, "status", limit=LIVES)
        except (OpsError, OSError):
            # A shortage on this machine says nothing about the rank.
            return True
        records = [reply.value["record"] or {} for reply in replies.values() if reply.ok]
        return any(record.get("state") in ON for record in records)

    async def _look(self) -> Mapping[str, str]:
        """Return the lost nodes; if the API does not answer, repeat the request until it does."""
        while True:
            try:
                return await in_thread(lambda: lost_of(self._services, self._kept.plan))
            except OpsError as exc:
                if not decide.passes(exc):
                    raise
                why = str(exc)
                self._printer.info(f"run {self.run.run_id}: {why}; asking again in {LOOK:g} s")
            await asyncio.sleep(LOOK)

    async def without_lost(self) -> list[Outcome]:
        """End the ranks on the remaining nodes, unless all ranks have ended by themselves; return all outcomes."""
        hosts = self.run.hosts
        gone = {host: self.lost[name] for host in hosts if (name := self._names[host]) in self.lost}
        left = tuple(host for host in hosts if host not in gone)
        found = {host: Outcome(0, host, "gone", reason=why) for host, why in gone.items()}
        if endings.is_over(self._told.values()):
            found |= {
                host: Outcome(0, host, "unknown", reason="the end of this rank was not reported") for host in left
            }
        elif left:
            self._losing()
            reason = "; ".join(self.lost.values())
            run = replace(self.run, hosts=left)
            stopped = await control.stop(self.fanout, run, grace=spec.GRACE_FAILURE, reason=reason)
            found |= {outcome.host: outcome for outcome in stopped.outcomes}
        return self._as_told([replace(found[host], rank=rank) for rank, host in enumerate(hosts)])
