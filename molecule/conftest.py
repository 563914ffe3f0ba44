"""What all scenarios' tests share: people's own ssh connections, and the journal of a worker whose test failed."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Generator
from typing import Any

import pytest
from testinfra.host import Host

from tests.support.skips import UNPROVED, judge

Done = subprocess.CompletedProcess[str]
Ssh = Callable[..., Done]


@pytest.fixture
def ssh(host: Host) -> Ssh:
    """Return a function that runs a command on the worker as somebody with a new login, host keys checked."""
    variables = host.ansible.get_variables()

    def run(command: str, user: str = "ada", key: str = "") -> Done:
        arguments = ["ssh", "-l", user, "-i", key or os.environ["TPU_OPS_PRIVATE_KEY"], "-o", "IdentitiesOnly=yes"]
        # A connection of its own: an open one keeps the environment that it began with.
        arguments += ["-o", "BatchMode=yes", "-o", "ControlPath=none"]
        arguments += [*shlex.split(variables["ansible_ssh_common_args"]), variables["ansible_host"], command]
        return subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def ada(ssh: Ssh) -> Callable[[str], str]:
    """Return a function that runs a command as the person of the lab's group_vars and returns what it prints."""

    def run(command: str) -> str:
        done = ssh(command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test's report the journal of the units that failed on its worker, or else the newest lines."""
    report = yield
    judge(report, UNPROVED.read_text() if report.skipped else "")
    host: Any = getattr(item, "funcargs", {}).get("host")
    if report.failed and host is not None and call.when == "call":
        with host.sudo():
            units = host.run("systemctl list-units --failed --plain --no-legend | cut -d ' ' -f 1").stdout.split()
            chosen = " ".join(f"--unit {shlex.quote(unit)}" for unit in units)
            journal = host.run(f"journalctl --no-pager --lines 60 {chosen}").stdout
        title = f"journal of {host.backend.host}: {', '.join(units) or 'no unit failed, its newest lines'}"
        report.sections.append((title, journal))
    return report
