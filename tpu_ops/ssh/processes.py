"""Runs ssh's processes, and remote command lines over a master or by ssh, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tpu_ops.ssh import mux, openssh
from tpu_ops.ssh.mux import Master, Unavailable
from tpu_ops.ssh.replies import Output

#: Seconds that ssh may take to talk to a master of this machine.
CONTROL_LIMIT = 5.0
_POLL = 0.05

#: What runs a remote command line.
Process = asyncio.subprocess.Process | mux.Session


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    *,
    stdout: int = asyncio.subprocess.PIPE,
    limit: int = 2**16,
    held: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ssh, or what uses it, for the length of a block; a process that has not ended then is killed.

    Args:
        command: The command line.
        stdout: Where its output goes; its input and errors are pipes.
        limit: Bytes that one part of its output may have where it is read in parts.
        held: Descriptors that it is given, such as those of locks.
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
    """Run a remote command line for the length of a block: over a master itself, or by ssh where it opens no session.

    Args:
        master: Of the worker; None where it is not known where it would listen.
        command: ssh's command line, whose last word is the remote one.
        limit: As for `started`.
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
    """Return a file that is nowhere: in memory, as a full disk is no reason not to reach a worker."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tpu_ops"), "w+b")
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("w+b")


async def quiet(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command without input; return its exit code (None: not ended in time, and killed) and what it said.

    Its output goes to a file, not a pipe: a master in the background may keep it open for minutes.
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
    """What a process prints, as far as it has come."""

    stdout: Output
    stderr: Output


async def converse(
    process: Process, said: Said, data: bytes, begun: bytes, heard: Callable[[], None], *, attended: bool = False
) -> None:
    """Give a process its input and take what it prints, until it has ended.

    Args:
        process: With three pipes.
        said: What it prints comes there.
        data: Its input; one that ends before it has read all is none the worse for it.
        begun: What it prints first.
        heard: Called when that has come.
        attended: Whether its input stays open until it has ended, so that it knows when this process is gone.
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
    """Kill a process that has not ended, collect it, and let go of its pipes.

    The master of a connection holds these pipes too, as long as the remote command lives; Process.wait would wait
    for that.
    """
    transport = process._transport  # type: ignore[attr-defined] # asyncio has no public way to it
    cancelled: asyncio.CancelledError | None = None
    try:
        if process.returncode is None:
            # Process.kill and the transport's close would collect a process that has just ended, and asyncio's own
            # watcher, which then finds none, would report 255.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # A killed process is collected at once, and asyncio has no event for that apart from its pipes' ends.
        while process.returncode is None:
            try:
                await asyncio.sleep(_POLL / 10)
            except asyncio.CancelledError as exc:
                # For the second time, as the loop is closed: the watcher would tell a loop that is gone, and say so.
                cancelled = exc
    finally:
        transport.close()
    if cancelled:
        raise cancelled
