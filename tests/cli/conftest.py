"""Commands as a user types them, in this process."""

from __future__ import annotations

import pytest

from tpu_ops.cli.main import main


@pytest.fixture
def tpu_ops(capfd):
    """Runs a command and returns its exit code, output and what it said besides."""

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(argv)
        return (code, *capfd.readouterr())

    return run
