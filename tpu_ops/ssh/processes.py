"""Runs ssh processes, and remote command lines over a master or by ssh, and ends them."""

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
from tpu_ops.ssh.mux import Master, Unavailable
from tpu_ops.ssh.replies import Output

#: Seconds for ssh to talk to a master on this machine.
CONTROL_LIMIT = 5.0
_POLL = 0.05

#: A running remote command line.
Process = asyncio.subprocess.Process | mux.Session


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    *,
    stdout: int = asyncio.subprocess.PIPE,
    limit: int = 2**16,
    held: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ssh, or a program that uses ssh, for the length of a block; kill the process if it is still running then.

    Args:
        command: The command line.
        stdout: Where its output goes; its input and errors are pipes.
        limit: Longest part of its output that is read at once, in bytes.
        held: Descriptors that the process inherits, such as those of locks.
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
async def session(master: Master | None, command: Sequence[str], *, limit: int = 2**16) -> AsyncIterator[Process]:
    """Run a remote command line for the length of a block: over a master directly, or by ssh if that fails.

    Args:
        master: The worker's master; None if its address is unknown.
        command: ssh's command line, whose last word is the remote command line.
        limit: See `started`.
    """
    direct = None
    if master:
        with contextlib.suppress(Unavailable):
            direct = await mux.open_session(master, command[-1], limit=limit, patience=CONTROL_LIMIT)
    if direct:
        with contextlib.closing(direct):
            yield direct
    else:
        async with started(command, limit=limit) as process:
            yield process


def _scratch() -> IO[bytes]:
    """Return an unnamed file, in memory if possible: a full disk must not prevent connections."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tpu_ops"), "w+b")
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("w+b")


async def quiet(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command without input; return its exit code and output. The code is None if it was killed at the limit.

    Its output goes to a file, not a pipe: a master in the background may keep a pipe open for minutes.
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
        said: Receives the output.
        data: The input; a process may end without reading all of it.
        begun: The first bytes that the command prints.
        heard: Called when ``begun`` has arrived.
        attended: Whether the input stays open until the process ends, so that it notices the end of this process.
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

    A master holds these pipes too, for as long as the remote command lives; Process.wait would wait for that.
    """
    transport = process._transport  # type: ignore[attr-defined] # asyncio has no public way to it
    cancelled: asyncio.CancelledError | None = None
    try:
        if process.returncode is None:
            # Process.kill and the transport's close might collect a process that has just ended, and asyncio's own
            # watcher would then report 255.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # A killed process is collected soon, but asyncio has no event for this apart from the end of its pipes.
        while process.returncode is None:
            try:
                await asyncio.sleep(_POLL / 10)
            except asyncio.CancelledError as exc:
                # Cancelled again: the loop is being closed, and asyncio's watcher would complain about a closed loop.
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
