"""Serves libtpu's runtime metrics on a listening socket, with the values that the lab's file for this worker asks for.

Runs inside the worker with its system Python (3.8 or newer) and python3-h2. It takes the socket as standard input. The
lab's file is read for each request. Messages are those of tpu_metric_service.proto and tpu_telemetry.proto in the wheel
of tpu-info; only what the metrics and the states of tensor cores need is encoded.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__:
    from tpu_ops.lab.image import chip_watch
else:  # on a worker, Python runs isolated (-I), without this directory on the path
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    import chip_watch  # type: ignore[import-not-found,no-redef]

SERVICE = "/tpu.monitoring.runtime.RuntimeMetricService/"
METADATA = Path("/var/lib/tpu-lab/worker/metadata.json")
GIB = 2**30
#: Memory of one device as libtpu counts devices: a core of v2 and v3, a chip of the others.
MEMORY = {"v2": 8, "v3": 16, "v4": 32, "v5litepod": 16, "v5p": 95, "v6e": 32}
TWO_CORES = ("v2", "v3")
#: Chips with one tensor core; the others have two, which are one device from v4 on.
ONE_TENSOR_CORE = ("v5litepod", "v6e")
TOTAL, USED = "tpu.runtime.hbm.memory.total.bytes", "tpu.runtime.hbm.memory.usage.bytes"
DUTY = "tpu.runtime.tensorcore.dutycycle.percent"
BANDWIDTH, IDLE = "tpu.runtime.hbm.utilization.percent", "tpu.runtime.tensorcore.idle_duration.seconds"
METRICS = (TOTAL, USED, DUTY, BANDWIDTH, IDLE)
#: Duty cycle, use of the memory bandwidth and share of the memory in use, by the state of the chips.
LOADS = {
    "busy": (97.5, 43.25, 0.75),
    "idle": (0.0, 0.0, 0.75),
    "hung": (100.0, 0.0, 0.75),
    "halted": (0.0, 0.0, 0.75),
}
#: The program of chips that have one, its launch on chips that hang, the number of programs that wait by the state of
#: the chips, and an error.
PROGRAM, STUCK = bytes.fromhex("5eed0fa11c0ffee5"), 1000
QUEUES = {"idle": 0, "hung": 1, "halted": 1}
HALTED = "Core halted unexpectedly"
NOT_FOUND, UNIMPLEMENTED = 5, 12


def metric(name: str, wanted: dict[str, Any], accelerator: str, chips: int, now: float) -> dict[int, float] | None:
    """Return the value of a metric for each device id; None if the service does not have the metric.

    Args:
        name: The metric.
        wanted: The lab's file: ``state``, ``at`` (when it was set, in seconds since 1970), ``first_id``, ``two_cores``.
        accelerator: The accelerator type.
        chips: The number of chips.
        now: The time in seconds since 1970.
    """
    state = wanted.get("state", "busy")
    duty, bandwidth, share = LOADS.get(state, LOADS["busy"])
    generation = accelerator.partition("-")[0]
    total = MEMORY.get(generation, 16) * GIB
    two = bool(wanted.get("two_cores")) or generation in TWO_CORES
    first = int(wanted.get("first_id", 0))
    cores = range(first, first + chips * (2 if two else 1))
    values: dict[str, float] = {
        TOTAL: total,
        USED: int(total * share),
        DUTY: duty,
        BANDWIDTH: bandwidth,
        IDLE: max(0.0, now - float(wanted.get("at", now))) if state in ("idle", "halted") else 0.0,
    }
    if name not in values or (state == "not-found" and name in (BANDWIDTH, IDLE)):
        return None
    # The duty cycle belongs to a chip. While libtpu starts, lists have different lengths.
    ids = range(first, first + chips) if name == DUTY else cores
    if state == "warming" and name != TOTAL:
        ids = ids[: len(ids) // 2]
    return dict.fromkeys(ids, values[name])


def core_states(wanted: dict[str, Any], accelerator: str, chips: int, now: float) -> dict[int, dict[str, Any]]:
    """Return the state of each tensor core by its id, with the keys of `core_state`; see `metric` for the arguments.

    Chips that do something have a new launch of their program each second; those that hang or have halted do not.
    """
    state = wanted.get("state", "busy")
    tensor_cores = 1 if accelerator.partition("-")[0] in ONE_TENSOR_CORE and not wanted.get("two_cores") else 2
    first = int(wanted.get("first_id", 0))
    launch = STUCK if state in ("hung", "halted") else int(now) % 2**31
    count = chips // 2 if state == "warming" else chips
    found = {}
    for number in range(count * tensor_cores):
        found[first + number] = {
            "chip": first + number // tensor_cores,
            "index": number % tensor_cores,
            "launch": None if state == "idle" else launch,
            "queued": QUEUES.get(state, 2),
            "error": HALTED if state == "halted" and number == 0 else "",
        }
    return found


# --- messages ------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return an integer as protobuf encodes it."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: bytes | str) -> bytes:
    """Return a field with a text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def integer(number: int, value: int) -> bytes:
    """Return a field with an integer."""
    return varint(number << 3) + varint(value)


