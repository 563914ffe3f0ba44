"""The metrics of libtpu's service: what to ask for, and what the answers say of each core. No sockets, no files.

Messages are those of the packages tpu.monitoring.runtime and tpu_telemetry, as the wheel of tpu-info has them.
"""

from __future__ import annotations

import struct

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Collection, Dict, Iterator, Optional, Tuple, Union

PATH = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"
#: The method that returns the states of cores, which versions since 2025-11 have, and its request without HLO.
STATES_PATH = "/tpu.monitoring.runtime.RuntimeMetricService/GetTpuRuntimeStatus"
STATES_REQUEST = b""
#: Metrics of every version of the service, and metrics that only newer versions or chips have, by their key in results.
BASIC = {
    "hbm_total": "tpu.runtime.hbm.memory.total.bytes",
    "hbm_used": "tpu.runtime.hbm.memory.usage.bytes",
    "duty": "tpu.runtime.tensorcore.dutycycle.percent",
}
OPTIONAL = {
    "hbm_bandwidth": "tpu.runtime.hbm.utilization.percent",
    "idle": "tpu.runtime.tensorcore.idle_duration.seconds",
}
#: Limits of credible values. A percentage may exceed 100 by an error of measurement.
_MOST_CORES = 64
_MOST_ID = 1_000_000
_MOST_BYTES = 1 << 50
_MOST_PERCENT = 101.0
_MOST_IDLE = 10 * 366 * 86400.0
#: Types of cores by their number in messages.
_CORE_TYPES = {1: "tensor", 2: "sparse-v0", 3: "sparse"}
#: Limits of states: bytes of an answer, number of cores, of a core's sequencers that are read, of programs that are
#: listed in a queue, bytes of a fingerprint and of an error. A host with 24 cores, of which 16 have many sequencers,
#: takes some 40 kilobytes.
_MOST_BYTES_OF_STATES, _MOST_STATES, _MOST_SEQUENCERS = 256 * 1024, 128, 64
_MOST_QUEUED, _MOST_FINGERPRINT, _MOST_ERROR = 8, 32, 300


class Nonsense(ValueError):
    """An answer is not a valid message, or has values that no chip has."""


def request(name: str) -> bytes:
    """Return the request for a metric as the serialized MetricRequest."""
    return bytes((0x0A, len(name))) + name.encode("ascii")


def gauges(answer: bytes) -> Dict[int, Union[int, float]]:
    """Return the value of each device id in a serialized MetricResponse.

    Raises:
        Nonsense: The bytes are no such message.
    """
    found: Dict[int, Union[int, float]] = {}
    for entry in _parts(_message(answer, 1), 3):
        device: Optional[int] = None
        for value in _values(_message(_message(entry, 1), 2), 3, 0):
            device = value
        if device is None or device > _MOST_ID or device in found:
            raise Nonsense("a value without a valid device id")
        found[device] = _gauge(_message(entry, 3))
        if len(found) > _MOST_CORES:
            raise Nonsense("values of more than {} devices".format(_MOST_CORES))
    return found


def _gauge(data: bytes) -> Union[int, float]:
    """Return the value of a Gauge: field 1 is a double, field 2 an int64."""
    found: Optional[Union[int, float]] = None
    for number, kind, value in _fields(data):
        if (number, kind) == (1, 1):
            found = struct.unpack("<d", value)[0]
        elif (number, kind) == (2, 0):
            found = _signed(value)
    if found is None:
        raise Nonsense("a device id without a number")
    return found


def _signed(value: int) -> int:
    """Return the number that a varint of an int32 or int64 stands for."""
    return value - (1 << 64) if value >> 63 else value


def _message(data: bytes, number: int) -> bytes:
    """Return the message in a field; a repeated field is merged, as protobuf does it, and a missing one is empty."""
    return b"".join(_parts(data, number))


def _parts(data: bytes, number: int) -> Iterator[bytes]:
    return (value for value in _values(data, number, 2))


def _values(data: bytes, number: int, kind: int) -> Iterator[Any]:
    return (value for found, wire, value in _fields(data) if (found, wire) == (number, kind))


