"""Pure functions for workers' containers: names, arguments for the container engine, parsers of the engine's output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError
from tpu_ops.lab.backend import PROJECT_NUMBER, WorkerSpec
from tpu_ops.lab.networks import LABEL, network_name

CACHE_VOLUME = "tpu-ops-lab-cache"
#: Directory in a worker with the download cache that all workers of all labs share.
CACHE_MOUNT = "/var/cache/tpu-lab"
STATE_MOUNT = "/var/lib/tpu-lab/worker"
#: Directory in a worker with the unix socket of the lab's Cloud Storage.
STORAGE_MOUNT = "/var/lib/tpu-lab/storage"
#: The device of file systems in user space, such as mounts of buckets. This machine's kernel may lack it.
FUSE = "/dev/fuse"
METADATA_SERVER = ("metadata.google.internal", "169.254.169.254")
#: Capabilities of a worker's container; root on a TPU VM has them too. CAP_SYS_RESOURCE is left out, since some
#: machines do not allow it for containers.
CAPABILITIES = (
    "SYS_ADMIN",  # systemd mounts file systems; the worker's own boot id is mounted over the kernel's
    "NET_ADMIN",  # firewall rules and interface settings in a worker's own network
    "NET_RAW",  # ping; not in Podman's default set
    "MKNOD",  # create device nodes
    "AUDIT_WRITE",  # sshd and sudo; not in Podman's default set
    "SYS_PTRACE",  # root reads /proc/*/fd of other users' processes, to find processes that use chips
    "SYS_NICE",  # systemd units can set a scheduling priority
    "IPC_LOCK",  # processes can lock memory
    "DAC_READ_SEARCH",  # an NFS server in user space opens files by handle
)
#: First major version of systemd that does not support cgroup v1.
SYSTEMD_WITHOUT_V1 = 256
#: Exit codes of the init in a worker's image: its directory is not visible; the boot id cannot be replaced.
STATE_UNSEEN, BOOT_ID_REFUSED = 78, 79


def container_name(instance: str, worker: WorkerSpec) -> str:
    """Return the name of a worker's container."""
    return f"tpu-lab-{instance}-{worker.node_id}-w{worker.index}"


def cgroup_args(layout: str, systemd: int) -> list[str]:
    """Return the container engine's arguments that give cgroups to the systemd in a worker.

    Args:
        layout: The machine's cgroup layout: ``v1``, ``hybrid`` or ``v2``.
        systemd: Major version of the image's systemd.

    Raises:
        UsageError: A systemd of this version cannot run on this machine.
    """
    source = "/sys/fs/cgroup"
    if systemd >= SYSTEMD_WITHOUT_V1 and layout != "v2":
        if layout == "v1":
            raise UsageError(
                f"systemd {systemd} of the worker image needs cgroup v2, which is not mounted on this machine",
                fix="boot this machine with systemd.unified_cgroup_hierarchy=1, or mount a cgroup2 file system on "
                "/sys/fs/cgroup/unified",
            )
        source = "/sys/fs/cgroup/unified"
    return ["--cgroupns=host", "--volume", f"{source}:/sys/fs/cgroup:rw"]


def cgroup_layout(root: Path = Path("/sys/fs/cgroup")) -> str:
    """Return this machine's cgroup layout: ``v1``, ``hybrid`` or ``v2``."""
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "hybrid" if (root / "unified" / "cgroup.procs").exists() else "v1"


def create_args(
    instance: str, worker: WorkerSpec, *, image: str, directory: Path, storage: Path, cgroup: Iterable[str]
) -> list[str]:
    """Return the engine's arguments that create a worker's container on the internal network.

    Args:
        instance: Name of the lab.
        worker: The worker.
        image: Tag of the worker's image.
        directory: The directory that the lab and the worker's guest agent share.
        storage: The directory with the unix socket of the lab's Cloud Storage.
        cgroup: The result of `cgroup_args`.
    """
    labels = {
        LABEL: instance,
        f"{LABEL}.node": worker.node_id,
        f"{LABEL}.index": str(worker.index),
        f"{LABEL}.name": f"projects/{worker.project}/locations/{worker.zone}/nodes/{worker.node}",
    }
    args = ["create", "--name", container_name(instance, worker), "--hostname", worker.hostname]
    args += [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]
    # `reboot` in a worker ends its container. The engine then starts the container again, unless the lab has stopped
    # it.
    args += ["--restart", "unless-stopped"]
    args += ["--network", network_name(instance, "internal"), "--ip", worker.internal_ip]
    args += [part for name in CAPABILITIES for part in ("--cap-add", name)]
    args += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    # As on a TPU VM, only root can bind ports below 1024; Docker's default allows these ports to every user.
    args += ["--sysctl", "net.ipv4.ip_unprivileged_port_start=1024"]
    args += [*cgroup, "--tmpfs", "/run", "--tmpfs", "/run/lock", "--shm-size", "1g"]
    args += ["--mount", f"type=bind,source={directory},target={STATE_MOUNT}"]
    args += ["--mount", f"type=bind,source={storage},target={STORAGE_MOUNT},readonly"]
    args += ["--volume", f"{CACHE_VOLUME}:{CACHE_MOUNT}"]
    # The device file of each chip is /dev/null: like a chip, a process can open it and keep it open.
    args += [part for path in worker.chip_devices for part in ("--device", f"/dev/null:{path}")]
    # Data disks are loop devices, which are attached and detached while a container runs. A container's device rules
    # cannot change, so all loop devices are allowed. The guest agent creates device nodes only for the worker's own
    # disks.
    args += ["--device-cgroup-rule", "b 7:* rwm"]
    args += ["--device", FUSE] if Path(FUSE).exists() else []
    return [*args, image]


