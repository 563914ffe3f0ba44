"""The snapshot of a fleet on this machine, and the lock by which one process at a time writes the fleet's files."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops import files
from tpu_ops.cloud import forms
from tpu_ops.cloud.node import Node
from tpu_ops.config import Settings
from tpu_ops.files import UnwritableError, unwritable
from tpu_ops.ssh.fleet_files import LARGEST, FleetFiles, replace

#: Version of the snapshot's format; files of other versions are not read.
VERSION = 1

#: Beginning of the year 10000 in seconds since 1970: Python cannot represent later dates.
_LATEST = 253_402_300_800.0

#: Seconds to wait for another process that writes the same files.
LOCK_TIMEOUT = 30.0


class Question(NamedTuple):
    """A request to the API for nodes. A stored snapshot is used only for the request that it answers."""

    projects: tuple[str, ...]
    zones: tuple[str, ...]
    endpoint: str
    credentials: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the request as a dictionary of JSON types."""
        return {
            "projects": sorted(self.projects),
            "zones": sorted(self.zones),
            "endpoint": self.endpoint,
            "credentials": self.credentials,
        }


def question_of(settings: Settings) -> Question:
    """Return the request that these settings make to the API."""
    # Requests to a custom endpoint carry no credentials, so the name of the credentials does not matter.
    asker = "" if settings.endpoint else settings.auth.name
    return Question(settings.projects, settings.zones, settings.endpoint, asker)


class Snapshot(NamedTuple):
    """The nodes as the API last listed them.

    Attributes:
        asked_at: When the API was asked, in seconds since 1970.
        nodes: The nodes, in the order of their full names.
        source: Source of a published snapshot; empty for the API.
        warnings: What could not be listed, in words.
        unanswered: Pairs (project, zone) that could not be listed: their nodes are older.
    """

    asked_at: float
    nodes: tuple[Node, ...]
    source: str = ""
    warnings: tuple[str, ...] = ()
    unanswered: tuple[tuple[str, str], ...] = ()


class Stored(NamedTuple):
    """A snapshot and the request that it answers; the request is a dictionary (`Question.to_json`)."""

    question: dict[str, Any]
    snapshot: Snapshot

    def answer(self, question: Question) -> Snapshot | None:
        """Return the snapshot if it answers this request, else None."""
        return self.snapshot if self.question == question.to_json() else None


