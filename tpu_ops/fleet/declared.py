"""The declared nodes of a fleet: `nodes.yml` beside the fleet's site.yml says which nodes should exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud import buckets
from tpu_ops.cloud.accelerators import default_runtime
from tpu_ops.cloud.names import CHOSEN
from tpu_ops.cloud.wish import STARTUP, Wish, check, check_name
from tpu_ops.config import ZONE, entries
from tpu_ops.errors import UsageError
from tpu_ops.fleet import targets
from tpu_ops.options import duration, shown

#: The file in the fleet directory.
FILE = Path("nodes.yml")
#: Keys of an entry.
KEYS = (
    "name",
    "type",
    "zones",
    "project",
    "spot",
    "reserved",
    "runtime",
    "network",
    "subnetwork",
    "internal_only",
    "service_account",
    "scopes",
    "labels",
    "metadata",
    "startup_script",
    "disks",
    "queued",
    "valid_until",
    "configure_at_boot",
    "keep",
)
_DISK = re.compile(rf"(?P<name>{CHOSEN}):(?P<mode>ro|rw)")

#: Returns the text of a file that an entry names. Raises OSError or UnicodeDecodeError.
Reader = Callable[[Path], str]


@dataclass(frozen=True)
class Declared:
    """One declared node.

    Attributes:
        wish: Its properties; the zone is empty, and ``spot`` is only set if the file says so.
        zones: The zones in which it may be created, in the order of preference; empty leaves them to the grant.
        spot: Whether it is a spot node; None leaves it to the grant.
        keep: Whether `tpu_ops apply --watch` makes it again.
        given: The keys that the file sets; other properties of an existing node are not compared.
        line: Line of the entry in the file.
    """

    wish: Wish
    zones: tuple[str, ...] = ()
    spot: bool | None = None
    keep: bool = False
    given: frozenset[str] = frozenset()
    line: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Project and name, which no two declared nodes share."""
        return self.wish.project, self.wish.name

    def fits(self, project: str, name: str) -> bool:
        """Return whether a node of this project and name is the declared one."""
        return self.key == (project, name)


def read(file: Path, projects: Sequence[str], content: Reader) -> tuple[Declared, ...]:
    """Return the declared nodes of a file.

    Args:
        file: The file.
        projects: The fleet's projects; the only one is the default of an entry.
        content: Returns the text of a startup script.

    Raises:
        UsageError: The file does not exist, or has faults; the error lists each with its line.
    """
    document = entries.read(file)
    if document is None:
        what = "this fleet declares no nodes"
        raise UsageError(what, where=str(file), fix="write the file: docs/nodes.md, Nodes as code, has an example")
    found = parsed(document, projects, content)
    document.check()
    return found


def parsed(document: entries.Document, projects: Sequence[str], content: Reader) -> tuple[Declared, ...]:
    """Return the declared nodes of a document, and add its faults to the document."""
    document.top().only(("nodes",))
    if document.data.get("nodes") is None:
        document.fault((), "the file has no list `nodes`; `nodes: []` says that no nodes should exist")
    found: list[Declared] = []
    for entry in document.entries("nodes", "a declared node, as in `{name: dev, type: v4-8}`"):
        if isinstance(entry, str):
            place = ("nodes", document.data["nodes"].index(entry))
            document.fault(place, f"{shown(entry)} is only a name: write it as {{name: ..., type: ...}}")
            continue
        found += _Entry(entry, projects, content).nodes()
    _refuse_overlaps(document, found)
    _refuse_shared_disks(document, found)
    return tuple(found)


