"""What `tpu_ops stop` promises, held against what the workers do."""

from __future__ import annotations

import argparse

import pytest

from tpu_ops.cli import stop
from tpu_ops.host import spec as host
from tpu_ops.runs import spec


def test_no_grace_is_promised_that_a_worker_does_not_give(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    stop.add_arguments(parser)
    assert spec.MAX_GRACE == host.MAX_GRACE
    assert parser.parse_args(["--grace", "3600", "r1"]).grace == host.MAX_GRACE
    with pytest.raises(SystemExit):
        parser.parse_args(["--grace", "3601", "r1"])
    assert "3601 is more than the 3600 seconds that a worker gives" in capsys.readouterr().err
