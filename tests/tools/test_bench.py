"""The benchmark's statistics and page as pure functions, and the page that is committed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time

import pytest

from tools.bench import report, samples
from tools.bench.__main__ import SECTIONS, document, fleet, main, numbers
from tools.bench.measure import ROOT, STOPWATCH, Command, clock, measured_on, rotated
from tools.bench.samples import MEASURED, Fleet, Sample, Series
from tpu_ops.errors import OpsError, UsageError

DOCS = ROOT / "docs"
SMALL, MIDDLE, LARGE = fleet(16, "v4-128"), fleet(1024, "v4-128"), fleet(10_000, "v4-128")
SINGLE = fleet(1024, "v4-8")


def series(*taken: Sample, fleets: tuple[Fleet, ...] = (SMALL, MIDDLE, LARGE)) -> Series:
    return Series("abc1234", "2026-11-21", {"cores": "2", "memory": "24 GB"}, fleets, taken)


def walls(of: Fleet, key: str, *seconds: float) -> list[Sample]:
    """Return one sample per round; the API requests are those that the command should make."""
    pages = -(-of.nodes // report.PAGE_SIZE)
    asked = {"first": {"ListNodes": pages, "GetGuestAttributes": of.nodes}, "floor": {}}.get(key, {"ListNodes": pages})
    return [Sample(number, of.name, key, wall, wall / 2, 50_000_000, asked) for number, wall in enumerate(seconds, 1)]


def test_a_spread_is_the_median_and_the_range():
    assert report.spread([3, 1, 2, 10]) == report.Spread(2.5, 1, 10)
    assert report.spread([3, 1, 2]).text(report.digits) == "2.00 (1.00..3.00)"
    assert report.spread([2.001, 2.002, 2.003]).text(report.digits) == "2.00"


@pytest.mark.parametrize(("number", "text"), [(0.0421, "0.04"), (9.994, "9.99"), (14.69, "14.7"), (123.4, "123")])
def test_numbers_have_three_digits_at_most(number, text):
    assert report.digits(number) == text


def test_a_ratio_is_of_two_samples_of_one_round():
    # The second round was slow for both: between the rounds the ratio would be 2 and more.
    taken = [*walls(LARGE, "floor", 10, 20, 10), *walls(LARGE, "again", 11, 22), *walls(MIDDLE, "again", 1, 1)]
    assert report.ratios(taken, LARGE, "again") == pytest.approx([1.1, 1.1])
    assert report.ratios(taken, MIDDLE, "again") == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda workers: 1 + workers / 1000, 1),
        (lambda workers: 5 + workers / 1000, 1),
        (lambda workers: workers**2 / 1e6, (1024 + 10_000) / (16 + 1024)),
    ],
)
def test_growth_is_1_where_it_is_linear_whatever_the_start_takes(seconds, expected):
    sizes = (SMALL, MIDDLE, LARGE)
    taken = [sample for size in sizes for sample in walls(size, "again", seconds(size.workers))]
    assert report.growth(taken, sizes, "again") == pytest.approx([expected])


def test_growth_out_of_nothing_is_not_linear():
    sizes = (SMALL, MIDDLE, LARGE)
    taken = [*walls(SMALL, "again", 1), *walls(MIDDLE, "again", 1), *walls(LARGE, "again", 9)]
    assert report.growth(taken, sizes, "again") == [float("inf")]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ([{}], "none"),
        ([{"ListNodes": 2}, {"ListNodes": 2}], "ListNodes 2"),
        ([{"ListNodes": 2, "GetNode": 1000}, {"ListNodes": 3}], "GetNode 0..1,000, ListNodes 2..3"),
    ],
)
def test_requests_are_counted_by_method(asked, text):
    assert report.requests_text(Sample(1, "f", "again", 1, 1, 1, counts) for counts in asked) == text


def good() -> list[Sample]:
    return [
        sample
        for size in (SMALL, MIDDLE, LARGE)
        for key, part in (("floor", 1.0), ("first", 1.1), ("again", 1.05), ("list", 0.1))
        for sample in walls(size, key, *(part * (1 + size.workers / 800) * noise for noise in (1.0, 1.02, 0.98)))
    ]


def test_every_target_is_stated_with_what_was_measured():
    rows = report.target_table(series(*good()))[2:]
    assert [row.rsplit("| ", 1)[1] for row in rows] == ["yes |"] * 5
    assert [word for word in ("1.05", "0.10", "so in all runs") if word not in "\n".join(rows)] == []


@pytest.mark.parametrize(
    ("worse", "target"),
    [
        (walls(LARGE, "again", 20, 20, 14), "at most 1.15 of the floor"),
        (walls(LARGE, "list", 4, 4, 1), "under 0.25 of the floor"),
        (walls(LARGE, "again", 99, 99, 99), "1 is linear"),
        ([Sample(4, MIDDLE.name, "again", 1, 1, 1, {"ListNodes": 1, "GetNode": 1})], "and nothing else"),
        ([Sample(4, MIDDLE.name, "first", 1, 1, 1, {"ListNodes": 1})], "GetGuestAttributes once per node"),
    ],
)
def test_a_target_that_is_missed_says_no(worse, target):
    replaced = {(sample.fleet, sample.rival, sample.round) for sample in worse}
    kept = [sample for sample in good() if (sample.fleet, sample.rival, sample.round) not in replaced]
    (row,) = [row for row in report.target_table(series(*kept, *worse)) if target in row]
    assert row.endswith("| **no** |")


def test_lists_of_more_nodes_than_a_page_holds_are_asked_for_page_by_page():
    taken = [*walls(SINGLE, "again", 2), *walls(SINGLE, "first", 2)]
    assert taken[0].requests == {"ListNodes": 2}
    assert report.unexpected_requests(series(*taken, fleets=(SINGLE,)), "again") == ""


def test_the_page_has_a_table_per_fleet_and_a_line_per_command():
    page = report.document(series(*good(), *walls(SINGLE, "again", 2), fleets=(SMALL, SINGLE, MIDDLE, LARGE)))
    headings = [text for text in page.splitlines() if text.startswith("### ")]
    assert headings == [
        "### 16 workers: 1 node v4-128",
        "### 1,024 workers: 1,024 nodes v4-8",
        "### 1,024 workers: 64 nodes v4-128",
        "### 10,000 workers: 625 nodes v4-128",
        "### Targets",
    ]
    assert page.count(f"| {MEASURED['list']} |") == 3
    assert f"| {MEASURED['floor']} | 13.5 (13.2..13.8) | 6.75 (6.62..6.88) | 50 |  | none |" in page
    assert "Commit abc1234, 2026-11-21. Machine: cores 2, memory 24 GB." in page
    assert "there are 3 rounds" in page


def test_a_series_survives_its_file(tmp_path):
    kept = series(*good())
    (tmp_path / "samples").write_text(kept.text())
    assert samples.read(tmp_path / "samples") == kept


def test_the_order_rotates_so_that_each_command_has_each_position_once():
    orders = [rotated(list(MEASURED), number) for number in range(len(MEASURED))]
    assert all(sorted(place) == sorted(MEASURED) for place in itertools.chain(orders, zip(*orders, strict=True)))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sizes", "17"], ["17 workers", "multiple of 16"]),
        (["--sizes", "many"], ["--sizes", "'many'"]),
        (["--sizes", "", "--single", ""], ["name at least one"]),
        (["--rounds", "0"], ["--rounds"]),
        (["--part", "site", "--workers", "0"], ["--workers", "at least one round and one worker"]),
        (["--part", "site", "--rounds", "0"], ["--rounds, --workers"]),
        (["--part", "runs", "--pods", "4,0"], ["--pods", "one worker"]),
        (["--part", "runs", "--rounds", "0"], ["--rounds"]),
        (["--docs"], ["no samples", "inventory.json", "make bench"]),
    ],
)
def test_an_impossible_measurement_is_a_usage_error(tmp_path, capsys, argv, words):
    assert main([*argv, "--out", str(tmp_path)]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_lists_of_numbers():
    assert numbers("16,1024,", "--sizes") == [16, 1024]


def test_the_stopwatch_measures_time_memory_and_exit_code_with_children(tmp_path):
    # The command starts a child that works and takes memory; what starts it all stays small.
    child = "import time; kept = bytearray(64_000_000)\nwhile time.process_time() < 0.1: pass"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('said'); sys.exit(3)"
    out, err = tmp_path / "out", tmp_path / "err"
    argv = [sys.executable, "-I", "-S", STOPWATCH, out, err, sys.executable, "-c", script]
    before = time.time()
    wall, user, system, peak, code, began, busy = map(float, subprocess.check_output(argv, text=True).split())
    assert before <= began <= time.time() - wall
    assert (code, out.read_text(), err.read_text()) == (3, "said\n", "")
    assert wall >= 0.1
    assert user + system >= 0.1
    # The system counts these in hundredths.
    assert user + system - 0.05 <= busy <= (wall + 0.1) * (os.cpu_count() or 1)
    assert 64_000 < peak < 128_000
    argv[7:] = ["/bin/true"]
    assert float(subprocess.check_output(argv, text=True).split()[3]) < 32_000, "memory of who asks is not counted"


def test_a_playbook_that_fails_is_told_with_its_task_s_words(tmp_path):
    script = "echo 'fatal: [w5]: FAILED! => no way'; for n in 1 2 3 4 5 6 7; do echo line $n; done; exit 2"
    said = tmp_path / "said"
    with pytest.raises(OpsError, match="sh ended with 2") as failed:
        clock(Command(("/bin/sh", "-c", script), dict(os.environ)), said, said, "site.yml on 16 workers")
    assert "fatal: [w5]: FAILED! => no way" in failed.value.what
    assert failed.value.what.endswith("line 7")


def test_stdout_and_stderr_in_one_file_do_not_overwrite_each_other(tmp_path):
    both = tmp_path / "both"
    argv = [sys.executable, "-I", "-S", STOPWATCH, both, both, "/bin/sh", "-c", "echo said; echo failed >&2; echo more"]
    subprocess.run(argv, check=True)
    assert both.read_text() == "said\nfailed\nmore\n"


def test_the_committed_page_is_what_the_committed_samples_make():
    kept = {path.name for path in (DOCS / "benchmarks").glob("*")}
    page = DOCS / "benchmarks.md"
    if not kept:
        assert not page.exists(), "a page without samples"
        return
    whole = {f"{name}.json" for name in ("inventory", *SECTIONS)}
    assert all(name in whole or re.fullmatch(r"(site|configure)-\d+\.json", name) for name in kept)
    assert page.read_text() == document(DOCS), "run make bench-docs"


def test_committed_samples_are_of_a_clean_commit_and_at_least_five_rounds():
    for path in (DOCS / "benchmarks").glob("inventory.json"):
        found = samples.read(path)
        assert not found.commit.endswith("-dirty")
        for size in found.fleets:
            for key in measured_on(size, smallest=size == found.fleets[0]):
                assert len(report.of(found.samples, size, key)) >= 5, (size, key)
