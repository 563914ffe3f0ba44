"""The benchmark of both ways to configure: what is counted, and the part of the page that the samples make."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable

import pytest

from tests.tools.test_bench import DOCS
from tests.tools.test_bench import good as inventory_samples
from tests.tools.test_bench import series as inventory_series
from tools.bench import configuring, worked
from tools.bench.__main__ import main
from tools.bench.configuring import FIRST, KINDS, UNCHANGING, ConfiguringSample, ConfiguringSeries
from tools.bench.samples import read_part
from tools.bench.traffic import Bytes, Counter, carried, sockets


def fleet(workers: int, each: float = 0.1, kinds: Iterable[str] = KINDS, drift: float = 2.0) -> ConfiguringSeries:
    """Return samples in which workers that configure themselves cost the controller 2 s, and so much for each."""
    samples = []
    for kind in kinds:
        cpu = 2.0 + each * workers * (20 if kind == "controller" else 1)
        wall = drift if kind == "drift" else 10.0
        samples.append(
            ConfiguringSample(1, workers, kind, wall, cpu, 15.0, 2000 * workers, 60_000 * workers, 5.0 * workers)
        )
    return ConfiguringSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(samples))


def answers(measured: list[ConfiguringSeries]) -> list[str]:
    """Return the last cells of the targets' table."""
    lines = configuring.section(measured)
    table = lines[lines.index("### Targets of configuring") :]
    return [row.removesuffix(" |").rsplit("| ", 1)[1] for row in table if row.startswith("| `")]


@pytest.mark.parametrize(
    ("many", "expected"),
    [
        (fleet(32), ["yes", "**no**", "yes"]),
        (fleet(32, each=0.3), ["**no**", "**no**", "yes"]),
        (fleet(32, each=0.012), ["yes", "yes", "yes"]),
        (fleet(32, each=0.012, drift=3.1), ["yes", "yes", "**no**"]),
    ],
)
def test_targets_are_the_time_for_each_worker_its_share_and_that_of_drift(many, expected):
    assert answers([fleet(4, each=0.012), many]) == expected


def test_the_reason_is_given_where_drift_takes_longer():
    slow, quick = (" ".join(configuring.section([fleet(4), fleet(32, drift=drift)])) for drift in (3.1, 2.9))
    assert "5.00 s of processor time on each of 32 workers, 160 s together" in slow
    assert "160 s together" not in quick


@pytest.mark.parametrize(("most", "said"), [(16, True), (32, False)])
def test_a_smaller_fleet_than_the_targets_are_meant_for_is_named(most, said):
    text = " ".join(configuring.section([fleet(4), fleet(most)]))
    assert ("32 workers were not measured" in text) is said


def test_times_of_more_workers_than_were_measured_are_on_the_line():
    lines = configuring.section([fleet(1, each=9.0), fleet(4), fleet(32)])
    (row,) = [line for line in lines if "2.000 | 130" in line]
    assert row == f"| {configuring.title('controller')} | 2.00 | 2.000 | 130 | 1026 | 4098 |"
    assert configuring.growth([fleet(1, each=9.0), fleet(4), fleet(32)], "workers") == pytest.approx((2.0, 0.1))


def test_nothing_is_derived_from_one_size():
    lines = configuring.section([fleet(1), fleet(4)])
    assert len([line for line in lines if line.startswith("| `")]) == 2 * len(KINDS)
    assert not any("derived" in line or "target" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_kinds_that_were_not_measured_on_a_fleet_have_no_line():
    lines = configuring.section([fleet(4), fleet(32, kinds=UNCHANGING)])
    assert [sum(configuring.title(kind) in line for line in lines) for kind in FIRST] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "output", "found"),
    [
        ("playbook", "a-w0  : ok=9 changed=0 unreachable=0\na-w1 : ok=9   changed=12 failed=0", {"a-w0": 0, "a-w1": 1}),
        ("workers", json.dumps({"hosts": {"a-w0": {"changed": 0}, "a-w1": {"changed": 3}}}), {"a-w0": 0, "a-w1": 1}),
        ("drift", json.dumps({"clean": ["a-w0"], "differences": [{"host": "a-w1"}]}), {"a-w0": 0}),
    ],
)
def test_changed_workers_are_known_from_each_command(kind, output, found):
    assert configuring.configured(KINDS[kind], output) == found


