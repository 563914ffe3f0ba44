"""What `tpu_ops stop` and `unlock` promise, held against what the workers do."""

from __future__ import annotations

import argparse
from types import ModuleType

import pytest

from tpu_ops.cli import stop, unlock
from tpu_ops.host import chips
from tpu_ops.host import spec as host


@pytest.mark.parametrize(
    ("command", "most"), [(stop, host.MAX_GRACE), (unlock, chips.MAX_GRACE)], ids=["stop", "unlock"]
)
def test_no_grace_is_promised_that_a_worker_does_not_give(
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
