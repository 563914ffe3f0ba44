"""An answer of the launcher that continues as frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from tpu_ops.protocol import wire
from tpu_ops.ssh import openssh, processes
from tpu_ops.ssh.replies import Reply, reply_of

#: Type of `Fanout.unless_gone`.
UnlessGone = Callable[[str], AbstractAsyncContextManager[object]]

#: Seconds for the launcher to begin its answer: it may hang although the connection is alive.
LIMIT = 45.0


class Broken(Exception):
    """A stream ended before its END frame, or contained something other than frames; the text gives the reason."""


class Frame(NamedTuple):
    """One frame of `follow`: its kind, the absolute log offset of its first byte, and its bytes."""

    kind: bytes
    offset: int
    payload: bytes


class Stream:
    """The framed answer of one worker.

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
        """Return the answer that precedes the frames; no frames follow a refusal.

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
        """Yield frames up to and including the END frame; all have a kind of the protocol.

        Raises:
            Broken: The connection ended before the END frame, or something other than a frame arrived.
        """
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        while True:
            try:
                kind, offset, size = wire.FRAME.unpack(await self._process.stdout.readexactly(wire.FRAME.size))
                if kind not in wire.KINDS:
                    version = f"version {wire.PROTOCOL} of the protocol"
                    raise Broken(f"its launcher sent a frame of kind {kind!r}, which {version} does not have")
                if size > wire.MAX_FRAME:
                    raise Broken(f"its launcher sent a frame of {size} bytes, more than {wire.MAX_FRAME}")
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
        """Return ssh's exit code and error output."""
        assert self._process.stderr is not None  # noqa: S101 - for the type checker
        try:
            async with asyncio.timeout(processes.CONTROL_LIMIT):
                said = await self._process.stderr.read()
                await self._process.wait()
        except TimeoutError:
            return None, "ssh closed its output and did not end"
        return self._process.returncode, said.decode(errors="replace")
