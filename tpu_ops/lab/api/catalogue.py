"""The zones of the lab's cloud, their accelerator types, and the runtime versions.

The zones follow the public documentation of regions and zones. Google's table of zones changes often, so the lab's
zones might differ from the real API. The sizes of accelerator types come from `tpu_ops.cloud.accelerators`.
"""

from __future__ import annotations

from functools import cache
from math import prod

from tpu_ops.cloud.accelerators import AcceleratorType, catalogue
from tpu_ops.lab.api.errors import ApiError, Code, invalid

#: Zone -> the TPU generations that the zone offers.
ZONES: dict[str, tuple[str, ...]] = {
    "asia-east1-c": ("v2",),
    "asia-northeast1-b": ("v6e",),
    "asia-southeast1-b": ("v5litepod",),
    "europe-west4-a": ("v2", "v3", "v6e"),
    "europe-west4-b": ("v5litepod", "v5p"),
    "southamerica-west1-a": ("v6e",),
    "us-central1-a": ("v2", "v3", "v5litepod", "v5p"),
    "us-central1-b": ("v2", "v3", "v6e"),
    "us-central1-c": ("v2", "v6e"),
    "us-central1-f": ("v2", "v3"),
    "us-central2-b": ("v4", "v6e"),
    "us-east1-c": ("v5litepod",),
    "us-east1-d": ("v2", "v3", "v5litepod", "v5p", "v6e"),
    "us-east5-a": ("v5p", "v6e"),
    "us-east5-b": ("v6e",),
    "us-south1-a": ("v5litepod", "v6e"),
    "us-west1-c": ("v5litepod",),
    "us-west4-a": ("v5litepod",),
    "us-west4-b": ("v5litepod",),
}

#: Google's runtime versions, and the lab's own (``lab-...``), each of which is named after a release of Debian or
#: Ubuntu.
RUNTIME_VERSIONS = (
    "lab-debian12",
    "lab-debian13",
    "lab-ubuntu2004",
    "lab-ubuntu2204",
    "lab-ubuntu2404",
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-pt-2.0",
    "tpu-vm-tf-2.15.0-pjrt",
    "tpu-vm-tf-2.15.0-pod-pjrt",
    "tpu-vm-tf-2.16.1-pjrt",
    "tpu-vm-tf-2.16.1-pod-pjrt",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)


def check_zone(zone: str) -> str:
    """Return the zone if the lab's cloud has this zone.

    Raises:
        ApiError: PERMISSION_DENIED, the real API's error for an unknown location (seen in dstackai/gpuhunt issue 98).
    """
    if zone not in ZONES:
        raise ApiError(Code.PERMISSION_DENIED, f"Location {zone} is not found or access is unauthorized.")
    return zone


@cache
def types_of(zone: str) -> dict[str, AcceleratorType]:
    """Return the accelerator types of a zone by name."""
    return {entry.name: entry for entry in catalogue() if entry.generation in ZONES[zone]}


def find_type(zone: str, name: str) -> AcceleratorType:
    """Return the accelerator type of a zone with this name.

    Raises:
        ApiError: INVALID_ARGUMENT; the zone does not offer this type.
    """
    found = types_of(zone).get(name)
    if found is None:
        raise invalid(
            f"Cloud TPU received a bad request. the accelerator {name} was not found in zone {zone} "
            f"(the zone has {', '.join(f'{generation}-*' for generation in ZONES[zone])})"
        )
    return found


def find_config(zone: str, label: str, topology: str) -> AcceleratorType:
    """Return a zone's accelerator type for the type and topology of an AcceleratorConfig.

    Raises:
        ApiError: INVALID_ARGUMENT; the zone does not offer such a type.
    """
    sides = topology.split("x")
    if all(side.isdigit() and int(side) > 0 for side in sides):
        chips = prod(int(side) for side in sides)
        for entry in types_of(zone).values():
            if entry.api_version == label and entry.chips == chips and entry.topology.count("x") == len(sides) - 1:
                return entry
    raise invalid(f"accelerator_config: type {label} with topology {topology!r} was not found in zone {zone}")


def check_runtime(version: str) -> str:
    """Return the runtime version if it exists.

    Raises:
        ApiError: INVALID_ARGUMENT; the runtime version does not exist.
    """
    if version not in RUNTIME_VERSIONS:
        raise invalid(f"runtime_version: {version!r} is unknown; the known versions are {', '.join(RUNTIME_VERSIONS)}")
    return version