def _fields(data: bytes) -> Iterator[Tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a serialized message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Nonsense("not a protobuf message")
        if size > len(data) - at:
            raise Nonsense("a field is longer than its message")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> Tuple[int, int]:
    """Return an integer, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise Nonsense("not a protobuf message")


def core_states(answer: bytes) -> list[Dict[str, Any]]:
    """Return the state of each core in a serialized GetTpuRuntimeStatusResponse, by id; what is missing is None.

    These cores include those that have no metrics, such as sparse cores, and their ids are not those of devices.

    Returns:
        For each core: its global ``id``; ``chip``; ``type``; ``index`` on the chip; ``error``, a text that is empty
        without an error; ``program``, the fingerprint of the program on it; ``launch`` and ``execution``, the ids of
        its launch and of its execution (XLA's run id); ``queue``, the number of programs that wait; and ``queued``, the
        first of them.

    Raises:
        Nonsense: The bytes are no such message.
    """
    if len(answer) > _MOST_BYTES_OF_STATES:
        raise Nonsense("states of {} bytes".format(len(answer)))
    entries = _Collected(answer).parts(2)
    if len(entries) > _MOST_STATES:
        raise Nonsense("states of more than {} cores".format(_MOST_STATES))
    found: Dict[int, Dict[str, Any]] = {}
    for core in map(_Collected, entries):
        number = core.integer(1) or 0
        found[number] = dict(_core_state(_Collected(core.data(2))), id=number)
    return [found[number] for number in sorted(found)]


def _core_state(summary: _Collected) -> Dict[str, Any]:
    """Return what a CurrentCoreStateSummary says."""
    identity = _Collected(summary.data(1))
    place = _Collected(identity.data(3))
    executions = (_Collected(each).integer(7) for each in summary.parts(2)[:_MOST_SEQUENCERS])
    queued = summary.parts(6)
    return {
        "chip": identity.integer(2),
        "type": _CORE_TYPES.get(place.integer(1) or 0),
        "index": place.integer(2),
        "error": summary.data(7)[:_MOST_ERROR].decode("utf-8", "replace"),
        "program": _fingerprint(summary, 4),
        "launch": summary.integer(5),
        "execution": next((each for each in executions if each is not None), None),
        "queue": len(queued),
        "queued": [
            {"execution": each.integer(1), "launch": each.integer(2), "program": _fingerprint(each, 3)}
            for each in map(_Collected, queued[:_MOST_QUEUED])
        ],
    }


def _fingerprint(message: _Collected, number: int) -> Optional[str]:
    return message.data(number)[:_MOST_FINGERPRINT].hex() or None


class _Collected:
    """The fields of a message, which is read once however many of them are asked for: any user can send long ones."""

    def __init__(self, data: bytes) -> None:
        self._found: Dict[Tuple[int, int], list[Any]] = {}
        for number, kind, value in _fields(data):
            self._found.setdefault((number, kind), []).append(value)

    def integer(self, number: int) -> Optional[int]:
        """Return the integer in a field; None if the field is missing."""
        values = self._found.get((number, 0))
        return _signed(values[-1]) if values else None

    def parts(self, number: int) -> list[bytes]:
        """Return the messages in a repeated field."""
        return self._found.get((number, 2), [])

    def data(self, number: int) -> bytes:
        """Return the message or text in a field; empty if the field is missing."""
        return b"".join(self.parts(number))


def described(
    values: Dict[str, Dict[int, Union[int, float]]], counts: Collection[int]
) -> Tuple[str, str, list[Dict[str, Any]]]:
    """Return the state (``ok`` or ``warming``), the reason or a remark, and the cores.

    Each core has the position of its ``chip``, from 0, if its chip has several cores; otherwise None.

    Args:
        values: The gauges by the metric's key; a metric that the service does not have is missing.
        counts: The numbers of chips that the metrics can be of: those that the process holds, and those of the host.

    Raises:
        Nonsense: A basic metric has a value that no chip has.
    """
    total, used = values.get("hbm_total", {}), values.get("hbm_used", {})
    lengths = ", ".join("{} of {}".format(len(values.get(key, {})), name) for key, name in BASIC.items())
    if not total or total.keys() != used.keys():
        return "warming", "no values of all cores yet: {}".format(lengths), []
    ids = sorted(total)
    each = cores_per_chip(len(ids), len(values.get("duty", ids)), counts)
    if not each:
        return "warming", "no values of all cores yet: {}".format(lengths), []
    columns: Dict[str, Optional[Dict[int, Any]]] = {
        "hbm_used": {core: _bytes(used[core]) for core in ids},
        "hbm_total": {core: _bytes(total[core]) for core in ids},
    }
    if any(used[core] > total[core] for core in ids):
        raise Nonsense("more memory in use than there is")
    remarks = []
    for key, most in (("duty", _MOST_PERCENT), ("hbm_bandwidth", _MOST_PERCENT), ("idle", _MOST_IDLE)):
        spread = _spread(values.get(key, {}), ids, each)
        try:
            columns[key] = {core: _number(key, value, most) for core, value in spread.items()}
        except Nonsense as exc:
            if key == "duty":
                raise
            columns[key] = None
            remarks.append(str(exc))
    cores = []
    for at, core in enumerate(ids):
        row = {key: (column or {}).get(core) for key, column in columns.items()}
        cores.append(dict(row, id=core, chip=at // each if each > 1 else None))
    return "ok", "; ".join(remarks), cores


def cores_per_chip(cores: int, duties: int, counts: Collection[int]) -> int:
    """Return how many cores each chip has; 0 if there are not all duty cycles yet.

    Chips of v2 and v3 have two cores, and one duty cycle. A process that holds a part of a host's chips can report
    either these or all. Newer chips have one core each, or two with a duty cycle for each of them.

    Args:
        cores: The number of cores.
        duties: The number of duty cycles.
        counts: The numbers of chips that the cores can belong to.
    """
    if duties != cores:
        return 2 if cores == 2 * duties and duties in counts else 0
    return 2 if cores not in counts and cores % 2 == 0 and cores // 2 in counts else 1


def _spread(found: Dict[int, Union[int, float]], ids: list[int], each: int) -> Dict[int, Union[int, float]]:
    """Return the values by core; none if they belong to other cores, or to a part of them.

    A metric can have a value for each chip with several cores. The order is the same in all lists, the ids need not be.
    """
    ordered = [found[key] for key in sorted(found)]
    if len(ordered) * each == len(ids):
        ordered = [value for value in ordered for _ in range(each)]
    return {core: ordered[at] for at, core in enumerate(ids)} if len(ordered) == len(ids) else {}


def _bytes(value: Union[int, float]) -> int:
    """Return a credible number of bytes."""
    if not 0 <= value <= _MOST_BYTES or value != int(value):
        raise Nonsense("{} bytes of memory".format(value))
    return int(value)


def _number(key: str, value: Union[int, float], most: float) -> float:
    """Return a credible percentage or time."""
    if not 0 <= value <= most:
        raise Nonsense("{} is {}".format({**BASIC, **OPTIONAL}[key], value))
    return float(value)
