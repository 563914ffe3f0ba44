"""The nodes that a user requests, and the API's requests for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpu_ops import files, texts
from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.cloud.names import check_chosen
from tpu_ops.cloud.node import Json, Node
from tpu_ops.cloud.remedies import node_deletion
from tpu_ops.errors import CloudError, UsageError

_log = logging.getLogger(__name__)

#: The API's limit of one entry of the metadata, in bytes.
_LARGEST_ENTRY = 256 * 1024
#: Key of the metadata with the script that each worker runs at every boot.
STARTUP = "startup-script"
#: Scope of a service account whose rights only its roles limit.
ALL_APIS = "https://www.googleapis.com/auth/cloud-platform"
#: Modes of data disks as users write them -> as the API spells them (google.cloud.tpu.v2.AttachedDisk.DiskMode).
DISK_MODES = {"ro": "READ_ONLY", "rw": "READ_WRITE"}


@dataclass(frozen=True)
class Wish:
    """The properties of the node that a user requests.

    Attributes:
        name: Short name.
        project: Project id.
        zone: The zone.
        accelerator_type: As in ``v4-32``.
        runtime_version: As in ``tpu-ubuntu2204-base``.
        spot: Whether it is a spot node.
        reserved: Whether it uses a reservation.
        labels: The labels.
        internal_only: Whether its workers have no external addresses.
        network: Name of the network; empty means the project's default.
        subnetwork: Name of the subnetwork; empty means the network's.
        service_account: E-mail of the service account; empty means the project's default.
        scopes: Scopes of the service account; empty means all.
        metadata: Entries of the metadata besides the ssh keys; values may be secret.
        disks: Name of each data disk -> its mode, ``ro`` or ``rw``.
        queued: Whether the node is requested by a queued resource of the same name.
        valid_until: For a queued resource: seconds after which it is given up; 0 means never.
        configure_at_boot: Place in a bucket, as in ``gs://my-bucket/tpu_ops``, with what the node needs to run site.yml
            on itself; empty means that it does not do that.
    """

    name: str
    project: str
    zone: str
    accelerator_type: str
    runtime_version: str
    spot: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    reserved: bool = False
    internal_only: bool = False
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    scopes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    disks: Mapping[str, str] = field(default_factory=dict)
    queued: bool = False
    valid_until: int = 0
    configure_at_boot: str = ""

    @property
    def parent(self) -> str:
        """Resource name of the node's location."""
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def full_name(self) -> str:
        """Resource name of the node."""
        return f"{self.parent}/nodes/{self.name}"

    @property
    def queue_name(self) -> str:
        """Resource name of the queued resource that requests the node."""
        return f"{self.parent}/queuedResources/{self.name}"

    @property
    def where(self) -> str:
        """The node in words."""
        return f"node {self.name}, zone {self.zone}, project {self.project}"


def check_name(name: str) -> str:
    """Return a node's name after checking it.

    Raises:
        UsageError: The API would reject the name.
    """
    return check_chosen(name, "node", f"node {name[:80]!r}")


def entry_of(file: Path) -> str:
    """Return the text of a file as a value of the metadata.

    Raises:
        OSError: The file cannot be read, or is larger than the API allows.
        UnicodeDecodeError: The file is not UTF-8 text.
    """
    return files.read_regular(file, _LARGEST_ENTRY).decode()


def check(wish: Wish) -> None:
    """Refuse a combination of properties that the API or the machines cannot fulfil.

    Raises:
        UsageError: The properties exclude each other.
    """
    fault, where, fix = "", "", ""
    if wish.spot and wish.reserved:
        fault, where, fix = "a node is either spot or reserved", "--spot and --reserved", "leave out one of them"
    elif wish.scopes and not wish.service_account:
        fault, where, fix = "scopes belong to a service account", "--scope", "add --service-account"
    elif wish.valid_until and not wish.queued:
        fault, where, fix = "only a queued resource can end while it waits", "--valid-until", "add --queued"
    elif writable := [name for name, mode in wish.disks.items() if mode == "rw" and _workers(wish) > 1]:
        fault = f"several workers cannot write to one disk, and {wish.accelerator_type} has {_workers(wish)}"
        where, fix = f"disk {writable[0]}", f"attach it read-only: {writable[0]}:ro"
    elif wish.configure_at_boot and STARTUP in wish.metadata:
        fault = "a node that configures itself at boot has a startup script for it already"
        where, fix = "--configure-at-boot", "leave out the startup script, or do its work in roles or by `tpu_ops run`"
    if fault:
        raise UsageError(fault, where=where, fix=fix)


def _workers(wish: Wish) -> int:
    try:
        return accelerator_type(wish.accelerator_type).workers
    except ValueError:
        return 1


def request(wish: Wish, keys: str) -> Json:
    """Return the fields of google.cloud.tpu.v2.Node that request the node.

    Args:
        wish: The node.
        keys: Lines of the metadata entry ``ssh-keys``.
    """
    network: Json = {"enable_external_ips": not wish.internal_only}
    network |= {key: value for key in ("network", "subnetwork") if (value := getattr(wish, key))}
    body: Json = {
        "accelerator_type": wish.accelerator_type,
        "runtime_version": wish.runtime_version,
        "network_config": network,
        "metadata": {"ssh-keys": keys, **wish.metadata},
    }
    if wish.labels:
        body["labels"] = dict(wish.labels)
    if (wish.spot or wish.reserved) and not wish.queued:
        body["scheduling_config"] = {"spot": True} if wish.spot else {"reserved": True}
    if wish.service_account:
        body["service_account"] = {"email": wish.service_account, "scope": list(wish.scopes) or [ALL_APIS]}
    if wish.disks:
        place = f"projects/{wish.project}/zones/{wish.zone}/disks"
        body["data_disks"] = [
            {"source_disk": f"{place}/{name}", "mode": DISK_MODES[mode]} for name, mode in wish.disks.items()
        ]
    return body


def queued_request(wish: Wish, body: Json) -> Json:
    """Return the fields of google.cloud.tpu.v2.QueuedResource that request the node.

    Args:
        wish: The node.
        body: The result of `request`.
    """
    queue: Json = {"tpu": {"node_spec": [{"parent": wish.parent, "node_id": wish.name, "node": body}]}}
    if wish.spot:
        queue["spot"] = {}
    elif wish.reserved:
        queue["guaranteed"] = {"reserved": True}
    if wish.valid_until:
        queue["queueing_policy"] = {"valid_until_duration": f"{wish.valid_until}s"}
    return queue


def must_match(wish: Wish, node: Node) -> None:
    """Check that the existing node has the requested properties; different labels only cause a warning.

    Raises:
        CloudError: The existing node has another type or runtime version, or only one of the two is preemptible.
    """
    others = [
        f"with {what.replace('_', ' ')} {getattr(node, what)}, not {getattr(wish, what)}"
        for what in ("accelerator_type", "runtime_version")
        if getattr(node, what) != getattr(wish, what)
    ]
    if node.preemptible != wish.spot:
        others.append("on demand, not as a spot node" if wish.spot else "as a spot node, not on demand")
    if others:
        raise CloudError(
            f"a node of this name exists {others[0]}",
            where=wish.where,
            fix=f"use another name, or delete the node first: `{node_deletion(wish.name, wish.zone)}`",
        )
    has = node.labels
    lacking = [
        f"{key}={value}{f' (it has {key}={has[key]})' if key in has else ''}"
        for key, value in wish.labels.items()
        if has.get(key) != value
    ]
    if lacking:
        _log.warning("the node existed before, without %s, and is not changed", texts.some(lacking))
