"""What is asked of all workers before a run: one round trip each, and every fault of every worker in one list."""

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

#: Seconds for each worker, a cold connection included.
LIMIT = 45.0
#: Clocks of two workers may differ by this much, the time of the round trip included, in seconds.
CLOCK_LIMIT = 60.0

#: What is looked at -> what is true of a worker that passes.
CHECKS = {
    "answers": "ssh and the launcher answer",
    "identity": "every worker is a separate machine",
    "chips": "all chips are present",
    "free": "the chips are free",
    "environment": "the environment exists",
    "same": "the environment is the same on all workers",
    "changing": "nothing that runs use is being changed",
    "mounts": "what is mounted from servers answers",
    "space": "the disks have free space",
    "clock": "the clocks agree",
}
#: Those in which workers are compared with each other.
COMPARED = ("identity", "same", "clock")
#: Those that `tpu_ops train --force` overrides. Without the others nothing would start, or hang: the workers
#: themselves refuse, by the same checks, and chips that somebody holds are never anybody else's.
FORCIBLE = ("same", "mounts", "space", "clock")


@dataclass(frozen=True)
class Fault:
    """One reason why a run cannot start.

    Attributes:
        worker: Where.
        problem: What is wrong.
        fix: What to do about it; may be empty.
        unreachable: Whether the worker did not answer at all.
        check: What was looked at, a key of `CHECKS` or of those that only the doctor shows (`doctor.CHECKS`).
    """

    worker: str
    problem: str
    fix: str = ""
    unreachable: bool = False
    check: str = "answers"

    @property
    def forcible(self) -> bool:
        """Whether a run may be started in spite of it."""
        return self.check in FORCIBLE

    @property
    def is_absence(self) -> bool:
        """Whether it is that the worker is away or not configured, which a recovery mends that brings it back."""
        return self.unreachable or self.check == "state" or self.fix.startswith(configure(""))


class PreflightError(OpsError):
    """Some workers are not fit for a run."""

    def __init__(self, faults: Sequence[Fault], total: int) -> None:
        workers = {fault.worker for fault in faults}
        verb = "is" if len(workers) == 1 else "are"
        named = "the only worker" if total == 1 else f"{len(workers)} of {total} workers"
        problem = next((fault.problem for fault in faults), "")
        super().__init__(
            f"{named} {verb} not ready for a run: {problem}",
            where=texts.folded(sorted(workers)),
            fix=_fix_of(faults),
        )
        self.faults = tuple(faults)
        if any(fault.unreachable for fault in faults):
            self.exit_code = ExitCode.UNREACHABLE

    def unconfigured(self) -> list[str]:
        """Return the workers that are to be configured, or to be brought back first."""
        return [fault.worker for fault in self.faults if fault.is_absence]

    def configured_by(self, fixes: Mapping[str, str]) -> None:
        """Have some of those be configured by somebody else already; what to do about each of them then is given."""
        self.faults = tuple(replace(fault, fix=fixes.get(fault.worker, fault.fix)) for fault in self.faults)
        self.fix = _fix_of(self.faults)


def _fix_of(faults: Sequence[Fault]) -> str:
    return first_fix([(fault.fix, fault.worker) for fault in faults]) or "see the table above"


def for_any(fix: str, worker: str) -> str:
    """Return what to do about one worker with a zero byte in place of its name: equal for all that it helps."""
    return re.sub(rf"(?<!\S){re.escape(worker)}(?!\S)", "\0", fix)


def first_fix(known: Sequence[tuple[str, str]]) -> str:
    """Given what to do about each worker, return the first for all workers that it helps; empty where there is none."""
    fixes = [(for_any(fix, worker), worker) for fix, worker in known if fix]
    workers = dict.fromkeys(worker for fix, worker in fixes if fix == fixes[0][0])
    return fixes[0][0].replace("\0", texts.target(list(workers))) if fixes else ""


#: What to do where the workers' launcher is newer than this machine's.
UPDATE = "update tpu_ops on this machine: `git pull && make env` in its clone"


def configure(worker: str) -> str:
    """Return the command that configures one worker, or those of a target."""
    return f"tpu_ops configure {worker}"


