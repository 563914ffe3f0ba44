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
_TYPES = {"string": 9, "bool": 8, "int64": 3, "double": 1, "int32": 5, "bytes": 12}
#: Fields of the messages, as (number, name, type, whether repeated); a type that is no scalar is a message.
_MESSAGES: dict[str, list[tuple[int, str, str, bool]]] = {
    "MetricRequest": [(1, "metric_name", "string", False), (2, "skip_node_aggregation", "bool", False)],
    "MetricResponse": [(1, "metric", "TPUMetric", False)],
    "TPUMetric": [(1, "name", "string", False), (2, "description", "string", False), (3, "metrics", "Metric", True)],
    "Metric": [(1, "attribute", "Attribute", False), (3, "gauge", "Gauge", False)],
    "Attribute": [(1, "key", "string", False), (2, "value", "AttrValue", False)],
    "AttrValue": [(1, "string_attr", "string", False), (3, "int_attr", "int64", False)],
    "Gauge": [(1, "as_double", "double", False), (2, "as_int", "int64", False)],
    "GetTpuRuntimeStatusRequest": [(1, "include_hlo_info", "bool", False)],
    # In messages, a map is a list of entries, and an enum a number.
    "GetTpuRuntimeStatusResponse": [(1, "host_name", "string", False), (2, "core_states", "Entry", True)],
    "Entry": [(1, "key", "int32", False), (2, "value", "CurrentCoreStateSummary", False)],
    "CurrentCoreStateSummary": [
        (1, "core_id", "TpuCoreIdentifier", False),
        (2, "sequencer_info", "SequencerInfo", True),
        (3, "xdb_server_running", "bool", False),
        (4, "program_fingerprint", "bytes", False),
        (5, "launch_id", "int32", False),
        (6, "queued_program_info", "QueuedProgramInfo", True),
        (7, "error_message", "string", False),
    ],
    "TpuCoreIdentifier": [
        (1, "global_core_id", "int32", False),
        (2, "chip_id", "int32", False),
        (3, "core_on_chip", "TpuCoreOnChipProto", False),
    ],
    "TpuCoreOnChipProto": [(1, "type", "int32", False), (2, "index", "int32", False)],
    "SequencerInfo": [
        (1, "sequencer_type", "int32", False),
        (3, "pc", "int64", False),
        (7, "run_id", "int64", False),
        (8, "hlo_location", "string", False),
    ],
    "QueuedProgramInfo": [
        (1, "run_id", "int64", False),
        (2, "launch_id", "int64", False),
        (3, "program_fingerprint", "bytes", False),
    ],
}
#: Messages whose fields are the members of a oneof, which are sent even if they are zero.
_ONEOFS = ("AttrValue", "Gauge")
#: Messages of the package tpu_telemetry, whose fields are sent even if they are zero.
_TELEMETRY = (
    "CurrentCoreStateSummary",
    "TpuCoreIdentifier",
    "TpuCoreOnChipProto",
    "SequencerInfo",
    "QueuedProgramInfo",
)


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
            if name in _TELEMETRY and not repeated:
                made.proto3_optional = True
                made.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
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


def status(cores: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Return the answer of GetTpuRuntimeStatus, given the fields of each core's state by its id."""
    entries = [{"key": core, "value": state} for core, state in cores.items()]
    return bytes(CLASSES["GetTpuRuntimeStatusResponse"](host_name="t1v", core_states=entries).SerializeToString())


#: An answer, a function that makes it, or an error.
Answer = bytes | Callable[[], bytes] | Any


@contextmanager
def serving(
    answers: Mapping[str, Answer], port: int = 0, service: str = "RuntimeMetricService", states: Answer | None = None
) -> Iterator[int]:
    """Serve these answers by the metric's name on all interfaces; others are NOT_FOUND. Yield the port.

    Without an answer for the states of cores, the service does not have that method.
    """

    def give(found: Answer, context: grpc.ServicerContext) -> Any:
        if not isinstance(found, grpc.StatusCode):
            return found() if callable(found) else found
        context.set_code(found)
        context.set_details("an error of the test")
        return b""

    def metric(request: Any, context: grpc.ServicerContext) -> Any:
        return give(answers.get(request.metric_name, grpc.StatusCode.NOT_FOUND), context)

    def status_of(request: Any, context: grpc.ServicerContext) -> Any:
        assert not request.include_hlo_info, "it is expensive"
        return give(states, context)

    def method(act: Callable[..., Any], message: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(act, request_deserializer=CLASSES[message].FromString)

    methods = {"GetRuntimeMetric": method(metric, "MetricRequest")}
    if states is not None:
        methods["GetTpuRuntimeStatus"] = method(status_of, "GetTpuRuntimeStatusRequest")
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    handlers = grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", methods)
    server.add_generic_rpc_handlers((handlers,))
    bound = server.add_insecure_port(f"[::]:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()
