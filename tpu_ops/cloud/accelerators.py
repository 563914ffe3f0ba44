"""The accelerator table: how many chips and workers an accelerator type has.

Source: the documentation of each Cloud TPU version (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e). For v5e and v6e
the documentation's "hosts" column is not the number of VMs: up to eight chips fit one VM, and larger slices have four
chips in every VM. For v5p the sizes are the documented common ones; names of other sizes are accepted as well.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<generation>v\d+(?:litepod|p|e)?)-(?P<count>[1-9][0-9]{0,5})")


@dataclass(frozen=True)
class _Generation:
    """One generation of TPUs in the table: the meaning of the number in the names of its accelerator types."""

    label: str
    cores_per_chip: int
    counts_cores: bool
    device_files: str
    sizes: tuple[int, ...]
    dimensions: int


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


_GENERATIONS = {
    "v2": _Generation("V2", 2, True, "/dev/accel", (8, 32, 128, 256, 512), 2),
    "v3": _Generation("V3", 2, True, "/dev/accel", (8, *_doubling(32, 2048)), 2),
    "v4": _Generation("V4", 2, True, "/dev/accel", _doubling(8, 4096), 3),
    "v5litepod": _Generation("V5LITE_POD", 1, False, "/dev/vfio/", (1, 4, *_doubling(8, 256)), 2),
    "v5p": _Generation("V5P", 2, True, "/dev/vfio/", (*_doubling(8, 8192), 12288), 3),
    "v6e": _Generation("V6E", 1, False, "/dev/vfio/", (1, 4, *_doubling(8, 256)), 2),
}


@dataclass(frozen=True)
class AcceleratorType:
    """The properties of an accelerator type.

    Attributes:
        name: As the API spells it, for example ``v4-32``.
        generation: The part before the dash, for example ``v4`` or ``v5litepod``.
        api_version: The ``AcceleratorConfig.Type`` name, for example ``V5LITE_POD``.
        cores: TensorCores of the whole slice.
        chips: Chips of the whole slice.
        workers: Number of VMs.
        chips_per_worker: Chips of each VM.
        topology: Chips per dimension, for example ``2x2x4``.
        device_files: Prefix of the chips' device files, ``/dev/accel`` or ``/dev/vfio/``.
    """

    name: str
    generation: str
    api_version: str
    cores: int
    chips: int
    workers: int
    chips_per_worker: int
    topology: str
    device_files: str


def _topology(chips: int, dimensions: int) -> str:
    """Return the most cubic grid of a number of chips: smaller sides first, sides of one chip last."""
    sides = [1] * dimensions
    rest, factor = chips, 2
    factors: list[int] = []
    while rest > 1:
        if rest % factor:
            factor += 1
        else:
            factors.append(factor)
            rest //= factor
    for prime in sorted(factors, reverse=True):
        sides[sides.index(min(sides))] *= prime
    return "x".join(str(side) for side in sorted(sides, key=lambda side: (side == 1, side)))


def accelerator_type(name: str) -> AcceleratorType:
    """Return the properties of an accelerator type, given its name.

    Raises:
        ValueError: The name has another form, an unknown generation, or a size that does not fit any VM layout.
    """
    match = _NAME.fullmatch(name)
    generation = _GENERATIONS.get(match["generation"]) if match else None
    if match is None or generation is None:
        known = ", ".join(f"{key}-N" for key in _GENERATIONS)
        raise ValueError(f"unknown accelerator type {name!r}: known forms are {known}")
    count = int(match["count"])
    if generation.counts_cores:
        if count % 8:
            raise ValueError(f"accelerator type {name!r}: {match['generation']} comes in multiples of 8 cores")
        chips, workers, cores = count // generation.cores_per_chip, count // 8, count
    else:
        if count > 8 and count % 4:
            raise ValueError(f"accelerator type {name!r}: past 8 chips, {match['generation']} comes in multiples of 4")
        chips, workers, cores = count, 1 if count <= 8 else count // 4, count * generation.cores_per_chip
    return AcceleratorType(
        name=name,
        generation=match["generation"],
        api_version=generation.label,
        cores=cores,
        chips=chips,
        workers=workers,
        chips_per_worker=chips // workers,
        topology=_topology(chips, generation.dimensions),
        device_files=generation.device_files,
    )


def type_of(label: str, topology: str) -> str:
    """Return the accelerator type of a request by generation and topology, such as ``V4`` and ``2x2x4``; "" if unknown.

    Args:
        label: The ``AcceleratorConfig.Type`` name.
        topology: Chips per dimension.
    """
    for name, generation in _GENERATIONS.items():
        if generation.label == label and re.fullmatch(r"\d+(x\d+)*", topology):
            chips = math.prod(map(int, topology.split("x")))
            return f"{name}-{chips * (generation.cores_per_chip if generation.counts_cores else 1)}"
    return ""


def spelled(generation: str) -> str:
    """Return a generation as accelerator types spell it: Google's e-mails and pages write ``v5e``."""
    return {"v5e": "v5litepod", "v5lite": "v5litepod"}.get(generation, generation)


def generations() -> tuple[str, ...]:
    """Return the generations of TPUs as accelerator types spell them, such as ``v5litepod``."""
    return tuple(_GENERATIONS)


def catalogue() -> tuple[AcceleratorType, ...]:
    """Return every accelerator type that the API offers in some zone."""
    return tuple(
        accelerator_type(f"{name}-{size}") for name, generation in _GENERATIONS.items() for size in generation.sizes
    )


#: Runtime version of a new node by generation: the version that the documentation names for JAX and PyTorch.
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def default_runtime(accelerator_type: str) -> str:
    """Return the runtime version for an accelerator type; empty if its generation is unknown."""
    return RUNTIMES.get(accelerator_type.split("-", 1)[0], "")
