"""Joins the errors and programs that libtpu reports of cores with the cores that have metrics.

libtpu numbers cores in two ways. A core in the metrics is a device as JAX counts it: a chip, or one of a chip's two
tensor cores. The states are those of all tensor cores and sparse cores. What they have in common is the chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: The chip of a core that names none.
_UNKNOWN = -1


class State(NamedTuple):
    """The state of a core that has metrics.

    Attributes:
        error: What libtpu reports as an error of a core, with the core's number; empty without an error.
        program: The fingerprint of the program on the core; empty if there is none, None if it is unknown.
        launch: The id of the program's launch, which is the same on all workers of a run; None if it is unknown.
        queued: The number of programs that wait; None if it is unknown.
    """

    error: str = ""
    program: str | None = None
    launch: int | None = None
    queued: int | None = None


def by_core(cores: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]] | None) -> list[State]:
    """Return the state of each core that has metrics.

    Args:
        cores: The cores in a launcher's answer, ordered by id.
        found: The states of cores in the same answer, ordered by id; None if they are unknown.
    """
    if not found:
        return [State()] * len(cores)
    positions = [at if core.get("chip") is None else int(core["chip"]) for at, core in enumerate(cores)]
    chips: dict[int, list[Mapping[str, Any]]] = {}
    for state in found:
        chips.setdefault(_UNKNOWN if state.get("chip") is None else int(state["chip"]), []).append(state)
    if len(chips) != len(set(positions)) or _UNKNOWN in chips:
        # Which of these cores is which is unknown.
        return [State(errors(found))] * len(cores)
    ordered = [chips[chip] for chip in sorted(chips)]
    return [
        _state(ordered[position], positions.count(position), positions[:at].count(position))
        for at, position in enumerate(positions)
    ]


def _state(states: Sequence[Mapping[str, Any]], devices: int, number: int) -> State:
    """Return the state of one of a chip's devices, given the states of the chip's cores."""
    tensor = [state for state in states if state.get("type") == "tensor"]
    if devices > 1 and len(tensor) == devices:
        others = [state for state in states if state.get("type") != "tensor"]
        tensor, states = [tensor[number]], [tensor[number], *others]
    programs = [state for state in tensor or states if state.get("program")]
    return State(
        errors(states),
        str(programs[0]["program"]) if programs else "",
        programs[0].get("launch") if programs else None,
        max(int(state.get("queue") or 0) for state in states),
    )


def errors(states: Iterable[Mapping[str, Any]]) -> str:
    """Return the errors of cores, each with the core's number; empty without errors."""
    return "; ".join(f"core {state.get('id')}: {state['error']}" for state in states if state.get("error"))
