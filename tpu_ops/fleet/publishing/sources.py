"""Sources and destinations of a published snapshot: a file, a web server, a bucket, a host that ssh reaches."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from tpu_ops import files
from tpu_ops.cloud import buckets
from tpu_ops.config import Settings
from tpu_ops.config.hosts import USER_AT_HOST, is_loopback
from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.fleet.publishing import web
from tpu_ops.fleet.publishing.documents import BEGINNING, LARGEST
from tpu_ops.ssh import openssh

#: Value of a source that stands for the API, not for a published snapshot.
API = ""

#: Default path of the snapshot on a host from which it is read by ssh.
PATH_THERE = "/var/lib/tpu_ops/snapshot.json"

#: Permissions of a snapshot that is published as a file: it contains no secrets.
MODE = 0o644

_SSH = re.compile(rf"ssh:(?P<host>{USER_AT_HOST})(?::(?P<path>.+))?")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FORMS = "a PATH, https://..., gs://BUCKET/OBJECT, ssh:HOST[:PATH], or api"
_CHUNK = 1024 * 1024


def parse(text: str, folder: Path, where: str) -> str:
    """Return a source in its canonical form.

    Args:
        text: The source as the user writes it; ``api`` is the API.
        folder: The directory that a relative path starts from.
        where: Where the user wrote the text, for errors.

    Raises:
        UsageError: The text is not a valid source.
    """
    if text == "api":
        return API
    if not text or not text.isprintable():
        raise UsageError("this is not a source of a snapshot", where=where, fix=f"use {_FORMS}")
    if text.startswith("gs://"):
        buckets.split(text, where)
        return text
    if text.startswith("ssh:"):
        if not _SSH.fullmatch(text):
            raise UsageError(
                f"{text!r:.80} does not name a host to read from", where=where, fix="write it as ssh:HOST[:PATH]"
            )
        return text
    if _SCHEME.match(text):
        return _url(text, where)
    return str(folder / files.expanded(text, where))


def named(settings: Settings) -> str:
    """Return the source in the settings, or "".

    Raises:
        UsageError: The text is not a valid source.
    """
    return parse(settings.snapshot, settings.file.parent, f"{settings.file}, key 'snapshot', or TPU_OPS_SNAPSHOT")


def _url(text: str, where: str) -> str:
    try:
        parts = urlsplit(text)
        host, secret = parts.hostname, parts.username is not None or parts.password is not None
        parts.port  # noqa: B018 - an invalid port raises
    except ValueError:
        host, secret = None, False
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(f"{text!r:.80} is not an address to read from", where=where, fix=f"use {_FORMS}")
    if parts.scheme == "http" and not is_loopback(host):
        raise UsageError("http is only for this machine", where=f"{where}, {shown(text)}", fix="use https")
    if secret:
        raise UsageError("an address that contains a password would be stored", where=where, fix="leave it out")
    return text


def shown(source: str) -> str:
    """Return a source as messages show it: without the query of a web address, which can contain a signature."""
    return source.partition("?")[0] if _SCHEME.match(source) and not source.startswith("gs://") else source or "the API"


def read(source: str, settings: Settings) -> bytes:
    """Return the content of a source, at most LARGEST bytes.

    Raises:
        CloudError: The source cannot be read in time, or its content is larger.
    """
    timeout = settings.request_timeout
    if source.startswith("gs://"):
        return buckets.read(source, settings.auth, limit=LARGEST, timeout=timeout)
    if match := _SSH.fullmatch(source):
        return _read_ssh(source, match["host"], match["path"] or PATH_THERE, timeout)
    if _SCHEME.match(source):
        return web.read(source, shown(source), limit=LARGEST, timeout=timeout)
    named = f"with key 'snapshot' in {settings.file} or TPU_OPS_SNAPSHOT" if settings.snapshot else "with --from"
    return _read_file(Path(source), named)


def destination(text: str, folder: Path, where: str) -> str:
    """Return the destination of a snapshot: a path or ``gs://BUCKET/OBJECT``.

    Args:
        text: The destination as the user writes it.
        folder: The directory that a relative path starts from.
        where: Where the user wrote the text, for errors.

    Raises:
        UsageError: A snapshot cannot be written to this destination.
    """
    remote = text == "api" or text.startswith("ssh:") or (_SCHEME.match(text) and not text.startswith("gs://"))
    if remote or not text or not text.isprintable():
        raise UsageError(
            f"{shown(text)!r:.80} cannot be written to", where=where, fix="use a PATH or gs://BUCKET/OBJECT"
        )
    return parse(text, folder, where)


def write(destination: str, text: str, settings: Settings) -> None:
    """Publish a snapshot atomically.

    Args:
        destination: A result of `destination`.
        text: The document as JSON.
        settings: The fleet's settings.

    Raises:
        UsageError: The destination is a directory, a device or the like.
        CloudError: The bucket does not accept the object.
        OpsError: The file cannot be written.
    """
    if destination.startswith("gs://"):
        buckets.write(
            destination,
            text.encode(),
            settings.auth,
            content_type="application/json",
            timeout=settings.request_timeout,
        )
        return
    path = Path(destination)
    try:
        if path.is_dir():
            raise UsageError("this is a directory", where=str(path), fix="name a file in it")
        if path.exists() and not path.is_file():
            raise UsageError(
                "this is not a regular file",
                where=str(path),
                fix="name another file, or a path that does not exist yet",
            )
        files.replace(path, text, MODE)
    except OSError as exc:
        raise OpsError(
            f"the snapshot cannot be published: {exc.strerror or exc}",
            where=str(path),
            fix=f"create the directory {path.parent}, and check that you can write there and that the file system "
            "has space",
        ) from exc


def _too_large(source: str) -> NoReturn:
    raise CloudError(
        f"the published snapshot is larger than {LARGEST // 2**20} MiB", where=source, fix="check that it is a snapshot"
    )


def _read_file(path: Path, named: str) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CloudError("this is not a file", where=str(path), fix="name the file that was published")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as exc:
        raise CloudError(
            f"the published snapshot cannot be read: {exc.strerror or exc}",
            where=str(path),
            fix=f"ask the snapshot's publisher to make the file readable, or set another snapshot {named}",
        ) from exc
    return data if len(data) <= LARGEST else _too_large(str(path))


def ssh_command(host: str, path: str) -> list[str]:
    """Return the command that prints a file of another host, with the user's own ssh config."""
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T"]
    user, at, place = host.rpartition("@")
    return ["ssh", *options, "--", f"{user}{at}{place.strip('[]')}", f"cat -- {shlex.quote(path)}"]


