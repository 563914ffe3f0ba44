"""The user's ssh keys: those in the user's ssh config, the one for a new node, and why ssh does not use a key."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

from tpu_ops.config import Settings
from tpu_ops.errors import UsageError
from tpu_ops.ssh import openssh
from tpu_ops.ssh.known_hosts import valid_key
from tpu_ops.ssh.processes import answer

#: Seconds that an ssh agent has to accept a connection.
_LIMIT = 5.0
#: Beginning of a public key. A public key in place of a private key names a key that an ssh agent holds.
_PUBLIC = re.compile(rb"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ ")


def named(config: Path) -> tuple[tuple[str, str], ...]:
    """Return the agent and the keys that the user's ssh config names for all hosts, as options (keyword, value).

    An agent whose socket does not exist is left out, since ssh would not fall back to SSH_AUTH_SOCK.
    """
    # IdentityFile=none removes ssh's default keys from the output; IgnoreUnknown makes ssh ignore misspelt options.
    *words, host = openssh.effective(config, "any")
    try:
        done = answer([*words, "-o", "IdentityFile=none", "-o", "IgnoreUnknown=*", host])
    except (OSError, subprocess.TimeoutExpired):
        return ()
    said = [line.partition(" ")[::2] for line in done.stdout.splitlines()]
    agents = [value for key, value in said if key == "identityagent" and Path(os.path.expandvars(value)).is_socket()]
    keys = [value for key, value in said if key == "identityfile" and value != "none"]
    # Quote the paths, which can contain blanks. Tokens such as %d are not escaped: ssh expands them.
    return (
        *(("IdentityAgent", f'"{agent}"') for agent in agents),
        *(("IdentityFile", f'"{key}"') for key in keys),
    )


def fault(key: Path) -> str:
    """Return why ssh does not offer a private key, and the fix; empty if ssh offers it."""
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
            f"{key} has a passphrase, and tpu_ops does not ask for passphrases: {add}, if no agent holds the key yet "
            "(`ssh-add -l`); "
            "or log in with `tpu_ops ssh HOST` first: commands then use the connection of this login"
        )
    if "permissions" in why:
        return f"other users can read {key}, so ssh does not use the key: `chmod 600 {quoted}`"
    return f"ssh cannot use {key} ({why}): see `ssh-keygen -y -f {quoted}`, or set another key" if why else ""


def agent_fault() -> str:
    """Return why ssh cannot reach the agent in SSH_AUTH_SOCK, and the fix; empty if it can, or if this is not set."""
    path = os.environ.get("SSH_AUTH_SOCK", "")
    if not path:
        return ""
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(_LIMIT)
            agent.connect(path)
    except OSError as exc:
        return (
            f"no ssh agent answers at {path} ({exc.strerror or exc}), which SSH_AUTH_SOCK names: this may be the agent "
            "of an earlier login, as in tmux or screen; set SSH_AUTH_SOCK to its value in a new login shell"
        )
    return ""


def _why(key: Path) -> str:
    """Return why OpenSSH cannot use a key without a passphrase; empty if it can use the key.

    Raises:
        OSError: The key cannot be read, or ssh-keygen cannot be started.
        subprocess.TimeoutExpired: ssh-keygen took too long.
    """
    with key.open("rb") as file:
        if _PUBLIC.match(file.read(64)):
            return ""
    done = answer(["ssh-keygen", "-y", "-P", "", "-f", str(key)])
    found = re.search(r"^Load key .*: (.+)$", done.stderr, re.MULTILINE) if done.returncode else None
    return found[1].strip() if found else ""


def ssh_keys(settings: Settings) -> str:
    """Return the `ssh-keys` metadata that allows the fleet's user to log in with the fleet's key.

    Raises:
        UsageError: No key is set, or the file of the public key does not contain exactly one key.
    """
    private = settings.private_key
    if private is None:
        raise UsageError(
            "there is no ssh key with which to log in on the new node",
            where=f"{settings.file}, key 'private_key'",
            fix="create a key (ssh-keygen -t ed25519), or set your key there or in TPU_OPS_PRIVATE_KEY",
        )
    public = Path(f"{private}.pub")
    fix = f"write the public key: ssh-keygen -y -f {shlex.quote(str(private))} > {shlex.quote(str(public))}"
    try:
        text = public.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError("the public half of the ssh key cannot be read", where=str(public), fix=fix) from exc
    words = text.split()
    if len(words) < 2 or not valid_key(words[0], words[1]):
        raise UsageError("this is not an ssh public key", where=str(public), fix=fix)
    count = sum(valid_key(*pair) for pair in itertools.pairwise(re.split(r"[\s,;]+", text)))
    if count > 1:
        raise UsageError(f"this file holds {count} keys, but a node gets exactly one", where=str(public), fix=fix)
    return f"{settings.user}:{words[0]} {words[1]} {settings.user}"
