"""Answers of launchers to the action `usage`, as workers of a fleet give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpu_ops.runs import usage
from tpu_ops.runs.usage import Use
from tpu_ops.ssh.replies import Reply

GIB = 2**30
#: When the workers answer, by this machine's clock. Theirs is a minute late.
NOW, LATE = 1_000_000.0, 60.0


def core(
    number: int, used: float = 12.0, duty: float | None = 96.0, total: float = 32.0, chip: int | None = None
) -> dict[str, Any]:
    """Return what libtpu says of one core; memory in GiB."""
    sizes = {"hbm_used": int(used * GIB), "hbm_total": int(total * GIB)}
    return {"id": number, "chip": chip, **sizes, "duty": duty, "hbm_bandwidth": None, "idle": None}


def core_state(
    number: int,
    *,
    chip: int | None,
    index: int = 0,
    kind: str = "tensor",
    error: str = "",
    program: str | None = None,
    launch: int | None = None,
    queue: int = 0,
) -> dict[str, Any]:
    """Return what a launcher says of the state of one core."""
    place = {"id": number, "chip": chip, "type": kind, "index": index, "error": error}
    return place | {"program": program, "launch": launch, "execution": None, "queue": queue, "queued": []}


def service(
    pid: int,
    cores: list[dict[str, Any]],
    state: str = "ok",
    why: str = "",
    states: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return what a launcher says of one process that holds chips."""
    return {"pid": pid, "port": 8431, "state": state, "why": why, "cores": cores, "core_states": states}


def process(pid: int, user: str = "ada", run: str = "", command: str = "python train.py") -> dict[str, Any]:
    """Return a process that holds a chip."""
    return {"user": user, "run": run, "pid": pid, "since": NOW - LATE - 3600, "command": command, "devices": []}


def answer(
    run: str = "",
    person: str = "ada",
    *,
    services: list[dict[str, Any]] | None = None,
    processes: list[dict[str, Any]] | None = None,
    chips: int = 4,
    silent: float = 5.0,
    stall: str = "",
) -> dict[str, Any]:
    """Return the answer of a worker: with a run that computes on four chips, or idle without a run."""
    holder = {"run_id": run, "person": person, "asker": person, "since": NOW - LATE - 7200} if run else None
    if services is None:
        services = [service(100, [core(number) for number in range(chips)])] if run else []
    if processes is None:
        processes = [process(100, person, run)] if run else []
    watch = {"last_output": None, "stall": {"at": 0, "sign": stall} if stall else None, "maintenance": None}
    record = {"run_id": run, "began": NOW - LATE - 7200, "last_output": NOW - LATE - silent, "watch": watch}
    return {
        "ok": True,
        "clock": NOW - LATE,
        "chips": [f"/dev/accel{number}" for number in range(chips)],
        "holder": holder,
        "argv": ["python", "train.py"] if run else [],
        "holders": processes,
        "services": services,
        "run": record if run else None,
    }


def use(worker: str, value: dict[str, Any] | Reply, before: Use | None = None, now: float = NOW) -> Use:
    """Return the use of a worker, given its answer."""
    reply = value._replace(host=worker) if isinstance(value, Reply) else Reply(worker, value)
    return usage.of_reply(worker.rpartition("-w")[0], reply, now, before)


def busy(
    duty: float, used: float = 12.0, run: str = "exp", states: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the answer of a worker with a run whose chips all have these values."""
    cores = [core(number, used, duty) for number in range(4)]
    return answer(run, services=[service(100, cores, states=states)], **more)


def launched(launch: int, program: str = "5eed", errors: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """Return the states of a worker's four chips with one core each, which have launched a program."""
    found = errors or {}
    return [
        core_state(at, chip=at, program=program, launch=launch, queue=2, error=found.get(at, "")) for at in range(4)
    ]


def fleet() -> Iterator[Use]:
    """Yield the uses of 256 workers: two runs, one stalled, a free node, a process without a run, and a lost node."""
    for number in range(128):
        yield use(f"pod-w{number}", busy(90 + number % 8, 11 + number % 3 / 2, "big", person="ada"))
    for number in range(64):
        stall = "no output for 14 min, chips idle for 11 min"
        yield use(f"mid-w{number}", busy(0, 30, "small", person="bob", silent=840, stall=stall))
    for number in range(60):
        yield use(f"idle-w{number}", answer())
    yield use("box-w0", answer(processes=[process(7, "eve")], services=[service(7, [], "none", "no metrics port")]))
    for number in range(3):
        yield use(f"gone-w{number}", Reply("", {}, "unreachable", f"connect to 10.0.0.{number}: timed out"))
