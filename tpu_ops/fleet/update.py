"""Brings the view of a fleet up to date: asks the API or reads a published snapshot, and writes what was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tpu_ops.config import Settings
from tpu_ops.fleet import hostkeys, masters, origin, published, selection, ssh_files, view
from tpu_ops.fleet.diff import Changes, diff
from tpu_ops.fleet.model import Node, workers_of
from tpu_ops.fleet.state import Files, Question, Snapshot, Stored, question_of, replace
from tpu_ops.fleet.view import Fleet

_log = logging.getLogger(__name__)


def newest(settings: Settings, *, learn: bool = True) -> tuple[Fleet, Changes]:
    """Refresh; where the published snapshot is older than what is known, return that and say so among its warnings.

    Args:
        settings: Of the fleet.
        learn: Whether to ask for host keys at all.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read.
        HostKeyAlarm: A node publishes another key than before; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    try:
        return refresh(settings, learn=learn)
    except published.OutdatedError as exc:
        if (found := view.last(settings)) is None:
            raise
        return found._replace(warnings=(str(exc), *found.warnings)), Changes()


def look(settings: Settings, *, source: str | None = None) -> tuple[Fleet, Changes]:
    """Ask the API, or read the published snapshot, and compare with what a person was told last; write nothing.

    Args:
        settings: Of the fleet.
        source: Where to read from, as `sources.parse` returns it; None where the settings and what is remembered say.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
    """
    files = Files(settings.state_dir)
    seen = origin.ask(settings, files, source, learn=False)
    stored = files.read()
    old = stored.answer(question_of(settings)) if stored else None
    if seen.source:
        # Whatever was asked for last: who asks for less once does not want to go back in time later.
        published.refuse_outdated(settings, seen, stored.snapshot if stored else None)
    nodes = origin.with_unanswered(seen.nodes, seen.unanswered, old)
    now = Snapshot(seen.asked_at, nodes, seen.source, seen.warnings, seen.unanswered)
    shown = files.read_shown(question_of(settings), stored)
    return view.of(settings, now, stored), _changes(settings, shown, nodes)


def refresh(
    settings: Settings,
    *,
    verify_keys: bool = False,
    learn: bool = True,
    source: str | None = None,
    told: bool = False,
) -> tuple[Fleet, Changes]:
    """Ask the API, learn the host keys of new nodes, and write snapshot, ssh_config and known_hosts.

    A published snapshot takes the place of the API where the settings, `source` or what is remembered name one.

    Args:
        settings: Of the fleet.
        verify_keys: Whether to compare the host keys of all serving nodes, not only learn those of new ones.
        learn: Whether to ask for host keys at all.
        source: Where to read from this time, as `sources.parse` returns it, and to be remembered.
        told: Whether a person is told what changed, and so of all that changed since the last time; else it is what
            changed since anybody asked.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
        HostKeyAlarm: A node publishes another key than before; nothing was written.
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
            # Another process asked later and wrote first: its nodes are the newer ones, and it may have asked for no
            # keys. (A view of the future is not newer: the clock was set back.)
            now = old._replace(nodes=origin.with_instance_names(old.nodes, seen.nodes))
        else:
            listed = origin.with_unanswered(seen.nodes, seen.unanswered, old)
            now = Snapshot(seen.asked_at, listed, seen.source, seen.warnings, seen.unanswered)
        known, first = files.host_keys()
        replaced = _replaced(stored, question, now.nodes)
        workers = workers_of(now.nodes)
        keys = hostkeys.merge(known, seen.learned.keys, workers, files.known_hosts, first, replaced=replaced)
        fleet = view.of(settings, now, stored)
        ssh_files.make_mux_dir(selection.mux_dir())
        # What somebody else has trusted on first contact is compared here, too, as soon as the node publishes a key.
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
    missing = hostkeys.missing(reached, keys, reasons, settings.command("refresh"))
    compared = hostkeys.compared(reached, known, seen.learned.keys, reasons) if verify_keys else {}
    fleet = fleet._replace(warnings=(*fleet.warnings, *missing), compared=compared, unheard=unheard)
    return fleet, _changes(settings, shown, now.nodes)


def _changes(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> Changes:
    """What changed of the nodes that the filters let pass."""
    before = selection.of(settings, old.nodes) if old else None
    now = selection.of(settings, nodes)
    return diff(before and (before[0], before[2]), (now[0], now[2]))


def _replaced(stored: Stored | None, question: Question, nodes: Sequence[Node]) -> set[str]:
    """Return the node ids of the last snapshot, whatever its projects and zones, whose names have other ids now."""
    if stored is None or stored.question.get("endpoint") != question.endpoint:
        return set()
    now = {node.full_name: node.node_id for node in nodes if node.node_id}
    gone = {node.node_id for node in stored.snapshot.nodes if now.get(node.full_name, node.node_id) != node.node_id}
    return gone.difference(now.values())


def _end_masters(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> None:
    """End the connections to addresses that are no longer those of the same worker."""
    now = {worker.host_key_alias: worker for worker in workers_of(nodes)}
    left, before = set(), old.nodes if old else ()
    ways = selection.ways_of(settings, before)
    for worker in workers_of(before):
        same = now.get(worker.host_key_alias)
        kept = {same.internal_ip, same.external_ip} if same else set()
        gone = {worker.internal_ip, worker.external_ip} - kept - {""}
        left |= {(address, ways.control(worker, address)) for address in gone}
    masters.end(left, user=settings.user, mux=selection.mux_dir())
