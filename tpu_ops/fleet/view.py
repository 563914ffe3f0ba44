"""The one view of a fleet, shared by Ansible, ssh and the commands, as it is kept on this machine.

`tpu_ops.fleet.update` brings it up to date, and is imported only where that is done: most commands start without.
"""

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.fleet import selection, ssh_files
from tpu_ops.fleet.model import Node, Worker
from tpu_ops.fleet.state import Files, Snapshot, Stored, question_of, replace

_log = logging.getLogger(__name__)


class Fleet(NamedTuple):
    """A fleet's nodes and workers: those of the projects and zones that its filters let pass.

    Attributes:
        settings: Of the fleet.
        nodes: In the order of their full names, of every state.
        workers: All workers of them.
        listed: Every node of the projects and zones, whatever the filters.
        labels: Unique short label of each of these, by its full name.
        asked_at: When the API was asked, seconds since 1970.
        warnings: What could not be listed or learned, in words.
        source: Where the published snapshot was read from that it is of; empty where the API was asked.
        compared: Workers whose known host keys were to be compared with the published ones: host -> why they could not
            be, or empty; nothing where that was not asked for.
        unlisted: Those of the warnings that belong to the nodes: what could not be listed when they were asked for.
        unanswered: The same as projects with a zone of each: the nodes there are as they were known before.
        unheard: Nodes that may publish host keys, though none was learned now: full name -> why that is not known.
    """

    settings: Settings
    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    listed: tuple[Node, ...]
    labels: Mapping[str, str]
    asked_at: float
    warnings: tuple[str, ...] = ()
    source: str = ""
    compared: Mapping[str, str] = MappingProxyType({})
    unlisted: tuple[str, ...] = ()
    unanswered: tuple[tuple[str, str], ...] = ()
    unheard: Mapping[str, str] = MappingProxyType({})

    @property
    def age(self) -> str:
        """How old it is, for people, as in ``published 12 min ago at gs://bucket/fleet.json``."""
        when = texts.ago(self.asked_at, time.time())
        if not self.source:
            return f"read from the API {when}"
        from tpu_ops.fleet import sources

        return f"published {when} at {sources.shown(self.source)}"

    @property
    def ssh_config(self) -> Path:
        """OpenSSH configuration with one host per worker."""
        return selection.ssh_config(self.settings)

    @property
    def known_hosts(self) -> Path:
        """Host keys of the workers."""
        return Files(self.settings.state_dir).known_hosts


def current(settings: Settings, said: Collection[str] = ()) -> Fleet:
    """Return the fleet as this machine knows it, and say its warnings; the API is asked where nothing is known yet.

    Args:
        settings: Of the fleet.
        said: Warnings that were said before.

    Raises:
        CloudError: The API was asked and refused or did not answer, or a published snapshot cannot be read.
        OpsError: The fleet's state cannot be written.
    """
    found = known(settings)
    if found is None:
        from tpu_ops.fleet import update

        found = update.newest(settings)[0]
    for text in (text for text in found.warnings if text not in said):
        _log.warning("%s", text)
    return found


def cached(settings: Settings) -> Fleet:
    """Return the fleet as this machine knows it, like `current`, but ask nobody for a damaged snapshot.

    Raises:
        OpsError: The snapshot is damaged or another program's, or as for `current`.
    """
    files = Files(settings.state_dir)
    if damage := files.damage():
        raise OpsError(
            f"what is known of the fleet cannot be read: {damage}",
            where=str(files.snapshot),
            fix="`tpu_ops refresh` asks again and replaces it",
        )
    return current(settings)


def known(settings: Settings) -> Fleet | None:
    """Return the fleet as this machine knows it, ready to be used, and ask nobody; None where nothing is known yet.

    Raises:
        OpsError: The fleet's state cannot be written.
    """
    fleet = last(settings)
    if fleet is None or not settings.snapshot:
        return fleet
    from tpu_ops.fleet import sources

    return fleet if fleet.source == sources.named(settings) else None


def last(settings: Settings) -> Fleet | None:
    """Return the same wherever it was read from, as another source than the settings' may have been named once."""
    files = Files(settings.state_dir)
    fleet = _kept(settings, files)
    if fleet is None:
        return None
    ssh_files.make_mux_dir(selection.mux_dir())
    # User, key or directories may have changed since the files were written.
    if _outdated(files, fleet):
        with files.lock():
            # Or another process is just writing a newer view: what was read before is no longer to be written.
            fleet = _kept(settings, files)
            for path, text in _outdated(files, fleet) if fleet else ():
                replace(path, text, 0o600)
    return fleet


def _kept(settings: Settings, files: Files) -> Fleet | None:
    snapshot = files.read_snapshot(question_of(settings))
    return of(settings, snapshot) if snapshot and files.known_hosts.exists() else None


def _outdated(files: Files, fleet: Fleet) -> list[tuple[Path, str]]:
    """Return the files of a fleet that do not hold what they should, and that."""
    return [
        (path, text) for path, text in selection.ssh_configs(fleet.settings, fleet.listed) if files.text(path) != text
    ]


def of(settings: Settings, snapshot: Snapshot, stored: Stored | None = None) -> Fleet:
    """Return the fleet that a snapshot is of.

    Args:
        settings: Of the fleet.
        snapshot: All nodes of its projects and zones.
        stored: What was known before.
    """
    nodes, workers, labels = selection.of(settings, snapshot.nodes)
    doubts = selection.doubts(settings, snapshot.nodes, stored.snapshot.nodes if stored else ())
    asked = (snapshot.asked_at, (*snapshot.warnings, *doubts), snapshot.source)
    found = (nodes, tuple(workers), snapshot.nodes, labels)
    return Fleet(settings, *found, *asked, unlisted=snapshot.warnings, unanswered=snapshot.unanswered)
