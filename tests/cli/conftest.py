"""Commands as a user types them, in this process."""

from __future__ import annotations

import os

import pytest

from tpu_ops.cli.main import main

#: Plays OpenSSH: no master is open, and one is opened where $SSH_SAYS is empty, else ssh says that and
#: fails. Every call is written down.
SSH = r"""#!/bin/sh
echo "$*" >>"$SSH_CALLS"
case "$*" in
*"-O check"*) exit 1 ;;
*"ProxyCommand=false"*) echo "Connection closed by UNKNOWN port 65535" >&2; exit 255 ;;
*"-f -N"*) ;;
*) exit 0 ;;
esac
[ -z "$SSH_SAYS" ] || { echo "$SSH_SAYS" >&2; exit 255; }
"""


@pytest.fixture
def tpu_ops(capfd):
    """Runs a command and returns its exit code, output and what it said besides."""

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(argv)
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A stand-in for ssh that connects nowhere; returns what it was called with."""
    program, calls = tmp_path / "bin" / "ssh", tmp_path / "ssh-calls"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CALLS", str(calls))
    monkeypatch.setenv("SSH_SAYS", "")
    return lambda: calls.read_text().splitlines()
