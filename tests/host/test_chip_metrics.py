"""The metrics of chips: read from a real gRPC server, from servers that misbehave, and never from a stranger's."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import chip_service
from tests.support.chip_service import BANDWIDTH, DUTY, IDLE, TOTAL, USED, response, serving
from tpu_ops.host import chip_metrics, grpc_call, listeners, proc, runtime_metrics

GIB = 2**30
ROOT = os.getuid() == 0
#: A user id without an account.
STRANGER = next(uid for uid in range(61234, 2**16) if proc.person_name(uid) == str(uid))


def holder(chips: int, pid: int = 0, first: int = 0) -> dict[str, Any]:
    """Return a process, by default this one, that holds some chips."""
    return {"pid": pid or os.getpid(), "devices": [f"/dev/accel{first + number}" for number in range(chips)]}


def answers(ids: list[int], **changes: Any) -> dict[str, chip_service.Answer]:
    """Return the answers of a service whose cores have these ids: core number N has N GiB in use."""
    values: dict[str, Any] = {
        TOTAL: dict.fromkeys(ids, 32 * GIB),
        USED: {core: number * GIB for number, core in enumerate(ids)},
        DUTY: {core: float(number) for number, core in enumerate(ids)},
        BANDWIDTH: dict.fromkeys(ids, 12.5),
        IDLE: dict.fromkeys(ids, 0.0),
    }
    names = {"total": TOTAL, "used": USED, "duty": DUTY, "bandwidth": BANDWIDTH, "idle": IDLE}
    values |= {names[key]: value for key, value in changes.items()}
    return {
        name: response(name, value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def read(port: int, *holders: dict[str, Any], limit: float = 30.0) -> list[dict[str, Any]]:
    return chip_metrics.read(list(holders) or [holder(4)], 4, limit, known=(port,))


def asked(given: Mapping[str, chip_service.Answer], chips: int = 4) -> dict[str, Any]:
    """Return what is read from a service with these answers."""
    with serving(given) as port:
        (found,) = read(port, holder(chips))
    assert (found["pid"], found["port"]) == (os.getpid(), port)
    return found


def test_each_core_has_its_memory_use_duty_cycle_bandwidth_and_idle_time() -> None:
    found = asked(answers([8, 9, 12, 13]))
    assert (found["state"], found["why"]) == ("ok", "")
    assert found["cores"] == [
        {
            "id": core,
            "chip": None,
            "hbm_used": number * GIB,
            "hbm_total": 32 * GIB,
            "duty": float(number),
            "hbm_bandwidth": 12.5,
            "idle": 0.0,
        }
        for number, core in enumerate([8, 9, 12, 13])
    ]


def test_chips_with_two_cores_have_one_duty_cycle_for_both() -> None:
    found = asked(answers([*range(8)], duty={0: 5.0, 1: 6.0, 2: 7.0, 3: 8.0}, bandwidth=None, idle=None))
    assert found["state"] == "ok"
    assert [core["duty"] for core in found["cores"]] == [5.0, 5.0, 6.0, 6.0, 7.0, 7.0, 8.0, 8.0]
    assert [core["chip"] for core in found["cores"]] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("held", [1, 2, 4])
@pytest.mark.parametrize("own", [True, False], ids=["its own", "all"])
def test_a_process_with_a_part_of_the_chips_reports_its_own_or_all(held: int, *, own: bool) -> None:
    """As on v2 and v3: two cores a chip, and one duty cycle for both."""
    chips = held if own else 4
    found = asked(answers([*range(8, 8 + 2 * chips)], duty=dict.fromkeys(range(chips), 5.0)), held)
    assert (found["state"], found["why"]) == ("ok", "")
    assert [core["chip"] for core in found["cores"]] == [number // 2 for number in range(2 * chips)]


@pytest.mark.parametrize(
    ("cores", "duties", "counts", "each"),
    [
        (4, 4, {4}, 1),
        (4, 4, {2, 4}, 1),  # v4: a process with two chips reports all four
        (1, 1, {1, 4}, 1),
        (8, 4, {4}, 2),
        (8, 4, {1, 4}, 2),
        (2, 1, {1, 4}, 2),
        (8, 8, {4}, 2),  # v7x: a duty cycle for each core
        (2, 2, {1, 4}, 2),
        (3, 3, {4}, 1),  # a device file is missing
        (4, 2, {4}, 0),
        (8, 3, {4}, 0),
        (8, 2, {4}, 0),
        (4, 0, {4}, 0),
        (1, 2, {4}, 0),
    ],
)
def test_the_cores_of_a_chip_follow_from_the_lengths_of_lists(
    cores: int, duties: int, counts: set[int], each: int
) -> None:
    assert runtime_metrics.cores_per_chip(cores, duties, counts) == each


@pytest.mark.parametrize("status", [None, grpc.StatusCode.UNAVAILABLE], ids=["NOT_FOUND", "UNAVAILABLE"])
def test_a_metric_that_a_version_lacks_is_null(status: grpc.StatusCode | None) -> None:
    found = asked(answers([0, 1, 2, 3], bandwidth=status, idle=status))
    assert (found["state"], found["why"]) == ("ok", "")
    assert {(core["hbm_bandwidth"], core["idle"]) for core in found["cores"]} == {(None, None)}
    assert [core["duty"] for core in found["cores"]] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (answers([0, 1, 2, 3], used={0: 1, 1: 1}), "4 of tpu.runtime.hbm.memory.total.bytes, 2 of"),
        (answers([0, 1, 2, 3], duty={0: 1.0, 1: 1.0}), "2 of tpu.runtime.tensorcore.dutycycle.percent"),
        (answers([]), "0 of tpu.runtime.hbm.memory.total.bytes, 0 of"),
        ({}, "0 of tpu.runtime.hbm.memory.total.bytes, 0 of"),
    ],
    ids=["memory", "duty", "empty", "missing"],
)
def test_lists_of_unequal_length_mean_that_the_service_warms_up(
    given: Mapping[str, chip_service.Answer], why: str
) -> None:
    found = asked(given)
    assert (found["state"], found["cores"]) == ("warming", [])
    assert found["why"].startswith("no values of all cores yet: ")
    assert why in found["why"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (answers([0], duty={0: float("nan")}), "dutycycle.percent is nan"),
        (answers([0], duty={0: 250.0}), "dutycycle.percent is 250.0"),
        (answers([0], duty={0: -1.0}), "dutycycle.percent is -1.0"),
        (answers([0], total={0: -1}), "-1 bytes of memory"),
        (answers([0], total={0: 2**62}), "bytes of memory"),
        (answers([0], total={0: float("inf")}), "inf bytes of memory"),
        (answers([0], used={0: 33 * GIB}), "more memory in use than there is"),
        (answers([-1]), "a value without a valid device id"),
        (answers([*range(65)]), "values of more than 64 devices"),
        ({**answers([0]), TOTAL: 2 * response(TOTAL, {0: GIB})}, "a value without a valid device id"),
        ({**answers([0]), TOTAL: b"\x0a\xff\xff\xff\x7f"}, "a field is longer than its message"),
        ({**answers([0]), TOTAL: b"\x0b" * 20}, "not a protobuf message"),
        ({**answers([0]), TOTAL: b"\xff" * 20}, "not a protobuf message"),
    ],
)
def test_values_that_no_chip_has_are_nonsense(given: Mapping[str, chip_service.Answer], why: str) -> None:
    found = asked(given, chips=1)
    assert (found["state"], found["cores"]) == ("broken", [])
    assert found["why"].startswith("it answers nonsense: ")
    assert why in found["why"]


def test_nonsense_of_a_metric_of_newer_versions_leaves_the_others() -> None:
    found = asked(answers([0, 1], bandwidth={0: 12.5, 1: float("nan")}, idle={0: 1.0, 1: 1e30}), chips=2)
    assert found["state"] == "ok"
    assert found["why"] == f"{BANDWIDTH} is nan; {IDLE} is 1e+30"
    assert [(core["duty"], core["hbm_bandwidth"], core["idle"]) for core in found["cores"]] == [
        (0.0, None, None),
        (1.0, None, None),
    ]


def test_an_answer_longer_than_the_first_window_is_read() -> None:
    found = asked({**answers([0]), USED: response(USED, {0: 7}, "x" * 300_000)}, chips=1)
    assert (found["state"], found["cores"][0]["hbm_used"]) == ("ok", 7)


def test_an_answer_of_ten_megabytes_is_not_read() -> None:
    begin = time.process_time()
    found = asked({**answers([0]), USED: response(USED, {0: 7}, "x" * 10_000_000)}, chips=1)
    assert (found["state"], found["cores"]) == ("broken", [])
    assert time.process_time() - begin < 1.5


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (grpc.StatusCode.INTERNAL, "gRPC status 13"),
        (grpc.StatusCode.PERMISSION_DENIED, "gRPC status 7"),
        (grpc.StatusCode.UNIMPLEMENTED, "it is another service: it has no metrics of libtpu"),
    ],
)
def test_an_error_of_the_service_is_named(status: grpc.StatusCode, why: str) -> None:
    found = asked({TOTAL: status})
    assert (found["state"], found["why"], found["cores"]) == ("broken", why, [])


def test_a_service_that_answers_too_late_is_silent() -> None:
    came = threading.Event()

    def late() -> bytes:
        came.wait()
        return b""

    with serving({TOTAL: late}) as port:
        (found,) = read(port, limit=0.4)
        came.set()
    assert (found["state"], found["why"]) == ("silent", "no answer in time")


def test_children_with_nothing_to_ask_take_no_time_from_the_service_of_their_parent() -> None:
    """As those of a program with many data loaders; the service needs longer than an equal share."""

    usual = answers([0])
    total = usual[TOTAL]
    assert isinstance(total, bytes)

    def slow() -> bytes:
        time.sleep(0.3)
        return total

    with serving(usual | {TOTAL: slow}) as port, contextlib.ExitStack() as stack:
        children = [stack.enter_context(program("/bin/sh", "-c", "echo; exec sleep 60")) for _ in range(20)]
        found = read(port, holder(1), *(holder(1, pid) for pid, _ in children), limit=4.0)
    assert [each["state"] for each in found] == ["ok"]


# --- the states of cores -------------------------------------------------------------------------------------------


def with_states(states: chip_service.Answer | None, limit: float = 30.0) -> dict[str, Any]:
    """Return what is read, with the states of cores, from a service of a chip with this answer for them."""
    with serving(answers([0]), states=states) as port:
        (found,) = chip_metrics.read_with_states([holder(1)], 1, limit, known=(port,))
    assert (found["state"], [core["id"] for core in found["cores"]]) == ("ok", [0]), "the metrics are always there"
    return found


def identity(chip: int, kind: int, index: int) -> dict[str, Any]:
    return {"global_core_id": 7, "chip_id": chip, "core_on_chip": {"type": kind, "index": index}}


def test_the_states_of_cores_have_their_chip_error_program_and_queue() -> None:
    queued = [{"run_id": 6 + at, "launch_id": 10 + at, "program_fingerprint": b"\xab\x0c"} for at in range(20)]
    busy = {
        "core_id": identity(4, 1, 1),
        "sequencer_info": [{"sequencer_type": 1, "pc": 2**40}, {"run_id": -5, "hlo_location": "x" * 1000}],
        "program_fingerprint": b"\xab\x0c",
        "launch_id": 9,
        "queued_program_info": queued,
    }
    faulty = {"core_id": identity(0, 3, 0), "launch_id": 0, "error_message": "halted\n" + "x" * 1000}
    found = with_states(chip_service.status({3: busy, 0: faulty, 2: {}}))["core_states"]
    waiting = [{"execution": 6 + at, "launch": 10 + at, "program": "ab0c"} for at in range(8)]
    empty = dict.fromkeys(("chip", "type", "index", "program", "launch", "execution"))
    empty |= {"error": "", "queue": 0, "queued": []}
    assert found == [
        empty | {"id": 0, "chip": 0, "type": "sparse", "index": 0, "error": "halted\n" + "x" * 293, "launch": 0},
        empty | {"id": 2},
        {
            "id": 3,
            "chip": 4,
            "type": "tensor",
            "index": 1,
            "error": "",
            "program": "ab0c",
            "launch": 9,
            "execution": -5,
            "queue": 20,
            "queued": waiting,
        },
    ]


@pytest.mark.parametrize(
    ("states", "found"),
    [
        (b"", []),
        (None, None),  # a version without the method
        (grpc.StatusCode.NOT_FOUND, None),
        (grpc.StatusCode.INTERNAL, None),
        (b"\xff" * 20, None),
        (b"\x12\xff\xff\xff\x7f", None),
        (b"\x12\x00" * 129, None),
        (b"\x18\x00" * 140_000, None),
        (b"\x18\x00" * 600_000, None),
    ],
    ids=["none", "old", "not found", "internal", "no message", "cut off", "many", "long", "too long"],
)
def test_states_that_cannot_be_read_leave_the_metrics(states: chip_service.Answer | None, found: object) -> None:
    assert with_states(states)["core_states"] == found


def test_states_that_come_too_late_leave_the_metrics() -> None:
    came = threading.Event()

    def late() -> bytes:
        came.wait()
        return b""

    begin = time.monotonic()
    with serving(answers([0]), states=late) as port:
        (found,) = chip_metrics.read_with_states([holder(1)], 1, 1.0, known=(port,))
        took = time.monotonic() - begin
        came.set()
    assert (found["state"], found["core_states"]) == ("ok", None)
    assert took < 2.5


def test_a_process_without_metrics_has_no_states() -> None:
    with program("sh", "-c", "echo; read x") as (pid, _):
        (found,) = chip_metrics.read_with_states([holder(1, pid)], 1, known=())
    assert (found["state"], found["core_states"]) == ("none", None)


# --- servers of raw bytes ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, port))
        listener.listen()
        yield listener


def misbehaving(act: Callable[[socket.socket], None], limit: float = 30.0) -> dict[str, Any]:
    """Return what is read from a server that does this with its first connection."""
    with listening() as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(10)
                act(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        (found,) = read(listener.getsockname()[1], limit=limit)
        thread.join()
    return found


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Return a function that waits for a request, and answers it with these bytes."""

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(data)
        while connection.recv(65536):
            pass

    return act


