"""The one view of a fleet, shared by Ansible, ssh and the commands, and kept on this machine.

It is asked from the API, or read from a published snapshot where the settings or `tpu_ops refresh --from` say so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path

from tpu_ops.cloud import nodes as cloud_nodes
from tpu_ops.cloud.client import Tpu, connect
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import build, hostkeys, masters, published, sources, ssh_files
from tpu_ops.fleet.diff import Changes, diff
from tpu_ops.fleet.model import Node, Worker, node_labels, workers_of
from tpu_ops.fleet.published import Seen
from tpu_ops.fleet.reach import Ways, control_path
from tpu_ops.fleet.state import Files, Scope, Snapshot, Stored, replace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fleet:
    """A fleet's nodes and workers: those of the projects and zones that its filters let pass.

    Attributes:
        settings: Of the fleet.
        nodes: In the order of their full names, of every state.
        workers: All workers of them.
        scope: Every node of the projects and zones.
        labels: Unique short label of each of these, by its full name.
        asked_at: When the API was asked, seconds since 1970.
        warnings: What could not be listed or learned, in words.
        source: Where the published snapshot was read from that it is of; empty where the API was asked.
    """

    settings: Settings
    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    scope: tuple[Node, ...]
    labels: Mapping[str, str]
    asked_at: float
    warnings: tuple[str, ...] = ()
    source: str = ""

    @property
    def age(self) -> str:
        """How old it is, for people, as in ``published 12 min ago at gs://bucket/fleet.json``."""
        when = sources.ago(self.asked_at, time.time())
        return f"published {when} at {sources.shown(self.source)}" if self.source else f"asked from the API {when}"

    @property
    def ssh_config(self) -> Path:
        """OpenSSH configuration with one host per worker."""
        return Files(self.settings.state_dir).ssh_config

    @property
    def known_hosts(self) -> Path:
        """Host keys of the workers."""
        return Files(self.settings.state_dir).known_hosts


def scope_of(settings: Settings) -> Scope:
    """Return what these settings ask the API for."""
    # An endpoint is spoken to without credentials.
    asker = "" if settings.endpoint else settings.auth.name
    return Scope(settings.projects, settings.zones, settings.endpoint, asker)


@contextmanager
def api(settings: Settings) -> Iterator[Tpu]:
    """Open the API that these settings name, for the length of a `with` block.

    Raises:
        CloudError: There are no credentials for it.
    """
    with ExitStack() as held:
        try:
            tpu = held.enter_context(connect(settings.endpoint, settings.request_timeout, settings.auth))
        except CloudError as exc:
            if source := source_of(settings):
                exc.fix = (
                    "log in (gcloud auth application-default login), or ask somebody who has credentials; without, "
                    f"this fleet is only read, from {sources.shown(source)}"
                )
            raise
        yield tpu


def source_of(settings: Settings) -> str:
    """Return where a fleet is read from: a published snapshot's source, or empty for the API.

    What the settings name wins over what was named by `tpu_ops refresh --from` and is remembered.

    Raises:
        UsageError: The settings name what is none.
    """
    return _source(settings, Files(settings.state_dir).read())


def _source(settings: Settings, stored: Stored | None) -> str:
    if settings.snapshot:
        return sources.parse(
            settings.snapshot, settings.file.parent, f"{settings.file}, key 'snapshot', or TPU_OPS_SNAPSHOT"
        )
    return stored.snapshot.source if stored else sources.API


def current(settings: Settings) -> Fleet:
    """Return the fleet as this machine knows it, and say its warnings; the API is asked where nothing is known yet.

    Raises:
        CloudError: The API was asked and refused or did not answer, or a published snapshot cannot be read.
        OpsError: The fleet's state cannot be written.
    """
    found = known(settings)
    if found is None:
        try:
            found = refresh(settings)[0]
        except published.OutdatedError as exc:
            if (found := _known(settings)) is None:
                raise
            _log.warning("%s", exc)
    for text in found.warnings:
        _log.warning("%s", text)
    return found


def known(settings: Settings) -> Fleet | None:
    """Return the fleet as this machine knows it, ready to be used, and ask nobody; None where nothing is known yet.

    Raises:
        OpsError: The fleet's state cannot be written.
    """
    fleet = _known(settings)
    return fleet if fleet and (not settings.snapshot or fleet.source == source_of(settings)) else None