def core_state(core: int, *, chip: int, index: int, launch: int | None, queued: int, error: str) -> bytes:
    """Return the CurrentCoreStateSummary of a tensor core, on which a launch of the program is unless it is None."""
    summary = field(1, integer(1, core) + integer(2, chip) + field(3, integer(1, 1) + integer(2, index)))
    sequencer = integer(1, 1) + integer(2, 0) + integer(3, 0x1A0 if launch else 0)
    if launch is not None:
        summary += field(2, sequencer + integer(6, 1) + integer(7, launch)) + field(4, PROGRAM) + integer(5, launch)
        for after in range(1, queued + 1):
            summary += field(6, integer(1, launch + after) + integer(2, launch + after) + field(3, PROGRAM))
    else:
        summary += field(2, sequencer)
    return summary + integer(3, 0) + (field(7, error) if error else b"")


def status_response(states: dict[int, dict[str, Any]]) -> bytes:
    """Return a GetTpuRuntimeStatusResponse."""
    entries = (field(2, integer(1, core) + field(2, core_state(core, **state))) for core, state in states.items())
    return field(1, socket.gethostname()) + b"".join(entries)


def metric_response(name: str, values: dict[int, float]) -> bytes:
    """Return a MetricResponse with a gauge for each device id."""
    entries = b""
    for device, value in values.items():
        attribute = field(1, "device-id") + field(2, varint(3 << 3) + varint(device))
        is_whole = isinstance(value, int)
        gauge = varint(2 << 3) + varint(int(value)) if is_whole else varint(1 << 3 | 1) + struct.pack("<d", value)
        entries += field(3, field(1, attribute) + field(3, gauge))
    return field(1, field(1, name) + field(2, f"The lab's {name}.") + entries)


def requested(message: bytes) -> str:
    """Return the name of the metric in a MetricRequest, whose fields are short."""
    at = 0
    while at < len(message):
        if message[at] == 0x0A:
            return message[at + 2 : at + 2 + message[at + 1]].decode(errors="replace")
        at += 2
    return ""


def answer(method: str, message: bytes, wanted: dict[str, Any], accelerator: str, chips: int) -> bytes | int:
    """Return the serialized answer of a method, or a gRPC status."""
    if wanted.get("state") == "broken":
        return b"\x0a\xff\xff\xff\x7f nonsense"
    if method == "ListSupportedMetrics":
        lacking = (BANDWIDTH, IDLE) if wanted.get("state") == "not-found" else ()
        return b"".join(field(1, field(1, name)) for name in METRICS if name not in lacking)
    if method == "GetTpuRuntimeStatus" and wanted.get("state") != "not-found":
        return status_response(core_states(wanted, accelerator, chips, time.time()))
    if method != "GetRuntimeMetric":
        return UNIMPLEMENTED
    name = requested(message)
    values = metric(name, wanted, accelerator, chips, time.time())
    return NOT_FOUND if values is None else metric_response(name, values)


# --- connections ---------------------------------------------------------------------------------------------------


def wanted_of(path: Path = chip_watch.STATE) -> dict[str, Any]:
    """Return the lab's file for this worker; an empty one if it is missing."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def accelerator_of(path: Path = METADATA) -> str:
    """Return the accelerator type of the worker's node."""
    return str(json.loads(path.read_text())["server"]["instance"]["attributes"]["accelerator-type"])


def serve(connection: socket.socket) -> None:
    """Answer the requests of one connection until the client closes it."""
    with connection:
        if wanted_of().get("state") == "silent":
            while connection.recv(65536):
                pass
            return
        for data in _answers(connection):
            connection.sendall(data)


def _answers(connection: socket.socket) -> Iterator[bytes]:
    """Yield the bytes to send."""
    from h2 import config, events
    from h2.connection import H2Connection

    state = H2Connection(config.H2Configuration(client_side=False, header_encoding="utf-8"))
    state.initiate_connection()
    yield state.data_to_send()
    methods: dict[int, str] = {}
    bodies: dict[int, bytes] = {}
    while data := connection.recv(65536):
        for event in state.receive_data(data):
            if isinstance(event, events.RequestReceived):
                path = dict(event.headers)[":path"]
                methods[event.stream_id] = path[len(SERVICE) :] if path.startswith(SERVICE) else ""
                bodies[event.stream_id] = b""
            elif isinstance(event, events.DataReceived):
                bodies[event.stream_id] += event.data
                state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, events.StreamEnded) and wanted_of().get("state") != "silent":
                method, body = methods.pop(event.stream_id), bodies.pop(event.stream_id)
                _respond(state, event.stream_id, method, body[5:])
        yield state.data_to_send()


def _respond(state: Any, stream: int, method: str, message: bytes) -> None:
    """Put the answer to a request into a connection's state."""
    found = answer(method, message, wanted_of(), accelerator_of(), len(chip_watch.chips()))
    begin = [(":status", "200"), ("content-type", "application/grpc")]
    if isinstance(found, int):
        state.send_headers(stream, [*begin, ("grpc-status", str(found))], end_stream=True)
        return
    state.send_headers(stream, begin)
    state.send_data(stream, b"\0" + struct.pack(">I", len(found)) + found)
    state.send_headers(stream, [("grpc-status", "0")], end_stream=True)


def main() -> None:
    """Serve on the socket that is standard input until the process is ended."""
    listener = socket.socket(fileno=0)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
