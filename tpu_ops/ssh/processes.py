"""Runs and ends ssh processes, and remote command lines over a master or by ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tpu_ops.ssh import mux, openssh
from tpu_ops.ssh.mux import Absent, Master, Unavailable
from tpu_ops.ssh.replies import Output

#: Seconds that a master on this machine has to answer.
CONTROL_LIMIT = 5.0
_POLL = 0.05

#: A remote command line that is running: an ssh process, or a session over a master.
Process = asyncio.subprocess.Process | mux.Session


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    *,
    stdout: int = asyncio.subprocess.PIPE,
    limit: int = 2**16,
    held: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ssh, or a program that uses ssh, for the length of a `with` block; then kill the process if it still runs.

    Args:
        command: The command line.
        stdout: Where the process's output goes; its input and error output are pipes.
        limit: Maximum size of the output that is read at once, in bytes.
        held: Descriptors that the process inherits, such as those of locked files.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        limit=limit,
        start_new_session=True,
        pass_fds=held,
        env=openssh.environment(),
    )
    try:
        yield process
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def session(
    master: Master | None, command: Sequence[str], *, limit: int = 2**16, shared: bool = False
) -> AsyncIterator[Process]:
    """Run a remote command line for the length of a `with` block: over a master directly, or by ssh if that fails.

    Args:
        master: The worker's master; None if its address is unknown.
        command: ssh's command line, whose last word is the remote command line.
        limit: Maximum size of the output that is read at once, in bytes.
        shared: Whether ssh could do nothing without a master either.

    Raises:
        Absent: ``shared``, and there is no master.
    """
    direct = None
    if master:
        try:
            direct = await mux.open_session(master, command[-1], limit=limit, patience=CONTROL_LIMIT)
        except Unavailable as exc:
            if shared and isinstance(exc, Absent):
                raise
    if direct:
        with contextlib.closing(direct):
            yield direct
    else:
        async with started(command, limit=limit) as process:
            yield process


def _scratch() -> IO[bytes]:
    """Return a temporary file, in memory if possible: a full disk must not prevent connections."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tpu_ops"), "w+b")
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("w+b")


async def quiet(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command without input; return its exit code and output. The exit code is None after a timeout.

    The output goes to a file, not a pipe: a master in the background can keep a pipe open for minutes.
    """
    with _scratch() as said:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=openssh.environment(),
        )
        try:
            async with asyncio.timeout(limit):
                await process.wait()
        except TimeoutError:
            return None, ""
        finally:
            await end(process)
        said.seek(0)
        return process.returncode, said.read().decode(errors="replace")


class Said(NamedTuple):
    """The output of a process so far."""

    stdout: Output
    stderr: Output


async def converse(
    process: Process, said: Said, data: bytes, begun: bytes, heard: Callable[[], None], *, attended: bool = False
) -> None:
    """Write a process's input and read its output until it ends.

    Args:
        process: A process with three pipes.
        said: Receives the output as it arrives.
        data: The input. The process can end before it has read all input.
        begun: Bytes that the command prints first, by which its start is recognised.
        heard: Called once ``begun`` has arrived.
        attended: Whether the input stays open until the process ends. By the input's end, the process then notices if
            this process ends.
    """
    assert process.stdin and process.stdout and process.stderr  # noqa: S101, PT018 - for the type checker
    await asyncio.gather(
        _feed(process.stdin, data, attended),
        _read(process.stdout, said.stdout, begun, heard),
        _read(process.stderr, said.stderr),
    )
    process.stdin.close()
    await process.wait()


async def _feed(writer: asyncio.StreamWriter, data: bytes, attended: bool) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data)
        await writer.drain()
    if not attended:
        writer.close()


async def _read(
    reader: asyncio.StreamReader, said: Output, begun: bytes = b"", heard: Callable[[], None] | None = None
) -> None:
    while piece := await reader.read(2**16):
        said.add(piece)
        if heard and begun in said.data:
            heard()
            heard = None


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that is still running, collect it, and close its pipes.

    Process.wait is not used: it would wait until a master, which also holds these pipes, ends the remote command.
    """
    transport = process._transport  # type: ignore[attr-defined] # asyncio has no public way to it
    cancelled: asyncio.CancelledError | None = None
    try:
        if process.returncode is None:
            # os.kill, since Process.kill and closing the transport could collect a process that has just ended:
            # asyncio's own watcher would then report 255.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # Poll: a killed process is collected soon, but asyncio reports that only after the end of its pipes.
        while process.returncode is None:
            try:
                await asyncio.sleep(_POLL / 10)
            except asyncio.CancelledError as exc:
                # Cancelled again, since the loop is being closed: wait on, or asyncio's watcher would report an error
                # later.
                cancelled = exc
    finally:
        transport.close()
    if cancelled:
        raise cancelled


def answer(command: Sequence[str], limit: float = CONTROL_LIMIT) -> subprocess.CompletedProcess[str]:
    """Run a short command of OpenSSH without input, such as `ssh -G` or `ssh-keygen`, and return what it printed.

    Raises:
        OSError: OpenSSH is not installed.
        subprocess.TimeoutExpired: The command took longer than `limit` seconds.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
        check=False,
        env=openssh.environment(),
    )