def floods(data: bytes) -> Callable[[socket.socket], None]:
    """Return a function that sends these bytes until the client goes."""

    def act(connection: socket.socket) -> None:
        while True:
            connection.sendall(data)

    return act


SETTINGS = frame(4)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda connection: connection.close(), ""),
        (says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), "it speaks HTTP/1"),
        (says(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n"), "a frame of "),
        (says(frame(0, b"x", 1, 1, length=2**24 - 1)), "a frame of 16777215 bytes"),
        (says(SETTINGS + frame(0, b"\0\0\0\0\xff", 1, 1)), "the length of a message is wrong"),
        (says(SETTINGS + frame(0, b"\1\0\0\0\0", 1, 1)), "the length of a message is wrong"),
        (says(SETTINGS + frame(0, b"\0", 1, 1)), "the length of a message is wrong"),
        (says(SETTINGS + frame(0, b"\x09", 9, 1)), "the padding of a frame is wrong"),
        (says(SETTINGS + frame(3, b"\0\0\0\2", 0, 1)), "it ends the call (error 2)"),
        (says(SETTINGS + frame(7, b"\0\0\0\0\0\0\0\x0b")), "it ends the connection (error 11)"),
        (says(SETTINGS + frame(1, b"\x8d", 4, 1)), "HTTP status 404"),
        (says(SETTINGS + frame(1, b"\x88\x40\xff", 5, 1)), "the headers are not valid"),
        (says(SETTINGS + frame(1, b"\x88\x40\x7f\xff\xff\xff\xff\xff\xff", 5, 1)), "the headers are not valid"),
        (says(SETTINGS + frame(1, b"", 5, 1)), "an error without a readable gRPC status"),
        (says(SETTINGS + frame(1, b"", 1, 1) + frame(0, b"", 1, 1)), "headers without their end"),
        (says(SETTINGS + frame(5, b"\0\0\0\2", 4, 1)), "unexpected frame of type 5"),
        (floods(frame(6, b"12345678") * 100), "frames"),
        (floods(frame(8, b"\0\0\0\1") * 100), "frames"),
        (floods(frame(0, b"x" * 16384, 0, 1)), "the answer is too long"),
        (floods(frame(0, b"x" * 16384, 0, 7)), "the answer is too long"),
        (floods(b"x" * 65536), "a frame of "),
    ],
)
def test_a_server_that_speaks_no_valid_grpc_is_broken(act: Callable[[socket.socket], None], why: str) -> None:
    found = misbehaving(act)
    assert (found["state"], found["cores"]) == ("broken", [])
    assert why in found["why"]


