"""The text of ssh_config, and the one set of ssh options behind it.

Ansible, the command line and the user's own ssh get the same options, so that each uses the connections that
another has opened. A worker is known by an alias bound to its node's id and its index: its address may change,
its host key may not.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tpu_ops import files
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import OpsError
from tpu_ops.ssh import openssh
from tpu_ops.ssh.ways import CONTROL_NAME, Way, host_name

#: How a fleet's ssh config begins, and by what it is known among other files.
HEADER = "# Written by tpu_ops"

#: Bytes of a socket's address, its final NUL included.
_ADDRESS = 104 if sys.platform == "darwin" else 108
#: Longest directory in which OpenSSH can make a control socket: two separators take 2 bytes of its address, and the
#: random suffix of the socket's first name 16.
_LONGEST_MUX_DIR = _ADDRESS - 1 - CONTROL_NAME - 2 - 16

#: Paths that mean the same to a shell, in quotes, and to every option of ssh.
_PLAIN = re.compile(r"[A-Za-z0-9/._@+=:, -]+")


def mux_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Given the environment and the user id, return the directory of the control sockets; makes nothing."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime if runtime and _is_usable(Path(runtime), uid) else _cache(environ), "tpu_ops", "mux")
    fits = path.is_absolute() and len(os.fsencode(path)) <= _LONGEST_MUX_DIR and _PLAIN.fullmatch(str(path))
    return path if fits else Path(f"/tmp/tpu_ops-{uid}")  # noqa: S108 - make_mux_dir and openssh.guard look whose it is


def _is_usable(directory: Path, uid: int) -> bool:
    """Return whether a directory is this user's or can yet be made; behind `su` it is that of whoever called it.

    The variable may be left of a session that has ended, or come from another machine with a job of its scheduler.
    """
    try:
        return directory.stat().st_uid == uid
    except FileNotFoundError:
        above = next((parent for parent in directory.absolute().parents if parent.exists()), Path("/"))
        return os.access(above, os.W_OK | os.X_OK)
    except OSError:
        return False


def _cache(environ: Mapping[str, str]) -> Path:
    """Return where a person's short-lived files are, by the password file where HOME does not say it."""
    home = Path(environ.get("HOME") or files.expanded("~", "HOME"))
    return home.absolute() / ".cache"


def make_mux_dir(path: Path) -> None:
    """Make the directory of the control sockets, for this user only.

    Raises:
        OpsError: It cannot be made, or exists and is another user's or no directory.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as exc:
        raise OpsError(
            f"the directory of the ssh control sockets cannot be created: {exc.strerror}",
            where=str(path),
            fix="set XDG_RUNTIME_DIR to a short directory of your own, or unset it",
        ) from exc
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise OpsError(
            "the directory of the ssh control sockets is not this user's own",
            where=str(path),
            fix="remove it, or set XDG_RUNTIME_DIR to a short directory of your own",
        )
    if stat.S_IMODE(info.st_mode) != 0o700:
        path.chmod(0o700)


def common_options(known_hosts: Path) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that are the same for every worker, as (keyword, value)."""
    return (
        ("UserKnownHostsFile", openssh.quoted(known_hosts)),
        ("StrictHostKeyChecking", "yes"),
        ("ControlMaster", "auto"),
        ("ControlPersist", "10m"),
        ("ServerAliveInterval", "5"),
        ("ServerAliveCountMax", "3"),
        ("ConnectTimeout", "10"),
        # The default key exchange of OpenSSH 9 costs ten times the processor time of this one.
        ("KexAlgorithms", "^curve25519-sha256"),
    )


def own_options(worker: Worker, way: Way) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that a worker has for itself, as (keyword, value)."""
    found = [("HostKeyAlias", worker.host_key_alias)]
    if way.control:
        found.append(("ControlPath", way.control))
    if way.proxy:
        found.append(("ProxyCommand", way.proxy))
    if way.patience:
        found.append(("ConnectTimeout", str(way.patience)))
    return tuple(found)


def arguments(options: Iterable[tuple[str, str]]) -> str:
    """Return options as arguments of ssh in one string, as Ansible takes them."""
    return " ".join(f"-o {shlex.quote(f'{key}={value}')}" for key, value in options)


def ssh_config(
    ways: Sequence[tuple[Worker, Way]],
    *,
    user: str,
    private_key: Path | None,
    options: Sequence[tuple[str, str]],
    mux: Path,
    forward_agent: bool = False,
) -> str:
    """Return the text of an OpenSSH configuration with one host per worker, fit to be included from another.

    A worker without an address gets a name that cannot be resolved, so that no other machine of its name answers.

    Args:
        ways: Each worker and how it is reached.
        user: Login name on the workers.
        private_key: The person's private key, if one is set.
        options: What all workers share (`common_options`).
        mux: The directory of the control sockets.
        forward_agent: Whether the person's ssh agent is forwarded.
    """
    lines = [f"{HEADER} from the Cloud TPU API; changes are lost at the next refresh."]
    if ways:
        lines += ["", *openssh.guard(mux, (worker.host for worker, _ in ways))]
    for worker, way in ways:
        lines += [
            "",
            f"Host {worker.host}",
            f"    HostName {host_name(worker, way)}",
            *(f"    {key} {value}" for key, value in own_options(worker, way)),
        ]
    if ways:
        lines += ["", "Host " + " ".join(worker.host for worker, _ in ways), f"    User {user}"]
        if private_key is not None:
            lines.append(f"    IdentityFile {openssh.quoted(private_key)}")
        lines.append(f"    ForwardAgent {'yes' if forward_agent else 'no'}")
        lines += [f"    {key} {value}" for key, value in options]
    return "\n".join(lines) + "\n"
