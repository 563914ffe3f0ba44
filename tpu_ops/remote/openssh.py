"""OpenSSH's command lines, how its options are written, and what it says when it fails."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path


def base(ssh_config: Path) -> list[str]:
    """Return the words that every call of ssh starts with."""
    return ["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"]


def open_master(ssh_config: Path, host: str) -> list[str]:
    """Return the command that opens a master connection and leaves it in the background."""
    return [*base(ssh_config), "-o", "ControlMaster=yes", "-f", "-N", "-T", host]


def control(ssh_config: Path, host: str, word: str) -> list[str]:
    """Return the command that tells a master something: ``check``, ``exit`` or ``stop``."""
    return [*base(ssh_config), "-O", word, host]


def session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over the master and opens none itself."""
    return [*base(ssh_config), "-o", "ControlMaster=no", "-T", host, command]


def effective(ssh_config: Path, host: str) -> list[str]:
    """Return the command that prints what ssh makes of a configuration for a host, and connects nowhere."""
    return [*base(ssh_config), "-G", host]


def contact(options: Iterable[tuple[str, str]], known_hosts: str, user: str, address: str) -> list[str]:
    """Return the command that writes down the host key with which a machine answers, and logs in on nothing.

    Args:
        options: How the machine is reached, as (keyword, value).
        known_hosts: File for the key, as ssh's options take it.
        user: Login name; nobody is authenticated.
        address: What to connect to.
    """
    own = (
        ("StrictHostKeyChecking", "accept-new"),
        ("UserKnownHostsFile", known_hosts),
        ("GlobalKnownHostsFile", "none"),
        ("PreferredAuthentications", "none"),
        ("BatchMode", "yes"),
        ("ControlMaster", "no"),
        ("ControlPath", "none"),
    )
    words = [word for key, value in (*own, *options) for word in ("-o", f"{key}={value}")]
    return ["ssh", "-F", "none", *words, "-T", "-l", user, address, "exit"]


def rsync_shell(ssh_config: Path) -> str:
    """Return what rsync takes as its remote shell, to go over the same masters."""
    return shlex.join([*base(ssh_config), "-o", "ControlMaster=no", "-T"])


def reason(stderr: str, code: int | None) -> str:
    """Given what ssh said, return the one line that tells why it failed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    known = [line for line in lines if "IDENTIFICATION HAS CHANGED" in line or "Host key verification" in line]
    if known:
        return "host key verification failed: another machine answers there, or its key is not known yet"
    return lines[-1] if lines else f"ssh ended with {code}"


def refused(stderr: str) -> bool:
    """Given what ssh said, return whether the worker answered with its own host key and refused the person."""
    return "Permission denied (" in stderr or "Too many authentication failures" in stderr
