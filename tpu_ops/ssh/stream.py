"""The answer of the launcher to `follow`, which continues as frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from tpu_ops.protocol import wire
from tpu_ops.ssh import openssh, processes
from tpu_ops.ssh.replies import Reply, reply_of

#: The type of `Fanout.unless_gone`, as this module calls it.
UnlessGone = Callable[[str], AbstractAsyncContextManager[object]]

#: Seconds that the launcher has to begin its answer. The launcher can hang although the connection is alive.
LIMIT = 45.0


class Broken(Exception):
    """A stream ended before its END frame, or contained invalid frames; the text has the reason."""


class Frame(NamedTuple):
    """One frame of `follow`: its kind, the absolute log offset of its first byte, and its bytes."""

    kind: bytes
    offset: int
    payload: bytes


class Stream:
    """The answer and the frames from the launcher of one worker.

    Attributes:
        heard_at: When the last bytes of a frame arrived, in the event loop's time.
    """

    heard_at = 0.0

    def __init__(self, host: str, process: processes.Process, marker: str, unless_gone: UnlessGone) -> None:
        self.host = host
        self._process = process
        self._unless_gone = unless_gone
        self._marker = marker

    async def answer(self) -> Reply:
        """Return the answer that precedes the frames. If the launcher refused the request, no frames follow.

        Raises:
            Broken: The answer did not come in time.
            Unreachable: The worker is no longer at its address.
        """
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        beginning = wire.beginning(self._marker)
        try:
            async with asyncio.timeout(LIMIT), self._unless_gone(self.host):
                await self._process.stdout.readuntil(beginning)
                line = await self._process.stdout.readuntil(b"\n")
        except TimeoutError:
            raise Broken(f"the launcher did not answer within {LIMIT:g} s") from None
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            code, said = await self._last_words()
            return reply_of(self.host, None, said, code)
        answer = beginning + line
        return reply_of(self.host, wire.find_answer(answer, self._marker), "", 0)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield the frames up to and including the END frame, and check that their kinds are known.

        Raises:
            Broken: The connection ended before the END frame, or an invalid frame arrived.
        """
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        while True:
            try:
                kind, offset, size = wire.FRAME.unpack(await self._process.stdout.readexactly(wire.FRAME.size))
                if kind not in wire.KINDS:
                    version = f"version {wire.PROTOCOL} of the protocol"
                    raise Broken(f"the worker's launcher sent a frame of kind {kind!r}, which {version} does not have")
                if size > wire.MAX_FRAME:
                    raise Broken(f"the worker's launcher sent a frame of {size} bytes, more than {wire.MAX_FRAME}")
                payload = await self._exactly(size)
            except asyncio.IncompleteReadError:
                code, said = await self._last_words()
                raise Broken(openssh.reason(said, code)) from None
            yield Frame(kind, offset, payload)
            if kind == wire.END:
                return

    async def _exactly(self, size: int) -> bytes:
        """Read exactly ``size`` bytes.

        Raises:
            asyncio.IncompleteReadError: The output ended early.
        """
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        payload = bytearray()
        while len(payload) < size:
            piece = await self._process.stdout.read(size - len(payload))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(payload), size)
            self.heard_at = asyncio.get_running_loop().time()
            payload += piece
        return bytes(payload)

    async def _last_words(self) -> tuple[int | None, str]:
        """Return ssh's exit code and error output, after ssh has closed its output."""
        assert self._process.stderr is not None  # noqa: S101 - for the type checker
        try:
            async with asyncio.timeout(processes.CONTROL_LIMIT):
                said = await self._process.stderr.read()
                await self._process.wait()
        except TimeoutError:
            return None, "ssh closed its output but did not end"
        return self._process.returncode, said.decode(errors="replace")
