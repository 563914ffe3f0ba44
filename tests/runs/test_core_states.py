"""The states of cores, joined with the cores that have metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chips import core, core_state
from tpu_ops.runs.core_states import State, by_core

#: Devices of two chips, each of which is a chip, or one of a chip's two cores.
CHIPS, CORES = [core(8), core(12)], [core(at, chip=at // 2) for at in range(4)]
#: Two chips with two tensor cores each.
TENSOR = [core_state(at, chip=at // 2, index=at % 2, program=f"0{at}", launch=40 + at, queue=at) for at in range(4)]
SPARSE = [core_state(at, chip=at - 4, kind="sparse", queue=9) for at in (4, 5)]


def test_a_core_of_a_chip_with_two_has_the_state_of_its_own() -> None:
    assert by_core(CORES, TENSOR) == [State("", f"0{at}", 40 + at, at) for at in range(4)]


def test_a_chip_that_is_one_device_has_the_states_of_all_its_cores() -> None:
    assert by_core(CHIPS, TENSOR) == [State("", "00", 40, 1), State("", "02", 42, 3)]
    assert by_core(CHIPS, TENSOR + SPARSE) == [State("", "00", 40, 9), State("", "02", 42, 9)]


def test_an_error_of_a_sparse_core_is_one_of_all_devices_of_its_chip() -> None:
    found = by_core(CORES, [*TENSOR, SPARSE[0] | {"error": "halted"}, SPARSE[1]])
    assert [state.error for state in found] == ["core 4: halted"] * 2 + [""] * 2


def test_a_core_without_a_program_has_none_and_a_queue() -> None:
    assert by_core([core(0)], [core_state(3, chip=5)]) == [State("", "", None, 0)]


@pytest.mark.parametrize("found", [None, []])
def test_states_that_a_launcher_does_not_have_are_unknown(found: list[Any] | None) -> None:
    assert by_core(CHIPS, found) == [State()] * 2


@pytest.mark.parametrize("cores", [CHIPS, CORES], ids=["chips", "cores"])
@pytest.mark.parametrize("chips", [[0, 1, 2], [0, 0, 0], [0, 1, None]], ids=["more", "fewer", "unknown"])
def test_errors_of_cores_of_unknown_devices_are_told_all_the_same(cores: list[Any], chips: list[int | None]) -> None:
    found = [core_state(at, chip=chip, program="01") for at, chip in enumerate(chips)]
    found[1]["error"] = "halted"
    assert by_core(cores, found) == [State("core 1: halted")] * len(cores)
