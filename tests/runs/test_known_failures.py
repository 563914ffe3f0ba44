"""Failures that are known by a text in a rank's output are named, with what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.cli import runs_output
from tpu_ops.host import logs
from tpu_ops.protocol import known_failures as texts_known
from tpu_ops.runs import known_failures
from tpu_ops.runs.outcomes import Outcome

OOM = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
    "space hbm. Used 49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G."
)
BUFFER = (
    "ValueError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00M. That was not "
    "possible. There are 6.43M free.; (0x0x1_HBM0)"
)
PROGRAM = (
    "XlaRuntimeError: RESOURCE_EXHAUSTED: Error loading program 'jit_f': Attempting to reserve 29.49G at the bottom of "
    "memory. That was not possible. There are 147.64M free, 0B reserved, and 147.64M reservable."
)
LOCKED = (
    "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 176028. "
    "Not attempting to load libtpu.so in this process."
)
BUSY = (
    "RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/vfio/1): Device "
    "or resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/1"
)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (OOM, "hbm"),
        (f"[rank0]: {OOM}", "hbm"),
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 4G, SparseCore Hbm usage 1G, exceeding available bytes: 9G",
            "hbm",
        ),
        (BUFFER, "hbm"),
        (PROGRAM, "hbm"),
        ("MemoryError", "host-memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 TiB for an array", "host-memory"),
        (
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you",
            "host-memory",
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host-memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "host-memory"),
        (LOCKED, "chips-in-use"),
        ("ABORTED: The TPU is already in use by another process probably owned by another user.", "chips-in-use"),
        ('ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm', "chips-in-use"),
        ("libtpu.so already in used by another process. Not attempting to load libtpu.so", "chips-in-use"),
        (BUSY, "chips-in-use"),
        ("TPU initialization failed: open(/dev/accel0): Operation not permitted", "chips-in-use"),
        ("Couldn't open device: /dev/accel0 (Operation not permitted); Unable to create Node", "chips-in-use"),
        ("INTERNAL: Failed to get global TPU topology.", "topology"),
        # XLA has a limit for each kernel as well, which a smaller batch does not change.
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack", ""),
        ("INVALID_ARGUMENT: shapes differ", ""),
        ("except MemoryErrors: pass", ""),
        ("open(/dev/vfio/1): No such file or directory", ""),
    ],
)
def test_a_line_names_its_failure(line: str, kind: str) -> None:
    found = texts_known.find(f"step 1\n{line}\n\nat exit\n")
    assert found == ({"kind": kind, "line": line} if kind else None)
    assert set(texts_known.TEXTS) == set(known_failures._FIXES)


def test_the_last_failure_counts_and_a_huge_line_is_cut() -> None:
    assert texts_known.find(f"{OOM}\n{LOCKED}\n") == {"kind": "chips-in-use", "line": LOCKED}
    found = texts_known.find("MemoryError: " + "x" * 100_000)
    assert found is not None
    assert len(found["line"]) == 500


@pytest.mark.parametrize(("after", "kind"), [(1000, "hbm"), (40_000, "")])
def test_a_log_stores_the_failure_that_its_last_lines_name(tmp_path: Path, after: int, kind: str) -> None:
    reading, writing = os.pipe()
    logger = logs.Logger(reading, str(tmp_path))
    logger.start()
    os.write(writing, OOM.encode() + b"\n" + b"an allocation of 1G\n" * (after // 20))
    os.close(writing)
    logger.join()
    assert logger.facts().get("known") == ({"kind": kind, "line": OOM} if kind else None)


def rank(number: int, line: str = "", *, state: str = "failed", first: dict[str, Any] | None = None) -> Outcome:
    record: dict[str, Any] = {"attempt": 1, "state": state, "first": first, "log": {}}
    record |= {"person": {"name": "ada"}, "since": 1.0, "ended": 2.0, "code_digest": ""}
    if line:
        record["log"]["known"] = texts_known.find(line)
    return Outcome(number, f"pod-w{number}", state, {"code": 1}, "exit code 1", record=record)


FIRST = {"rank": 1, "worker": "pod-w1", "cause": "exit code 1"}


@pytest.mark.parametrize(
    ("outcomes", "kind", "of_rank"),
    [
        ([rank(0, first=FIRST, state="stopped"), rank(1, OOM, first=FIRST)], "hbm", 1),
        ([rank(0, OOM, first=FIRST), rank(1, LOCKED, first=FIRST)], "chips-in-use", 1),
        # The rank that failed first only says that it lost another one.
        ([rank(0, OOM, first=FIRST, state="stopped"), rank(1, first=FIRST)], "hbm", 0),
        ([rank(0, first={**FIRST, "cause": "killed by SIGKILL: out of memory"})], "host-memory", 1),
        ([rank(0, first=FIRST), rank(1, first=FIRST)], "", None),
        ([rank(0, OOM, state="succeeded"), rank(1, state="succeeded")], "", None),
    ],
)
def test_a_run_is_explained_by_the_rank_that_names_its_failure(
    outcomes: list[Outcome], kind: str, of_rank: int | None
) -> None:
    found = known_failures.of_run(outcomes)
    assert (found.kind if found else "", found.rank if found else None) == (kind, of_rank)


def test_a_kind_of_a_later_launcher_is_left_out() -> None:
    outcome = rank(1, OOM, first=FIRST)
    assert outcome.record is not None
    outcome.record["log"]["known"] = {"kind": "later", "line": "x"}
    assert known_failures.of_run([outcome]) is None


def test_the_traceback_of_an_older_launcher_names_the_failure_too() -> None:
    outcome = rank(1, first=FIRST)
    traceback = {"at": 1.0, "error": LOCKED, "text": f"Traceback\n{LOCKED}"}
    found = known_failures.of_run([replace(outcome, record={**(outcome.record or {}), "traceback": traceback})])
    assert found is not None
    assert found.kind == "chips-in-use"


def test_status_and_runs_name_the_failure_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [rank(0, state="stopped", first=FIRST), rank(1, f"\x1b[31m{OOM}", first=FIRST)]
    assert runs_output.failed_first(outcomes, ()) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "rank 1 (pod-w1) failed first: exit code 1"
    assert told[1].startswith("  the chips' memory (HBM) was full, in the last lines of rank 1 (pod-w1): ")
    assert told[1].endswith(OOM)
    assert "\x1b" not in told[1]
    assert told[2].startswith("  fix: use a smaller batch")
    summary = runs_output.summary("r1", outcomes)
    assert (summary["known_failure"]["kind"], summary["known_failure"]["rank"]) == ("hbm", 1)
    assert summary["first_failure"]["cause"] == "exit code 1", "the facts stay as they are"
    end = runs_output.end_of(outcomes, summary)
    assert (end.words, end.exit_code) == ("1, HBM full", 1)
