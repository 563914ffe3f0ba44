"""The progress of rsync processes: how many bytes they have transferred so far."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import subprocess
from collections.abc import Callable

#: Called with a worker, its bytes so far, its bytes in all (0 if unknown), and whether its copy has ended.
Moved = Callable[[str, int, int, bool], None]
#: Options with which rsync prints its progress, as numbers without separators.
OPTIONS = ("--info=progress2", "--no-human-readable")
#: The first version of rsync that has these options.
_FIRST = (3, 1)
#: A line of progress ends with a carriage return, any other line with a newline.
_PROGRESS, _END = re.compile(rb"\s*(\d+)\s+\d+%"), re.compile(rb"[\r\n]")


@functools.cache
def options() -> tuple[str, ...]:
    """Return the options with which this machine's rsync prints its progress; empty if its version has none."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version (\d+)\.(\d+)", done.stdout)
        if found and (int(found[1]), int(found[2])) >= _FIRST:
            return OPTIONS
    return ()


async def communicate(
    process: asyncio.subprocess.Process, data: bytes, told: Callable[[int], None]
) -> tuple[bytes, bytes]:
    """Write the input of an rsync process and read its output until it ends, as `Process.communicate` does.

    Args:
        process: The process, with three pipes.
        data: The input.
        told: Called with the bytes that the process has transferred so far.

    Returns:
        The output without the progress, and the error output.
    """
    assert process.stdin and process.stdout and process.stderr  # noqa: S101, PT018 - for the type checker
    reading = _read(process.stdout, told), process.stderr.read(), _feed(process.stdin, data)
    out, said, _ = await asyncio.gather(*reading)
    await process.wait()
    return out, said


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _read(reader: asyncio.StreamReader, told: Callable[[int], None]) -> bytes:
    lines, rest = [], b""
    while piece := await reader.read(2**16):
        *whole, rest = _END.split(rest + piece)
        for line in whole:
            if match := _PROGRESS.match(line):
                told(int(match[1]))
            elif line:
                lines.append(line)
    return b"\n".join([*lines, rest])
