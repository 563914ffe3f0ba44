"""A person's server on this host: its unit, and the requests that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.specs import myself
from tpu_ops.host import environment, servers, unit
from tpu_ops.protocol.wire import PROTOCOL, Refused


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The commands that systemd gets, and its answer, for a request of the present user with root's rights."""
    found: dict[str, Any] = {"commands": [], "answer": (0, "")}
    variables = tmp_path / "jax.env"
    variables.write_text("JAX_PLATFORMS=cpu\n")

    def call(command: list[str], limit: float) -> tuple[int, str]:
        found["commands"].append(command)
        return tuple(found["answer"])

    monkeypatch.setattr(unit, "call", call)
    monkeypatch.setattr(servers, "require_root", lambda: None)
    monkeypatch.setattr(servers, "asking", myself)
    monkeypatch.setattr(environment, "load_config", lambda: {"environment_files": [str(variables)]})
    found["variables"] = variables
    return found


def test_the_unit_belongs_to_the_person_who_asks_and_is_named_after_them(systemd):
    assert servers.start({"protocol": PROTOCOL, "server": "jupyter"}) == {"ok": True, "started": True}
    (command,) = systemd["commands"]
    person = myself()
    assert f"--unit=tpu-jupyter-{person.name}.service" in command
    assert {
        f"--property=User={person.name}",
        "--property=RuntimeDirectoryMode=0700",
        f"--property=RuntimeDirectory=tpu-jupyter-{person.name}",
        f"--property=EnvironmentFile={systemd['variables']}",
    } <= set(command)
    assert command[-2:] == ["/bin/bash", f"{person.home}/.local/share/tpu_ops/jupyter/{os.uname().nodename}/start"]


@pytest.mark.parametrize(
    ("action", "answer", "value"),
    [
        (servers.start, (1, "Unit tpu-jupyter-x.service was already loaded"), {"ok": True, "started": False}),
        (servers.stop, (0, ""), {"ok": True, "stopped": True}),
        (servers.stop, (5, "Unit tpu-jupyter-x.service not loaded."), {"ok": True, "stopped": False}),
    ],
)
def test_a_request_that_is_repeated_changes_nothing(systemd, action, answer, value):
    systemd["answer"] = answer
    assert action({"protocol": PROTOCOL, "server": "jupyter"}) == value


def test_other_programs_other_versions_and_missing_files_are_refused(systemd):
    with pytest.raises(Refused, match=r"unknown server '\.\./bin'"):
        servers.start({"protocol": PROTOCOL, "server": "../bin"})
    with pytest.raises(Refused, match="protocol version"):
        servers.stop({"protocol": PROTOCOL + 1, "server": "jupyter"})
    systemd["variables"].unlink()
    with pytest.raises(Refused, match=r"jax\.env"):
        servers.start({"protocol": PROTOCOL, "server": "jupyter"})
    assert systemd["commands"] == []
