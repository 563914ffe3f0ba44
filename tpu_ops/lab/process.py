"""The record of the API's process, and the check that the recorded process still runs.

The lab sends signals to the recorded process, so the record is checked first: another program might have written the
file, or the kernel might have given the process id to another process.
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
    """The content of an instance's ``process.json``.

    Attributes:
        pid: Process id.
        started: When the process started, in clock ticks since boot. The id alone is not enough, since ids are reused.
        grpc: The gRPC endpoint; its port is 0 if not known yet.
        rest: The REST endpoint; its port is 0 if not known yet.
        serves: Whether the process has reported that it serves requests.
    """

    pid: int
    started: str
    grpc: str
    rest: str
    serves: bool = True

    @property
    def ports(self) -> tuple[int, int]:
        """The ports for gRPC and REST."""
        return int(self.grpc.rsplit(":", 1)[1]), int(self.rest.rsplit(":", 1)[1])

    def runs(self) -> bool:
        """Return whether the recorded process still runs and is a process of the lab's API."""
        return start_time(self.pid) == self.started and serves_api(arguments(self.pid))

    def write(self, path: Path) -> None:
        """Write the record to a file atomically.

        Raises:
            OSError: The file cannot be written.
        """
        partial = path.with_suffix(".new")
        try:
            partial.write_text(json.dumps(asdict(self)))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def read(path: Path) -> Record | None:
    """Return the record in a file, even if its process has ended; None if the file is missing or invalid."""
    try:
        found = json.loads(path.read_bytes())
        record = Record(found["pid"], found["started"], found["grpc"], found["rest"], found.get("serves", True))
        sound = _GRPC.fullmatch(record.grpc) and _REST.fullmatch(record.rest) and max(record.ports) < 1 << 16
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    # isinstance() would accept a bool as an int. Process id 1, 0 and negative numbers (process groups) are invalid.
    whole = type(record.pid) is int and record.pid > 1 and type(record.started) is str and type(record.serves) is bool
    return record if sound and whole else None


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if the process does not run.

    A zombie does not count as running.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, LookupError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def arguments(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if the command line cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def serves_api(words: list[str]) -> bool:
    """Return whether a command line runs the lab's API: an editor's command line can contain the module's name."""
    return ("-m", MODULE) in itertools.pairwise(words)


def unrecorded(state_file: Path, instance: str) -> Record | None:
    """Return a running API process of this lab without a record, for example because the record's file was removed."""
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
