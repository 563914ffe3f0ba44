"""A fleet's files on this machine: snapshot.json, ssh_config, known_hosts. Written atomically, one writer at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.fleet.model import Node

#: Form of the snapshot; one of another form is not read.
VERSION = 1

#: Seconds to wait for another process that writes the same files.
LOCK_TIMEOUT = 30.0


@dataclass(frozen=True)
class Scope:
    """What was asked for; a snapshot answers only the same question."""

    projects: tuple[str, ...]
    zones: tuple[str, ...]
    endpoint: str
    credentials: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the scope as a dictionary of JSON types."""
        return {
            "projects": sorted(self.projects),
            "zones": sorted(self.zones),
            "endpoint": self.endpoint,
            "credentials": self.credentials,
        }


@dataclass(frozen=True)
class Snapshot:
    """The nodes as the API last listed them.

    Attributes:
        asked_at: When the API was asked, seconds since 1970.
        nodes: In the order of their full names.
        source: Where a published snapshot was read from instead; empty where it was the API.
    """

    asked_at: float
    nodes: tuple[Node, ...]
    source: str = ""


@dataclass(frozen=True)
class Stored:
    """A snapshot and the question that it answers, as its scope's dictionary."""

    scope: dict[str, Any]
    snapshot: Snapshot

    def answer(self, scope: Scope) -> Snapshot | None:
        """Return the snapshot where it answers this question."""
        return self.snapshot if self.scope == scope.to_json() else None


@dataclass(frozen=True)
class Files:
    """Paths of a fleet's files."""

    directory: Path

    @property
    def snapshot(self) -> Path:
        """Nodes as the API last listed them."""
        return self.directory / "snapshot.json"

    @property
    def ssh_config(self) -> Path:
        """OpenSSH configuration, one host per worker."""
        return self.directory / "ssh_config"

    @property
    def jump_config(self) -> Path:
        """OpenSSH configuration for a jump that is no worker of the fleet."""
        return self.directory / "jump_config"

    @property
    def known_hosts(self) -> Path:
        """Host keys, under each worker's alias."""
        return self.directory / "known_hosts"

    def read(self) -> Stored | None:
        """Return the snapshot, whatever question it answers; None where there is none or it is damaged."""
        try:
            return _stored(self.snapshot.read_text(encoding="utf-8"))
        except (OSError, ValueError, OverflowError, RecursionError):
            return None

    def read_snapshot(self, scope: Scope) -> Snapshot | None:
        """Return the snapshot, or None where there is none, it answers another question, or is damaged."""
        stored = self.read()
        return stored.answer(scope) if stored else None

    def write_snapshot(self, scope: Scope, snapshot: Snapshot) -> None:
        """Replace the snapshot."""
        data = {
            "version": VERSION,
            "scope": scope.to_json(),
            "source": snapshot.source,
            "asked_at": snapshot.asked_at,
            "nodes": [node.to_json() for node in snapshot.nodes],
        }
        replace(self.snapshot, json.dumps(data, indent=1) + "\n", 0o600)

    def text(self, path: Path) -> str:
        """Return a file's text; empty where there is none."""
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as exc:
            raise OpsError(
                f"cannot read the fleet's state: {exc.strerror}", where=str(path), fix="move it away: it is made anew"
            ) from exc

    @contextmanager
    def lock(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Keep other writers out for as long as the block lasts.

        Raises:
            OpsError: Another writer did not end in time, or the directory cannot be written.
        """
        path = self.directory / "lock"
        with ExitStack() as held:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(files.locked(path, timeout))
            except TimeoutError as exc:
                raise OpsError(
                    f"another process held the fleet's state for more than {timeout:.0f} s",
                    where=str(path),
                    fix="see which with `fuser` on that file, and run this again when it has ended",
                ) from exc
            except OSError as exc:
                raise unwritable(self.directory, exc) from exc
            yield


def _stored(text: str) -> Stored | None:
    """Return the snapshot that a text is; None where it has not its form or is one of another version.

    Raises:
        ValueError: It is no JSON, or a node in it is none.
        OverflowError: A number in it is too large.
        RecursionError: It is nested too deeply.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        return None
    scope, asked_at, source, nodes = (data.get(key) for key in ("scope", "asked_at", "source", "nodes"))
    if not isinstance(scope, dict) or not isinstance(source, str | None) or not isinstance(nodes, list):
        return None
    if isinstance(asked_at, bool) or not isinstance(asked_at, int | float) or not math.isfinite(asked_at):
        return None
    if "\\ud" in text:
        # Half a character, which no file can be written with.
        json.dumps(data, ensure_ascii=False).encode()
    return Stored(scope, Snapshot(float(asked_at), tuple(map(Node.from_json, nodes)), source or ""))


def replace(path: Path, text: str, mode: int) -> None:
    """Replace a file's text at once: a reader sees the old text or the new, never a part.

    Raises:
        OpsError: It cannot be written.
    """
    try:
        files.replace(path, text, mode)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def unwritable(path: Path, exc: OSError) -> OpsError:
    """Return the error for a file or directory of the state that cannot be written."""
    return OpsError(
        f"cannot write the fleet's state: {exc.strerror or exc}",
        where=str(path),
        fix="make it writable and see that the disk has space (df), or set TPU_OPS_STATE to another directory",
    )
