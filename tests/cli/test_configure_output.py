"""The lines that `tpu_ops configure` prints for Ansible's events."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.ansible.playbook import Outcome, Step
from tpu_ops.cli import configure


def test_each_line_of_a_failure_and_of_a_report_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A list of faults in variables has many lines, each with its file and line number."""
    faults = "\n".join(f"main.yml:{number}: no role has this variable" for number in range(1, 103))
    configure.show_failures([Step("Check", "", "pod-w0", "failed", faults)])
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["pod-w0: failed: Check", "  main.yml:1: no role has this variable"]
    assert said[100:] == ["  main.yml:100: no role has this variable", "  ... 2 more lines: --json has all"]
    progress = configure.Progress()
    for host in ("pod-w0", "pod-w1"):
        progress(Step("Report", "", host, "ok", report=("pod: 16 chips", f"{host}: fine")))
    progress.end()
    assert capsys.readouterr().err == "Report:\n  pod: 16 chips\n  pod-w0: fine\n  pod-w1: fine\n"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (["Missing sudo password"] * 2, True),
        (["Task failed: sudo: a password is required"], True),
        (["Missing sudo password", "no disk"], False),
    ],
)
def test_the_right_that_is_missing_is_named_where_that_is_all(
    capsys: pytest.CaptureFixture[str], messages: list[str], told: bool
) -> None:
    failures = [Step("Try", "", f"pod-w{rank}", "failed", message) for rank, message in enumerate(messages)]
    settings: Any = SimpleNamespace(file=Path("x"))
    assert configure.exit_code(Outcome(code=2, failures=failures), "site.yml", "pod", settings) == 1
    assert (configure.FULL_SUDO in capsys.readouterr().err) is told


@pytest.mark.parametrize(
    ("server", "exported", "command"),
    [
        ("pod-w0", "", "tpu_ops configure pod-w0 --tags nfs"),
        ("filer", "", "ansible-playbook -i '/my fleet/inventory/tpu_vm.yml' /tool/site.yml --tags nfs --limit filer"),
        # The other host is in one of those that the shell names.
        ("filer", "a.yml,b.yml", "ansible-playbook /tool/site.yml --tags nfs --limit filer"),
    ],
)
def test_the_suggested_nfs_command_is_limited_to_the_server(
    monkeypatch: pytest.MonkeyPatch, server: str, exported: str, command: str
) -> None:
    settings: Any = SimpleNamespace(file=Path("/my fleet/inventory/tpu_vm.yml"))
    monkeypatch.setenv("ANSIBLE_INVENTORY", exported)
    fleet = SimpleNamespace(workers=[SimpleNamespace(host="pod-w0")])
    monkeypatch.setattr("tpu_ops.cli.configure.view.known", lambda _: fleet)
    assert configure.letting_in([server], settings, Path("/tool/site.yml")) == f"`{command}`"
