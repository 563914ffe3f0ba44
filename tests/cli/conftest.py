"""Commands as a user types them, in this process."""

from __future__ import annotations

import os
import sys

import pytest

from tpu_ops.cli.main import main

#: Plays OpenSSH: no master is open, and one is opened where $SSH_SAYS is empty, else ssh says that and
#: fails. With $SSH_WAITS it waits, as for the touch of a key. Every call is written down.
SSH = r"""#!/bin/sh
echo "$*" >>"$SSH_CALLS"
case "$*" in
*"-O check"*) exit 1 ;;
*"ProxyCommand=false"*) echo "Connection closed by UNKNOWN port 65535" >&2; exit 255 ;;
*"-f -N"*) [ -z "$SSH_WAITS" ] || exec sleep 60 ;;
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
def unread(monkeypatch):
    """Has whoever reads this process's results go away before the first: the next write breaks the pipe."""

    def leave() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))

    return leave


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
    monkeypatch.setenv("SSH_WAITS", "")
    return lambda: calls.read_text().splitlines()