def test_a_server_that_drips_bytes_is_given_up_in_time() -> None:
    def drip(connection: socket.socket) -> None:
        for byte in SETTINGS * 100:
            connection.sendall(bytes((byte,)))
            time.sleep(0.02)

    begin = time.monotonic()
    assert misbehaving(drip, limit=0.5)["state"] == "silent"
    assert time.monotonic() - begin < 10


# --- which socket is asked -----------------------------------------------------------------------------------------

#: A program that listens on ports, perhaps as another user, says so, and waits.
LISTEN = """
import os, socket, sys
for uid in sys.argv[2:]:
    os.setuid(int(uid))
made = []
for port in sys.argv[1].split(","):
    made.append(socket.socket())
    made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made[-1].bind(("127.0.0.1", int(port)))
    made[-1].listen()
print(",".join(str(each.getsockname()[1]) for each in made), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def program(*argv: str, **options: Any) -> Iterator[tuple[int, str]]:
    """Run a program until the end of the block; yield its pid and its first line."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, text=True, stdin=pipe, stdout=pipe, **options) as process:
        assert process.stdout
        try:
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.kill()


def test_many_silent_services_take_no_longer_than_one() -> None:
    """They accept connections, since the kernel does, and say nothing."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(program(sys.executable, "-c", LISTEN, "0")) for _ in range(3)]
        begin = time.monotonic()
        held = [holder(1, pid, number) for number, (pid, _) in enumerate(started)]
        found = chip_metrics.read(held, 4, 0.9, known=[int(port) for _, port in started])
        assert time.monotonic() - begin < 2.5
    assert [(one["pid"], str(one["port"]), one["state"]) for one in found] == [
        (pid, port, "silent") for pid, port in started
    ]


def test_a_process_that_listens_on_no_port_has_no_metrics() -> None:
    with program("sh", "-c", "echo; read x") as (pid, _):
        found = chip_metrics.read([holder(1, pid)], 4, known=())
    why = "it listens on no port of libtpu's metrics service"
    assert found == [{"pid": pid, "port": 0, "state": "none", "why": why, "cores": []}]


def test_nobody_holds_a_chip_and_nothing_is_asked() -> None:
    assert chip_metrics.read([], 4) == []
    assert chip_metrics.read([{"pid": os.getpid(), "devices": ["/dev/vfio/vfio"]}], 4) == []


@pytest.mark.skipif(not ROOT, reason="it takes root to be somebody else")
def test_a_socket_of_another_person_on_the_usual_port_is_not_used() -> None:
    with (
        program(sys.executable, "-c", LISTEN, "0", str(STRANGER)) as (_, port),
        program("sh", "-c", "echo; read x") as (pid, _line),
    ):
        assert [(one["pid"], one["state"]) for one in read(int(port), holder(1, pid))] == [(pid, "none")]


@pytest.mark.skipif(not ROOT, reason="the socket has to belong to root")
def test_a_socket_of_root_on_the_usual_port_is_used_for_a_process_without_one() -> None:
    with serving(answers([4, 5])) as port, program("sh", "-c", "echo; read x") as (pid, _line):
        (found,) = read(port, holder(2, pid))
        assert (found["pid"], found["port"], found["state"]) == (pid, port, "ok")
        (none,) = chip_metrics.read([holder(2, pid)], 4, known=())
        assert none["state"] == "none"


def test_other_ports_of_the_process_are_tried_after_the_usual_one() -> None:
    """The process has a port of something that never answers, as a notebook has, and other gRPC services."""
    with (
        listening(),
        serving({}, service="ProfilerService"),
        serving(answers([0, 1])) as port,
    ):
        (usual,) = read(port, holder(2))
        (other,) = chip_metrics.read([holder(2)], 4, 6.0, known=())
    assert (usual["port"], usual["state"]) == (port, "ok")
    assert (other["port"], other["state"]) == (port, "ok")


def test_ports_that_speak_no_grpc_are_no_metrics_service() -> None:
    with program(sys.executable, "-c", LISTEN, ",".join("0" * 20)) as (pid, _):
        begin = time.monotonic()
        (found,) = chip_metrics.read([holder(1, pid)], 4, 0.5, known=())
        assert time.monotonic() - begin < 2.5
    assert found["state"] == "none"


@pytest.mark.parametrize(
    "name", ["TPU_RUNTIME_METRICS_PORTS=8431,x,{}", "LIBTPU_INIT_ARGS=--a=1 --runtime_metric_service_port={} --b"]
)
def test_the_environment_of_a_process_names_its_port(name: str) -> None:
    with listening() as free:
        port = free.getsockname()[1]
    variable, _, value = name.format(port).partition("=")
    with program(sys.executable, "-c", LISTEN, str(port), env={**os.environ, variable: value}) as (pid, _):
        (found,) = chip_metrics.read([holder(1, pid)], 4, 0.3, known=())
    assert (found["port"], found["state"]) == (port, "silent"), "it is asked, and what it says counts"


def test_children_that_share_the_socket_or_the_chips_are_left_out() -> None:
    with (
        listening() as listener,
        program("sh", "-c", "echo; sleep 60", pass_fds=[listener.fileno()]) as (forked, _),
        program("sh", "-c", "echo; read x") as (bare, _line),
        program("sh", "-c", "echo; read x") as (other, _more),
    ):
        port = listener.getsockname()[1]
        held = [holder(4), holder(4, forked), holder(4, bare), holder(1, other, first=4)]
        found = chip_metrics.read(held, 4, 0.4, known=(port,))
    shown = [(one["pid"], one["state"]) for one in found]
    # If root runs the tests, `other` has no other socket of root to be asked on.
    assert shown == [(os.getpid(), "silent"), (other, "none")]


def test_a_port_that_several_processes_share_counts_for_one() -> None:
    with (
        program(sys.executable, "-c", LISTEN, "0") as (one, port),
        program(sys.executable, "-c", LISTEN, port) as (
            other,
            _,
        ),
    ):
        found = chip_metrics.read([holder(1, one), holder(1, other, first=1)], 4, 0.4, known=(int(port),))
    assert [(each["pid"], each["state"]) for each in found] == [(one, "silent"), (other, "none")]
    assert found[1]["why"] == f"it shares port {port} with another process"


#: A program that serves what it reads from standard input in its own network namespace.
SERVE = """
import subprocess, sys
from tests.support import chip_service
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with chip_service.serving({chip_service.TOTAL: chip_service.response(chip_service.TOTAL, {3: 9}),
    chip_service.USED: chip_service.response(chip_service.USED, {3: 5})}) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not ROOT, reason="it takes root to make a network namespace")
