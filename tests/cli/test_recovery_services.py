"""The services of the command line that a recovery uses."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, stand_in
from tpu_ops.cli.recovery_services import Services
from tpu_ops.fleet import view

WARNING = "zone b did not answer"


def test_a_warning_of_the_fleet_is_printed_once_in_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fleet, printed = SimpleNamespace(workers=pod(2), warnings=(WARNING,)), []

    def current(_: object, said: Collection[str]) -> Any:
        printed.append(set(said))
        return fleet

    monkeypatch.setattr(view, "current", current)
    monkeypatch.setattr(view, "with_host_keys", lambda *_: (fleet, pod(2)))
    services = Services(stand_in(tmp_path), "r1", ("another warning",))
    for _ in range(2):
        services.fleet()
        services.workers_of(["pod"])
    assert capsys.readouterr().err == ""
    assert printed == [{"another warning"}, {"another warning", WARNING}]
    services = Services(stand_in(tmp_path), "r1")
    for _ in range(2):
        services.workers_of(["pod"])
    assert capsys.readouterr().err == f"warning: {WARNING}\n"
