"""The API's process as this machine knows it: what was recorded of it, and whether a process really is that one.

What is found here may be signalled, so nothing is believed: a record is a file that anything may have written, and
the kernel gives a process id to another process once its owner is gone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

#: The module that every API process runs.
MODULE = "tpu_ops.lab.api"
_GRPC = re.compile(r"127\.0\.0\.1:\d{1,5}")
_REST = re.compile(r"http://127\.0\.0\.1:\d{1,5}")


@dataclass(frozen=True)
class Record:
    """What stands in an instance's ``process.json``.

    Attributes:
        pid: Process id.
        started: When it started, in clock ticks since boot: process ids are used again.
        grpc: Where it answers, or will; port 0 while it is not known yet.
        rest: Likewise.
        serves: Whether it has said that it answers.
    """

    pid: int
    started: str
    grpc: str
    rest: str
    serves: bool = True

    @property
    def ports(self) -> tuple[int, int]:
        """Where it answers gRPC and REST."""
        return int(self.grpc.rsplit(":", 1)[1]), int(self.rest.rsplit(":", 1)[1])

    def runs(self) -> bool:
        """Return whether this very process still runs, and is one of the lab's API."""
        return start_time(self.pid) == self.started and serves_api(arguments(self.pid))

    def write(self, path: Path) -> None:
        """Put the record in a file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        partial = path.with_suffix(".new")
        try:
            partial.write_text(json.dumps(asdict(self)))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def read(path: Path) -> Record | None:
    """Return the record that a file holds, of a process that runs or ran, or None where it holds none."""
    try:
        found = json.loads(path.read_bytes())
        record = Record(found["pid"], found["started"], found["grpc"], found["rest"], found.get("serves", True))
        sound = _GRPC.fullmatch(record.grpc) and _REST.fullmatch(record.rest) and max(record.ports) < 1 << 16
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    # A bool is an int as well. Process 1 and process groups (0, negative) are never the lab's.
    whole = type(record.pid) is int and record.pid > 1 and type(record.started) is str and type(record.serves) is bool
    return record if sound and whole else None


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; the empty string where none runs.

    One that has ended and only waits to be reaped (as under an init that does not reap) does not run.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, LookupError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; nothing where it cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def serves_api(words: list[str]) -> bool:
    """Return whether a command line is that of the lab's API: an editor's or a pager's may name it too."""
    return ("-m", MODULE) in itertools.pairwise(words)


def unrecorded(state_file: Path, instance: str) -> Record | None:
    """Return an API process of this lab that runs although no record tells of it, as when the record was removed."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or not serves_api(words := arguments(int(entry.name))):
            continue
        options = dict(itertools.pairwise(words))
        if options.get("--state") == str(state_file) and options.get("--containers") == instance:
            pid = int(entry.name)
            record = Record(pid, start_time(pid), "127.0.0.1:0", "http://127.0.0.1:0", serves=False)
            if record.runs():
                return record
    return None
