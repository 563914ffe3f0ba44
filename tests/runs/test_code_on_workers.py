"""The code of a run on workers, where others sync a directory of the same name from other machines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.conftest import BOTH
from tests.support.gate import gate
from tests.support.runs import Bench, rounds, second_desk

pytestmark = pytest.mark.lab

BARRIER = 15.0


@pytest.fixture(scope="module")
def desk(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Another machine, whose people use the same accounts on the workers."""
    return second_desk(bench, tmp_path_factory.mktemp("desk"))


@pytest.fixture
def codes(bench: Bench, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two directories of one name, whose program prints `a` or `b`."""
    found = []
    for word in "ab":
        place = tmp_path / word / "code"
        place.mkdir(parents=True)
        (place / "train.py").write_text(f"import time; print('code {word}', flush=True); time.sleep(600)")
        found.append(str(place))
    yield found[0], found[1]
    for index in BOTH:
        bench.inside(index, "rm -rf /home/bob/tpu_ops")


def there(bench: Bench) -> list[str]:
    """Return which code stands on each worker."""
    return [bench.inside(index, "grep -o 'code .' /home/bob/tpu_ops/code/train.py").strip() for index in BOTH]


def train(code: str, name: str) -> tuple[str, ...]:
    """Return the words that start a run of a directory's program."""
    options = ("--detach", "--barrier", f"{BARRIER}", "--name", name, "--sync", code)
    return ("train", "pod", *options, "--", "python", "train.py")


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check that a command was refused, and said these words."""
    assert done.returncode == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == []


def test_code_that_a_run_uses_is_replaced_by_force_alone(bench: Bench, desk: Bench, codes: tuple[str, str]) -> None:
    own, other = codes
    started = bench.tpu_ops(*train(own, "uses-code"), person="bob")
    assert started.returncode == 0, started.stderr
    refused(
        desk.tpu_ops("sync", "pod", other, person="bob"),
        "run uses-code of bob uses ~/tpu_ops/code",
        "`tpu_ops stop uses-code`",
    )
    refused(desk.tpu_ops(*train(other, "late-code"), person="bob"), "run uses-code of bob has held")
    assert there(bench) == ["code a", "code a"]
    assert desk.tpu_ops("sync", "pod", own, person="bob").returncode == 0, "nothing differs"
    forced = desk.tpu_ops("sync", "pod", other, "--force", person="bob")
    assert (forced.returncode, there(bench)) == (0, ["code b", "code b"])
    assert "run uses-code of bob uses ~/tpu_ops/code: its files are replaced during the run" in forced.stderr
    assert bench.tpu_ops("stop", "uses-code", person="bob").returncode == 0
    assert desk.tpu_ops("sync", "pod", own, person="bob").returncode == 0, "the lock ended with the run"


def test_no_sync_comes_between_the_copy_of_a_start_and_its_ranks(
    bench: Bench, desk: Bench, codes: tuple[str, str]
) -> None:
    own, other = codes
    with gate(bench, 1) as reached:
        starter = bench.popen(*train(own, "started-code"), person="bob")
        bench.await_(reached, "a start that waits for worker 1")
        words = "another command is copying code there, or starting a run with it"
        refused(desk.tpu_ops("sync", "pod", other, "--force", person="bob"), words)
        starter.kill()
        starter.communicate(timeout=20)
        # Its rank on worker 0 waits for the others.
        bench.await_(
            lambda: "run started-code of bob uses" in desk.tpu_ops("sync", "pod", other, person="bob").stderr,
            "the lock of the killed start is gone, and that of its rank is not",
        )
    assert there(bench) == ["code a", "code a"]
    bench.await_clean(0, BARRIER + 2)


@rounds(2, 20)
def test_of_two_starts_with_different_code_one_runs_its_own(
    bench: Bench, desk: Bench, codes: tuple[str, str], number: int
) -> None:
    names = [f"race-a-{number}", f"race-b-{number}"]
    starters = {
        name: where.popen(*train(code, name), person="bob")
        for name, code, where in zip(names, codes, (bench, desk), strict=True)
    }
    said = {name: starter.communicate(timeout=120)[1] for name, starter in starters.items()}
    won = [name for name, starter in starters.items() if starter.returncode == 0]
    assert len(won) == 1, said
    (lost,) = set(names) - set(won)
    assert "another command is copying code" in said[lost] or f"run {won[0]} of bob" in said[lost]
    for index in BOTH:
        bench.await_log(index, won[0], f"code {won[0][5]}")
    shown = json.loads(
        bench.tpu_ops("sync", "pod", codes[names.index(won[0])], "--dry-run", "--json", person="bob").stdout
    )
    assert {bench.record(index, won[0])["code_digest"] for index in BOTH} == {shown["code_digest"]}
    assert bench.tpu_ops("stop", won[0], person="bob").returncode == 0
    for index in BOTH:
        bench.await_clean(index)
