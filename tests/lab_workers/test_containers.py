"""What the engine is told to make, and how its answers are read."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.lab import containers
from tpu_ops.lab.backend import WorkerSpec

WORKER = WorkerSpec(
    project="lab",
    zone="us-central2-b",
    node="pod",
    node_id="4711",
    index=1,
    peers=("10.160.0.10", "10.160.0.11"),
    external_ip="198.18.0.11",
    runtime_version="tpu-ubuntu2204-base",
    accelerator_type="v4-16",
    chip_devices=("/dev/accel0", "/dev/vfio/3"),
    metadata={"ssh-keys": "tpu:ssh-ed25519 AAAA tpu"},
)


def create(worker: WorkerSpec = WORKER) -> list[str]:
    cgroup = containers.cgroup_args("hybrid", 252)
    folders = {"directory": Path("/state/w1"), "storage": Path("/state/storage")}
    return containers.create_args("west", worker, image="image:1", **folders, cgroup=cgroup)


def pairs(args: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(args))


def test_everything_made_carries_the_instance() -> None:
    found = pairs(create())
    assert ("--name", "tpu-lab-west-4711-w1") in found
    assert ("--label", "tpu-ops.lab=west") in found
    assert ("--label", "tpu-ops.lab.node=4711") in found
    assert ("--label", "tpu-ops.lab.index=1") in found
    assert ("--network", "tpu-lab-west-internal") in found


def test_a_worker_gets_its_internal_address_chips_and_shared_directory() -> None:
    found = pairs(create())
    assert ("--ip", "10.160.0.11") in found
    assert ("--device", "/dev/null:/dev/accel0") in found
    assert ("--device", "/dev/null:/dev/vfio/3") in found
    assert ("--mount", "type=bind,source=/state/w1,target=/var/lib/tpu-lab/worker") in found
    assert ("--mount", "type=bind,source=/state/storage,target=/var/lib/tpu-lab/storage,readonly") in found
    assert ("--volume", "tpu-ops-lab-cache:/var/cache/tpu-lab") in found


def test_no_privileged_container_and_no_capability_that_some_machines_lack() -> None:
    args = create()
    assert "--privileged" not in args
    assert ("--cap-add", "SYS_RESOURCE") not in pairs(args)
    assert ("--cap-add", "SYS_ADMIN") in pairs(args)


def test_a_reboot_brings_a_worker_back_and_a_stop_does_not() -> None:
    assert ("--restart", "unless-stopped") in pairs(create())


@pytest.mark.parametrize(
    ("layout", "systemd", "source"),
    [
        ("v2", 249, "/sys/fs/cgroup"),
        ("v2", 257, "/sys/fs/cgroup"),
        ("hybrid", 252, "/sys/fs/cgroup"),
        ("hybrid", 257, "/sys/fs/cgroup/unified"),
        ("v1", 252, "/sys/fs/cgroup"),
    ],
)
def test_cgroups_fit_the_machine_and_the_systemd(layout: str, systemd: int, source: str) -> None:
    assert containers.cgroup_args(layout, systemd) == ["--cgroupns=host", "--volume", f"{source}:/sys/fs/cgroup:rw"]


def test_a_systemd_without_cgroup_v1_is_refused_where_there_is_only_v1() -> None:
    with pytest.raises(UsageError, match=r"systemd 257 .* needs cgroup v2"):
        containers.cgroup_args("v1", 257)


@pytest.mark.parametrize(
    ("files", "layout"),
    [(["cgroup.controllers"], "v2"), (["unified/cgroup.procs"], "hybrid"), (["memory/tasks"], "v1")],
)
def test_the_cgroup_layout_is_read_from_the_mounts(tmp_path: Path, files: list[str], layout: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert containers.cgroup_layout(tmp_path) == layout


def described(status: str = "running", **addresses: str) -> containers.Container:
    networks = {f"tpu-lab-west-{kind}": address for kind, address in addresses.items()}
    return containers.Container("tpu-lab-west-4711-w1", status, 0, networks)


@pytest.mark.parametrize(
    ("container", "external", "leave", "join"),
    [
        (described(internal="10.160.0.11"), "198.18.0.11", [], ["external"]),
        (described(internal="10.160.0.11", external="198.18.0.11"), "198.18.0.11", [], []),
        (described(internal="10.160.0.11", external="198.18.0.99"), "198.18.0.11", ["external"], ["external"]),
        (described(internal="10.160.0.11", external="198.18.0.11"), "", ["external"], []),
        (described(), "198.18.0.11", [], ["internal", "external"]),
    ],
)
def test_a_half_made_or_moved_worker_gets_exactly_its_addresses(
    container: containers.Container, external: str, leave: list[str], join: list[str]
) -> None:
    worker = replace(WORKER, external_ip=external)
    assert containers.wrong_networks("west", worker, container) == (leave, join)


def test_a_stopped_container_is_described_by_its_configured_addresses() -> None:
    entry = {
        "Name": "/tpu-lab-west-4711-w1",
        "State": {"Status": "exited", "ExitCode": 78},
        "NetworkSettings": {
            "Networks": {
                "docker": {"IPAMConfig": {"IPv4Address": "10.160.0.11"}, "IPAddress": ""},
                "podman": {"IPAMConfig": None, "IPAddress": "198.18.0.11"},
            }
        },
    }
    addresses = {"docker": "10.160.0.11", "podman": "198.18.0.11"}
    assert containers.parse_container(entry) == containers.Container("tpu-lab-west-4711-w1", "exited", 78, addresses)


def test_a_worker_serves_only_when_it_has_applied_this_very_metadata() -> None:
    content = containers.metadata_file(WORKER)
    digest = hashlib.sha256(content).hexdigest()
    status = json.dumps({"boot_id": "b", "applied": digest, "ready": True})
    assert containers.serves(containers.parse_status(status), content)
    assert not containers.serves(
        containers.parse_status(status), containers.metadata_file(replace(WORKER, metadata={}))
    )
    assert not containers.serves(containers.parse_status(status.replace("true", "false")), content)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ready": true}', '"ready"', "null"])
def test_nonsense_from_a_worker_is_no_status(text: str) -> None:
    assert containers.parse_status(text) == containers.Status()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("[1]", {}),
        ('{"hostkeys": {"ssh-ed25519": "AAAA", "n": 1}, "x": 3}', {"hostkeys": {"ssh-ed25519": "AAAA"}}),
    ],
)
def test_guest_attributes_are_text_or_nothing(text: str, found: dict[str, dict[str, str]]) -> None:
    assert containers.parse_attributes(text) == found
