"""The lab's metrics of chips: what the service says in each state, and when its port is open."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chip_service import BANDWIDTH, CLASSES, DUTY, IDLE, TOTAL, USED
from tpu_ops.lab import shared
from tpu_ops.lab.image import chip_service, chip_watch

GIB = 2**30


def ask(name: str, wanted: dict[str, Any], accelerator: str = "v4-8", chips: int = 4) -> dict[int, float] | int:
    """Return what the service answers, as Google's protobuf library reads it, or the status."""
    message = CLASSES["MetricRequest"](metric_name=name, skip_node_aggregation=True).SerializeToString()
    found = chip_service.answer("GetRuntimeMetric", message, wanted, accelerator, chips)
    if isinstance(found, int):
        return found
    metric = CLASSES["MetricResponse"].FromString(found).metric
    assert metric.name == name
    return {
        entry.attribute.value.int_attr: getattr(entry.gauge, entry.gauge.WhichOneof("value"))
        for entry in metric.metrics
    }


@pytest.mark.parametrize(
    ("accelerator", "chips", "cores", "total"),
    [("v2-8", 4, 8, 8), ("v3-32", 4, 8, 16), ("v4-8", 4, 4, 32), ("v5litepod-8", 8, 8, 16), ("v6e-1", 1, 1, 32)],
)
def test_cores_and_memory_are_those_of_the_accelerator_type(
    accelerator: str, chips: int, cores: int, total: int
) -> None:
    assert ask(TOTAL, {}, accelerator, chips) == dict.fromkeys(range(cores), total * GIB)
    assert ask(USED, {}, accelerator, chips) == dict.fromkeys(range(cores), total * GIB * 3 // 4)
    assert ask(DUTY, {}, accelerator, chips) == dict.fromkeys(range(chips), 97.5)


def test_ids_need_not_begin_at_zero_and_chips_can_have_two_cores() -> None:
    wanted = {"first_id": 8, "two_cores": True}
    assert (list(ask(TOTAL, wanted)), list(ask(DUTY, wanted))) == ([*range(8, 16)], [8, 9, 10, 11])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "values"),
    [
        ("busy", {DUTY: 97.5, BANDWIDTH: 43.25, IDLE: 0.0}),
        ("hung", {DUTY: 100.0, BANDWIDTH: 0.0, IDLE: 0.0}),
        ("not-found", {DUTY: 97.5, BANDWIDTH: 5, IDLE: 5}),
    ],
)
def test_the_values_of_a_state(state: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        expected = value if value == chip_service.NOT_FOUND else dict.fromkeys(range(4), value)
        assert ask(name, {"state": state}) == expected


def test_idle_chips_count_the_time() -> None:
    wanted = {"state": "idle", "at": time.time() - 600}
    assert ask(DUTY, wanted) == dict.fromkeys(range(4), 0.0)
    idle = ask(IDLE, wanted)
    assert isinstance(idle, dict)
    assert all(600 <= value < 700 for value in idle.values())


def test_chips_that_warm_up_have_lists_of_different_lengths() -> None:
    assert [len(ask(name, {"state": "warming"})) for name in (TOTAL, USED, DUTY)] == [4, 2, 2]  # type: ignore[arg-type]


def test_what_is_unknown_has_a_status() -> None:
    assert ask("tpu.runtime.something.else", {}) == chip_service.NOT_FOUND
    assert chip_service.answer("GetSomething", b"", {}, "v4-8", 4) == chip_service.UNIMPLEMENTED
    older = {"state": "not-found"}
    assert chip_service.answer("GetTpuRuntimeStatus", b"", older, "v4-8", 4) == chip_service.UNIMPLEMENTED


def states(state: str = "busy", accelerator: str = "v4-8", **wanted: Any) -> list[Any]:
    """Return the cores' states that the service answers, as Google's protobuf library reads them, by id."""
    found = chip_service.answer("GetTpuRuntimeStatus", b"", {"state": state, **wanted}, accelerator, 4)
    assert isinstance(found, bytes)
    told = CLASSES["GetTpuRuntimeStatusResponse"].FromString(found)
    assert told.host_name == socket.gethostname()
    assert [entry.key for entry in told.core_states] == [
        entry.value.core_id.global_core_id for entry in told.core_states
    ]
    return [entry.value for entry in told.core_states]


@pytest.mark.parametrize(
    ("state", "program", "queued"),
    [("busy", True, 2), ("idle", False, 0), ("hung", True, 1), ("halted", True, 1), ("warming", True, 2)],
)
def test_the_cores_of_a_state_have_a_program_and_a_queue(state: str, program: bool, queued: int) -> None:
    found = states(state)
    assert len(found) == (4 if state == "warming" else 8)
    for core in found:
        assert core.program_fingerprint == (chip_service.PROGRAM if program else b"")
        assert (core.HasField("launch_id"), len(core.queued_program_info)) == (program, queued)
        assert [core.launch_id + 1 + at for at in range(queued)] == [one.launch_id for one in core.queued_program_info]
        assert [one.run_id for one in core.sequencer_info] == [core.launch_id]
    assert [core.error_message for core in found] == [
        chip_service.HALTED if state == "halted" and at == 0 else "" for at in range(len(found))
    ]


@pytest.mark.parametrize(
    ("accelerator", "two_cores", "places"),
    [
        ("v4-8", False, [(8, 0), (8, 1), (9, 0), (9, 1), (10, 0), (10, 1), (11, 0), (11, 1)]),
        ("v6e-4", False, [(8, 0), (9, 0), (10, 0), (11, 0)]),
        ("v6e-4", True, [(8, 0), (8, 1), (9, 0), (9, 1), (10, 0), (10, 1), (11, 0), (11, 1)]),
    ],
)
def test_chips_have_one_or_two_tensor_cores(
    accelerator: str, *, two_cores: bool, places: list[tuple[int, int]]
) -> None:
    found = [core.core_id for core in states(accelerator=accelerator, first_id=8, two_cores=two_cores)]
    assert [(core.chip_id, core.core_on_chip.index) for core in found] == places
    assert {core.core_on_chip.type for core in found} == {1}


def test_each_state_of_the_command_is_known_to_the_service() -> None:
    known = {*chip_service.LOADS, "warming", "not-found", "silent", "broken", "refused"}
    assert known == set(shared.CHIP_STATES)


# --- the port ------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def chip(tmp_path: Path) -> Path:
    """A file that counts as a chip."""
    (tmp_path / "accel0").touch()
    return tmp_path / "accel0"


Watching = Callable[[], chip_watch.ChipWatch]


@pytest.fixture
def watching(chip: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Make the port of a worker with this chip, which answers with a program of the test's own."""
    program = tmp_path / "answer.py"
    program.write_text(
        "import socket\nlistener = socket.socket(fileno=0)\nwhile True: listener.accept()[0].send(b'here')\n"
    )
    monkeypatch.setattr(chip_watch, "PROGRAM", program)
    made: list[chip_watch.ChipWatch] = []

    def make() -> chip_watch.ChipWatch:
        made.append(chip_watch.ChipWatch([str(chip)], port, tmp_path / "chips.json"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_port_is_open_while_a_process_holds_a_chip(watching: Watching, chip: Path, port: int) -> None:
    watch = watching()
    watch.wait(0.05)
    assert not is_open(port)
    with chip.open():
        watch.wait(0.05)
        assert is_open(port)
    watch.wait(0.05)
    assert not is_open(port)


def test_the_port_of_a_chip_that_is_held_at_the_start_is_open(watching: Watching, chip: Path, port: int) -> None:
    with chip.open():
        watching().wait(0.05)
        assert is_open(port)


def test_the_program_answers_on_the_port(watching: Watching, chip: Path, port: int) -> None:
    watch = watching()
    with chip.open():
        watch.wait(0.05)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            assert connection.recv(10) == b"here"


def test_a_refused_port_is_closed_and_opened_again(watching: Watching, chip: Path, port: int, tmp_path: Path) -> None:
    watch = watching()
    with chip.open():
        watch.wait(0.05)
        for state, open_now in (("refused", False), ("idle", True)):
            (tmp_path / "chips.json").write_text(json.dumps({"state": state}))
            watch.wait(0.05)
            assert is_open(port) is open_now


def test_a_port_that_a_program_has_is_left_to_it(watching: Watching, chip: Path, port: int) -> None:
    watch = watching()
    with socket.create_server(("127.0.0.1", port)) as other, chip.open():
        watch.wait(0.05)
        assert is_open(port)
        other.close()
        watch.wait(0.05)
        watch.wait(0.05)
        assert is_open(port)


def test_a_worker_without_chips_waits() -> None:
    begin = time.monotonic()
    chip_watch.ChipWatch([]).wait(0.05)
    assert time.monotonic() - begin >= 0.05