def test_a_process_in_another_network_namespace_is_asked_there() -> None:
    with program("unshare", "--net", sys.executable, "-c", SERVE, cwd=Path(__file__).parents[2]) as (pid, port):
        (found,) = read(int(port), holder(1, pid))
    assert (found["port"], found["state"]) == (int(port), "ok")
    assert [(core["id"], core["hbm_used"], core["duty"]) for core in found["cores"]] == [(3, 5, None)]


@pytest.mark.skipif(not ROOT, reason="it takes root to make a network namespace")
def test_a_port_that_is_closed_before_it_is_asked_is_none() -> None:
    """The loopback interface of a new namespace is down, so that no connection is possible."""
    listen = "import socket; made = socket.create_server(('', 0)); print(made.getsockname()[1], flush=True); input()"
    with program("unshare", "--net", sys.executable, "-c", listen) as (pid, port):
        (found,) = read(int(port), holder(1, pid))
    assert (found["pid"], found["port"], found["state"]) == (pid, 0, "none")
    assert found["why"].startswith("the port is closed: ")


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:20EF 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 4711 1 0000000000000000 100
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000000000000000 100
   2: 0100007F:20EF 0100007F:C001 01 00000000:00000000 00:00000000 00000000  1001        0 4713 1 0000000000000000 100
   3: 0100007F:20F0 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 4714 1 0000000000000000 100
