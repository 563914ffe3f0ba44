from __future__ import annotations

from typing import Any

import pytest

from tools.check_changes import faults


def run(*changed: Any, check: bool = False, playbook: str = "converge.yml", failed: Any = ()) -> dict[str, Any]:
    shown = {"ran": [change[:2] for change in changed], "handlers": ["role : H"]}
    return shown | {
        "scenario": "s",
        "playbook": playbook,
        "check": check,
        "failed": list(failed),
        "changed": list(changed),
    }


A: tuple[str, str, list[str]] = ("role : A", "w0", ["/etc/a"])
B: tuple[str, str, list[str]] = ("role : B", "w0", [])


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([run(A, B, check=True), run(A, B), run()], None),
        ([run(check=True), run(A)], "role : A on w0 (/etc/a) was changed, and check mode did not say so"),
        ([run(A, B, check=True), run(A)], "role : B on w0 was announced, and not changed"),
        ([run(("role : A", "w0", []), check=True), run(A)], "role : A on w0 was announced"),
        ([run(("role : A", "w1", ["/etc/a"]), check=True), run(A)], "on w1 (/etc/a) was announced"),
        ([run(A, check=True), run(A), run(B, playbook="without_skips.yml")], "without skips, role : B on w0 changes"),
        # A second check is held against the second converge, and what came first does not count.
        ([run(A, check=True), run(A), run(B, check=True), run(A)], "role : A on w0"),
        ([run(A), run(B, playbook="side_effect.yml"), run(check=True)], None),
        ([run(A)], "s: no run in check mode"),
        # A run that failed is Molecule's to report.
        ([run(A, check=True), run(failed=["w0"])], None),
    ],
)
def test_check_mode_has_to_name_exactly_what_is_changed(records: list[dict[str, Any]], fault: str | None) -> None:
    found, _ = faults([run(playbook="without_skips.yml"), *records], set())
    assert found == [] if fault is None else any(fault in text for text in found)


def test_a_run_without_skips_skips_nothing_that_converge_has_done() -> None:
    full = run(playbook="without_skips.yml")
    handler: tuple[str, str, list[str]] = ("role : H", "w0", [])
    records = [run(A, B, handler, check=True), run(A, B, handler), run(), full]
    assert faults(records, set(), {"role : B"})[0] == ["s: without skips, role : A is skipped on w0"]
    full["ran"] = [A[:2], B[:2]]
    assert faults(records, set())[0] == []
    full["ran"] = [A[:2], ("role : B", "w1")]
    assert faults(records, set())[0] == ["s: without skips, role : B is skipped on w0"]


def test_exceptions_count_for_their_task_only_and_are_reported_as_needed() -> None:
    records = [run(playbook="without_skips.yml"), run(check=True), run(A, B)]
    found, needed = faults(records, {("s", "role : A"), ("other", "role : B")})
    assert [text for text in found if "role : A" in text] == []
    assert len(found) == 1
    assert needed == {("s", "role : A")}


def test_a_scenario_without_a_run_without_skips_is_found() -> None:
    assert faults([run(A, check=True), run(A)], set())[0] == ["s: no run without skips"]
