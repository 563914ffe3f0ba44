"""The benchmark beside other tools: what counts as unchanged, and the part of the page that the samples make."""

from __future__ import annotations

import ast
import json

import pytest
import yaml

from tests.tools.test_bench import DOCS
from tools.bench import rivals
from tools.bench.configuring import ConfiguringSample, ConfiguringSeries
from tools.bench.rivals import KINDS, TEN
from tools.bench.samples import read_part


def series(times: float = 3.0) -> ConfiguringSeries:
    """Return samples of two rounds in which each other tool takes so many times as long as the workers themselves."""
    samples = []
    for number in (1, 2):
        for kind in KINDS:
            wall = number * (1.0 if kind == rivals.OWN else times)
            samples.append(ConfiguringSample(number, 8, kind, wall, wall / 2, wall, 8000, 16_000, 40.0))
    return ConfiguringSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(samples))


def test_each_tool_has_a_line_with_its_ratios_within_a_round():
    lines = rivals.section(series())
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(KINDS)
    assert len({line.count("|") for line in table}) == 1
    assert table[2].split(" | ")[1:4] == ["1.50 (1.00..2.00)", "1.00", "0.75 (0.50..1.00)"]
    assert table[-1].split(" | ")[1:5] == ["4.50 (3.00..6.00)", "3.00", "2.25 (1.50..3.00)", "3.00"]
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def pyinfra(*counts: object) -> str:
    """Return the last line of pyinfra's table."""
    return "    Grand total  " + "   ".join(map(str, counts)) + "   "


def hosts(*changed: int) -> str:
    """Return the output of play.py."""
    return json.dumps({"hosts": {f"w{index}": {"changed": number} for index, number in enumerate(changed)}})


@pytest.mark.parametrize(
    ("kind", "output", "found"),
    [
        ("pyinfra", pyinfra(18, "-", "-", 18), True),
        ("pyinfra", pyinfra(18, 1, "-", 17), False),
        ("pyinfra", pyinfra(9, "-", "-", 9), False),
        ("workers", hosts(0, 0), True),
        ("controller", hosts(0, 1), False),
        ("workers", hosts(0), False),
        ("mitogen", "w0 : ok=10 changed=0\nw1 : ok=10 changed=0", True),
        ("few", "w0 : ok=10 changed=0\nw1 : ok=10 changed=1", False),
    ],
)
def test_a_run_that_changes_something_or_leaves_out_workers_is_noticed(kind, output, found):
    assert rivals.unchanged(kind, output, 2) is found


def test_both_descriptions_have_the_same_ten_operations():
    tasks = [task["name"] for task in yaml.safe_load((TEN / "roles" / "ten" / "tasks" / "main.yml").read_text())]
    names = [
        keyword.value.value
        for node in ast.walk(ast.parse((TEN / "deploy.py").read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    ]
    assert [*names, "Run a command that only reads"] == tasks
    assert len(names) == rivals.OPERATIONS


def test_committed_samples_have_a_clean_commit_and_every_tool():
    for path in (DOCS / "benchmarks").glob("rivals.json"):
        found = read_part(path, ConfiguringSample)
        assert not found.commit.endswith("-dirty")
        assert {sample.kind for sample in found.samples} == {*KINDS}
