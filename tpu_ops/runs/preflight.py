"""Checks all workers before a run, with one request to each worker; the result lists every fault of every worker."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.protocol import wire
from tpu_ops.runs import advice
from tpu_ops.ssh import openssh
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer, including a cold connection.
LIMIT = 45.0
#: Allowed difference between the clocks of two workers, in seconds. The measured difference includes the time of the
#: requests.
CLOCK_LIMIT = 60.0

#: The checks before a run: key -> the statement that is true of a worker that passes.
CHECKS = {
    "answers": "ssh and the launcher answer",
    "identity": "every worker is a separate machine",
    "chips": "all chips are present",
    "free": "the chips are free",
    "environment": "the environment exists",
    "same": "the environment is the same on all workers",
    "changing": "Ansible is not changing what runs use",
    "mounts": "the servers of mounted file systems answer",
    "space": "the disks have free space",
    "clock": "the clocks agree",
}
#: The checks that compare workers with each other.
COMPARED = ("identity", "same", "clock")
#: The checks that `tpu_ops train --force` overrides. All other checks have to pass, or the run would not start or would
#: hang: the workers repeat these checks at the start, and chips in use cannot be shared.
FORCIBLE = ("same", "mounts", "space", "clock")


@dataclass(frozen=True)
class Fault:
    """One reason why a run cannot start.

    Attributes:
        worker: The worker.
        problem: The problem.
        fix: The fix; may be empty.
        unreachable: Whether the worker did not answer at all.
        check: The check that failed: a key of `CHECKS`, or of `doctor.CHECKS` for checks that only the doctor performs.
    """

    worker: str
    problem: str
    fix: str = ""
    unreachable: bool = False
    check: str = "answers"

    @property
    def forcible(self) -> bool:
        """Whether `tpu_ops train --force` overrides the fault."""
        return self.check in FORCIBLE

    @property
    def is_absence(self) -> bool:
        """Whether the worker does not answer or is not configured. A recovery removes such a fault."""
        return self.unreachable or self.check == "state" or self.fix.startswith(configure(""))


#: Fix of an error that is printed below the table of all faults.
_TABLE = "see the table above"


class PreflightError(OpsError):
    """Some workers failed a check."""

    def __init__(self, faults: Sequence[Fault], total: int) -> None:
        workers = {fault.worker for fault in faults}
        verb = "is" if len(workers) == 1 else "are"
        named = "the only worker" if total == 1 else f"{len(workers)} of {total} workers"
        problem = next((fault.problem for fault in faults), "")
        self._summary = f"{named} {verb} not ready for a run"
        super().__init__(
            f"{self._summary}: {problem}",
            where=texts.folded(sorted(workers)),
            fix=_fix_of(faults),
        )
        self.faults = tuple(faults)
        if any(fault.unreachable for fault in faults):
            self.exit_code = ExitCode.UNREACHABLE

    def refer_to_table(self) -> None:
        """Leave out problem and fix, which the table above the error has for each fault."""
        self.what, self.fix = self._summary, _TABLE

    def unconfigured(self) -> list[str]:
        """Return the workers that have to be configured, or whose nodes have to be brought back, before a run."""
        return [fault.worker for fault in self.faults if fault.is_absence]

    def configured_by(self, fixes: Mapping[str, str]) -> None:
        """Replace the fix of faults on workers that another process is already configuring: worker -> new fix."""
        self.faults = tuple(replace(fault, fix=fixes.get(fault.worker, fault.fix)) for fault in self.faults)
        self.fix = _fix_of(self.faults)


def _fix_of(faults: Sequence[Fault]) -> str:
    return first_fix([(fault.fix, fault.worker) for fault in faults]) or _TABLE


def for_any(fix: str, worker: str) -> str:
    """Replace the worker's name in its fix by a NUL byte, so that the same fix for several workers compares equal."""
    return re.sub(rf"(?<![^\s`]){re.escape(worker)}(?![^\s`])", "\0", fix)


