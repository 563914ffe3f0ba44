"""Resources that the lab and its workers share: directories of the guest agents, the network, kernel limits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tpu_ops.files import state_root
from tpu_ops.lab.backend import BackendError

#: Maximum number of bytes that are read from a guest agent's file: root in the worker can write files of any size.
MAX_BYTES = 1 << 20
#: Number of inotify instances that a worker uses after its boot, and while several users are logged in (both measured).
INOTIFY_AT_BOOT, INOTIFY_IN_USE = 8, 17
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
#: What the chips of a worker can do, as tpu_ops/lab/image/chip_service.py reports it.
CHIP_STATES = ("busy", "idle", "hung", "halted", "warming", "not-found", "silent", "broken", "refused")
_SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
_log = logging.getLogger(__name__)


def worker_directories(instance: str) -> Path:
    """Return the directory that holds one directory for each worker of a lab."""
    return state_root() / "lab" / instance / "workers"


def storage_directory(instance: str) -> Path:
    """Return the directory with the unix socket on which a lab's Cloud Storage serves workers."""
    return state_root() / "lab" / instance / "storage"


def storage_socket(instance: str, port: int) -> socket.socket:
    """Return a unix socket for a lab's Cloud Storage; it replaces the sockets of earlier processes.

    Args:
        instance: Name of the lab.
        port: The port of the lab's Cloud Storage on this machine. The socket's file is named ``<port>.sock``, so that
            workers know which of their ports leads to it.

    Raises:
        OSError: The directory cannot be written.
    """
    directory = storage_directory(instance)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in directory.glob("*.sock"):
        old.unlink()
    made = socket.socket(socket.AF_UNIX)
    handle = os.open(directory, os.O_RDONLY)
    try:
        # The path of a socket has at most 107 bytes; the directory's path can be longer.
        made.bind(f"/proc/self/fd/{handle}/{port}.sock")
    finally:
        os.close(handle)
    return made


def certificate_bundle(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of certificate authorities that this machine trusts, or None if there is none."""
    named = (environ.get("SSL_CERT_FILE"), _SYSTEM_CA)
    return next((Path(name) for name in named if name and Path(name).is_file()), None)


def entries(parent: Path) -> list[Path]:
    """Return the paths of all files in a directory; empty if the directory does not exist."""
    return sorted(parent.iterdir()) if parent.is_dir() else []


def remove_directory(path: Path) -> None:
    """Remove a worker's directory; use sudo if root has created files in the directory."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and os.geteuid() != 0:
        command = ["sudo", "-n", "rm", "-rf", "--one-file-system", "--", str(path)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)


def read(path: Path) -> str:
    """Return a small file's text; empty if the file cannot be read.

    Symbolic links are not followed, since a worker might have created them.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically by one that only its owner can read; do nothing if the content is the same."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if read(path) == content.decode():
        return
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


def set_chips(directory: Path, state: str, options: Mapping[str, object] = MappingProxyType({})) -> None:
    """Set what the chips of a worker do.

    Args:
        directory: The directory that the lab and the worker share.
        state: One of `CHIP_STATES`.
        options: ``first_id``, the id of the first core, and ``two_cores``, whether each chip has two.
    """
    replace(directory / "chips.json", json.dumps({"state": state, "at": time.time(), **options}).encode())


async def ssh_answers(address: str, port: int = 22) -> bool:
    """Return whether an ssh server at this address sends its banner within two seconds."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                return await reader.readexactly(4) == b"SSH-"
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


def inotify_limit(workers: int, limit: int) -> int | None:
    """Return the required limit of inotify instances, or None if the current limit is sufficient.

    Args:
        workers: The number of running workers of all labs.
        limit: The current limit, fs.inotify.max_user_instances.
    """
    wanted = workers * INOTIFY_IN_USE + 64
    return None if limit >= wanted else max(1024, 2 * wanted)


def allow_inotify(workers: int) -> None:
    """Raise the kernel's limit of inotify instances if it is too low: systemd in each worker uses several instances.

    Raises:
        BackendError: The limit is too low and cannot be raised.
    """
    try:
        limit = int(INOTIFY.read_text())
    except OSError:
        return
    wanted = inotify_limit(workers, limit)
    if wanted is None:
        return
    setting = f"fs.inotify.max_user_instances={wanted}"
    command = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "sysctl", "-q", "-w", setting]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    if done.returncode == 0:
        _log.info("raised fs.inotify.max_user_instances from %d to %d for the lab's workers", limit, wanted)
        return
    if workers * INOTIFY_AT_BOOT < limit:
        _log.warning("fs.inotify.max_user_instances stays at %d: logins on many workers at once might fail", limit)
        return
    raise BackendError(
        f"{workers} workers need more than the {limit} inotify instances that this machine allows, and raising "
        f"this limit was refused: run `sudo sysctl -w {setting}`, or ask for fewer workers"
    )
