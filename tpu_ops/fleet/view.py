"""The view of a fleet that Ansible, ssh and all commands share: stored on this machine and refreshed on request.

A refresh asks the API or reads a published snapshot. It then writes snapshot.json, ssh_config and known_hosts while it
holds the fleet's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import Node, Worker, workers_of
from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.fleet import origin, selection
from tpu_ops.fleet.diff import Changes, diff
from tpu_ops.fleet.publishing import published, sources
from tpu_ops.fleet.state import Files, Question, Snapshot, Stored, question_of
from tpu_ops.ssh import client_config, host_keys, masters
from tpu_ops.ssh.fleet_files import replace

_log = logging.getLogger(__name__)


#: Seconds to wait until the workers of a new node have published their host keys, and seconds between two checks.
KEYS_TIMEOUT, KEYS_DELAY = 180.0, 2.0


class Fleet(NamedTuple):
    """The nodes of a fleet's projects and zones that pass its filters, and their workers.

    Attributes:
        settings: The fleet's settings.
        nodes: The nodes in every state, in the order of their full names.
        workers: All workers of the nodes.
        listed: All nodes of the projects and zones, without the filters.
        labels: Full name of each listed node -> its unique short label.
        asked_at: When the API was asked, in seconds since 1970.
        warnings: What could not be listed or learned, in words.
        source: Source of the published snapshot; empty if the API was asked.
        compared: Host -> why its known host key could not be compared with a published key; an empty text if it was
            compared. No hosts if no comparison was requested.
        unlisted: The part of ``warnings`` about nodes that could not be listed.
        unanswered: Pairs (project, zone) that could not be listed: their nodes are older.
        unheard: Full name of a node -> why it is unknown whether the node publishes host keys.
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
        """Age of the view for messages, as in ``published 12 min ago at gs://bucket/fleet.json``."""
        when = texts.ago(self.asked_at, time.time())
        if not self.source:
            return f"read from the API {when}"
        return f"published {when} at {sources.shown(self.source)}"

    @property
    def ssh_config(self) -> Path:
        """Path of the OpenSSH configuration file with one host per worker."""
        return selection.ssh_config(self.settings)

    @property
    def known_hosts(self) -> Path:
        """Path of the file with the host keys of the workers."""
        return Files(self.settings.state_dir).known_hosts


def current(settings: Settings, said: Collection[str] = ()) -> Fleet:
    """Return the fleet in the snapshot and log its warnings; ask the API if there is no snapshot.

    Args:
        settings: The fleet's settings.
        said: Warnings that are not logged again.

    Raises:
        CloudError: The API refused or did not answer, or a published snapshot cannot be read.
        OpsError: The fleet's state cannot be written.
    """
    found = known(settings)
    if found is None:
        found = newest(settings)[0]
    for text in (text for text in found.warnings if text not in said):
        _log.warning("%s", text)
    return found


def cached(settings: Settings) -> Fleet:
    """Return the fleet like `current`, but do not ask the API if the snapshot is damaged.

    Raises:
        OpsError: The snapshot is damaged or of another version, or the fleet's state cannot be written.
    """
    files = Files(settings.state_dir)
    if damage := files.damage():
        raise OpsError(
            f"the fleet's snapshot cannot be read: {damage}",
            where=str(files.snapshot),
            fix="`tpu_ops refresh` asks the API again and replaces the file",
        )
    return current(settings)


def known(settings: Settings) -> Fleet | None:
    """Return the fleet in the stored snapshot without asking the API, and update its ssh_config; None without snapshot.

    Raises:
        OpsError: The fleet's state cannot be written.
    """
    fleet = last(settings)
    if fleet is None or not settings.snapshot:
        return fleet
    return fleet if fleet.source == sources.named(settings) else None


def last(settings: Settings) -> Fleet | None:
    """Return the fleet like `known`, even if the snapshot's source differs from the source in the settings."""
    files = Files(settings.state_dir)
    fleet = _kept(settings, files)
    if fleet is None:
        return None
    client_config.make_mux_dir(selection.mux_dir())
    # User, key or directories in the settings may have changed since the files were written.
    if _outdated(files, fleet):
        with files.lock():
            # Read the snapshot again while holding the lock: another process can have replaced it.
            fleet = _kept(settings, files)
            for path, text in _outdated(files, fleet) if fleet else ():
                replace(path, text, 0o600)
    return fleet


