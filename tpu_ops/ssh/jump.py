"""Finds out where ssh connects to for a jump that is no worker of the fleet."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tpu_ops.ssh import openssh

#: Seconds for ssh to print what it makes of its configuration, or to ask a connection that is open.
_LIMIT = 5.0


def place_of(jump_config: Path, options: Sequence[str], name: str) -> tuple[str, int]:
    """Return the address and port of a jump; the address is empty where no plain connection says whether it is there.

    That is behind a further proxy, or where a connection is open that ssh takes in place of a new one.

    Args:
        jump_config: The OpenSSH configuration that is used for it.
        options: Options of ssh that go before its name.
        name: Its name, as ssh gets it.
    """
    unknown = ("", 0)
    *check, host = openssh.control(jump_config, name, "check")
    *effective, _ = openssh.effective(jump_config, name)
    try:
        if _run([*check, *options, host]).returncode == 0:
            return unknown
        done = _run([*effective, *options, host])
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    found = dict(line.split(" ", 1) for line in done.stdout.lower().splitlines() if " " in line)
    proxied = any(found.get(key, "none") != "none" for key in ("proxycommand", "proxyjump"))
    port = found.get("port", "")
    return unknown if done.returncode or proxied or not port.isdecimal() else (found.get("hostname", ""), int(port))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
        env=openssh.environment(),
    )
