"""The benchmark's sections on nodes and on killed commands."""

from __future__ import annotations

import pytest

from tools.bench import kills, nodes
from tools.bench.kills import KillSample, KillSeries
from tools.bench.nodes import NodesSample, NodesSeries

LISTS = {"ListNodes": 1, "ListQueuedResources": 1}
GOOD = {"apply": 0.9, "few": 4.0, "many": 6.0, "few-api": 2.0, "many-api": 2.2}


def shown(walls: dict[str, float], lists: dict[str, int] = LISTS) -> list[str]:
    """Return whether each target is met."""
    taken = [NodesSample(1, key, wall, 1.0, lists if key == "apply" else {}) for key, wall in walls.items()]
    lines = nodes.section(NodesSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(taken)))
    return [line.rsplit("| ", 1)[1] for line in lines[lines.index("### Targets of nodes") :] if line.endswith(" |")][1:]


@pytest.mark.parametrize(
    ("walls", "lists", "missed"),
    [
        ({}, LISTS, None),
        ({}, {"ListNodes": 3}, 0),
        ({"apply": 1.1}, LISTS, 1),
        ({"many": 6.1}, LISTS, 2),
        ({"many-api": 3.1}, LISTS, 3),
    ],
)
def test_a_missed_target_says_no(walls, lists, missed):
    assert shown(GOOD | walls, lists) == ["**no** |" if number == missed else "yes |" for number in range(4)]


def test_requests_at_which_a_command_was_killed_are_counted_and_losses_stand_out():
    taken = [
        KillSample("create", 1, "GetNode", "before", True),
        KillSample("create", 2, "CreateNode", "before", True),
        KillSample("create", 2, "CreateNode", "after", False),
        KillSample("create", 3, "GetNode", "before", True),
    ]
    lines = kills.section(KillSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(taken)))
    assert lines[-1] == "| `create` | GetNode 2, CreateNode 1 | CreateNode 1 | 4 | **3** |"