def stored(settings: Settings) -> Fleet | None:
    """Return the fleet like `last`, but write nothing."""
    return _kept(settings, Files(settings.state_dir))


def _kept(settings: Settings, files: Files) -> Fleet | None:
    snapshot = files.read_snapshot(question_of(settings))
    return of(settings, snapshot) if snapshot and files.known_hosts.exists() else None


def _outdated(files: Files, fleet: Fleet) -> list[tuple[Path, str]]:
    """Return path and new text of each ssh_config file of a fleet that is outdated."""
    return [
        (path, text) for path, text in selection.ssh_configs(fleet.settings, fleet.listed) if files.text(path) != text
    ]


def of(settings: Settings, snapshot: Snapshot, stored: Stored | None = None) -> Fleet:
    """Return the fleet of a snapshot.

    Args:
        settings: The fleet's settings.
        snapshot: All nodes of the fleet's projects and zones.
        stored: The former snapshot: a jump host that was in it and is gone causes a warning.
    """
    nodes, workers, labels = selection.of(settings, snapshot.nodes)
    doubts = selection.doubts(settings, snapshot.nodes, stored.snapshot.nodes if stored else ())
    asked = (snapshot.asked_at, (*snapshot.warnings, *doubts), snapshot.source)
    found = (nodes, tuple(workers), snapshot.nodes, labels)
    return Fleet(settings, *found, *asked, unlisted=snapshot.warnings, unanswered=snapshot.unanswered)


def newest(settings: Settings, *, learn: bool = True) -> tuple[Fleet, Changes]:
    """Refresh the fleet; if the published snapshot is older than the local snapshot, use the local one and warn.

    Args:
        settings: The fleet's settings.
        learn: Whether to ask for host keys.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read.
        HostKeyAlarm: A node publishes a key that differs from the known one; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    try:
        return refresh(settings, learn=learn)
    except published.OutdatedError as exc:
        if (found := last(settings)) is None:
            raise
        return found._replace(warnings=(str(exc), *found.warnings)), Changes()


def look(settings: Settings, *, source: str | None = None, beside: Sequence[origin.Job] = ()) -> tuple[Fleet, Changes]:
    """Return the fleet from the API or the published snapshot, and its changes since the user saw it; write nothing.

    Args:
        settings: The fleet's settings.
        source: A result of `sources.parse`; None means the source in the settings, else the source of the stored
            snapshot.
        beside: Functions that are called with the API's client while the nodes are listed; not called if a published
            snapshot is read.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
    """
    files = Files(settings.state_dir)
    seen = origin.ask(settings, files, source, learn=False, beside=beside)
    stored = files.read()
    old = stored.answer(question_of(settings)) if stored else None
    if seen.source:
        # Compare with the last snapshot even if it answers another request: changing projects or zones must not make an
        # older published snapshot acceptable.
        published.refuse_outdated(settings, seen, stored.snapshot if stored else None)
    nodes = origin.with_unanswered(seen.nodes, seen.unanswered, old)
    now = Snapshot(seen.asked_at, nodes, seen.source, seen.warnings, seen.unanswered)
    shown = files.read_shown(question_of(settings), stored)
    return of(settings, now, stored), _changes(settings, shown, nodes)


def refresh(
    settings: Settings,
    *,
    verify_keys: bool = False,
    learn: bool = True,
    source: str | None = None,
    told: bool = False,
) -> tuple[Fleet, Changes]:
    """Ask the API, learn the host keys of new nodes, and write the snapshot, ssh_config and known_hosts.

    A published snapshot is read instead of the API if `source`, the settings or the stored snapshot name a source.

    Args:
        settings: The fleet's settings.
        verify_keys: Whether to compare the known host keys of all READY nodes with the published keys.
        learn: Whether to ask for host keys.
        source: A new source, a result of `sources.parse`; it is stored with the snapshot.
        told: Whether the caller shows the changes to the user: they are then the changes since changes were last shown,
            otherwise those since the last refresh.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
        HostKeyAlarm: A node publishes a key that differs from the known one; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    files, question = Files(settings.state_dir), question_of(settings)
    seen = origin.ask(settings, files, source, verify_keys=verify_keys, learn=learn)
    with files.lock():
        stored = files.read()
        if stored is None and (damage := files.damage()):
            _log.warning("%s: %s; the fleet was read again; the file is replaced", files.snapshot, damage)
        old = stored.answer(question) if stored else None
        if seen.source:
            published.refuse_outdated(settings, seen, stored.snapshot if stored else None)
        if old is not None and not seen.source and not old.source and seen.asked_at < old.asked_at <= time.time():
            # Another process asked the API later than this one, and wrote first: keep its nodes. The host keys learned
            # here are used all the same. (A snapshot with a future time is not newer: the clock was set back.)
            now = old._replace(nodes=origin.with_instance_names(old.nodes, seen.nodes))
        else:
            listed = origin.with_unanswered(seen.nodes, seen.unanswered, old)
            now = Snapshot(seen.asked_at, listed, seen.source, seen.warnings, seen.unanswered)
        known, first = files.host_keys()
        replaced = _replaced(stored, question, now.nodes)
        workers = workers_of(now.nodes)
        keys = host_keys.merge(known, seen.learned.keys, workers, files.known_hosts, first, replaced=replaced)
        fleet = of(settings, now, stored)
        client_config.make_mux_dir(selection.mux_dir())
        # Record keys from a published snapshot that its publisher trusted on first contact: they are compared as soon
        # as the node publishes a key.
        doubtful = seen.learned.trusted_first - (known.keys() - first)
        files.write_host_keys(keys, (first - seen.learned.keys.keys()) | (doubtful & keys.keys()))
        for path, config in selection.ssh_configs(settings, fleet.listed):
            replace(path, config, 0o600)
        shown = files.read_shown(question, stored) if told else old
        files.write_snapshot(question, now, told=told)
    _end_masters(settings, old, now.nodes)
    asked = {node.full_name for node in seen.nodes}
    reasons = {node.full_name: "the API did not list it this time" for node in now.nodes if node.full_name not in asked}
    unheard = {name: seen.learned.reasons.get(name, "") for name in seen.learned.unheard} | reasons
    reasons |= seen.learned.reasons
    reached = selection.reached(settings, now.nodes)
    missing = host_keys.missing(reached, keys, reasons)
    compared = host_keys.compared(reached, known, seen.learned.keys, reasons) if verify_keys else {}
    fleet = fleet._replace(warnings=(*fleet.warnings, *missing), compared=compared, unheard=unheard)
    return fleet, _changes(settings, shown, now.nodes)