def _known(settings: Settings) -> Fleet | None:
    """The same, wherever it was read from."""
    files = Files(settings.state_dir)
    snapshot = files.read_snapshot(scope_of(settings))
    if snapshot is None or not files.known_hosts.exists():
        return None
    fleet = _fleet(settings, snapshot)
    ssh_files.make_mux_dir(mux_dir())
    for path, text in _ssh_configs(settings, fleet.scope):
        # User, key or directories may have changed since the file was written.
        if files.text(path) != text:
            with files.lock():
                replace(path, text, 0o600)
    return fleet


def look(settings: Settings, *, source: str | None = None) -> tuple[Fleet, Changes]:
    """Ask the API, or read the published snapshot, and compare with what this machine knows; write nothing.

    Args:
        settings: Of the fleet.
        source: Where to read from, as `sources.parse` returns it; None where the settings and what is remembered say.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
    """
    files = Files(settings.state_dir)
    seen = _ask(settings, files, source, learn=False)
    stored = files.read()
    old = stored.answer(scope_of(settings)) if stored else None
    if seen.source:
        # Whatever was asked for last: who asks for less once does not want to go back in time later.
        published.refuse_outdated(seen, stored.snapshot if stored else None)
    nodes = _with_unanswered(seen.nodes, seen.unanswered, old)
    now = Snapshot(seen.asked_at, nodes, seen.source)
    return _fleet(settings, now, seen.warnings, stored), _changes(settings, old, nodes)


