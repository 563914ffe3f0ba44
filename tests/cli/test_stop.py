"""The grace that `tpu_ops stop` and `unlock` accept."""

from __future__ import annotations

import argparse
from types import ModuleType

import pytest

from tpu_ops.cli import stop, unlock
from tpu_ops.protocol import spec, wire


@pytest.mark.parametrize(
    ("command", "most"), [(stop, spec.MAX_GRACE), (unlock, wire.MAX_UNLOCK_GRACE)], ids=["stop", "unlock"]
)
def test_a_grace_that_workers_do_not_allow_is_a_usage_error(
    command: ModuleType, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(["--grace", f"{most:.0f}", "r1"]).grace == most
    with pytest.raises(SystemExit):
        parser.parse_args(["--grace", f"{most + 1:.0f}", "r1"])
    assert f"{most + 1:.0f} is more than {most:.0f} seconds, the most that a worker allows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--grace", "soon", "r1"])
    assert "'soon' is not a number: give a number of seconds" in capsys.readouterr().err
