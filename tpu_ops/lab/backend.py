"""The interface through which the lab's API controls workers, and a backend without workers.

The API's state decides which workers exist and which addresses they have; a backend creates and removes workers
accordingly. Every method of a backend is idempotent: after an API process was killed during a call, the next process
calls the method again.
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


#: Number of every project in the lab, which real projects have beside their id.
PROJECT_NUMBER = "1"
#: Maximum number of data disks of a worker: their devices are /dev/sdb to /dev/sdy.
MAX_DISKS = 24


@dataclass(frozen=True)
class DataDisk:
    """A data disk of a node, attached to each of its workers.

    Attributes:
        source: The disk's resource name.
        number: The disk's number, from 1, which stays the same while the disk is attached: the name of the disk's
            device is ``google-persistent-disk-<number>``.
        read_only: Whether the disk is read-only for all users, including root.
    """

    source: str
    number: int
    read_only: bool


def disk_resource(source: str) -> str:
    """Return a disk's resource name; clients send this name, or a URL that ends with the name."""
    return source[max(source.find("projects/"), 0) :]


@dataclass(frozen=True)
class WorkerSpec:
    """The specification of one worker, from the API's state.

    Attributes:
        project: Id of the node's project.
        zone: Zone of the node.
        node: Short name of the node.
        node_id: Numeric id of the node in the API, as decimal digits.
        index: Worker index, from 0.
        peers: Internal addresses of all workers of the node, in the order of the worker indexes.
        external_ip: The worker's external address; empty for a node without external addresses.
        runtime_version: Runtime version of the node, which decides the worker's container image.
        accelerator_type: Accelerator type of the node, for example ``v4-32``.
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
        """The worker's host name, in the form that TPU VMs have."""
        return f"t1v-n-{hashlib.sha256(self.node_id.encode()).hexdigest()[:8]}-w-{self.index}"

    @property
    def instance_id(self) -> str:
        """The worker's id as a Compute Engine instance, as decimal digits."""
        return str(int.from_bytes(hashlib.sha256(f"{self.node_id}/{self.index}".encode()).digest()[:8], "big") >> 1)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which JAX on CPU connects the processes of all workers.

        On a real pod, JAX reads these values from the pod's metadata. The three empty values keep JAX from asking a
        metadata server about other slices.
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
    """The networks of the workers' internal and external addresses."""

    internal: IPv4Network
    external: IPv4Network


class Backend(Protocol):
    """The interface of a backend, which runs the workers of the lab's nodes."""

    @property
    def networks(self) -> Networks:
        """The networks of the workers' addresses; the first eight addresses of each network are reserved."""

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        """Create and start these workers with exactly the addresses of their specs; return when each worker serves ssh.

        Workers that `halt` has shut down are started again, possibly with other addresses.

        Raises:
            BackendError: A worker did not start; the other workers might have started.
        """

    async def halt(self, workers: Sequence[WorkerSpec]) -> None:
        """Shut these workers down and keep their boot disks. Workers that do not run are left unchanged."""

    async def kill(self, workers: Sequence[WorkerSpec]) -> None:
        """Kill these workers, as a preemption does; their boot disks are kept until `remove`."""

    async def remove(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove these workers and their boot disks. Workers that do not exist are skipped."""

    async def publish(self, workers: Sequence[WorkerSpec]) -> None:
        """Attach and detach data disks as the workers' specs require; pass the metadata to the workers' guest agents.

        Raises:
            BackendError: A disk could not be attached.
        """

    async def forget_disk(self, source: str) -> None:
        """Remove the data of a disk that no worker uses.

        Raises:
            BackendError: The data cannot be removed.
        """

    async def guest_attributes(self, worker: WorkerSpec) -> dict[str, dict[str, str]]:
        """Return the attributes that the worker's guest agent published: namespace -> key -> value."""

    async def prune(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove all workers of the lab except these, and detach the data disks that these workers do not use."""

    def image(self, runtime_version: str) -> str:
        """Return a description, for users, of the container image of a runtime version."""


class NoWorkers:
    """A backend that runs no workers: nodes exist only in the API, with invented addresses and host keys."""

    networks = Networks(IPv4Network("10.128.0.0/12"), IPv4Network("100.64.0.0/12"))

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        """Do nothing, since this backend has no workers."""

    halt = kill = remove = publish = prune = boot

    async def forget_disk(self, source: str) -> None:
        """Do nothing, since disks have no data here."""

    async def guest_attributes(self, worker: WorkerSpec) -> dict[str, dict[str, str]]:
        """Return an invented host key, derived from the node id and the worker's index, without a private key."""
        seed = hashlib.sha256(f"{worker.node_id}/{worker.index}".encode()).digest()
        name = b"ssh-ed25519"
        blob = len(name).to_bytes(4, "big") + name + len(seed).to_bytes(4, "big") + seed
        return {"hostkeys": {name.decode(): b64encode(blob).decode()}}

    def image(self, runtime_version: str) -> str:
        """Return a text for users that says that no image is used."""
        return "none (API only)"
