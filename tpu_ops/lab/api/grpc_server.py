"""Serves the lab's API over gRPC on one port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tpu_ops.lab.api import wire
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.methods import MIXINS, TPU
from tpu_ops.lab.api.service import Handler, Service
from tpu_ops.lab.api.wire import Message, Page


def _unary(service: Service, api: str, method: str, handler: Handler, request: Callable[..., Message]) -> Any:
    async def answer(message: Message, context: Any) -> Message:
        try:
            found = await service.call(method, handler, api, message)
        except ApiError as failure:
            await context.abort(getattr(grpc.StatusCode, failure.code.name), failure.message)
            raise
        return found.message(api) if isinstance(found, Page) else found

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=request.FromString,  # type: ignore[attr-defined] # every message class has FromString
        response_serializer=lambda response: response.SerializeToString(),
    )


def _handlers(service: Service) -> tuple[Any, ...]:
    found = []
    for api in wire.VERSIONS:
        methods = {
            method: _unary(service, api, method, TPU[method], wire.request_class(api, method))
            for method in wire.methods(api)
        }
        found.append(grpc.method_handlers_generic_handler(f"google.cloud.tpu.{api}.Tpu", methods))
    for name, table in MIXINS.items():
        methods = {
            method: _unary(service, "v2", method, handler, request) for method, (request, _, handler) in table.items()
        }
        found.append(grpc.method_handlers_generic_handler(name, methods))
    return tuple(found)


async def serve(service: Service, bind: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve the API over gRPC; return the server and its port.

    Raises:
        OSError: The port cannot be used.
    """
    # Without so_reuseport=0, a second server could silently share the port.
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(_handlers(service))
    host = f"[{bind}]" if ":" in bind else bind
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as failure:
        raise OSError(str(failure)) from failure
    await server.start()
    return server, bound
