"""A run that another shell has started, which asks for other projects or zones and so has a state of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_control import OLD, Answers
from tpu_ops import config
from tpu_ops.config import Settings
from tpu_ops.errors import UsageError
from tpu_ops.fleet.state import Files, Snapshot, question_of
from tpu_ops.runs import control, records

Shell = dict[str, str]


def settings(folder: Path, shell: Shell, fleet: str = "fleet", **options: Any) -> Settings:
    """Return the settings of a fleet as a shell with these variables has them."""
    environ = {"HOME": str(folder / "home"), "TPU_OPS_STATE": str(folder / "state"), **shell}
    data = {"plugin": "tpu_vm", "projects": ["lab"], "user": "ada", **options}
    return config.from_data(data, folder / fleet / "inventory/tpu_vm.yml", environ)


def begin(of: Settings) -> None:
    """Have a run started with these settings."""
    records.write(of.state_dir, OLD)
    Files(of.state_dir).write_snapshot(question_of(of), Snapshot(1.0, ()))


async def fix_of(monkeypatch: pytest.MonkeyPatch, of: Settings, shell: Shell, word: str = "old") -> str:
    """Return what is to be done in a shell that asks for a run of which nobody there knows."""
    for name in ("TPU_OPS_PROJECT", "TPU_OPS_ZONES"):
        monkeypatch.setenv(name, shell.get(name, ""))
    fleet: Any = SimpleNamespace(workers=(), listed=(), settings=of)
    fanout: Any = Answers()
    with pytest.raises(UsageError) as caught:
        await control.find(fleet, fanout, word)
    return caught.value.fix


@pytest.mark.parametrize(
    ("started", "asked", "command"),
    [
        ({"TPU_OPS_ZONES": "z-b,z-a"}, {}, "`TPU_OPS_ZONES=z-a,z-b tpu_ops status old`"),
        ({"TPU_OPS_PROJECT": "mine"}, {}, "`TPU_OPS_PROJECT=mine tpu_ops status old`"),
        ({}, {"TPU_OPS_ZONES": "z-a"}, "`env -u TPU_OPS_ZONES tpu_ops status old`"),
        (
            {"TPU_OPS_PROJECT": "mine"},
            {"TPU_OPS_ZONES": "z-a"},
            "`env -u TPU_OPS_ZONES TPU_OPS_PROJECT=mine tpu_ops status old`",
        ),
        (
            {"TPU_OPS_PROJECT": "mine", "TPU_OPS_ZONES": "z-a"},
            {"TPU_OPS_ZONES": "z-a"},
            "`TPU_OPS_PROJECT=mine TPU_OPS_ZONES=z-a tpu_ops status old`",
        ),
    ],
)
async def test_a_run_of_a_shell_that_asks_for_other_places_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Shell, asked: Shell, command: str
) -> None:
    begin(settings(tmp_path, started))
    fix = await fix_of(monkeypatch, settings(tmp_path, asked), asked)
    what = "a run of this name was started in a shell with other projects or zones"
    assert fix == f"{what}: {command}; `tpu_ops list` shows the workers, `tpu_ops runs` the runs"
    other = await fix_of(monkeypatch, settings(tmp_path, asked), asked, "older")
    assert "other projects" not in other


@pytest.mark.parametrize(
    "changes", [{"fleet": "other/fleet"}, {"endpoint": "127.0.0.1:1"}], ids=["another fleet", "a test service"]
)
async def test_runs_of_what_is_no_part_of_this_fleet_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    begin(settings(tmp_path, {"TPU_OPS_ZONES": "z-a"}, **changes))
    assert "other projects" not in await fix_of(monkeypatch, settings(tmp_path, {}), {})
