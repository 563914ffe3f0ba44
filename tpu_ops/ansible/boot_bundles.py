"""Nodes that configure themselves when they boot: what a new node needs for site.yml goes to a bucket beforehand.

A bundle has no secrets. Its digest is in the node's metadata, and the worker runs only a bundle with this digest. So an
account that may write to the bucket can keep a node from configuring itself, but cannot change what the node runs. The
worker's part is `boot`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.ansible import archives, boot, first_boot, on_workers, playbook, playing, receiver, values
from tpu_ops.ansible.archives import Archive
from tpu_ops.ansible.on_workers import Order
from tpu_ops.cloud import buckets, creation
from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.cloud.node import Node, Worker
from tpu_ops.cloud.wish import DISK_MODES, STARTUP, Wish
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import view
from tpu_ops.fleet.publishing import documents
from tpu_ops.fleet.state import Snapshot

#: The length of the digest in the name of a bundle.
_DIGITS = 16

_log = logging.getLogger(__name__)


def published(settings: Settings, wishes: Sequence[Wish], *, dry: bool = False) -> list[Wish]:
    """Publish the bundles of new nodes; return the nodes with the startup scripts that fetch them.

    Args:
        settings: The settings of the fleet.
        wishes: The nodes; those without `configure_at_boot` are returned as they are.
        dry: Whether nothing is written to the bucket.

    Raises:
        UsageError: A node cannot configure itself, or the fleet's variables have faults.
        CloudError: The bucket does not accept the bundle.
    """
    places = {(wish.zone, wish.spot) for wish in wishes if wish.configure_at_boot}
    if not places:
        return list(wishes)
    project = playbook.project_of(settings.path, settings.file)
    sent = [archives.of_ansible(), archives.of_project(project)]
    done: dict[int, Wish] = {}
    objects: dict[str, bytes] = {}
    for zone, spot in sorted(places):
        # The names and groups of workers depend on the other nodes of the fleet. So the inventory is computed once for
        # each zone, with all new nodes in this zone: each of them will exist in one zone only.
        together = {
            number: wish
            for number, wish in enumerate(wishes)
            if wish.configure_at_boot and (wish.zone, wish.spot) == (zone, spot)
        }
        orders = _orders(settings, project, list(together.values()))
        for number, wish in together.items():
            data = _bundle(orders[wish.full_name], sent)
            digest = hashlib.sha256(data).hexdigest()
            uri = f"{wish.configure_at_boot}/{wish.name}-{digest[:_DIGITS]}.json"
            done[number] = _with_script(wish, uri, digest)
            objects[uri] = data
            objects |= {f"{wish.configure_at_boot}/{archive.digest}.tar.gz": archive.data for archive in sent}
    for uri, data in () if dry else objects.items():
        _upload(settings, uri, data)
    return [done.get(number, wish) for number, wish in enumerate(wishes)]


def ordered(settings: Settings, orders: Sequence[creation.Order], *, dry: bool = False) -> list[creation.Order]:
    """Do the same for the nodes in each place that their orders name; return the orders with these nodes."""
    wishes = iter(published(settings, [wish for order in orders for wish in order.wishes], dry=dry))
    return [order._replace(wishes=tuple(next(wishes) for _ in order.wishes)) for order in orders]


def _bundle(orders: Sequence[Order], sent: Sequence[Archive]) -> bytes:
    """Return the bundle of one node, as `boot` reads it."""
    content = {
        "orders": [dataclasses.asdict(order) for order in orders],
        "archives": [hashlib.sha256(archive.data).hexdigest() for archive in sent],
        "digits": len(sent[0].digest),
        "receiver": inspect.getsource(receiver),
        "kept": on_workers.ARCHIVES,
        "python": archives.oldest_python(),
    }
    return json.dumps(content).encode()


def _with_script(wish: Wish, uri: str, digest: str) -> Wish:
    """Return a node with the startup script that fetches its bundle."""
    origin = os.environ.get("STORAGE_EMULATOR_HOST", "")
    call = f"sys.exit(configure({uri.removeprefix('gs://')!r}, {digest!r}, {origin!r}))"
    script = f"#!/usr/bin/python3 -I\n{inspect.getsource(boot)}\n\n{call}\n"
    return replace(wish, metadata={**wish.metadata, STARTUP: script, first_boot.KEY: uri})


def _upload(settings: Settings, uri: str, data: bytes) -> None:
    kind = "application/json" if uri.endswith(".json") else "application/gzip"
    try:
        buckets.write(uri, data, settings.auth, content_type=kind, timeout=settings.request_timeout)
    except CloudError as exc:
        exc.fix = f"{exc.fix}; `tpu_ops bucket create` makes a bucket in the region of the nodes"
        raise


def _orders(settings: Settings, project: playbook.Project, wishes: Sequence[Wish]) -> dict[str, list[Order]]:
    """Return what the workers of new nodes run: resource name of the node -> one order per worker.

    The inventory is computed as it will be once these nodes exist, from a snapshot that contains them.
    """
    file = project.playbook("site")
    if why := playing.not_on_workers(settings, project, file):
        raise _refusal(why)
    planned = {wish.full_name: _planned(wish) for wish in wishes}
    known = view.last(settings)
    others = [node for node in known.listed if node.full_name not in planned] if known else []
    nodes = tuple(sorted([*others, *planned.values()], key=lambda node: node.full_name))
    fleet = view.of(settings, Snapshot(time.time(), nodes))
    workers = [worker for worker in fleet.workers if worker.node.full_name in planned]
    if lacking := planned.keys() - {worker.node.full_name for worker in workers}:
        names = texts.some(sorted(planned[name].name for name in lacking))
        raise _refusal(f"{names}: {settings.file} has filters or zones without it")
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bundle-") as directory:
        snapshot = Path(directory, "snapshot.json")
        places = (settings.projects, settings.zones)
        snapshot.write_text(documents.document(time.time(), *places, nodes, {}).text(), encoding="utf-8")
        environ = os.environ | {"TPU_OPS_SNAPSHOT": str(snapshot), "TPU_OPS_STATE": directory}
        hosts = [worker.host for worker in workers]
        found = values.compute(project, file, hosts=hosts, environ=environ, secrets=False)
    if found.cannot:
        raise _refusal(texts.some(sorted({reason for reasons in found.cannot.values() for reason in reasons})))
    return {name: [_order(found, worker) for worker in _of(workers, name)] for name in planned}


def _order(found: values.Values, worker: Worker) -> Order:
    own = found.hosts[worker.host]
    # Each worker is on its own: it knows no peer that could pass downloads on.
    alone = json.dumps({"python_share_downloads": False})
    inventories = [found.shared.inventory, own.inventory]
    return Order("site", [], inventories, [found.shared.extra, own.extra, alone])


def _of(workers: Iterable[Worker], name: str) -> list[Worker]:
    return sorted((one for one in workers if one.node.full_name == name), key=lambda one: one.index)


def _planned(wish: Wish) -> Node:
    """Return a node as the API will list it once it is READY, without addresses."""
    try:
        kind = accelerator_type(wish.accelerator_type)
    except ValueError as exc:
        raise _refusal(f"{wish.where}: {exc}") from exc
    disks: list[dict[str, Any]] = [
        {"source": f"projects/{wish.project}/zones/{wish.zone}/disks/{name}", "mode": DISK_MODES[mode]}
        for name, mode in wish.disks.items()
    ]
    return Node(
        name=wish.name,
        project=wish.project,
        zone=wish.zone,
        node_id="",
        accelerator_type=wish.accelerator_type,
        runtime_version=wish.runtime_version,
        state="READY",
        health="HEALTHY",
        internal_ips=("",) * kind.workers,
        external_ips=("",) * kind.workers,
        chips=kind.chips,
        chips_per_worker=kind.chips_per_worker,
        topology=kind.topology,
        labels=dict(wish.labels),
        queued_resource=wish.name if wish.queued else "",
        preemptible=wish.spot,
        spot=wish.spot,
        reserved=wish.reserved,
        data_disks=tuple(disks),
        service_account=wish.service_account,
    )


def _refusal(where: str) -> UsageError:
    return UsageError(
        "the node cannot configure itself",
        where=where,
        fix="leave configure_at_boot out, and run `tpu_ops configure` once the node is READY",
    )
