"""The one view of a fleet: asked from the API, kept on this machine, shared by Ansible, ssh and the commands."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.cloud import nodes as cloud_nodes
from tpu_ops.cloud.client import Tpu, connect
from tpu_ops.config import Settings
from tpu_ops.fleet import build, hostkeys, masters, ssh_files
from tpu_ops.fleet.diff import Changes, diff
from tpu_ops.fleet.model import Node, Worker, workers_of
from tpu_ops.fleet.state import Files, Scope, Snapshot, replace


@dataclass(frozen=True)
class Fleet:
    """A fleet's nodes and workers.

    Attributes:
        settings: Of the fleet.
        nodes: All nodes in scope, of every state.
        workers: All workers of them.
        asked_at: When the API was asked, seconds since 1970.
        warnings: What could not be listed or learned, in words.
    """

    settings: Settings
    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    asked_at: float
    warnings: tuple[str, ...] = ()

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
    return Scope(settings.projects, settings.zones, settings.endpoint)


def api(settings: Settings) -> AbstractContextManager[Tpu]:
    """Open the API that these settings name, for the length of a `with` block.

    Raises:
        CloudError: There are no credentials for it.
    """
    return connect(settings.endpoint, settings.request_timeout)


def current(settings: Settings) -> Fleet:
    """Return the fleet as this machine knows it; the API is asked only where nothing is known yet.

    Raises:
        CloudError: The API was asked and refused or did not answer.
        OpsError: The fleet's state cannot be written.
    """
    files = Files(settings.state_dir)
    snapshot = files.read_snapshot(scope_of(settings))
    if snapshot is None or not files.known_hosts.exists():
        return refresh(settings)[0]
    fleet = _fleet(settings, snapshot)
    ssh_files.make_mux_dir(mux_dir())
    text = ssh_config_text(settings, fleet.workers)
    # User, key or directories may have changed since the file was written.
    if files.text(files.ssh_config) != text:
        with files.lock():
            replace(files.ssh_config, text, 0o600)
    return fleet


def look(settings: Settings) -> tuple[Fleet, Changes]:
    """Ask the API and compare with what this machine knows; write nothing.

    Raises:
        CloudError: The API refused or did not answer.
    """
    asked_at = time.time()
    with api(settings) as tpu:
        listing = cloud_nodes.list_nodes(tpu, settings.projects, settings.zones)
    old = Files(settings.state_dir).read_snapshot(scope_of(settings))
    nodes = _with_unanswered(build.nodes(listing.nodes), listing.unanswered, old)
    return _fleet(settings, Snapshot(asked_at, nodes), listing.warnings), diff(old.nodes if old else None, nodes)


def refresh(settings: Settings, *, verify_keys: bool = False) -> tuple[Fleet, Changes]:
    """Ask the API, learn the host keys of new nodes, and write snapshot, ssh_config and known_hosts.

    Args:
        settings: Of the fleet.
        verify_keys: Whether to compare the host keys of all serving nodes, not only learn those of new ones.

    Raises:
        CloudError: The API refused or did not answer.
        HostKeyAlarm: A node publishes another key than before; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    files, scope = Files(settings.state_dir), scope_of(settings)
    asked_at = time.time()
    with api(settings) as tpu:
        listing = cloud_nodes.list_nodes(tpu, settings.projects, settings.zones)
        listed = build.nodes(listing.nodes)
        known = ssh_files.parse_known_hosts(files.text(files.known_hosts))
        learned = hostkeys.fetch(tpu, hostkeys.wanted(workers_of(listed), known, verify=verify_keys))
    with files.lock():
        old = files.read_snapshot(scope)
        if old is not None and old.asked_at > asked_at:
            # Another process asked later and wrote first: its view is the newer one.
            return _fleet(settings, old), Changes()
        nodes = _with_unanswered(listed, listing.unanswered, old)
        workers = workers_of(nodes)
        keys = hostkeys.merge(
            ssh_files.parse_known_hosts(files.text(files.known_hosts)), learned.keys, workers, files.known_hosts
        )
        ssh_files.make_mux_dir(mux_dir())
        replace(files.known_hosts, ssh_files.known_hosts(keys), 0o644)
        replace(files.ssh_config, ssh_config_text(settings, workers), 0o600)
        files.write_snapshot(scope, Snapshot(asked_at, nodes))
    changes = diff(old.nodes if old else None, nodes)
    left = {change.old for change in changes.addresses if change.old} | (
        _addresses(old) - _addresses(Snapshot(0, nodes))
    )
    masters.end(left, user=settings.user, mux=mux_dir())
    warnings = (*listing.warnings, *hostkeys.missing(workers, keys, learned.reasons))
    return _fleet(settings, Snapshot(asked_at, nodes), warnings), changes


def has_keys(settings: Settings, workers: Sequence[Worker]) -> bool:
    """Return whether known_hosts holds keys of all these workers."""
    files = Files(settings.state_dir)
    known = ssh_files.parse_known_hosts(files.text(files.known_hosts))
    return all(worker.host_key_alias in known for worker in workers)


def mux_dir() -> Path:
    """Return the directory of the ssh control sockets."""
    return ssh_files.mux_dir(os.environ, os.getuid())


def ssh_options(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that all workers of the fleet share."""
    return ssh_files.common_options(Files(settings.state_dir).known_hosts, mux_dir())


def ssh_config_text(settings: Settings, workers: Sequence[Worker]) -> str:
    """Return the text of the fleet's ssh_config."""
    return ssh_files.ssh_config(
        workers,
        connect_with=settings.connect_with,
        user=settings.user,
        private_key=settings.private_key,
        options=ssh_options(settings),
    )


def _fleet(settings: Settings, snapshot: Snapshot, warnings: tuple[str, ...] = ()) -> Fleet:
    return Fleet(settings, snapshot.nodes, tuple(workers_of(snapshot.nodes)), snapshot.asked_at, warnings)


def _addresses(snapshot: Snapshot | None) -> set[str]:
    nodes = snapshot.nodes if snapshot else ()
    return {address for node in nodes for address in (*node.internal_ips, *node.external_ips) if address}


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
