"""The API's process: its record on this machine, and whether a running process is the recorded one.

The process may receive signals, so the record is not trusted: another program may have written the file. The kernel may
also have given the process id to another process.
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
        started: When it started, in clock ticks since boot, because process ids are used again.
        grpc: The gRPC endpoint; port 0 if not known yet.
        rest: The REST endpoint; port 0 if not known yet.
        serves: Whether it has reported that it serves.
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
    """Return the record in a file, of a process that runs or ran; None if there is no valid one."""
    try:
        found = json.loads(path.read_bytes())
        record = Record(found["pid"], found["started"], found["grpc"], found["rest"], found.get("serves", True))
        sound = _GRPC.fullmatch(record.grpc) and _REST.fullmatch(record.rest) and max(record.ports) < 1 << 16
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    # A bool is an int too. Process 1 and process groups (0, negative) are never valid.
    whole = type(record.pid) is int and record.pid > 1 and type(record.started) is str and type(record.serves) is bool
    return record if sound and whole else None


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not run.

    A zombie does not count as running.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, LookupError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; empty if it cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def serves_api(words: list[str]) -> bool:
    """Return whether a command line is that of the lab's API; an editor's may contain the module's name as well."""
    return ("-m", MODULE) in itertools.pairwise(words)


def unrecorded(state_file: Path, instance: str) -> Record | None:
    """Return a running API process of this lab that has no record, for example because the file was removed."""
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