def refresh(
    settings: Settings, *, verify_keys: bool = False, learn: bool = True, source: str | None = None
) -> tuple[Fleet, Changes]:
    """Ask the API, learn the host keys of new nodes, and write snapshot, ssh_config and known_hosts.

    A published snapshot takes the place of the API where the settings, `source` or what is remembered name one.

    Args:
        settings: Of the fleet.
        verify_keys: Whether to compare the host keys of all serving nodes, not only learn those of new ones.
        learn: Whether to ask for host keys at all.
        source: Where to read from this time, as `sources.parse` returns it, and to be remembered.

    Raises:
        CloudError: The API refused or did not answer, or the published snapshot cannot be read or is too old.
        HostKeyAlarm: A node publishes another key than before; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    files, scope = Files(settings.state_dir), scope_of(settings)
    seen = _ask(settings, files, source, verify_keys=verify_keys, learn=learn)
    with files.lock():
        stored = files.read()
        old = stored.answer(scope) if stored else None
        if seen.source:
            published.refuse_outdated(seen, stored.snapshot if stored else None)
        elif old is not None and not old.source and seen.asked_at < old.asked_at <= time.time():
            # Another process asked later and wrote first: its view is the newer one. (One of the future is not: the
            # clock was set back.)
            return _fleet(settings, old), Changes()
        now = Snapshot(seen.asked_at, _with_unanswered(seen.nodes, seen.unanswered, old), seen.source)
        text = files.text(files.known_hosts)
        known, first = ssh_files.parse_known_hosts(text), ssh_files.trusted_first(text)
        replaced = _replaced(stored, scope, now.nodes)
        workers = workers_of(now.nodes)
        keys = hostkeys.merge(known, seen.learned.keys, workers, files.known_hosts, first, replaced=replaced)
        fleet = _fleet(settings, now, seen.warnings, stored)
        ssh_files.make_mux_dir(mux_dir())
        replace(files.known_hosts, ssh_files.known_hosts(keys, first - seen.learned.keys.keys()), 0o644)
        for path, config in _ssh_configs(settings, fleet.scope):
            replace(path, config, 0o600)
        files.write_snapshot(scope, now)
    _end_masters(settings, old, now.nodes)
    missing = hostkeys.missing(_reached(settings, now.nodes), keys, seen.learned.reasons)
    return replace_fields(fleet, warnings=(*fleet.warnings, *missing)), _changes(settings, old, now.nodes)


def _ask(
    settings: Settings, files: Files, source: str | None, *, verify_keys: bool = False, learn: bool = True
) -> Seen:
    """Ask the API or read the published snapshot."""
    stored = files.read()
    chosen = _source(settings, stored) if source is None else source
    if chosen:
        return published.read(settings, chosen, learn=learn)
    old = stored.answer(scope_of(settings)) if stored else None
    return _ask_api(settings, files, old, verify_keys=verify_keys, learn=learn)


def _ask_api(settings: Settings, files: Files, old: Snapshot | None, *, verify_keys: bool, learn: bool) -> Seen:
    """Ask the API for the nodes, and for what the workers publish of themselves that is not known yet."""
    if not settings.projects:
        # A fleet that names a published snapshot needs none, until the API itself is asked for.
        fix = "list your Google Cloud project ids there, or set TPU_OPS_PROJECT"
        raise UsageError("no project is set", where=f"{settings.file}, key 'projects'", fix=fix)
    asked_at = time.time()
    with api(settings) as tpu:
        listing = cloud_nodes.list_nodes(
            tpu, settings.projects, settings.zones, strict_permissions=settings.strict_permissions
        )
        nodes = _with_instance_names(build.nodes(listing.nodes), old)
        learned = hostkeys.Learned()
        if learn:
            text = files.text(files.known_hosts)
            known, first = ssh_files.parse_known_hosts(text), ssh_files.trusted_first(text)
            # What was trusted on first contact is compared as soon as the worker publishes it after all.
            known = {alias: keys for alias, keys in known.items() if alias not in first}
            workers = _reached(settings, nodes)
            asked = hostkeys.wanted(workers, known, verify=verify_keys, instance_names=settings.iap)
            learned = hostkeys.fetch(tpu, asked, instance_names=settings.iap)
    names = {node.full_name: learned.instance_names.get(node.full_name, node.instance_names) for node in nodes}
    nodes = tuple(replace_fields(node, instance_names=names[node.full_name]) for node in nodes)
    return Seen(asked_at, nodes, listing.unanswered, learned, listing.warnings)


def selected(settings: Settings, nodes: Sequence[Node]) -> tuple[tuple[Node, ...], list[Worker], dict[str, str]]:
    """Given all nodes of the projects and zones, return those that pass the filters, their workers, and all labels."""
    labels = node_labels(nodes)
    chosen = tuple(
        node
        for node in nodes
        if settings.filters.match(node.name, labels[node.full_name], node.accelerator_type, node.labels)
    )
    return chosen, workers_of(chosen, labels), labels


def keys_of(settings: Settings) -> dict[str, ssh_files.Keys]:
    """Return the host keys that are known, by alias."""
    files = Files(settings.state_dir)
    return ssh_files.parse_known_hosts(files.text(files.known_hosts))


def has_keys(settings: Settings, workers: Sequence[Worker]) -> bool:
    """Return whether known_hosts holds keys of all these workers."""
    known = keys_of(settings)
    return all(worker.host_key_alias in known for worker in workers)


def mux_dir() -> Path:
    """Return the directory of the ssh control sockets."""
    return ssh_files.mux_dir(os.environ, os.getuid())


def ssh_options(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that all workers of the fleet share."""
    return ssh_files.common_options(Files(settings.state_dir).known_hosts)


def _reached(settings: Settings, scope: Sequence[Node]) -> list[Worker]:
    """Return the workers of the fleet, and the one through which others are reached where the filters hide it."""
    _, workers, labels = selected(settings, scope)
    jump = ways_of(settings, scope).jump
    if not jump or any(worker.host == jump for worker in workers):
        return workers
    return [*workers, *(worker for worker in workers_of(scope, labels) if worker.host == jump)]


def _ssh_configs(settings: Settings, scope: Sequence[Node]) -> list[tuple[Path, str]]:
    """Return the fleet's ssh_config, and what else it leads to: paths and texts."""
    ways, files = ways_of(settings, scope), Files(settings.state_dir)
    own = ssh_files.ssh_config(
        [(worker, ways.of(worker)) for worker in _reached(settings, scope)],
        user=settings.user,
        private_key=settings.private_key,
        options=ssh_options(settings),
        mux=mux_dir(),
        forward_agent=settings.forward_agent,
    )
    return [(files.ssh_config, own), *([(files.jump_config, ways.jump_config)] if ways.jump_config else [])]


