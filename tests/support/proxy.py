"""A TCP proxy that a test puts between a client and a server, to break what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

_CHUNK = 64 * 1024


class Proxy:
    """Passes bytes on to a server, until it is asked for something else.

    Once it is closed, its address refuses connections.

    Args:
        target: ``host:port`` of the server.

    Attributes:
        address: ``host:port`` for the client.
        connections: How many connections were accepted.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.connections = 0
        self._size = self._left = self._cuts = 0
        self._passing = asyncio.Event()
        self._passing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        starting = asyncio.start_server(self._accept, sock=listener)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut_after(self, size: int, times: int = 1) -> None:
        """Cut the connection when this many more bytes of answers have passed.

        Args:
            size: The bytes, HTTP/2's own frames among them.
            times: How many connections are cut so, one after the other, each after as many bytes again.
        """
        self._change(lambda: self._be(size=size, cuts=times, passing=True))

    def hang(self) -> None:
        """Accept connections, and let no byte of answer pass from now on."""
        self._change(lambda: self._be(passing=False))

    def pass_on(self) -> None:
        """Let everything pass again, what was held back first."""
        self._change(lambda: self._be(passing=True))

    def close(self) -> None:
        """Cut every connection, and refuse new ones."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _change(self, change: Callable[[], None]) -> None:
        """Do something in the proxy's thread, and return when it is done."""

        async def run() -> None:
            change()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _be(self, *, passing: bool, size: int = 0, cuts: int = 0) -> None:
        self._size = self._left = size
        self._cuts = cuts
        if passing:
            self._passing.set()
        else:
            self._passing.clear()

    async def _end(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        # Those who serve the connections see their ends and come to their own.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            # Without a buffer of its own, what is drained is what the client gets.
            writer.transport.set_write_buffer_limits(high=0)
            with contextlib.suppress(OSError):
                if self._server.is_serving():
                    await self._serve(reader, writer)
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until either side ends it, or the proxy cuts it."""
        answers, requests = await asyncio.open_connection(*self._target)
        pumps = {asyncio.create_task(_pass_on(reader, requests)), asyncio.create_task(self._answer(answers, writer))}
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        requests.transport.abort()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what the server answers, as far as was asked."""
        while data := await reader.read(_CHUNK):
            await self._passing.wait()
            cut = bool(self._cuts) and len(data) >= self._left
            data = data[: self._left] if cut else data
            self._left -= len(data)
            if cut:
                self._cuts, self._left = self._cuts - 1, self._size
            writer.write(data)
            await writer.drain()
            if cut:
                return


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