def _read_pipe(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the output of a process; stop reading above the maximum size of a snapshot."""
    assert process.stdout is not None  # noqa: S101 - for the type checker
    handle, data = process.stdout.fileno(), bytearray()
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    while len(data) <= LARGEST:
        # Poll up to the deadline: a child of the process can keep the pipe open after the process has ended.
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        piece = os.read(handle, _CHUNK)
        if not piece:
            break
        data += piece
    return bytes(data)


def _read_ssh(source: str, host: str, path: str, timeout: float) -> bytes:
    # A file, not a pipe: an ssh master in the background would keep a pipe for standard error open.
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                ssh_command(host, path),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        except OSError as exc:
            raise openssh.absent(exc) from exc
        deadline, over = time.monotonic() + timeout, False
        try:
            data = _read_pipe(process, deadline)
            if len(data) <= LARGEST:
                process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            data, over = b"", True
        finally:
            # This also kills the children of ssh, but not an ssh master, which has its own session.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        said.seek(0)
        text = said.read(_CHUNK).decode(errors="replace")
    if len(data) > LARGEST:
        _too_large(source)
    if over or process.returncode:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        why = f"ssh took longer than {timeout:g} s" if over else lines[-1] if lines else "ssh failed"
        raise CloudError(
            f"the published snapshot cannot be read: {why}",
            where=source,
            fix=f"this command shows the reason: `{shlex.join(ssh_command(host, path))}`",
        )
    # Login shells may print other text before the command's output.
    return data[max(0, data.find(BEGINNING)) :]
