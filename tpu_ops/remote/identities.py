"""Private keys of a person that ssh passes over without a word where it cannot ask for anything."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

#: Seconds for ssh-keygen to read a key, whose file may be far away, and for an agent to take a connection.
_LIMIT = 5.0
#: How a public key begins. In the place of a private one it names a key that an agent holds.
_PUBLIC = re.compile(rb"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ ")


def fault(key: Path) -> str:
    """Return why ssh does not offer a private key, and what to do about it; empty where it does."""
    try:
        why = _why(key)
    except PermissionError as exc:
        return f"{key} cannot be read: {exc.strerror}"
    except (OSError, subprocess.TimeoutExpired):
        return ""
    quoted = shlex.quote(str(key))
    if "passphrase" in why:
        add = f"`ssh-add {quoted}`" if os.environ.get("SSH_AUTH_SOCK") else f'`eval "$(ssh-agent)"; ssh-add {quoted}`'
        return (
            f"{key} has a passphrase, for which nobody is asked here: {add}, if no agent holds it yet (`ssh-add -l`); "
            "or log in with `tpu_ops ssh HOST` first, and its connection is used"
        )
    if "permissions" in why:
        return f"others can read {key}, so ssh does not use it: `chmod 600 {quoted}`"
    return f"ssh cannot use {key} ({why}): see `ssh-keygen -y -f {quoted}`, or name another" if why else ""


def agent_fault() -> str:
    """Return why ssh finds no agent though one is named, and what to do about it; empty where it finds it."""
    path = os.environ.get("SSH_AUTH_SOCK", "")
    if not path:
        return ""
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(_LIMIT)
            agent.connect(path)
    except OSError as exc:
        return (
            f"no ssh agent answers at {path} ({exc.strerror or exc}), which SSH_AUTH_SOCK names: it may be that of an "
            "earlier login, as in tmux or screen; set it as a new login shell has it"
        )
    return ""


def _why(key: Path) -> str:
    """Return why OpenSSH cannot use a key without a passphrase, in its words; empty where it can.

    Raises:
        OSError: The key cannot be read, or OpenSSH not be asked.
        subprocess.TimeoutExpired: It did not say.
    """
    with key.open("rb") as file:
        if _PUBLIC.match(file.read(64)):
            return ""
    done = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", key],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
    )
    found = re.search(r"^Load key .*: (.+)$", done.stderr, re.MULTILINE) if done.returncode else None
    return found[1].strip() if found else ""
