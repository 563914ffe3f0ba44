"""The interface between the lab's API and its workers, and a backend without workers.

The API's state decides which workers exist and which addresses they have; a backend carries this out. Every method is
idempotent, so that an API process that was killed in the middle can simply call it again.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Protocol


class BackendError(Exception):
    """A worker could not be booted, stopped or removed; the text names the worker and the reason."""


#: Maximum number of data disks of a worker: their devices are /dev/sdb to /dev/sdy.
MAX_DISKS = 24


@dataclass(frozen=True)
class DataDisk:
    """A data disk of a node, attached to each of its workers.

    Attributes:
        source: The disk's resource name.
        number: The disk's number from 1, unchanged while it is attached: its device is
            ``google-persistent-disk-<number>``.
        read_only: Whether no user can write to it, not even root.
    """

    source: str
    number: int
    read_only: bool


def disk_resource(source: str) -> str:
    """Return the resource name of a disk, which clients give as a name or as a URL that ends in the name."""
    return source[max(source.find("projects/"), 0) :]


@dataclass(frozen=True)
class WorkerSpec:
    """One worker as the API's state requires it.

    Attributes:
        project: Project id.
        zone: Zone.
        node: Short name of the node.
        node_id: The API's numeric id of the node, digits.
        index: Worker index, from 0.
        peers: Internal addresses of all workers of the node, in order.
        external_ip: External address; empty for a node without external addresses.
        runtime_version: Decides which image is used.
        accelerator_type: For example ``v4-32``.
        chip_devices: Device files of the worker's chips, for example ``/dev/accel0``.
        metadata: The node's metadata entries, including ``ssh-keys``.
        disks: The node's data disks.
    """

    project: str
    zone: str
    node: str
    node_id: str
    index: int
    peers: tuple[str, ...]
    external_ip: str
    runtime_version: str
    accelerator_type: str
    chip_devices: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    disks: tuple[DataDisk, ...] = ()

    @property
    def internal_ip(self) -> str:
        """This worker's internal address."""
        return self.peers[self.index]

    @property
    def hostname(self) -> str:
        """The worker's own host name, formed as on a TPU VM."""
        return f"t1v-n-{hashlib.sha256(self.node_id.encode()).hexdigest()[:8]}-w-{self.index}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which JAX on CPU forms the same group of processes as from a real pod's metadata.

        The three empty values keep JAX from asking a metadata server about other slices.
        """
        return {
            "JAX_FORCE_TPU_INIT": "1",
            "JAX_PLATFORMS": "cpu",
            "TPU_WORKER_ID": str(self.index),
            "TPU_WORKER_HOSTNAMES": ",".join(self.peers),
            "MEGASCALE_COORDINATOR_ADDRESS": "",
            "MEGASCALE_NUM_SLICES": "",
            "MEGASCALE_SLICE_ID": "",
        }


@dataclass(frozen=True)
class Networks:
    """The two networks of the workers' addresses."""

    internal: IPv4Network
    external: IPv4Network


class Backend(Protocol):
    """Runs the workers of the lab's nodes."""

    @property
    def networks(self) -> Networks:
        """The networks of the workers' addresses; the first eight addresses of each are reserved."""

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        """Create and start these workers under exactly these addresses; return when each one serves ssh.

        Also used to start workers again after `halt`, possibly with other addresses.

        Raises:
            BackendError: A worker did not start; the others may have.
        """

    async def halt(self, workers: Sequence[WorkerSpec]) -> None:
        """Shut these workers down and keep their disks. Workers that do not run are left unchanged."""

    async def kill(self, workers: Sequence[WorkerSpec]) -> None:
        """Kill these workers, as a preemption does; their disks are kept until `remove`."""

    async def remove(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove these workers and their disks. Workers that do not exist are skipped."""

    async def publish(self, workers: Sequence[WorkerSpec]) -> None:
        """Attach and detach data disks to match the workers' specs, and pass the metadata to their guest agents.

        Raises:
            BackendError: A disk could not be attached.
        """

    async def guest_attributes(self, worker: WorkerSpec) -> dict[str, dict[str, str]]:
        """Return the attributes that the worker's guest agent published: namespace -> key -> value."""

    async def prune(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove everything of this instance's backend that belongs to none of these workers."""

    def image(self, runtime_version: str) -> str:
        """Return a description for users of the image that is used for a runtime version."""


class NoWorkers:
    """A backend for a fleet that exists only in the API: addresses and host keys are invented, nothing runs."""

    networks = Networks(IPv4Network("10.128.0.0/12"), IPv4Network("100.64.0.0/12"))

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        """There is nothing to boot."""

    halt = kill = remove = publish = prune = boot

    async def guest_attributes(self, worker: WorkerSpec) -> dict[str, dict[str, str]]:
        """Return a host key derived from the node id and index: it has the right form, but no private key."""
        seed = hashlib.sha256(f"{worker.node_id}/{worker.index}".encode()).digest()
        name = b"ssh-ed25519"
        blob = len(name).to_bytes(4, "big") + name + len(seed).to_bytes(4, "big") + seed
        return {"hostkeys": {name.decode(): b64encode(blob).decode()}}

    def image(self, runtime_version: str) -> str:
        """There is no image for any runtime version."""
        return "none (API only)"