def connect_args(instance: str, worker: WorkerSpec, kind: str) -> list[str]:
    """Return the engine's arguments that connect a worker's container to a network, with the worker's address."""
    address = worker.internal_ip if kind == "internal" else worker.external_ip
    return ["network", "connect", "--ip", address, network_name(instance, kind), container_name(instance, worker)]


def disconnect_args(instance: str, worker: WorkerSpec, kind: str) -> list[str]:
    """Return the engine's arguments that disconnect a worker's container from a network."""
    return ["network", "disconnect", "--force", network_name(instance, kind), container_name(instance, worker)]


@dataclass(frozen=True)
class Container:
    """A container as the engine describes it.

    Attributes:
        name: The container's name.
        status: The engine's status: ``created``, ``running``, ``paused``, ``restarting``, ``exited``, ``dead``.
        exit_code: The exit code of the container's last run.
        addresses: Name of each network -> the container's address in it; while the container does not run, the
            configured address.
    """

    name: str
    status: str
    exit_code: int
    addresses: Mapping[str, str]


def parse_container(description: Mapping[str, Any]) -> Container:
    """Return a container from one entry of the output of `container inspect`."""
    addresses = {}
    for name, network in (description["NetworkSettings"].get("Networks") or {}).items():
        configured = (network.get("IPAMConfig") or {}).get("IPv4Address")
        addresses[name] = configured or network.get("IPAddress") or ""
    state = description["State"]
    return Container(description["Name"].lstrip("/"), state["Status"], int(state.get("ExitCode") or 0), addresses)


def wrong_networks(instance: str, worker: WorkerSpec, container: Container) -> tuple[list[str], list[str]]:
    """Return the kinds of networks to disconnect a container from, and the kinds of networks to connect it to then."""
    leave, join = [], []
    for kind, address in (("internal", worker.internal_ip), ("external", worker.external_ip)):
        have = container.addresses.get(network_name(instance, kind))
        if have is not None and have != address:
            leave.append(kind)
        if address and have != address:
            join.append(kind)
    return leave, join


def metadata_file(worker: WorkerSpec, disks: Sequence[Mapping[str, object]] = ()) -> bytes:
    """Return the content of the file ``metadata.json`` that a worker's guest agent reads.

    Args:
        worker: The worker.
        disks: The worker's data disks, from `tpu_ops.lab.disks.Attachments.devices`.
    """
    # As on a TPU VM, a worker can resolve the host names of all workers of its node to their internal addresses.
    peers = {replace(worker, index=index).hostname: address for index, address in enumerate(worker.peers)}
    content = {
        "hosts": peers | dict([METADATA_SERVER]),
        "environment": worker.environment,
        "disks": list(disks),
        "metadata": dict(worker.metadata),
        "server": _server_entries(worker),
    }
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _server_entries(worker: WorkerSpec) -> dict[str, dict[str, object]]:
    """Return what a worker's metadata server answers, beside the node's own metadata entries."""
    return {
        "instance": {
            "attributes": {"agent-worker-number": str(worker.index), "accelerator-type": worker.accelerator_type},
            "hostname": f"{worker.hostname}.{worker.zone}.c.{worker.project}.internal",
            "id": worker.instance_id,
            "name": worker.hostname,
            "zone": f"projects/{PROJECT_NUMBER}/zones/{worker.zone}",
        },
        "project": {"project-id": worker.project, "numeric-project-id": PROJECT_NUMBER},
    }


@dataclass(frozen=True)
class Status:
    """The status that a worker's guest agent reports."""

    boot_id: str = ""
    applied: str = ""
    ready: bool = False
    disk_fault: str = ""


def parse_status(text: str) -> Status:
    """Parse a guest agent's status file; an invalid file is ignored, since root in the worker can write to it."""
    try:
        data = json.loads(text)
        fault = str(data.get("disk_fault", ""))[:300]
        return Status(str(data["boot_id"]), str(data["applied"]), data["ready"] is True, fault)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Status()


def parse_attributes(text: str) -> dict[str, dict[str, str]]:
    """Parse a guest agent's file of guest attributes into namespace -> key -> value; only text values are kept."""
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(data, dict):
        return {}
    return {
        namespace: {key: value for key, value in entries.items() if isinstance(value, str)}
        for namespace, entries in data.items()
        if isinstance(entries, dict)
    }


def serves(status: Status, metadata: bytes) -> bool:
    """Return whether a worker accepts logins and has applied exactly this metadata."""
    return status.ready and status.applied == hashlib.sha256(metadata).hexdigest()
