"""The benchmark of site.yml: what is counted, and the part of the page that the samples make."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from tests.tools.test_bench import DOCS
from tests.tools.test_bench import good as inventory_samples
from tests.tools.test_bench import series as inventory_series
from tools.bench import site, site_report
from tools.bench.__main__ import main
from tools.bench.measure import ROOT
from tools.bench.samples import read_part
from tools.bench.site import KINDS, ON_CONTROLLER, SiteSample, SiteSeries


def sample(kind: str, number: int = 1, **other: float) -> SiteSample:
    usual = SiteSample(number, 8, kind, 30.0, 8.0, 90_000_000, 13 * 8, 20 * 8, 40 * 8, 0)
    return dataclasses.replace(usual, **other)  # type: ignore[arg-type]


def series(*taken: SiteSample, workers: int = 8) -> SiteSeries:
    return SiteSeries(
        "abc1234", "2026-11-21", {"cores": "2"}, tuple(dataclasses.replace(one, workers=workers) for one in taken)
    )


def test_modules_are_counted_apart_from_what_ansible_does_itself():
    tasks = [
        {"action": "ansible.builtin.assert", "ran": 8, "skipped": 0, "changed": 0},
        {"action": "check_variables", "ran": 8, "skipped": 0, "changed": 0},
        {"action": "ansible.builtin.apt", "ran": 2, "skipped": 6, "changed": 1},
        {"action": "managed_files", "ran": 8, "skipped": 0, "changed": 0},
    ]
    assert site.counts(tasks) == {"modules": 10, "tasks": 26, "skipped": 6, "changed": 1}


@pytest.mark.parametrize(("workers", "sizes"), [(0, []), (1, [1]), (7, [4, 2, 1]), (15, [8, 4, 2, 1]), (16, [16])])
def test_a_fleet_is_in_nodes_as_large_as_they_can_be(workers, sizes):
    assert site.pods(workers) == sizes


def test_ansible_s_own_actions_are_named_in_full():
    own = {path.stem for path in (ROOT / "playbooks" / "action_plugins").glob("*.py")}
    assert all(name.startswith("ansible.builtin.") for name in ON_CONTROLLER - own)
    assert own <= ON_CONTROLLER


def test_a_series_survives_its_file(tmp_path):
    kept = series(*(sample(kind) for kind in KINDS))
    (tmp_path / "site-8.json").write_text(kept.text())
    assert read_part(tmp_path / "site-8.json", SiteSample) == kept


def test_a_table_has_a_line_per_kind_of_run_with_numbers_per_worker():
    found = series(sample("first", wall=300.0), sample("second", modules=100), sample("second", 2, wall=32.0))
    lines = site_report.table(found)
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2:] == [
        f"| {KINDS['first']} | 300 | 8.00 | 90 | 13.0 | 20.0 | 40.0 | 0.00 | 0.050 |",
        f"| {KINDS['second']} | 31.0 (30.0..32.0) | 8.00 | 90 | 12.8 (12.5..13.0) | 20.0 | 40.0 | 0.00 | 0.050 |",
    ]


@pytest.mark.parametrize(
    ("taken", "answers"),
    [
        (series(sample("second")), ["yes", "yes"]),
        (series(sample("second", wall=60.0)), ["**no**", "yes"]),
        (series(sample("second", modules=8 * 16)), ["yes", "**no**"]),
        (series(sample("second", modules=32), sample("first", modules=60), workers=2), ["**no**"]),
        (series(sample("first", wall=900.0)), []),
    ],
)
def test_targets_are_of_runs_without_changes(taken, answers):
    rows = site_report.targets([taken])[2:]
    assert [row.rsplit("| ", 1)[1].removesuffix(" |") for row in rows] == answers


def test_the_page_has_both_parts_and_does_without_that_of_site_yml(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inventory.json").write_text(inventory_series(*inventory_samples()).text())
    assert main(["--docs", "--out", str(tmp_path)]) == 0
    alone = (tmp_path / "benchmarks.md").read_text()
    for workers in (16, 8):
        kept = series(sample("first"), sample("second"), workers=workers)
        (tmp_path / "benchmarks" / f"site-{workers}.json").write_text(kept.text())
    assert main(["--docs", "--out", str(tmp_path)]) == 0
    both = (tmp_path / "benchmarks.md").read_text()
    assert both.startswith(alone)
    headings = [line for line in both.removeprefix(alone).splitlines() if line.startswith("#")]
    assert headings == [
        "## site.yml",
        "### site.yml on 8 workers",
        "### site.yml on 16 workers",
        "### Targets of site.yml",
    ]
    assert max(map(len, both.removeprefix(alone).replace("|", "\n").splitlines())) <= 120


def test_samples_that_cannot_be_understood_are_an_error(tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inventory.json").write_text(inventory_series(*inventory_samples()).text())
    (tmp_path / "benchmarks" / "site-8.json").write_text(json.dumps({"samples": [{"wall": 1}]}))
    assert main(["--docs", "--out", str(tmp_path)]) == 2
    assert "make bench" in capsys.readouterr().err


def test_committed_samples_have_a_clean_commit_and_five_idempotent_rounds():
    for path in (DOCS / "benchmarks").glob("site-*.json"):
        found = read_part(path, SiteSample)
        assert not found.commit.endswith("-dirty")
        assert path.name == f"site-{site.workers(found)}.json"
        # The first run is not measured where all rounds are of one fleet.
        kinds = {entry.kind for entry in found.samples}
        assert kinds in ({*KINDS}, {*site.UNCHANGING})
        assert min(len(site_report.of(found, kind)) for kind in kinds) >= 5
        assert not any(entry.changed for entry in found.samples if entry.kind != "first")


def test_the_bench_fleet_differs_only_as_the_page_says(tmp_path, monkeypatch):
    made, ran = [], []

    class Played(site.Site):
        @contextlib.contextmanager
        def up(self):
            yield

        def fleet(self, workers):
            made.append(workers)
            return contextlib.nullcontext()

        def sample(self, number, workers, kind):
            ran.append((number, kind))
            return sample(kind, number)

    monkeypatch.setattr(site, "Site", Played)
    ((size, samples),) = site.run([8], 2, tmp_path, lambda text: None, anew=False)
    assert (size, made) == (8, [8])
    assert ran == [(0, "first"), (1, "second"), (1, "check"), (2, "second"), (2, "check")]
    assert [(one.round, one.kind) for one in samples] == ran[1:]
    page = "\n".join(site_report.of_one_size(series(*samples)))
    assert "2 rounds on one fleet, which an unmeasured run had configured. Machine" in page.replace("\n", " ")
