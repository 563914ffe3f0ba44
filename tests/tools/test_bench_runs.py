"""The benchmark of runs: what its commands are, what is refused, and the part of the page that the samples make."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.tools.test_bench import DOCS
from tests.tools.test_bench import good as inventory_samples
from tests.tools.test_bench import series as inventory_series
from tools.bench import runs, runs_report
from tools.bench.__main__ import main
from tools.bench.measure import Command, Took
from tools.bench.runs import KINDS, LOG, NODE, Pod, RunSample, RunSeries, last_start
from tools.bench.samples import read_part
from tpu_ops.errors import OpsError
from tpu_ops.ssh.client_config import common_options

#: Seconds of wall time and of CPU that reach every target.
GOOD = {
    "floor": (0.5, 0.2),
    "run": (0.9, 0.5),
    "clush": (1.0, 0.6),
    "ansible": (8.0, 9.0),
    "gcloud": (7.5, 5.1),
    "top": (1.6, 0.9),
    "start": (2.5, 1.0),
    "stacks": (2.2, 1.0),
    "stop": (2.9, 1.0),
    "doctor": (1.0, 0.6),
    "logs": (0.5, 0.4),
    "fetch": (2.0, 1.5),
    "python": (0.02, 0.01),
    "help": (0.08, 0.07),
}
SHARED = ("ControlMaster", "ControlPersist", "ServerAliveInterval", "ServerAliveCountMax", "KexAlgorithms")
TAKEN = {"logs": LOG, "fetch": 32 * LOG}


def sample(kind: str, number: int = 1, workers: int = 32, **other: float | None) -> RunSample:
    wall, cpu = GOOD[kind]
    usual = RunSample(number, workers, kind, wall, cpu, 50_000_000, TAKEN.get(kind, 0), 2.5)
    return dataclasses.replace(usual, **other)  # type: ignore[arg-type]


def series(*taken: RunSample) -> RunSeries:
    return RunSeries("abc1234", "2026-11-22", {"cores": "2"}, taken)


def answers(*changed: RunSample) -> dict[str, str]:
    """Return the answer of each target where these samples stand for those of their kind and size."""
    replaced = {(one.kind, one.workers) for one in changed}
    kept = [sample(kind, workers=workers) for workers in (4, 32) for kind in GOOD]
    found = series(*(one for one in kept if (one.kind, one.workers) not in replaced), *changed)
    rows = [row.strip("| ").split(" | ") for row in runs_report.target_table(found)[2:]]
    return {row[0]: row[-1] for row in rows}


def test_every_target_is_judged():
    assert list(answers()) == [target.title for target in runs_report.TARGETS]
    assert set(answers().values()) == {"yes"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([sample("floor", wall=0.4)], ["of the floor"]),
        ([sample("start", wall=3.1)], ["train --detach"]),
        ([sample("stop", wall=3.1, workers=4)], ["stop --grace"]),
        ([sample("top", wall=1.9)], ["top --once"]),
        ([sample("stacks", wall=3.1)], ["tpu_ops stacks"]),
        ([sample("ansible", cpu=4.9)], ["CPU of `ansible"]),
        ([sample("ansible", wall=7.1, workers=4)], ["wall time of `ansible"]),
        ([sample("gcloud", cpu=4.9)], ["CPU of `gcloud"]),
        ([sample("gcloud", wall=7.1)], ["wall time of `gcloud"]),
        ([sample("help", cpu=0.16)], ["--help"]),
    ],
)
def test_a_target_that_is_missed_with_any_number_of_workers_says_no(changed, words):
    missed = [title for title, answer in answers(*changed).items() if answer == "**no**"]
    assert len(missed) == len(words)
    assert all(word in title for word, title in zip(words, missed, strict=True))


def test_a_start_is_judged_with_32_workers_only():
    assert set(answers(sample("start", wall=9.0, workers=4)).values()) == {"yes"}
    (row,) = [row for row in runs_report.target_table(series(sample("start", wall=9.0, workers=4))) if "train" in row]
    assert row.endswith("| 9.00 |  |")


def test_numbers_are_of_one_round_and_rounds_without_all_kinds_are_left_out():
    # The second round was slow for both: between the rounds the ratio would be another.
    found = series(*(sample(kind, number, wall=number * 2.0) for number in (1, 2) for kind in ("ansible", "run")))
    more = series(*found.samples, sample("run", 3, wall=9.0))
    ratio = lambda ansible, run: ansible.wall / run.wall  # noqa: E731
    assert runs_report.numbers(more, 32, ("ansible", "run"), ratio) == [1.0, 1.0]


def test_without_gcloud_nothing_is_said_of_it():
    found = series(*(sample(kind) for kind in GOOD if kind != "gcloud"))
    assert "`gcloud" not in "\n".join(runs_report.section(found))


def test_a_table_has_a_line_per_kind_with_cpu_per_worker_and_what_logs_bring():
    lines = runs_report.table(series(*(sample(kind) for kind in GOOD), sample("run", 2, wall=1.1)), 32)
    assert {line.count("|") for line in lines} == {9}
    assert lines[2:4] == [
        f"| {KINDS['floor']} | 0.50 |  | 0.20 | 6.25 | 2.50 | 50 |  |",
        f"| {KINDS['run']} | 1.00 (0.90..1.10) | 1.80 | 0.50 | 15.6 | 2.50 | 50 |  |",
    ]
    assert f"| {KINDS['fetch']} | 2.00 |  | 1.50 | 46.9 | 2.50 | 50 | 134 |" in lines
    assert f"| {KINDS['help']} | 0.08 |  | 0.07 |  |  | 50 |  |" in lines
    unknown = runs_report.table(series(*(sample(kind, busy=None) for kind in GOOD)), 32)
    assert f"| {KINDS['fetch']} | 2.00 |  | 1.50 | 46.9 |  | 50 | 134 |" in unknown


def test_the_page_has_the_part_and_does_without_it(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inventory.json").write_text(inventory_series(*inventory_samples()).text())
    assert main(["--docs", "--out", str(tmp_path)]) == 0
    alone = (tmp_path / "benchmarks.md").read_text()
    kept = series(*(sample(kind, workers=workers) for workers in (4, 32) for kind in GOOD))
    (tmp_path / "benchmarks" / "runs.json").write_text(kept.text())
    assert read_part(tmp_path / "benchmarks" / "runs.json", RunSample) == kept
    assert main(["--docs", "--out", str(tmp_path)]) == 0
    more = (tmp_path / "benchmarks.md").read_text().removeprefix(alone)
    headings = [line for line in more.splitlines() if line.startswith("#")]
    assert headings == ["## Runs", "### Runs on 4 workers", "### Runs on 32 workers", "### Targets of runs"]
    assert max(map(len, more.replace("|", "\n").splitlines())) <= 120


class Shell(Pod):
    """A pod whose commands only note what they would be."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.environ["TPU_OPS_USER"] = "tpu"
        self.workers = 2
        self.rows = [{"host": f"{NODE}-w{rank}", "stdout": json.dumps({"began": 103.5 + rank})} for rank in (0, 1)]
        self.called: list[str] = []
        monkeypatch.setattr(runs, "clock", self.clock)

    def do(self, *argv: str) -> str:
        return json.dumps(self.rows) if argv[1] == "run" else "/state/ssh_config\n"

    def clock(self, command: Command, stdout: Path, stderr: Path, where: str) -> Took:
        """Do what the commands of logs do, and nothing else."""
        assert Path(command.argv[0]).is_absolute()
        self.called.append(where.partition(" ")[0])
        full = (runs._LINE + "\n").encode() * (LOG // (len(runs._LINE) + 1) + 1)
        stdout.write_bytes(full[:LOG] if "logs" in command.argv else b"")
        if "--fetch" in command.argv:
            folder = self.root / "fetched" / self.written
            folder.mkdir(parents=True)
            for rank in range(self.workers):
                (folder / f"rank-{rank}.log").write_bytes(full[:LOG])
        return Took(1.0, 0.5, 1000, 100.0, 1.5)


def test_a_round_runs_everything_once_and_takes_the_start_from_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}")
    pod = Shell(tmp_path, monkeypatch)
    taken = {one.kind: one for one in pod.round(3)}
    assert sorted(pod.called) == sorted(taken) == sorted(KINDS)
    first = pod.called.index("start")
    assert pod.called[first : first + 3] == ["start", "stacks", "stop"]
    assert (taken["start"].wall, taken["stop"].wall) == (4.5, 1.0)
    assert (taken["logs"].size, taken["fetch"].size, taken["run"].size) == (LOG, 2 * LOG, 0)
    assert not (tmp_path / "fetched").exists(), "the next fetch begins anew"


