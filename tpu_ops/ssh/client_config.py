"""The text of a fleet's ssh_config, and the ssh options that Ansible and the commands use too.

Ansible, the commands and the user's own ssh get the same options, so that they share master connections. A worker's
host keys are stored under an alias, made of the node's id and the worker's index: the worker's address can change, but
its host key must stay the same.
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

#: First words of a fleet's ssh config, by which it is distinguished from other files.
HEADER = "# Written by tpu_ops"

#: Maximum length of a Unix socket's path in bytes, including the final NUL.
_ADDRESS = 104 if sys.platform == "darwin" else 108
#: Maximum length of the path of a directory in which OpenSSH can create a control socket. Of the socket's path, two
#: separators take 2 bytes, and the random suffix of its temporary name takes 16.
_LONGEST_MUX_DIR = _ADDRESS - 1 - CONTROL_NAME - 2 - 16

#: Paths for which quotes are enough, in a shell and in every ssh option: no other escaping is needed.
_PLAIN = re.compile(r"[A-Za-z0-9/._@+=:, -]+")


def mux_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory for the control sockets of a user, without creating it."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime if runtime and _is_usable(Path(runtime), uid) else _cache(environ), "tpu_ops", "mux")
    fits = path.is_absolute() and len(os.fsencode(path)) <= _LONGEST_MUX_DIR and _PLAIN.fullmatch(str(path))
    return path if fits else Path(f"/tmp/tpu_ops-{uid}")  # noqa: S108 - make_mux_dir and openssh.guard check its owner


def _is_usable(directory: Path, uid: int) -> bool:
    """Return whether a directory belongs to this user or can be created.

    XDG_RUNTIME_DIR can be the directory of another user after `su`, of a session that has ended, or of another machine
    that submitted this job to a scheduler.
    """
    try:
        return directory.stat().st_uid == uid
    except FileNotFoundError:
        above = next((parent for parent in directory.absolute().parents if parent.exists()), Path("/"))
        return os.access(above, os.W_OK | os.X_OK)
    except OSError:
        return False


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the user's cache directory. If HOME is not set, the home directory is taken from the password file."""
    home = Path(environ.get("HOME") or files.expanded("~", "HOME"))
    return home.absolute() / ".cache"


def make_mux_dir(path: Path) -> None:
    """Create the directory for the control sockets, which only this user can access.

    Raises:
            OpsError: The directory cannot be created, belongs to another user, or is not a directory.
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
            fix="remove this directory, or set XDG_RUNTIME_DIR to a short directory of your own",
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
        # The default key exchange of OpenSSH 9 takes ten times the processor time of curve25519.
        ("KexAlgorithms", "^curve25519-sha256"),
    )


def own_options(worker: Worker, way: Way) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that differ between workers for one worker, as (keyword, value)."""
    found = [("HostKeyAlias", worker.host_key_alias)]
    if way.control:
        found.append(("ControlPath", way.control))
    if way.proxy:
        found.append(("ProxyCommand", way.proxy))
    if way.patience:
        found.append(("ConnectTimeout", str(way.patience)))
    return tuple(found)


def arguments(options: Iterable[tuple[str, str]]) -> str:
    """Return ssh options as one string of command-line arguments, in the form that Ansible takes."""
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
    """Return the text of an OpenSSH configuration with one host per worker. Users can include it in their own.

    The only worker of a node has the node's name as well. A worker without an address gets a name that cannot be
    resolved, so that ssh never connects to another machine.

    Args:
        ways: Each worker, and how it is reached.
        user: Login name on the workers.
        private_key: The user's private key, if one is set.
        options: Options that all workers share (`common_options`).
        mux: The directory for the control sockets.
        forward_agent: Whether the user's ssh agent is forwarded.
    """
    lines = [f"{HEADER} from the Cloud TPU API; changes are lost at the next refresh."]
    called = names([worker for worker, _ in ways])
    every = ",".join(name for each in called.values() for name in each)
    if ways:
        lines += ["", *openssh.guard(mux, [every])]
    for worker, way in ways:
        lines += [
            "",
            f"Host {' '.join(called[worker.host])}",
            f"    HostName {host_name(worker, way)}",
            *(f"    {key} {value}" for key, value in own_options(worker, way)),
        ]
    if ways:
        # A Host line with many names would take ssh memory and time that grow with the square of their number.
        lines += ["", f"Match originalhost {every}", f"    User {user}"]
        if private_key is not None:
            lines.append(f"    IdentityFile {openssh.quoted(private_key)}")
        lines.append(f"    ForwardAgent {'yes' if forward_agent else 'no'}")
        lines += [f"    {key} {value}" for key, value in options]
    return "\n".join(lines) + "\n"


def names(workers: Sequence[Worker]) -> dict[str, list[str]]:
    """Return host -> its names: a node's only worker also has the node's name, unless another worker is called so."""
    hosts = {worker.host for worker in workers}
    return {
        worker.host: [
            worker.host,
            *([worker.label] if worker.node.worker_count == 1 and worker.label not in hosts else []),
        ]
        for worker in workers
    }