def faults_of(worker: Worker, probe: Mapping[str, Any]) -> list[Fault]:
    """Given what one worker says about itself, return what is wrong with it alone.

    It finds most of it by itself, with what its supervisor asks again when a run starts.
    """
    if probe["protocol"] != wire.PROTOCOL:
        problem = f"its launcher has protocol version {probe['protocol']}, this machine {wire.PROTOCOL}"
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
        found.append(Fault(worker.host, "it does not report its boot id", fix, check="identity"))
    return found


def differences(
    probes: Mapping[str, Mapping[str, Any]], asked_venv: str = "", ages: Mapping[str, float] | None = None
) -> list[Fault]:
    """Given what all workers say about themselves, return which of them differ from the most, and in what.

    Args:
        probes: By worker.
        asked_venv: The environment that the person named, if any.
        ages: Seconds since each worker said so: behind a proxy many of them are minutes apart. None is all at once.
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
            # Configured alone, it has nobody to agree with.
            together = configure(texts.target([*probes]))
            fix = f"make {venv['path']} the same on all workers" if asked_venv else together
            found.append(Fault(host, f"its environment differs: {_venv_difference(venv, example)}", fix, check="same"))
        if probe["boot_id"] and boots[probe["boot_id"]] > 1:
            same = [name for name in probes if name != host and probes[name]["boot_id"] == probe["boot_id"]]
            what = f"it is the same machine as {texts.folded(same)}"
            found.append(Fault(host, what, "tpu_ops refresh", check="identity"))
        if abs(off := clocks[host] - middle) > CLOCK_LIMIT:
            found.append(Fault(host, f"its clock is {off:+.0f} s off", configure(host), check="clock"))
    return found


def _venv_difference(venv: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    # Launchers of before tell of some packages only.
    key = "installed" if "installed" in venv and "installed" in usual else "packages"
    own, others, first = venv[key], usual[key], {*venv["packages"], *usual["packages"]}
    parts = [
        f"{name} {own.get(name, 'missing')} (others {others.get(name, 'none')})"
        for name in sorted({*own, *others}, key=lambda name: (name not in first, name))
        if own.get(name) != others.get(name)
    ]
    if venv["python"].split(".")[:2] != usual["python"].split(".")[:2]:
        parts.insert(0, f"Python {venv['python']} (others {usual['python']})")
    return texts.some(parts) or f"digest {venv['digest']} (others {usual['digest']})"


def fault_of_reply(reply: Reply) -> Fault:
    """Given that a worker did not describe itself, return the fault that this is."""
    unreachable = reply.kind in {"unreachable", "timeout"}
    moved = unreachable and not openssh.of_host_key(reply.problem)
    fix = reply.fix or ("if its address or state changed: tpu_ops refresh" if moved else "")
    if unreachable and openssh.refused(reply.problem):
        fix = f"see why: tpu_ops run {reply.host} -- true"
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
    """Ask all workers at once; return what each says about itself.

    Args:
        fanout: Reaches the workers.
        workers: The workers.
        venv: The environment that the person named, if any.
        user: Who the command is to run as; empty is who asks.
        forced: Called with each fault that is overridden; without it none is.
        run_id: A run that must not have been on any of them, if any.

    Raises:
        PreflightError: Some are not fit; it lists every fault of every worker.
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
    """Return a fault of a worker that a run of the very name has which is to be started."""
    return replace(fault, fix=f"{fault.fix}; or {advice.OTHER_NAME}") if fault.check == "free" else fault


async def examine(
    fanout: Fanout, workers: Sequence[Worker], venv: str = "", user: str = "", run_id: str = ""
) -> tuple[list[Fault], dict[str, Mapping[str, Any]]]:
    """Ask all workers at once; return every fault of every worker, and what each says about itself."""
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
    faults += [Fault(host, f"run {run_id} has been on it before", advice.OTHER_NAME) for host in known]
    for worker in workers:
        if worker.host in probes:
            found = faults_of(worker, probes[worker.host])
            faults += [_of_name(fault) for fault in found] if worker.host in on else found
    ages = {host: time.monotonic() - when for host, when in came.items()}
    return faults + differences(probes, venv, ages), probes