"""
TABLE6 = (
    "   0: 00000000000000000000000000000000:20EF 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 15 1 0\n"
    "   1: 00000000000000000000000001000000:20F0 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 16 1 0\n"
)


def test_the_kernels_tables_are_read_up_to_the_first_connection() -> None:
    found = [(each.host, each.port, each.uid, each.inode) for each in listeners.parse(TABLE.splitlines())]
    assert found == [("127.0.0.1", 8431, 1001, 4711), ("0.0.0.0", 22, 0, 4712)]  # noqa: S104 - nothing is bound
    found = [(each.host, each.port, each.uid, each.inode) for each in listeners.parse(TABLE6.splitlines())]
    assert found == [("::", 8431, 0, 15), ("::1", 8432, 0, 16)]


@pytest.mark.parametrize(
    ("block", "found"),
    [
        # As python3-hpack 4 encodes :status 200, content-type, grpc-status and grpc-message for a table of size 0.
        ("20885f8b1d75d0620d263d4c4d656440889acac8b21234da8f8107", (0, 200)),
        ("20885f8b1d75d0620d263d4c4d656440889acac8b21234da8f816f", (5, 200)),
        ("20885f8b1d75d0620d263d4c4d656440889acac8b21234da8f8208bf", (12, 200)),
        ("20885f106170706c69636174696f6e2f67727063400b677270632d737461747573023132", (12, 200)),
        ("204883682dff7681f3", (-1, 415)),
        # A status that is no number, and one of too many digits.
        ("400b677270632d7374617475730178", (-1, -1)),
        ("400b677270632d7374617475730431303030", (-1, -1)),
        ("40889acac8b21234da8f82ffff", (-1, -1)),
        ("", (-1, -1)),
    ],
)
def test_the_status_in_headers_is_found(block: str, found: tuple[int, int]) -> None:
    assert grpc_call.statuses(bytes.fromhex(block)) == found


def test_the_message_in_headers_is_found() -> None:
    status, message = b"\x00\x0bgrpc-status\x0212", b"\x00\x0cgrpc-message\x0eunimplemented."
    assert grpc_call.message_of(b"\x20\x88" + status + message) == b"unimplemented."
    assert grpc_call.message_of(b"\x20\x88" + status) == b""


def test_random_bytes_raise_no_other_error() -> None:
    chance = random.Random(31)  # noqa: S311 - the same bytes in each test
    good = response(TOTAL, {0: GIB, 1: GIB})
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(runtime_metrics.Nonsense):
            runtime_metrics.gauges(bytes(data))
        with contextlib.suppress(runtime_metrics.Nonsense):
            runtime_metrics.core_states(bytes(data))
        with contextlib.suppress(grpc_call.CallError):
            grpc_call.statuses(chance.randbytes(chance.randrange(40)))
