"""Made-up answers of workers about their runs, for tests of reports."""

from __future__ import annotations

import math
import random
from typing import Any

from tpu_ops.runs.outcomes import outcome_of
from tpu_ops.runs.report_data import Place, Sources

#: 2026-11-20 08:00:00 UTC.
BEGIN = 1_795_161_600.0
GIB = 2**30
DIGEST = "4f1d2c7a9b3e"
COMMIT = "8d1c6f0a5b7e4d3c2b1a0f9e8d7c6b5a4f3e2d1c"


def record(rank: int, size: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a rank's record, as far as a report needs it."""
    found: dict[str, Any] = {
        "run_id": "lm-7b",
        "attempt": 1,
        "rank": rank,
        "world_size": size,
        "person": {"uid": 1001, "name": "ada"},
        "asker": "ada",
        "argv": ["python", "train.py", "--config", "configs/7b.yml", "--steps", "200000"],
        "cwd": "/srv/projects/lm",
        "started_from": "desk:/home/ada/lm",
        "code_digest": COMMIT,
        "since": BEGIN,
        "began": BEGIN + 12,
        "exited": None,
        "ended": None,
        "state": "running",
        "reason": "",
        "exit": None,
        "first": None,
        "intent": None,
        "notes": [],
        "traceback": None,
    }
    return found | changes


def history(begin: float, end: float, points: int, *, seed: int = 0, stop: float | None = None) -> list[dict[str, Any]]:
    """Return samples of a host of four chips that trains from one time to another, and stands still after ``stop``."""
    dice, out, found = random.Random(seed), 0, []  # noqa: S311 - no secret
    for index in range(points):
        at = begin + (index + 1) * (end - begin) / points
        busy = at < (stop or end) and at - begin > 0.01 * (end - begin)
        out += int(dice.uniform(400, 900) * (end - begin) / points) if busy else 0
        duty = 88 + 6 * math.sin(index / 17 + seed) + dice.uniform(-3, 3) if busy else 0.0
        used = int((22.5 if busy else 1.0) * GIB + dice.uniform(0, GIB))
        cores = [[core, used, 32 * GIB, round(duty + core / 2, 1), None, 0.0] for core in range(4)]
        found.append({"t": round(at, 1), "out": out, "cores": cores, "state": "ok"})
    return found


def stacks(place: str, pid: int = 4711) -> dict[str, Any]:
    """Return stacks of one process, as a worker keeps them."""
    file, _, line = place.partition(":")
    frames = [["all_reduce" if "train" in place else "next", file, int(line)], ["main", "train.py", 141]]
    process = {"pid": pid, "parent": 1, "user": "ada", "command": "python train.py", "state": "S", "source": "py-spy"}
    threads = [{"name": "MainThread", "active": True, "frames": frames}]
    return {"at": BEGIN, "processes": [process | {"why": "", "threads": threads}], "omitted": 0}


def of_run(size: int = 4, points: int = 300, seconds: float = 2 * 86400) -> Sources:
    """Return a run of two attempts: both stood still; the first lost a node, in the second rank 2 failed."""
    second, stalled = BEGIN + 0.4 * seconds, BEGIN + 0.93 * seconds
    end = BEGIN + seconds
    told, outcomes = {}, []
    for rank in range(size):
        failed = rank == 2
        one = record(
            rank,
            size,
            attempt=2,
            since=second,
            began=second + 45,
            exited=end,
            ended=end,
            state="failed" if failed else "stopped",
            exit={"code": 1} if failed else {"signal": 15},
            reason="exit code 1" if failed else "rank 2 failed: exit code 1",
            first={"rank": 2, "worker": "pod-w2", "cause": "exit code 1"},
            intent=None if failed else {"kind": "failed"},
            notes=["the run stands still: no output for 15 min, chips idle for 15 min"] if not rank else [],
        )
        earlier = {key: one[key] for key in ("attempt", "since", "began", "exited", "ended", "state", "reason", "exit")}
        earlier |= {"attempt": 1, "since": BEGIN, "began": BEGIN + 12, "exited": None, "ended": second - 1800}
        earlier |= {"state": "lost", "reason": "the host was restarted", "exit": None, "first": None, "intent": None}
        earlier["watch"] = {"stall": {"at": second - 7200, "sign": "no output for 15 min, chips idle for 15 min"}}
        first = history(BEGIN, second - 1800, points // 2, seed=rank)
        told[rank] = {
            "record": one,
            "history": first + history(second, end, points - points // 2, seed=rank, stop=stalled),
            "watch": {
                "at": end,
                "last_output": stalled + rank,
                "chips": "idle",
                "idle_since": stalled + 20,
                "stall": {"at": stalled + 900, "sign": "no output for 15 min, chips idle for 15 min"},
                "maintenance": None,
            },
            "stacks": stacks("data.py:41" if failed else "train.py:88", 4711 + rank),
            "tail": f"step 171{0 if failed else 1} loss 2.0{rank if failed else 3}\n"
            + ("OSError: [Errno 5] Input/output error: 'shard-0412.array_record'" if failed else "saved checkpoint"),
            "attempts": [earlier],
            "environment": {
                "path": "/opt/venvs/jax",
                "python": "3.12",
                "digest": DIGEST,
                "packages": {"jax": "0.10.2", "libtpu": "0.0.42"},
            },
        }
        outcomes.append(outcome_of(rank, f"pod-w{rank}", one))
    kind = Place("pod", f"v4-{8 * size}", "us-central2-b", size)
    return Sources("lm-7b", tuple(outcomes), told, places=(kind,), now=end + 3600)
