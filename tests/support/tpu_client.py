"""google-cloud-tpu's own clients, unmodified, over each of their transports."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcAsyncIOTransport, TpuGrpcTransport, TpuRestTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport as AlphaAsyncTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcTransport as AlphaTransport

from tests.support.lab_api import PATIENCE, LabApi


class Client:
    """One of google-cloud-tpu's clients behind one way to call it.

    Args:
        api: The API.
        transport: How to reach it.
        types: The package of the client.
        address: ``host:port`` for gRPC where that is not the API's own.

    Attributes:
        transport: ``grpc``, ``grpc_asyncio`` or ``rest``.
        types: The package of its messages.
    """

    def __init__(self, api: LabApi, transport: str, types: Any = tpu_v2, address: str = "") -> None:
        self.transport = transport
        self.types = types
        alpha = types is tpu_v2alpha1
        if transport == "rest":
            host = api.rest.removeprefix("http://")
            wire = TpuRestTransport(host=host, url_scheme="http", credentials=AnonymousCredentials())
            self._client = tpu_v2.TpuClient(transport=wire)
        elif transport == "grpc":
            channel = grpc.insecure_channel(address or api.grpc)
            wire = (AlphaTransport if alpha else TpuGrpcTransport)(channel=channel)
            self._client = types.TpuClient(transport=wire)
        else:
            wire = (AlphaAsyncTransport if alpha else TpuGrpcAsyncIOTransport)(
                channel=grpc.aio.insecure_channel(address or api.grpc)
            )
            self._client = types.TpuAsyncClient(transport=wire)

    async def call(self, method: str, **request: Any) -> Any:
        """Call a method with a request of these fields."""
        return await self._invoke(method, request)

    async def _invoke(self, method: str, request: Any, patience: float = PATIENCE) -> Any:
        function = getattr(self._client, method)
        if self.transport == "grpc_asyncio":
            return await function(request=request, timeout=patience)
        return await asyncio.to_thread(function, request=request, timeout=patience)

    async def finish(self, operation: Any) -> Any:
        """Poll an operation until it has ended and return its result; an error of it is raised."""
        async with asyncio.timeout(PATIENCE):
            while not await self._maybe(operation.done):  # noqa: ASYNC110 - there is no event, only polling
                await asyncio.sleep(0.01)
        return await self._maybe(operation.result)

    async def do(self, method: str, **request: Any) -> Any:
        """Call a method that begins an operation and return the operation's result."""
        return await self.finish(await self.call(method, **request))

    async def _maybe(self, function: Any) -> Any:
        return await (function() if self.transport == "grpc_asyncio" else asyncio.to_thread(function))

    async def pages(self, method: str, **request: Any) -> list[Any]:
        """Return every page of a list."""
        pager = await self.call(method, **request)
        if self.transport == "grpc_asyncio":
            return [page async for page in pager.pages]
        return await asyncio.to_thread(lambda: list(pager.pages))

    async def close(self) -> None:
        """Let go of the channel."""
        if self.transport == "grpc_asyncio":
            await self._client.transport.close()
        else:
            self._client.transport.close()
