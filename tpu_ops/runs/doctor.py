"""Checks of workers: the checks before a start, and further checks for problems that slow down or spoil runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.errors import UsageError
from tpu_ops.runs import advice, control, preflight, preparations
from tpu_ops.runs.preflight import Fault
from tpu_ops.ssh.fanout import Fanout

#: Checks that only the doctor performs: key -> the statement that is true of a worker that passes.
FURTHER = {
    "state": "the nodes are READY",
    "launcher": "the launcher is the same on all workers",
    "lockfile": "no stale lockfile of libtpu exists",
    "preload": "TCMalloc is not loaded into every program",
}
CHECKS = {"state": FURTHER["state"], **preflight.CHECKS, **FURTHER}


@dataclass(frozen=True)
class Finding:
    """The result of one check over all workers.

    Attributes:
        check: Key of `CHECKS`.
        faults: The failures; empty if all workers pass.
        asked: The workers on which the check was possible.
        each_node: Whether each worker was compared only with workers of its own node, because there are several nodes.
        notes: Nodes that differ, as sentences: those of one accelerator type, and those that the target names. This is
            no fault, but a run on all of them would be refused.
    """

    check: str
    faults: tuple[Fault, ...]
    asked: tuple[str, ...]
    each_node: bool = False
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether at least one worker was checked and no worker failed."""
        return not self.faults and bool(self.asked)


async def examine(fanout: Fanout, workers: Sequence[Worker], target: str = "") -> list[Finding]:
    """Run all checks on all workers at the same time.

    If a run can have the target, all its workers are compared with each other, as at a start. Otherwise, only workers
    of the same node are compared.

    Args:
        fanout: Reaches the workers.
        workers: The workers.
        target: The target that names the workers; empty means the whole fleet.
    """
    serving = [worker for worker in workers if worker.node.state in SERVING_STATES]
    groups = _compared(serving, target)
    looked = await asyncio.gather(*(preflight.examine(fanout, members) for members in groups))
    faults = [fault for found, _ in looked for fault in found]
    probes = {host: probe for _, found in looked for host, probe in found.items()}
    faults += [
        Fault(
            worker.host,
            f"its node is {worker.node.state}",
            until_ready(worker.node),
            check="state",
        )
        for worker in workers
        if worker not in serving
    ]
    faults += further(probes)
    every, answering = tuple(worker.host for worker in workers), tuple(probes)
    asked = {"state": every, "answers": tuple(worker.host for worker in serving)}
    apart = preflight.COMPARED if len(groups) > 1 else ()
    notes = {"same": tuple(differing_nodes(serving, probes, named=bool(target)))} if apart else {}
    return [
        Finding(
            check,
            tuple(fault for fault in faults if fault.check == check),
            asked.get(check, answering),
            check in apart,
            notes.get(check, ()),
        )
        for check in CHECKS
    ]


def unconfigured(findings: Sequence[Finding], state_dir: Path) -> list[Finding]:
    """Return the findings; for workers that a recovery on this machine brings back, the fix is to wait for it."""
    asked = {fault.worker for finding in findings for fault in finding.faults if fault.is_absence}
    fixes = {host: work.fix for host, work in preparations.each_at_work(state_dir, asked).items()}

    def waited_for(fault: Fault) -> Fault:
        return replace(fault, fix=fixes.get(fault.worker, fault.fix)) if fault.is_absence else fault

    return [replace(finding, faults=tuple(map(waited_for, finding.faults))) for finding in findings]


def _compared(workers: Sequence[Worker], target: str) -> list[list[Worker]]:
    """Return groups of workers to be compared: one group if a run can have all workers, else one per node."""
    if target:
        with contextlib.suppress(UsageError):
            return [control.by_rank(workers, target)]
    nodes: dict[str, list[Worker]] = {}
    for worker in workers:
        nodes.setdefault(worker.node.full_name, []).append(worker)
    return list(nodes.values())


def differing_nodes(
    workers: Sequence[Worker], probes: Mapping[str, Mapping[str, Any]], *, named: bool = False
) -> list[str]:
    """Return a sentence for each group of nodes whose environment is not that of most nodes they are compared with.

    Args:
        workers: The workers.
        probes: Their answers.
        named: Whether the user named these nodes: then all are compared, else only those of one accelerator type.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    types: dict[str, str] = {}
    for worker in workers:
        venv = probes[worker.host]["venv"] if worker.host in probes else {}
        if venv.get("exists"):
            types[worker.label] = worker.node.accelerator_type
            group = groups.setdefault("" if named else worker.node.accelerator_type, {})
            group.setdefault(venv["digest"], {})[worker.label] = venv
    found = []
    for digests in groups.values():
        usual, *others = sorted(digests.values(), key=len, reverse=True)
        for other in others:
            # A node whose own workers differ has a fault of its own.
            if labels := sorted(other.keys() - usual.keys(), key=texts.natural):
                most = sorted(usual, key=texts.natural)
                called = most[0] if len(most) == 1 else "others"
                differs = advice.environment_differences(other[labels[0]], usual[most[0]], called)
                text = f"the environment of {', '.join(labels)} is not that of {texts.some(most)}: {differs}"
                if len({types[label] for label in (*labels, *most)}) == 1:
                    together = texts.target(sorted({*labels, *usual}, key=texts.natural))
                    text += f"; for a run on all of them: {preflight.configure(together)}"
                found.append(text)
    return found


def further(probes: Mapping[str, Mapping[str, Any]]) -> list[Fault]:
    """Return the faults of the checks that only the doctor performs, given the workers' probes."""
    programs = Counter(probe["program"] for probe in probes.values())
    usual = programs.most_common(1)[0][0] if programs else ""
    found = []
    for host, probe in probes.items():
        fix = preflight.configure(host)
        if probe["program"] != usual:
            problem = f"the worker's launcher is {probe['program']}, that of most workers is {usual}"
            found.append(Fault(host, problem, fix, check="launcher"))
        # Lockfiles that `unlock` does not remove are left out: the worker's probe reports them, with their fix.
        strange = {one["path"] for one in probe.get("in_the_way", ())}
        stale = [path for path in probe["lockfiles"] if path not in strange]
        if stale and not probe["holders"] and not probe["holder"]:
            problem = f"{', '.join(stale)} exists, and nobody holds a chip"
            found.append(Fault(host, problem, f"tpu_ops unlock {host}", check="lockfile"))
        for entry in probe["preloads"]:
            if "tcmalloc" in entry["line"]:
                problem = f"{entry['file']} loads TCMalloc: {entry['line']}"
                found.append(Fault(host, problem, f"{fix} (role tcmalloc)", check="preload"))
    return found
