"""The lines that `tpu_ops configure` prints for Ansible's events."""

from __future__ import annotations

import pytest

from tpu_ops.ansible.playbook import Step
from tpu_ops.cli import configure


def test_each_line_of_a_failure_and_of_a_report_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A list of faults in variables has many lines, each with its file and line number."""
    faults = "\n".join(f"main.yml:{number}: no role has this variable" for number in range(1, 103))
    configure.Progress().failures([Step("Check", "", "pod-w0", "failed", faults)])
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["pod-w0: failed: Check", "  main.yml:1: no role has this variable"]
    assert said[100:] == ["  main.yml:100: no role has this variable", "  ... 2 more lines: --json has all"]
    progress = configure.Progress()
    for host in ("pod-w0", "pod-w1"):
        progress(Step("Report", "", host, "ok", report=("pod: 16 chips", f"{host}: fine")))
    progress.end()
    assert capsys.readouterr().err == "Report:\n  pod: 16 chips\n  pod-w0: fine\n  pod-w1: fine\n"


APT = (
    "The following NEW packages will be installed:",
    "  htop",
    "0 upgraded, 1 newly installed, 0 to remove and 4 not upgraded.",
)


def test_a_change_names_what_changes_on_the_hosts_where_it_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    progress = configure.Progress()
    for host, changes in (
        ("pod-w0", APT),
        ("pod-w1", APT),
        ("solo-w0", ("ada", "bob", "eve", "f" * 90, "zoe")),
        ("b", ()),
    ):
        progress(Step("Install", "base", host, "changed", changes=changes))
    progress(Step("Break", "", "b", "failed", "no"))
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "pod-w[0-1]: changed: base : Install: htop",
        f"solo-w0: changed: base : Install: ada, bob, eve, {'f' * 80} ... and 1 more",
        "b: changed: base : Install",
    ], "a failure is printed once, at the end"


def test_a_diff_is_printed_below_its_change(capsys: pytest.CaptureFixture[str]) -> None:
    progress = configure.Progress(check=True, diff=True)
    progress(Step("Write", "", "b", "changed", changes=("/etc/x", "-one", "+two")))
    progress.end()
    assert capsys.readouterr().err == "b: would change: Write\n  /etc/x\n  -one\n  +two\n"