class Files(FleetFiles):
    """All files of a fleet on this machine."""

    @property
    def snapshot(self) -> Path:
        """Path of the snapshot: the nodes as the API last listed them."""
        return self.directory / "snapshot.json"

    @property
    def shown(self) -> Path:
        """The snapshot that was last shown to the user: changes are reported relative to it."""
        return self.directory / "shown.json"

    def read(self) -> Stored | None:
        """Return the stored snapshot, whatever request it answers; None if there is no snapshot or it is damaged."""
        return _read(self.snapshot)

    def damage(self) -> str:
        """Return why the stored snapshot cannot be read; empty if it can be read, or if there is no snapshot."""
        if not os.path.lexists(self.snapshot) or self.read() is not None:
            return ""
        try:
            version = json.loads(files.read_regular(self.snapshot, LARGEST)).get("version")
        except (OSError, ValueError, AttributeError, RecursionError):
            version = VERSION
        other = isinstance(version, int) and not isinstance(version, bool) and version != VERSION
        return f"the file has version {version}, this program reads {VERSION}" if other else "the file is damaged"

    def read_shown(self, question: Question, stored: Stored | None) -> Snapshot | None:
        """Return the snapshot that the user was shown last, else the current one; None if neither answers the request.

        Args:
            question: The request to answer.
            stored: The current snapshot.
        """
        shown = None
        with suppress(OSError):
            shown = None if self.shown.samefile(self.snapshot) else _read(self.shown)
        answers = (found.answer(question) for found in (shown, stored) if found)
        return next(filter(None, answers), None)

    def read_snapshot(self, question: Question) -> Snapshot | None:
        """Return the stored snapshot; None if it is missing, is damaged, or answers another request."""
        stored = self.read()
        return stored.answer(question) if stored else None

    def write_snapshot(self, question: Question, snapshot: Snapshot, *, told: bool = False) -> None:
        """Replace the snapshot.

        Args:
            question: The request that the snapshot answers.
            snapshot: The new snapshot.
            told: Whether the snapshot is shown to the user; the very first snapshot counts as shown.

        Raises:
            OpsError: The snapshot cannot be written.
        """
        data = {
            "version": VERSION,
            "scope": question.to_json(),
            "source": snapshot.source,
            "asked_at": snapshot.asked_at,
            "warnings": snapshot.warnings,
            "unanswered": snapshot.unanswered,
            "nodes": [node.to_json() for node in snapshot.nodes],
        }
        first = not os.path.lexists(self.shown)
        if first and self.snapshot.is_file():
            self._remember_shown()
            first = False
        replace(self.snapshot, json.dumps(data, indent=1) + "\n", 0o600)
        if told or first:
            self._remember_shown()

    def _remember_shown(self) -> None:
        """Record the current snapshot as shown to the user."""
        made = self.directory / ".shown.json"
        try:
            made.unlink(missing_ok=True)
            try:
                # A hard link suffices: the snapshot is replaced, never changed in place.
                made.hardlink_to(self.snapshot)
                made.replace(self.shown)
            except OSError:
                files.replace(self.shown, files.read_regular(self.snapshot, LARGEST), 0o600)
            # Remove the link: the rename does nothing if both names already were the same file.
            made.unlink(missing_ok=True)
        except OSError as exc:
            raise unwritable(self.shown, exc) from exc

    @contextmanager
    def lock(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Keep other writers of the fleet's files out for the length of a `with` block.

        Raises:
            UnwritableError: Another writer did not end in time, or the directory cannot be written.
        """
        path = self.directory / "lock"
        with ExitStack() as held:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(files.locked(path, timeout))
                configs = {self.ssh_config(), *self.directory.glob("ssh_config-*")}
                own = (self.snapshot, self.shown, *configs, self.jump_config, self.known_hosts)
                files.clear(self.directory, own)
            except TimeoutError as exc:
                raise UnwritableError(
                    f"another process held the fleet's state for more than {timeout:.0f} s",
                    where=str(path),
                    fix="find the process with `fuser` on that file, and run this command again when the process has "
                    "ended",
                ) from exc
            except OSError as exc:
                raise unwritable(self.directory, exc) from exc
            yield


def _read(path: Path) -> Stored | None:
    """Return the snapshot in a file; None if the file does not exist or is damaged."""
    try:
        return _stored(files.read_regular(path, LARGEST).decode())
    except (OSError, ValueError, OverflowError, RecursionError):
        return None


def _stored(text: str) -> Stored | None:
    """Return the snapshot in a text; None if it is invalid or has another version.

    Raises:
        ValueError: The text is not JSON, or a node in it is invalid.
        OverflowError: A number in the text is too large.
        RecursionError: The JSON is nested too deeply.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        return None
    question, asked_at, source, nodes = (data.get(key) for key in ("scope", "asked_at", "source", "nodes"))
    if not isinstance(question, dict) or not isinstance(source, str | None) or not isinstance(nodes, list):
        return None
    # Earlier versions of tpu_ops did not write these keys.
    warnings, unanswered = data.get("warnings", []), data.get("unanswered", [])
    if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
        return None
    if not forms.places(unanswered):
        return None
    if isinstance(asked_at, bool) or not isinstance(asked_at, int | float) or not 0 <= asked_at < _LATEST:
        return None
    if "\\ud" in text:
        # An unpaired surrogate raises ValueError here: it could not be written to a file later.
        json.dumps(data, ensure_ascii=False).encode()
    found = (tuple(map(Node.from_json, nodes)), source or "", tuple(warnings), tuple(map(tuple, unanswered)))
    return Stored(question, Snapshot(float(asked_at), *found))
