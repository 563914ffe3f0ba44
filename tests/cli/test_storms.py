"""create, apply and delete while the API refuses many requests, and when it does not say that operations are done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.fleet import ZONE, FleetDir
from tpu_ops.cloud import client, operations

Command = Callable[..., tuple[int, str, str]]
#: What the API answers to two of three requests in a storm: HTTP 429 and 503.
REFUSALS: tuple[dict[str, Any], ...] = (
    {"code": "RESOURCE_EXHAUSTED", "message": "Maximum number of requests per minute"},
    {"code": "UNAVAILABLE", "message": "The service is currently unavailable."},
)


@pytest.fixture
def storm(fleet: FleetDir, monkeypatch: pytest.MonkeyPatch, ssh: object) -> Iterator[Callable[[int], None]]:
    """Has the API refuse two of three of the next 30 requests, in an order that a seed gives."""
    assert ssh
    monkeypatch.setenv("SSH_SAYS", "No route to host")
    monkeypatch.setattr(client, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(client, "LONGEST_DELAY", 0.05)

    def begin(seed: int) -> None:
        drawn = random.Random(seed)  # noqa: S311 - no secret
        for _ in range(30):
            fleet.api.fault(project=fleet.project, times=1, **drawn.choice([*REFUSALS, {"seconds": 0.001}]))

    yield begin
    fleet.api.clear_faults()


def names(fleet: FleetDir) -> dict[str, str]:
    """Return the state of each node."""
    found = fleet.api.call("GET", f"v2/{fleet.location()}/nodes")[1].get("nodes", [])
    return {node["name"].rpartition("/")[2]: node["state"] for node in found}


def repeated(fleet: FleetDir, tpu_ops: Command, *argv: str) -> None:
    """Run a command until it succeeds; each failure must be an error of the cloud with a fix. Then the storm ends."""
    for _ in range(30):
        code, _, err = tpu_ops(*argv)
        if code == 0:
            break
        assert (code, "error: " in err, "fix: " in err, "Traceback" in err) == (3, True, True, False), err
    assert code == 0, err
    left = fleet.api.call("GET", "lab/faults")[1]["faults"]
    assert len(left) < 28, "the command has met no storm"
    fleet.api.clear_faults()


@pytest.mark.parametrize("seed", range(3))
def test_repeated_commands_outlast_a_storm_with_exactly_the_wanted_nodes(
    fleet: FleetDir, tpu_ops: Command, storm: Callable[[int], None], seed: int
) -> None:
    (fleet.path / "nodes.yml").write_text(
        f"nodes: [{{name: 'b-[1-2]', type: v4-8, zones: [{ZONE}]}}, {{name: a, type: v4-8, zones: [{ZONE}]}}]\n"
    )
    storm(seed)
    repeated(fleet, tpu_ops, "create", "a", "--type", "v4-8", "--zone", ZONE)
    assert names(fleet) == {"a": "READY"}
    storm(seed + 100)
    repeated(fleet, tpu_ops, "apply", "--yes", "--no-configure")
    assert names(fleet) == {"a": "READY", "b-1": "READY", "b-2": "READY"}
    storm(seed + 200)
    repeated(fleet, tpu_ops, "delete", "a,b-1,b-2", "--yes")
    assert names(fleet) == {}


def test_nodes_that_are_ready_end_create_and_apply_though_the_operation_is_not_done(
    fleet: FleetDir, tpu_ops: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations were seen to be done only 11 minutes after their nodes were READY."""
    asked: list[str] = []

    def is_never_done(_: object, operation: str, **__: object) -> bool:
        asked.append(operation)
        return False

    monkeypatch.setattr(operations, "is_done", is_never_done)
    code, _, err = tpu_ops("create", "a", "--type", "v4-8", "--zone", ZONE, "--timeout", "20")
    assert (code, names(fleet)) == (0, {"a": "READY"}), err
    (fleet.path / "nodes.yml").write_text(f"nodes: [{{name: 'b-[1-2]', type: v4-8, zones: [{ZONE}]}}]\n")
    code, _, err = tpu_ops("apply", "--yes", "--no-configure", "--timeout", "20")
    assert (code, names(fleet)) == (0, {"a": "READY", "b-1": "READY", "b-2": "READY"}), err
    assert len(set(asked)) == 3