def ways_of(settings: Settings, scope: Sequence[Node]) -> Ways:
    """Given all nodes of the projects and zones, return what finds the way to each worker of a fleet."""
    hosts = [worker.host for worker in workers_of(scope)] if settings.proxy_jump else []
    return Ways(settings, Files(settings.state_dir), mux_dir(), hosts)


def doubts(settings: Settings, scope: Sequence[Node], before: Sequence[Node] = ()) -> tuple[str, ...]:
    """Return warnings where the settings seem to mean other nodes than there are.

    Args:
        settings: Of the fleet.
        scope: All nodes of the projects and zones.
        before: Those that were there before.
    """
    found = []
    if scope and not selected(settings, scope)[0]:
        filters = settings.filters
        named = {
            "names": filters.names,
            "labels": ["=".join((key, "|".join(values))) if values else key for key, values in filters.labels],
            "accelerator_types": filters.accelerator_types,
        }
        words = "; ".join(f"{name}: {', '.join(values)}" for name, values in named.items() if values)
        found.append(
            f"the filters let none of {len(scope)} node{'s' * (len(scope) != 1)} pass ({words}), see {settings.file}"
        )
    if settings.proxy_jump:
        nodes = (*scope, *before)
        names = {node.name for node in nodes}.union(node_labels(scope).values(), node_labels(before).values())
        if lost := ways_of(settings, scope).lost_jump(names):
            found.append(lost)
    return tuple(found)


def _fleet(
    settings: Settings, snapshot: Snapshot, warnings: tuple[str, ...] = (), stored: Stored | None = None
) -> Fleet:
    nodes, workers, labels = selected(settings, snapshot.nodes)
    warnings = (*warnings, *doubts(settings, snapshot.nodes, stored.snapshot.nodes if stored else ()))
    asked = (snapshot.asked_at, warnings, snapshot.source)
    return Fleet(settings, nodes, tuple(workers), snapshot.nodes, labels, *asked)


def _changes(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> Changes:
    """What changed of the nodes that the filters let pass."""
    before = selected(settings, old.nodes) if old else None
    now = selected(settings, nodes)
    return diff(before and (before[0], before[2]), (now[0], now[2]))


def _replaced(stored: Stored | None, scope: Scope, nodes: Sequence[Node]) -> set[str]:
    """Return the node ids of the last snapshot, whatever its projects and zones, whose names have other ids now."""
    if stored is None or stored.scope.get("endpoint") != scope.endpoint:
        return set()
    now = {node.full_name: node.node_id for node in nodes if node.node_id}
    gone = {node.node_id for node in stored.snapshot.nodes if now.get(node.full_name, node.node_id) != node.node_id}
    return gone.difference(now.values())


def _end_masters(settings: Settings, old: Snapshot | None, nodes: tuple[Node, ...]) -> None:
    """End the connections to addresses that are no longer those of the same worker."""
    now = {worker.host_key_alias: worker for worker in workers_of(nodes)}
    left, mux = set(), mux_dir()
    for worker in workers_of(old.nodes if old else ()):
        same = now.get(worker.host_key_alias)
        kept = {same.internal_ip, same.external_ip} if same else set()
        gone = {worker.internal_ip, worker.external_ip} - kept - {""}
        left |= {(address, control_path(mux, worker)) for address in gone}
    masters.end(left, user=settings.user, mux=mux)


def _with_instance_names(listed: tuple[Node, ...], old: Snapshot | None) -> tuple[Node, ...]:
    """Give nodes the instance names that are known of the same node ids."""
    known = {node.node_id: node.instance_names for node in (old.nodes if old else ()) if node.instance_names}
    return tuple(replace_fields(node, instance_names=known.get(node.node_id, ())) for node in listed)


def _with_unanswered(
    listed: tuple[Node, ...], unanswered: tuple[tuple[str, str], ...], old: Snapshot | None
) -> tuple[Node, ...]:
    """Add the last known nodes of places that did not answer: they are not gone, only not seen."""
    places, names = set(unanswered), {node.full_name for node in listed}
    kept = [
        node
        for node in (old.nodes if old else ())
        if node.full_name not in names and {(node.project, node.zone), (node.project, "-")} & places
    ]
    return tuple(sorted((*listed, *kept), key=lambda node: node.full_name))