class _Entry:
    """Reads one entry of the file, which declares one or more nodes."""

    def __init__(self, entry: entries.Entry, projects: Sequence[str], content: Reader) -> None:
        self._entry, self._projects, self._content = entry, projects, content

    def nodes(self) -> list[Declared]:
        """Return the nodes; empty if its names or type are faulty."""
        entry = self._entry
        entry.only(KEYS)
        names, wish = self._names(), self._wish()
        spot = entry.flag("spot") if entry.data.get("spot") is not None else None
        if entry.flag("reserved"):
            if spot:
                entry.fault("reserved", "a node is either spot or reserved")
            spot = False
        zones = entry.names("zones", form=ZONE, expected="zones, as in us-central2-b")
        keep, given = entry.flag("keep"), frozenset(key for key in KEYS if entry.data.get(key) is not None)
        if len(names) > 1 and (writable := [disk for disk, mode in wish.disks.items() if mode == "rw"]):
            entry.fault("disks", f"several nodes cannot write to one disk: write {writable[0]}:ro")
        for key in ("name", "type"):
            if entry.data.get(key) is None:
                entry.document.fault(entry.path, f"the entry has no {key}")
        return [
            Declared(replace(wish, name=name), tuple(dict.fromkeys(zones)), spot, keep, given, entry.line)
            for name in names
        ]

    def _names(self) -> list[str]:
        text = self._entry.text("name", expected="a node set, as in dev or sweep-[1-8]")
        try:
            found = targets.names_of(text) if "[" in text or "," in text else [text] if text else []
            return [check_name(name) for name in found]
        except UsageError as exc:
            self._entry.fault("name", f"name: {exc.what}; {exc.fix}")
            return []

    def _wish(self) -> Wish:
        """Return the properties of the nodes, without name and zone."""
        entry = self._entry
        kind = entry.text("type", expected="an accelerator type, as in v4-8")
        runtime = entry.text("runtime") or default_runtime(kind)
        if kind and not runtime:
            entry.fault("type", f"type: there is no default runtime version for {shown(kind)}: set `runtime`")
        wish = Wish(
            name="",
            project=self._project(),
            zone="",
            accelerator_type=kind,
            runtime_version=runtime,
            spot=entry.data.get("spot") is True,
            reserved=entry.data.get("reserved") is True and entry.data.get("spot") is not True,
            labels=entry.mapping("labels"),
            internal_only=entry.flag("internal_only"),
            network=entry.text("network"),
            subnetwork=entry.text("subnetwork"),
            service_account=entry.text("service_account"),
            scopes=entry.names("scopes"),
            metadata=self._metadata(),
            disks=self._disks(),
            queued=entry.flag("queued"),
            valid_until=self._valid_until(),
            configure_at_boot=self._configure_at_boot(),
        )
        try:
            check(wish)
        except UsageError as exc:
            entry.document.fault(entry.path, exc.what)
        return wish

    def _project(self) -> str:
        entry = self._entry
        project = entry.text("project", expected="a project id")
        if project and project not in self._projects:
            known = f"it has {texts.some(list(self._projects))}"
            entry.fault("project", f"project: {shown(project)} is not a project of this fleet; {known}")
        elif not project and entry.data.get("project") is None and len(self._projects) != 1:
            entry.document.fault(entry.path, "the entry has no project, and the fleet has not exactly one")
        return project or (self._projects[0] if self._projects else "")

    def _metadata(self) -> Mapping[str, str]:
        entry = self._entry
        found = entry.mapping("metadata")
        if "ssh-keys" in found:
            entry.fault("metadata", "metadata: tpu_ops writes the entry ssh-keys itself; users_people adds keys")
        script = entry.text("startup_script", expected="the path of a file")
        if not script:
            return found
        if STARTUP in found:
            entry.fault("startup_script", f"startup_script: metadata has the entry {STARTUP} as well")
        path = entry.document.file.parent / Path(script).expanduser()
        try:
            return {**found, STARTUP: self._content(path)}
        except OSError as exc:
            entry.fault("startup_script", f"startup_script: {path} cannot be read: {exc.strerror}")
        except ValueError:
            entry.fault("startup_script", f"startup_script: {path} is not UTF-8 text")
        return found

    def _configure_at_boot(self) -> str:
        text = self._entry.text("configure_at_boot", expected="a place in a bucket, as in gs://my-bucket/tpu_ops")
        try:
            return buckets.folder(text) if text else ""
        except UsageError as exc:
            self._entry.fault("configure_at_boot", f"configure_at_boot: {exc.what}; {exc.fix}")
            return ""

    def _disks(self) -> dict[str, str]:
        words = self._entry.names("disks", form=_DISK, expected="disks with their modes, as in data:ro or scratch:rw")
        pairs = [(name, mode) for name, _, mode in (word.rpartition(":") for word in words)]
        if len({name for name, _ in pairs}) < len(pairs):
            self._entry.fault("disks", "disks: a disk is listed twice")
        return dict(pairs)

    def _valid_until(self) -> int:
        value: Any = self._entry.data.get("valid_until")
        if value is None:
            return 0
        try:
            return int(duration(str(value)))
        except ValueError as exc:
            self._entry.fault("valid_until", f"valid_until: {exc}")
            return 0


def _refuse_overlaps(document: entries.Document, found: Iterable[Declared]) -> None:
    """Add a fault for each entry that declares a node which an earlier entry declares."""
    first: dict[tuple[str, str], Declared] = {}
    twice: dict[tuple[int, int], list[str]] = {}
    for node in found:
        before = first.setdefault(node.key, node)
        if before is not node:
            twice.setdefault((node.line, before.line), []).append(node.wish.name)
    for (line, other), names in twice.items():
        document.fault_at(
            line, f"{texts.some(names)} {'is' if len(names) == 1 else 'are'} declared in line {other} too"
        )


def _refuse_shared_disks(document: entries.Document, found: Iterable[Declared]) -> None:
    """Add a fault for each entry with a disk that another entry or this one writes to."""
    users: dict[tuple[str, str, str], list[tuple[Declared, str]]] = {}
    for node in found:
        for disk, mode in node.wish.disks.items():
            for zone in node.zones or ("",):
                users.setdefault((node.wish.project, zone, disk), []).append((node, mode))
    for (_, _, disk), pairs in users.items():
        lines = sorted({node.line for node, _ in pairs})
        if len(lines) > 1 and any(mode == "rw" for _, mode in pairs):
            what = f"disk {disk} is used in line {lines[0]} too, and only nodes that all read it can share it"
            document.fault_at(lines[-1], f"{what}: write {disk}:ro in both")
