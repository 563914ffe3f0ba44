"""What `make bench` measured, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

S = TypeVar("S")

#: Rival -> what it is, in the order they are shown.
RIVALS = {
    "floor": "Ansible's own floor: a script that prints the same inventory from a file",
    "first": "`ansible-inventory --list`, first time: host keys are learnt",
    "again": "`ansible-inventory --list`, again",
    "cached": "`ansible-inventory --list`, out of the plugin's cache",
    "list": "`tpu_ops list`",
    "refresh": "`tpu_ops refresh`",
    "help": "`tpu_ops --help`",
}


@dataclass(frozen=True)
class Fleet:
    """A fleet that was measured.

    Attributes:
        nodes: How many nodes it has.
        accelerator_type: Of all its nodes.
        workers: Of all nodes together.
    """

    nodes: int
    accelerator_type: str
    workers: int

    @property
    def name(self) -> str:
        """What the samples call it."""
        return f"{self.nodes} x {self.accelerator_type}"


@dataclass(frozen=True)
class Sample:
    """One run of one rival.

    Attributes:
        round: In which all rivals ran once, counted from 1.
        fleet: Name of the fleet.
        rival: Key of `RIVALS`.
        wall: Seconds.
        cpu: Seconds of processor time, user and system, of the command and its children.
        peak: Largest resident size of the command or one of its children, in bytes.
        requests: Method of the API -> how often it was called.
    """

    round: int
    fleet: str
    rival: str
    wall: float
    cpu: float
    peak: int
    requests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """All samples of one run of the benchmark.

    Attributes:
        commit: What was measured, as `git describe --always --dirty` names it.
        date: Day of the run, ISO 8601.
        machine: What it ran on, in words: property -> value.
        fleets: Smallest first.
        samples: In the order they were taken.
    """

    commit: str
    date: str
    machine: Mapping[str, str]
    fleets: tuple[Fleet, ...]
    samples: tuple[Sample, ...]

    def text(self) -> str:
        """Return the series as JSON with one line per sample."""
        head = {"commit": self.commit, "date": self.date, "machine": dict(self.machine)}
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for key, entries in (("fleets", self.fleets), ("samples", self.samples)):
            lines = ",\n  ".join(json.dumps(asdict(entry)) for entry in entries)
            parts.append(f'"{key}": [\n  {lines}\n]')
        return "{\n" + ",\n".join(parts) + "\n}\n"


@dataclass(frozen=True)
class PartSeries(Generic[S]):
    """All samples of one measurement of another part than the inventory.

    Attributes:
        commit: What was measured, as `git describe --always --dirty` names it.
        date: Day of the measurement, ISO 8601.
        machine: What it ran on, in words: property -> value.
        samples: In the order they were taken.
    """

    commit: str
    date: str
    machine: Mapping[str, str]
    samples: tuple[S, ...]

    def text(self) -> str:
        """Return the series as JSON with one line per sample."""
        head = {"commit": self.commit, "date": self.date, "machine": dict(self.machine)}
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines = ",\n  ".join(json.dumps(vars(sample)) for sample in self.samples)
        return "{\n" + ",\n".join([*parts, f'"samples": [\n  {lines}\n]']) + "\n}\n"


def read_part(path: Path, kind: Callable[..., S]) -> PartSeries[S]:
    """Return the series that a file holds.

    Args:
        path: The file.
        kind: What makes a sample of its attributes.

    Raises:
        OSError: It cannot be read.
        ValueError, KeyError, TypeError: It holds none.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    data["samples"] = tuple(kind(**entry) for entry in data["samples"])
    return PartSeries(**data)


def parse(text: str) -> Series:
    """Return the series of a JSON text.

    Raises:
        ValueError, KeyError, TypeError: It is none.
    """
    data: dict[str, Any] = json.loads(text)
    data["fleets"] = tuple(Fleet(**entry) for entry in data["fleets"])
    data["samples"] = tuple(Sample(**entry) for entry in data["samples"])
    return Series(**data)


def read(path: Path) -> Series:
    """Return the series that a file holds.

    Raises:
        OSError: It cannot be read.
        ValueError, KeyError, TypeError: It holds none.
    """
    return parse(path.read_text())