def test_connections_are_opened_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}")
    pod = Shell(tmp_path, monkeypatch)
    pod.open_connections()
    assert pod.called == ["run", "gcloud"]


def test_logs_that_are_not_all_there_are_an_error(tmp_path, monkeypatch):
    pod = Shell(tmp_path, monkeypatch)
    (tmp_path / "output").write_text(f"[0] {runs._LINE}\n" * 5)
    with pytest.raises(OpsError, match=f"{5 * (len(runs._LINE) + 1)} bytes of logs came instead of {LOG}"):
        pod._came("logs")


@pytest.mark.parametrize("stdout", ["", "{}", '{"began": null}', "no such file"])
def test_a_rank_that_did_not_begin_is_an_error(stdout):
    rows = [{"host": "pod-w0", "stdout": '{"began": 1.5}'}, {"host": "pod-w1", "stdout": stdout, "stderr": "gone"}]
    with pytest.raises(OpsError, match="pod-w1"):
        last_start(rows)
    assert last_start(rows[:1]) == 1.5


def test_compared_tools_reach_all_workers_over_the_same_connections(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}")
    commands = Shell(tmp_path, monkeypatch).commands()
    assert (tmp_path / "hosts").read_text() == "pod-w0\npod-w1\n"
    for kind, words in {"floor": "-P 2", "clush": "-f 2", "ansible": "-f 2"}.items():
        line = " ".join(commands[kind].argv)
        assert words in line
        assert "-F /state/ssh_config" in line
    # gcloud's ssh has its own names of the workers: it gets what all have in common.
    common = dict(common_options(tmp_path / "known_hosts"))
    flags = [word.removeprefix("--ssh-flag=-o").split("=", 1) for word in commands["gcloud"].argv if "-flag=" in word]
    assert {key: value for key, value in flags if key in common} == {key: common[key] for key in SHARED}
    assert "ControlPath" in dict(flags)


def test_a_program_that_is_missing_is_said_and_gcloud_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "gcloud" else f"/bin/{name}")
    assert set(KINDS) - set(Shell(tmp_path, monkeypatch).commands()) == {"gcloud", "start", "stacks", "stop"}
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "clush" else f"/bin/{name}")
    with pytest.raises(OpsError, match="clush is not installed"):
        Shell(tmp_path, monkeypatch).commands()


def test_committed_samples_are_of_a_clean_commit_and_at_least_five_rounds():
    for path in (DOCS / "benchmarks").glob("runs.json"):
        found = read_part(path, RunSample)
        assert not found.commit.endswith("-dirty")
        assert runs_report.sizes(found) == [4, 8, 16, 32]
        for workers in runs_report.sizes(found):
            for kind in set(KINDS) - {"gcloud"}:
                assert len(runs_report.of(found, workers, kind)) >= 5, (workers, kind)