SS = """\
ESTAB 0 36 198.51.100.1:59254 198.51.100.8:22 bbr rto:212 bytes_sent:2952 bytes_acked:2917 bytes_received:2861 segs:9
ESTAB 0 0 [fd00::1]:59255 [fd00::8]:22 cubic bytes_sent:7 bytes_retrans:2 bytes_acked:7 bytes_received:8 unacked:1
ESTAB 0 0 198.51.100.1:40000 198.51.100.9:22 cubic bytes_sent:5 bytes_acked:5 bytes_received:6
ESTAB 0 0 198.51.100.1:40001 198.51.100.8:22 cubic rto:200
"""


def test_only_connections_to_the_workers_are_counted():
    found = sockets(SS, {"198.51.100.8", "fd00::8"})
    assert [*found.values()] == [Bytes(2952, 2861), Bytes(7, 8)]


def test_connections_that_open_or_close_during_a_run_are_counted():
    kept, closed, opened = ("me:1", "a:22"), ("me:2", "b:22"), ("me:3", "b:22")
    readings = [
        {kept: Bytes(10, 20), closed: Bytes(100, 100)},
        {kept: Bytes(11, 25), closed: Bytes(103, 104)},
        {kept: Bytes(12, 30), opened: Bytes(1000, 1)},
    ]
    assert carried(readings) == Bytes(2 + 3 + 1000, 10 + 4 + 1)


def test_a_counter_reads_during_the_block():
    asked, enough = [], threading.Event()

    def reading():
        asked.append(1)
        if len(asked) > 4:
            enough.set()
        return {("me:1", "a:22"): Bytes(len(asked), 0)} if len(asked) < 4 else {}

    with Counter(reading, period=0.001) as counter:
        assert enough.wait(5)
    assert counter.total == Bytes(2, 0)


V1 = "9:name=systemd:/docker/ab12/init.scope\n2:cpu,cpuacct:/docker/ab12\n0::/docker/ab12/init.scope\n"
V2 = "0::/system.slice/docker-ab12.scope/init.scope\n"


@pytest.mark.parametrize(
    ("text", "file", "content"),
    [
        (V1, "cpuacct/docker/ab12/cpuacct.usage", "2500000000\n"),
        (V2, "system.slice/docker-ab12.scope/cpu.stat", "usage_usec 2500000\nuser_usec 2000000\n"),
    ],
)
def test_a_container_s_processor_time_is_that_of_its_cgroup(tmp_path, text, file, content):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(content)
    assert worked.of(text, tmp_path) == 2.5


def test_the_page_has_the_sizes_in_order(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inventory.json").write_text(inventory_series(*inventory_samples()).text())
    for workers in (16, 4):
        (tmp_path / "benchmarks" / f"configure-{workers}.json").write_text(fleet(workers).text())
    assert main(["--docs", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.index("### Configuring 4 workers") < page.index("### Configuring 16 workers")
    assert read_part(tmp_path / "benchmarks" / "configure-4.json", ConfiguringSample) == fleet(4)


def test_committed_samples_have_a_clean_commit_and_every_kind_that_changes_nothing():
    for path in (DOCS / "benchmarks").glob("configure-*.json"):
        found = read_part(path, ConfiguringSample)
        assert not found.commit.endswith("-dirty")
        assert path.name == f"configure-{found.samples[0].workers}.json"
        assert {*UNCHANGING} <= {sample.kind for sample in found.samples}
