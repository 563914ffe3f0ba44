"""The known state of the nodes of a run that does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops.cloud.remaking import Plan
from tpu_ops.runs import nodes, records, recovery
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.spec import RunSpec

BEFORE = pod(1)[0].node
SEEN = (Outcome(0, "pod-w0", "unreachable"), Outcome(1, "b-w0", "unreachable"))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fleet as it is known now; whoever asks for it has asked at 5 s."""
    known: Any = SimpleNamespace(listed=[], asked_at=5.0, unlisted=())
    monkeypatch.setattr("tpu_ops.runs.nodes.view.known", lambda _: known)
    return known


def fleet(folder: Path, *, is_known: bool, zones: tuple[str, ...] = (), snapshot: str = "") -> Any:
    """Return the fleet as it was known before, with the node or without it."""
    settings = SimpleNamespace(state_dir=folder, projects=(BEFORE.project,), zones=zones, snapshot=snapshot)
    return SimpleNamespace(settings=settings, workers=pod(1) if is_known else [])


def states(fleet: Any, begun: float = 4.0) -> list[str]:
    return [outcome.state for outcome in nodes.without_nodes(fleet, "r1", SEEN, begun)]


@pytest.mark.parametrize("is_known", [True, False], ids=["deleted just now", "deleted before"])
@pytest.mark.parametrize(
    ("state", "left"), [("PREEMPTED", "gone"), ("", "gone"), ("READY", "unreachable"), ("REPAIRING", "unreachable")]
)
def test_nothing_of_a_run_is_left_on_a_node_that_was_taken_away(
    tmp_path: Path, now: Any, state: str, left: str, is_known: bool
) -> None:
    now.listed = [BEFORE._replace(state=state)] if state else []
    if not is_known:
        records.write(tmp_path, records.started_on("r1", pod(1), ("true",)))
    before = fleet(tmp_path, is_known=is_known)
    assert states(before, 6.0) == ["unreachable"] * 2, "it may have been started again since"
    assert states(before) == [left, "unreachable"], "of b nothing was known before"
    now.unlisted = ("zone z could not be listed",)
    assert states(before)[0] == (left if state else "unreachable"), "it may be in that zone"


@pytest.mark.parametrize(
    ("zones", "snapshot", "left"),
    [((), "", "gone"), ((BEFORE.zone,), "", "gone"), (("other",), "", "unreachable"), ((), "gs://b/s", "unreachable")],
)
def test_a_node_that_these_settings_do_not_ask_for_may_be_there(
    tmp_path: Path, now: Any, zones: tuple[str, ...], snapshot: str, left: str
) -> None:
    records.write(tmp_path, records.started_on("r1", pod(1), ("true",)))
    assert states(fleet(tmp_path, is_known=False, zones=zones, snapshot=snapshot))[0] == left


def test_a_record_of_an_older_version_does_not_say_where_its_nodes_were(tmp_path: Path, now: Any) -> None:
    records.write(tmp_path, records.new("r1", ("pod",), (BEFORE.node_id,), ("pod-w0",), ("true",)))
    assert states(fleet(tmp_path, is_known=False))[0] == "unreachable"


@pytest.mark.parametrize(
    ("from_here", "state", "taken"),
    [
        ("known", "PREEMPTED", True),
        ("known", "", True),
        ("known", "READY", False),
        ("known", "REPAIRING", False),
        # Whoever recovers it brings the node back: here, or perhaps elsewhere.
        ("recovered", "PREEMPTED", False),
        ("", "PREEMPTED", False),
    ],
)
def test_a_node_is_gone_for_good_where_nobody_brings_it_back(
    tmp_path: Path, now: Any, from_here: str, state: str, taken: bool
) -> None:
    now.listed = [BEFORE._replace(state=state)] if state else []
    if from_here:
        records.write(tmp_path, records.started_on("r1", pod(1), ("true",)))
    if from_here == "recovered":
        recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), recovery.options_of(RunSpec("r1", ("x",)), {})))
    assert nodes.taken(fleet(tmp_path, is_known=True), "r1")("pod-w0") is taken


def test_a_renamed_node_is_the_same_and_a_recreated_one_is_another(tmp_path: Path, now: Any) -> None:
    records.write(tmp_path, records.started_on("r1", pod(1), ("true",)))
    is_taken = nodes.taken(fleet(tmp_path, is_known=True), "r1")
    now.listed = [BEFORE]
    assert not is_taken("pod-w0")
    now.listed = [BEFORE._replace(node_id="9")]
    assert is_taken("pod-w0")
