"""libtpu's metrics service as Google's own gRPC and protobuf libraries serve it, with answers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tpu.monitoring.runtime"
TOTAL, USED = "tpu.runtime.hbm.memory.total.bytes", "tpu.runtime.hbm.memory.usage.bytes"
DUTY = "tpu.runtime.tensorcore.dutycycle.percent"
BANDWIDTH, IDLE = "tpu.runtime.hbm.utilization.percent", "tpu.runtime.tensorcore.idle_duration.seconds"
_TYPES = {"string": 9, "bool": 8, "int64": 3, "double": 1}
#: Fields of the messages, as (number, name, type, whether repeated); a type that is no scalar is a message.
_MESSAGES: dict[str, list[tuple[int, str, str, bool]]] = {
    "MetricRequest": [(1, "metric_name", "string", False), (2, "skip_node_aggregation", "bool", False)],
    "MetricResponse": [(1, "metric", "TPUMetric", False)],
    "TPUMetric": [(1, "name", "string", False), (2, "description", "string", False), (3, "metrics", "Metric", True)],
    "Metric": [(1, "attribute", "Attribute", False), (3, "gauge", "Gauge", False)],
    "Attribute": [(1, "key", "string", False), (2, "value", "AttrValue", False)],
    "AttrValue": [(1, "string_attr", "string", False), (3, "int_attr", "int64", False)],
    "Gauge": [(1, "as_double", "double", False), (2, "as_int", "int64", False)],
}
#: Messages whose fields are the members of a oneof, which are sent even if they are zero.
_ONEOFS = ("AttrValue", "Gauge")


def _classes() -> dict[str, Any]:
    """Return a class for each message."""
    file = descriptor_pb2.FileDescriptorProto(name="tests_tpu_metrics.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONEOFS:
            message.oneof_decl.add(name="value")
        for number, field, kind, repeated in fields:
            made = message.field.add(name=field, number=number, label=3 if repeated else 1)
            made.type = _TYPES.get(kind, 11)
            if kind not in _TYPES:
                made.type_name = f".{PACKAGE}.{kind}"
            if name in _ONEOFS:
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


CLASSES = _classes()


def response(name: str, values: Mapping[int, float], description: str = "") -> bytes:
    """Return the answer with one gauge for each device; a whole number is sent as an integer."""
    metric = CLASSES["TPUMetric"](name=name, description=description)
    for device, value in values.items():
        entry = metric.metrics.add()
        entry.attribute.key = "device-id"
        entry.attribute.value.int_attr = device
        if isinstance(value, int):
            entry.gauge.as_int = value
        else:
            entry.gauge.as_double = value
    return bytes(CLASSES["MetricResponse"](metric=metric).SerializeToString())


#: An answer, a function that makes it, or an error.
Answer = bytes | Callable[[], bytes] | Any


@contextmanager
def serving(answers: Mapping[str, Answer], port: int = 0, service: str = "RuntimeMetricService") -> Iterator[int]:
    """Serve these answers by the metric's name on all interfaces; others are NOT_FOUND. Yield the port."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        found = answers.get(request.metric_name, grpc.StatusCode.NOT_FOUND)
        if not isinstance(found, grpc.StatusCode):
            return found() if callable(found) else found
        context.set_code(found)
        context.set_details(f"no {request.metric_name}")
        return b""

    method = grpc.unary_unary_rpc_method_handler(answer, request_deserializer=CLASSES["MetricRequest"].FromString)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    handlers = grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", {"GetRuntimeMetric": method})
    server.add_generic_rpc_handlers((handlers,))
    bound = server.add_insecure_port(f"[::]:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()