def once_each(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return each fault once, with all workers that have the fault; its fix names these workers as one target."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["problem"], for_any(row["fix"], row["worker"])), []).append(row)
    found = []
    for (problem, fix), group in groups.items():
        hosts = [row["worker"] for row in group]
        found.append({"worker": texts.folded(hosts), "problem": problem, "fix": fix.replace("\0", texts.target(hosts))})
    return found


def first_fix(known: Sequence[tuple[str, str]]) -> str:
    """Return the first fix of (fix, worker) pairs, with the names of all workers that have the same fix; else empty."""
    fixes = [(for_any(fix, worker), worker) for fix, worker in known if fix]
    workers = dict.fromkeys(worker for fix, worker in fixes if fix == fixes[0][0])
    return fixes[0][0].replace("\0", texts.target(list(workers))) if fixes else ""


#: Fix for workers whose launcher is newer than this machine's tpu_ops.
UPDATE = "update tpu_ops on this machine: `git pull && make env` in its clone"


def configure(worker: str) -> str:
    """Return the `tpu_ops configure` command for one worker or for a target."""
    return f"tpu_ops configure {worker}"


def faults_of(worker: Worker, probe: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of one worker, given its probe, without comparing the worker with other workers.

    The worker itself finds most faults and reports them in the probe. Its supervisor repeats these checks when a run
    starts.
    """
    if probe["protocol"] != wire.PROTOCOL:
        problem = f"the launcher has protocol version {probe['protocol']}, this machine {wire.PROTOCOL}"
        newer = probe["protocol"] > wire.PROTOCOL
        return [Fault(worker.host, problem, UPDATE if newer else configure(worker.host))]
    found = [
        Fault(
            worker.host,
            fault["problem"],
            fault["fix"].replace("WORKER", worker.host) or configure(worker.host),
            check=fault["check"],
        )
        for fault in probe["faults"]
    ]
    if not probe["boot_id"]:
        fix = "look at /proc/sys/kernel/random/boot_id there"
        found.append(Fault(worker.host, "the worker does not report its boot id", fix, check="identity"))
    return found


def differences(
    probes: Mapping[str, Mapping[str, Any]], asked_venv: str = "", ages: Mapping[str, float] | None = None
) -> list[Fault]:
    """Compare the probes of all workers; return the faults of workers that differ from the majority.

    Args:
        probes: The probes by worker.
        asked_venv: The environment that the user named, if any.
        ages: Seconds since each worker answered, for the comparison of clocks: behind a proxy, answers can arrive
            minutes apart. None means that all answered at the same time.
    """
    found: list[Fault] = []
    usual = Counter(probe["venv"]["digest"] for probe in probes.values()).most_common(1)[0][0] if probes else ""
    example = next((probe["venv"] for probe in probes.values() if probe["venv"]["digest"] == usual), None)
    boots = Counter(probe["boot_id"] for probe in probes.values())
    clocks = {host: float(probe["clock"]) + (ages or {}).get(host, 0.0) for host, probe in probes.items()}
    middle = sorted(clocks.values())[len(clocks) // 2] if clocks else 0.0
    for host, probe in probes.items():
        venv = probe["venv"]
        if example and venv["exists"] and venv["digest"] != usual:
            # The fix configures all workers together: if only one worker is configured, it cannot be made equal to the
            # others.
            together = configure(texts.target([*probes]))
            fix = f"make {venv['path']} the same on all workers" if asked_venv else together
            found.append(Fault(host, advice.other_environment(venv, example), fix, check="same"))
        if probe["boot_id"] and boots[probe["boot_id"]] > 1:
            same = [name for name in probes if name != host and probes[name]["boot_id"] == probe["boot_id"]]
            what = f"the worker is the same machine as {texts.folded(same)}"
            found.append(Fault(host, what, "tpu_ops refresh", check="identity"))
        if abs(off := clocks[host] - middle) > CLOCK_LIMIT:
            found.append(Fault(host, f"the worker's clock is {off:+.0f} s off", configure(host), check="clock"))
    return found


def require_environment(before: Mapping[str, Any], probes: Mapping[str, Mapping[str, Any]], run_id: str) -> None:
    """Require that all workers have the environment of a run's first attempt.

    Args:
        before: The environment before the first attempt, from a probe; empty if unknown.
        probes: The workers' probes.
        run_id: The run.

    Raises:
        OpsError: A worker has another environment.
    """
    venvs = {host: probe["venv"] for host, probe in probes.items()}
    others = [host for host, venv in venvs.items() if before and venv["digest"] != before["digest"]]
    if others:
        what = advice.environment_differences(venvs[others[0]], before, "before")
        raise OpsError(
            f"the environment is not that of attempt 1: {what}",
            where=f"run {run_id}, {texts.folded(others)}",
            fix="bring the versions of attempt 1 back, by the lock in inventory/locks or by jax_constraints, run "
            f"`{configure(texts.target(list(probes)))}` and `tpu_ops attach {run_id} --recover`; or "
            f"`tpu_ops stop {run_id}`, and start a new run from the last checkpoint",
        )


def fault_of_reply(reply: Reply) -> Fault:
    """Return the fault of a worker whose answer contains no probe."""
    unreachable = reply.kind in {"unreachable", "timeout"}
    moved = unreachable and not openssh.of_host_key(reply.problem)
    fix = reply.fix or ("if the address or state of its node has changed: `tpu_ops refresh`" if moved else "")
    if unreachable and openssh.refused(reply.problem):
        fix = f"see why: `tpu_ops run {reply.host} -- true`"
    return Fault(reply.host, reply.problem, fix, unreachable=unreachable)


async def check(
    fanout: Fanout,
    workers: Sequence[Worker],
    venv: str = "",
    user: str = "",
    *,
    forced: Callable[[Fault], None] | None = None,
    run_id: str = "",
) -> dict[str, Mapping[str, Any]]:
    """Check all workers at once; return their probes, or raise an error if a worker failed a check.

    Args:
        fanout: Reaches the workers.
        workers: The workers.
        venv: The environment that the user named, if any.
        user: The user that the command runs as; empty means the user who asks.
        forced: Called with each fault that is overridden, as by --force; None means that no fault is overridden.
        run_id: The name of the new run. It is a fault if a worker already knows a run of this name. Empty means no such
            check.

    Raises:
        PreflightError: Some workers failed; the error lists every fault of every worker.
    """
    faults = [
        Fault(worker.host, f"its node is {worker.node.state}", until_ready(worker.node), True)
        for worker in workers
        if worker.node.state not in SERVING_STATES
    ]
    if faults:
        raise PreflightError(faults, len(workers))
    faults, probes = await examine(fanout, workers, venv, user, run_id)
    if forced:
        for fault in faults:
            if fault.forcible:
                forced(fault)
        faults = [fault for fault in faults if not fault.forcible]
    if faults:
        raise PreflightError(faults, len(workers))
    return probes


def _of_name(fault: Fault) -> Fault:
    """Add "choose another name" to the fix of a fault if a run of the same name holds the worker."""
    return replace(fault, fix=f"{fault.fix}; or {advice.OTHER_NAME}") if fault.check == "free" else fault


async def examine(
    fanout: Fanout, workers: Sequence[Worker], venv: str = "", user: str = "", run_id: str = ""
) -> tuple[list[Fault], dict[str, Mapping[str, Any]]]:
    """Probe all workers at once; return every fault of every worker, and the probes."""
    asked = {"venv": venv, "user": user, **({"run_id": run_id} if run_id else {})}
    requests = {worker.host: {**asked, "chips": worker.node.chips_per_worker} for worker in workers}
    came: dict[str, float] = {}

    def note(reply: Reply) -> None:
        came[reply.host] = time.monotonic()

    replies = await fanout.call(requests, "probe", limit=LIMIT, done=note)
    faults = [fault_of_reply(reply) for reply in replies.values() if not reply.ok]
    probes = {host: reply.value["probe"] for host, reply in replies.items() if reply.ok}
    on = {host for host, probe in probes.items() if run_id and (probe.get("holder") or {}).get("run_id") == run_id}
    known = [host for host in probes if replies[host].value.get("known") and host not in on]
    faults += [Fault(host, f"run {run_id} has been on this worker before", advice.OTHER_NAME) for host in known]
    for worker in workers:
        if worker.host in probes:
            found = faults_of(worker, probes[worker.host])
            faults += [_of_name(fault) for fault in found] if worker.host in on else found
    ages = {host: time.monotonic() - when for host, when in came.items()}
    return faults + differences(probes, venv, ages), probes
