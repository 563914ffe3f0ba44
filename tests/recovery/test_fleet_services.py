"""The API and the workers of a fleet that a recovery uses."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.runs.test_parts import pod, stand_in
from tests.support.fleet import FleetDir
from tpu_ops.cloud.pending import Requests
from tpu_ops.errors import UsageError
from tpu_ops.fleet import view
from tpu_ops.recovery.fleet_services import FleetServices

WARNING = "zone b did not answer"


def services_of(state_dir: Path, *said: str) -> FleetServices:
    """Return the services of a recovery that shows no progress and runs no playbook."""
    return FleetServices(stand_in(state_dir), "r1", said, waiting=Mock(), display=Mock())


def test_a_warning_of_the_fleet_is_printed_once_in_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    fleet, printed = SimpleNamespace(workers=pod(2), warnings=(WARNING,)), []

    def current(_: object, said: Collection[str]) -> Any:
        printed.append(set(said))
        return fleet

    monkeypatch.setattr(view, "current", current)
    monkeypatch.setattr(view, "with_host_keys", lambda *_: (fleet, pod(2)))
    services = services_of(tmp_path, "another warning")
    for _ in range(2):
        services.fleet()
        services.workers_of(["pod"])
    assert logged.messages == []
    assert printed == [{"another warning"}, {"another warning", WARNING}]
    services = services_of(tmp_path)
    for _ in range(2):
        services.workers_of(["pod"])
    assert [(record.levelname, record.getMessage()) for record in logged.records] == [("WARNING", WARNING)]


@pytest.mark.parametrize("outside", [False, True])
def test_a_node_that_the_grant_no_longer_covers_comes_back_only_if_that_is_allowed(
    fleet: FleetDir, outside: bool
) -> None:
    fleet.create("pod", "v4-8")
    services = FleetServices(fleet.settings(), "r1", outside_grant=outside, waiting=Mock(), display=Mock())
    plan = services.remember([f"{fleet.location()}/nodes/pod"], Mock())
    fleet.act("delete", "pod")
    (fleet.path / "grant.yml").write_text(
        "ends: 2100-01-01\nlines: [4 spot Cloud TPU v4 chips in zone us-central2-b]\n"
    )
    with contextlib.nullcontext() if outside else pytest.raises(UsageError, match="no line of the grant covers a v4-8"):
        services.bring_back(plan, "r1/2", Requests())
    assert fleet.api.call("GET", f"v2/{fleet.location()}/nodes/pod")[0] == (200 if outside else 404)