def _changes(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> Changes:
    """Return the changes of the nodes that pass the fleet's filters."""
    before = selection.of(settings, old.nodes) if old else None
    now = selection.of(settings, nodes)
    return diff(before and (before[0], before[2]), (now[0], now[2]))


def _replaced(stored: Stored | None, question: Question, nodes: Sequence[Node]) -> set[str]:
    """Return the ids of nodes in the last snapshot that were recreated: another node has their name now."""
    if stored is None or stored.question.get("endpoint") != question.endpoint:
        return set()
    now = {node.full_name: node.node_id for node in nodes if node.node_id}
    gone = {node.node_id for node in stored.snapshot.nodes if now.get(node.full_name, node.node_id) != node.node_id}
    return gone.difference(now.values())


def _end_masters(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> None:
    """End ssh master connections to addresses that their workers no longer have."""
    now = {worker.host_key_alias: worker for worker in workers_of(nodes)}
    left, before = set(), old.nodes if old else ()
    ways = selection.ways_of(settings, before)
    for worker in workers_of(before):
        same = now.get(worker.host_key_alias)
        kept = {same.internal_ip, same.external_ip} if same else set()
        gone = {worker.internal_ip, worker.external_ip} - kept - {""}
        left |= {(address, ways.control(worker, address)) for address in gone}
    masters.end_left(left, user=settings.user, mux=selection.mux_dir())


def with_host_keys(settings: Settings, names: Collection[str], progress: Progress) -> tuple[Fleet, list[Worker]]:
    """Refresh the fleet until the host keys of all workers of these nodes are known, or `KEYS_TIMEOUT` has passed.

    Args:
        settings: The fleet's settings.
        names: Full names of the nodes.
        progress: Called before each wait with the seconds so far and the reason for waiting.

    Returns:
        The fleet, and the workers of these nodes; no workers if the fleet does not list the nodes.
    """
    start = time.monotonic()
    while True:
        fleet, _ = refresh(settings)
        workers = [worker for worker in fleet.workers if worker.node.full_name in names]
        elapsed = time.monotonic() - start
        if not workers or host_keys.has_keys(settings, workers) or elapsed > KEYS_TIMEOUT:
            return fleet, workers
        progress(elapsed, "waiting for the node's workers to publish their host keys")
        time.sleep(KEYS_DELAY)
