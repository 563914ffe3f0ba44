"""Finds the address to which ssh connects for a jump host that is not a worker of the fleet."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tpu_ops.ssh import openssh
from tpu_ops.ssh.processes import answer


def place_of(jump_config: Path, options: Sequence[str], name: str) -> tuple[str, int]:
    """Return the address and port of a jump host; the address is empty if ssh would not connect to it directly.

    ssh does not connect directly if the jump host is behind another proxy, or if a master connection to it is open.

    Args:
        jump_config: The OpenSSH configuration for the jump host.
        options: ssh options that precede the jump host's name.
        name: The name of the jump host for ssh.
    """
    unknown = ("", 0)
    *check, host = openssh.control(jump_config, name, "check")
    *effective, _ = openssh.effective(jump_config, name)
    try:
        if answer([*check, *options, host]).returncode == 0:
            return unknown
        done = answer([*effective, *options, host])
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    found = dict(line.split(" ", 1) for line in done.stdout.lower().splitlines() if " " in line)
    proxied = any(found.get(key, "none") != "none" for key in ("proxycommand", "proxyjump"))
    port = found.get("port", "")
    return unknown if done.returncode or proxied or not port.isdecimal() else (found.get("hostname", ""), int(port))
