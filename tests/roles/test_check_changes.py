from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import check_changes
from tools.check_changes import compared, without_skips


def run(*changed: Any, check: bool = False, playbook: str = "converge.yml", failed: Any = ()) -> dict[str, Any]:
    shown = {"ran": [change[:2] for change in changed], "handlers": ["role : H"]}
    return shown | {
        "scenario": "s",
        "playbook": playbook,
        "check": check,
        "failed": list(failed),
        "changed": list(changed),
    }


Change = tuple[str, str, list[str], list[str]]
A: Change = ("role : A", "w0", ["/etc/a"], [])
B: Change = ("role : B", "w0", [], ["one"])
B2: Change = ("role : B", "w0", [], ["one", "two"])
C: Change = ("role : C", "w0", [], [])
BREAK = run(playbook="side_effect.yml")


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([run(A, B, check=True), run(A, B), run()], None),
        ([run(check=True), run(A)], "role : A on w0 (/etc/a) was changed, but not announced by check mode"),
        ([run(A, B, check=True), run(A)], "role : B on w0 was announced by check mode, but not changed"),
        ([run(("role : A", "w0", [], []), check=True), run(A)], "role : A on w0 was announced"),
        ([run(("role : A", "w1", ["/etc/a"], []), check=True), run(A)], "on w1 (/etc/a) was announced"),
        # Of a bare worker check mode cannot know every detail; of one that was broken it has to.
        ([run(B, check=True), run(B2), BREAK, run(B2, check=True), run(B2)], None),
        (
            [BREAK, run(B, check=True), run(B2)],
            "role : B on w0 (one, two) was changed, but not announced by check mode",
        ),
        (
            [BREAK, run(B2, check=True), run(B)],
            "role : B on w0 (one, two) was announced by check mode, but not changed",
        ),
        # A second check is held against the second converge, and what came first does not count.
        ([run(A, check=True), run(A), run(B, check=True), run(A)], "role : A on w0"),
        ([run(A), BREAK, run(check=True)], None),
        ([run(A)], "s: no run in check mode"),
        # A run that failed is Molecule's to report.
        ([run(A, check=True), run(failed=["w0"])], None),
    ],
)
def test_check_mode_has_to_name_exactly_what_is_changed(records: list[dict[str, Any]], fault: str | None) -> None:
    found, _ = compared(records, set())
    assert found == [] if fault is None else any(fault in text for text in found)


def test_check_mode_exceptions_count_for_one_task_and_stale_ones_are_found() -> None:
    prepared, broken = ("s", "role : A", "prepared"), ("s", "role : A", "broken")
    missed = "s: role : A on w0 (/etc/a) was changed, but not announced by check mode"
    once = [run(check=True), run(A)]
    assert compared(once, {prepared, ("other", "role : A", "prepared")}) == ([], set())
    assert compared(once, {broken}) == ([missed], {broken})
    assert compared([*once, BREAK, *once], {prepared}) == ([missed], set())
    assert compared([*once, BREAK, *once], {prepared, broken}) == ([], set())


def test_a_run_without_skips_changes_nothing() -> None:
    assert without_skips([run(A), run(B, playbook="without_skips.yml")], {("s", "role : A")})[0] == [
        "s: without skips, role : B on w0 (one) changes again"
    ]
    assert without_skips([run(A, check=True), run(A)], set())[0] == ["s: no run without skips"]
    # The scenario of all roles leaves it to theirs.
    assert without_skips([run(A) | {"scenario": "site"}], set()) == ([], set())


@pytest.mark.parametrize(
    ("ran", "found", "stale"),
    [
        ([], ["role : A is skipped on w0"], []),
        ([A[:2]], [], []),
        ([A[:2], B[:2]], [], ["role : B"]),
        # It ran for one worker, and not for the one on which converge had changed something by it.
        ([A[:2], ("role : B", "w1")], [], []),
    ],
)
def test_the_list_of_skips_equals_the_skipped_tests(ran: list[Any], found: list[str], stale: list[str]) -> None:
    handler: Change = ("role : H", "w0", [], [])
    full = run(playbook="without_skips.yml") | {"ran": ran}
    records = [run(C, check=True), run(A, B, handler), run(), full, run(C)]
    # Of what has changed nothing before, and of scenarios that did not run, nothing is known.
    looked_at: set[tuple[str, ...]] = {("s", "role : B"), ("s", "role : C"), ("other", "role : A")}
    assert without_skips(records, looked_at) == (
        [f"s: without skips, {text}" for text in found],
        {("s", task) for task in stale},
    )


def test_an_exception_that_one_worker_needs_is_needed() -> None:
    elsewhere: Change = ("role : A", "w1", [], [])
    full = run(playbook="without_skips.yml") | {"ran": [A[:2]]}
    assert without_skips([run(A, elsewhere), full], {("s", "role : A")}) == ([], set())


def test_entries_that_are_not_needed_are_named_by_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_changes, "ROOT", tmp_path)
    for name, attribute, more in (
        ("exceptions.yml", "EXCEPTIONS", ", workers: broken"),
        ("looked_at.yml", "LOOKED_AT", ""),
    ):
        (tmp_path / name).write_text("[{scenario: s, task: 'role : A', reason: none" + more + "}]")
        monkeypatch.setattr(check_changes, attribute, tmp_path / name)
    records = [run(A, check=True), run(A), run(playbook="without_skips.yml") | {"ran": [A[:2]]}]
    runs = tmp_path / "runs"
    runs.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert check_changes.main(str(runs)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "exceptions.yml: s does not need role : A on workers broken",
        "looked_at.yml: s does not need role : A",
    ]
    (tmp_path / "looked_at.yml").write_text("[{task: 'role : A', reason: none}]")
    assert check_changes.main(str(runs)) == 1
    assert "needs scenario, task and reason, and no more" in capsys.readouterr().err
