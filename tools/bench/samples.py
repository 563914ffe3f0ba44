"""The samples of `make bench`, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

S = TypeVar("S")

#: The measured commands, of this program and of others: key -> description, in the order of the page.
MEASURED = {
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
        nodes: Number of nodes.
        accelerator_type: Accelerator type of all nodes.
        workers: Number of workers of all nodes.
    """

    nodes: int
    accelerator_type: str
    workers: int

    @property
    def name(self) -> str:
        """The fleet's name in samples."""
        return f"{self.nodes} x {self.accelerator_type}"


@dataclass(frozen=True)
class Sample:
    """The measurement of one command in one round.

    Attributes:
        round: Number of the round, from 1, in which each command ran once.
        fleet: Name of the fleet.
        rival: Key of the command in `MEASURED`. The committed samples have this field's name.
        wall: Duration in seconds.
        cpu: Seconds of processor time, user and system, of the command and its children.
        peak: Largest resident size of the command or one of its children, in bytes.
        requests: Number of calls by API method.
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
        commit: The measured commit, as `git describe --always --dirty` names it.
        date: Day of the run, ISO 8601.
        machine: Properties of the machine as text: property -> value.
        fleets: The fleets, smallest first.
        samples: The samples in the order in which they were taken.
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
    """All samples of one measurement of a part other than the inventory.

    Attributes:
        commit: The measured commit, as `git describe --always --dirty` names it.
        date: Day of the measurement, ISO 8601.
        machine: Properties of the machine as text: property -> value.
        samples: The samples in the order in which they were taken.
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
    """Return the series in a file.

    Args:
        path: The file.
        kind: Creates a sample from its attributes.

    Raises:
        OSError: The file cannot be read.
        ValueError, KeyError, TypeError: The content is not a series.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    data["samples"] = tuple(kind(**entry) for entry in data["samples"])
    return PartSeries(**data)


def parse(text: str) -> Series:
    """Return the series in a JSON text.

    Raises:
        ValueError, KeyError, TypeError: The text is not a series.
    """
    data: dict[str, Any] = json.loads(text)
    data["fleets"] = tuple(Fleet(**entry) for entry in data["fleets"])
    data["samples"] = tuple(Sample(**entry) for entry in data["samples"])
    return Series(**data)


def read(path: Path) -> Series:
    """Return the series in a file.

    Raises:
        OSError: The file cannot be read.
        ValueError, KeyError, TypeError: The content is not a series.
    """
    return parse(path.read_text())
