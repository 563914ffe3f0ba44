"""Workers in real containers: sixteen at once, and what happens to them afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from tpu_ops.lab import containers, networks, removal, shared
from tpu_ops.lab.backend import BackendError, WorkerSpec
from tpu_ops.lab.image import build
from tpu_ops.lab.workers import ContainerBackend

pytestmark = [pytest.mark.lab, pytest.mark.asyncio(loop_scope="module")]

SIZE = 16
HOST_BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class Lab:
    """One instance with a pod, and the way into its workers with host keys checked."""

    backend: ContainerBackend
    folder: Path
    pod: list[WorkerSpec]

    async def trust(self, pod: Sequence[WorkerSpec]) -> None:
        """Write known_hosts from what the workers' guest agents published."""
        lines = []
        for worker in pod:
            keys = (await self.backend.guest_attributes(worker))["hostkeys"]
            lines += [f"w{worker.index} {kind} {blob}" for kind, blob in keys.items()]
        (self.folder / "known_hosts").write_text("\n".join(lines) + "\n")

    async def ssh(self, worker: WorkerSpec, command: str, *, user: str = "tpu", check: bool = True) -> str:
        """Run a command on a worker."""
        options = {
            "UserKnownHostsFile": str(self.folder / "known_hosts"),
            "HostKeyAlias": f"w{worker.index}",
            "StrictHostKeyChecking": "yes",
            "KexAlgorithms": "^curve25519-sha256",
            "IdentityFile": str(self.folder / "key"),
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "LogLevel": "ERROR",
        }
        args = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        process = await asyncio.create_subprocess_exec(
            *("ssh", "-F", "none", *args, f"{user}@{worker.external_ip or worker.internal_ip}", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 120)
        if check and process.returncode:
            raise AssertionError(f"{command!r} on w{worker.index}: {process.returncode} {(out + err).decode()}")
        return out.decode() + ("" if process.returncode == 0 else f"failed: {err.decode()}")

    async def everywhere(self, pod: Sequence[WorkerSpec], command: str) -> list[str]:
        """Run a command on several workers at once."""
        return [text.strip() for text in await asyncio.gather(*(self.ssh(worker, command) for worker in pod))]


def make_pod(backend: ContainerBackend, key: str, size: int, *, node_id: str, first: int = 10) -> list[WorkerSpec]:
    """Return the workers of a node, addressed from the lab's networks."""
    internal = tuple(str(backend.networks.internal[first + index]) for index in range(size))
    return [
        WorkerSpec(
            project="lab",
            zone="us-central2-b",
            node=f"pod{node_id}",
            node_id=node_id,
            index=index,
            peers=internal,
            external_ip=str(backend.networks.external[first + index]),
            runtime_version="tpu-ubuntu2204-base",
            accelerator_type="v4-128",
            chip_devices=("/dev/accel0", "/dev/accel1", "/dev/vfio/0"),
            metadata={"ssh-keys": f"tpu:{key}"},
        )
        for index in range(size)
    ]


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition; fail when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of this module's own, with a key pair."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_OPS_STATE", str(folder))
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
        yield folder


@pytest.fixture(autouse=True)
def _this_state(state: Path, _no_real_service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the module's state directory also during each test."""
    monkeypatch.setenv("TPU_OPS_STATE", str(state))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(state: Path, pytestconfig: pytest.Config) -> AsyncIterator[Lab]:
    """Sixteen workers, booted at once; what this took is printed."""
    instance = f"t{os.getpid()}"
    key = (state / "key.pub").read_text().strip()
    backend = ContainerBackend(instance)
    try:
        await build.ensure(backend.engine, "tpu-ubuntu2204-base")
        pod = make_pod(backend, key, SIZE, node_id="1")
        start = time.monotonic()
        await backend.boot(pod)
        took = time.monotonic() - start
        made = Lab(backend, state, pod)
        await made.trust(pod)
        # Each process's own memory and its share of what it shares, and what the worker keeps in memory as files.
        command = (
            "sudo -n sh -c 'cat /proc/[0-9]*/smaps_rollup' 2>/dev/null | awk '/^Pss:/ {sum += $2} END {print sum}'; "
        )
        command += "df --output=used /run /dev/shm | tail -n +2"
        used = sum(int(word) for text in await made.everywhere(pod, command) for word in text.split()) // 1024
        # Past pytest's capture, which would show it for a failed test only.
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(f"\n{SIZE} workers booted in {took:.1f} s and use {used} MiB of memory\n")
        assert took < 90
        assert 100 < used < 1500
        yield made
    finally:
        await asyncio.to_thread(removal.teardown, instance)
        assert await asyncio.to_thread(removal.leftovers, instance) == []


async def test_sixteen_workers_are_machines_of_their_own(lab: Lab) -> None:
    command = (
        "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; systemctl is-system-running --wait; "
        "cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub; getent ahostsv4 $(hostname) | head -n1 | cut -d' ' -f1"
    )
    told = [text.splitlines() for text in await lab.everywhere(lab.pod, command)]
    boot_ids, machine_ids, names, states, keys, addresses = (list(column) for column in zip(*told, strict=True))
    assert len({*boot_ids, HOST_BOOT_ID}) == SIZE + 1
    assert len(set(machine_ids)) == SIZE
    assert len(set(keys)) == SIZE
    assert names == [worker.hostname for worker in lab.pod]
    assert addresses == list(lab.pod[0].peers)
    assert set(states) == {"running"}


async def test_a_worker_is_what_the_roles_and_the_launcher_expect(lab: Lab) -> None:
    worker, peer = lab.pod[0], lab.pod[1]
    told = await lab.ssh(
        worker,
        f"""
        set -e
        test "$(sudo -n id -u)" = 0
        test "$(sudo -n systemd-run --quiet --wait --pipe -p KillMode=mixed echo unit)" = unit
        python3 -c 'import sys; assert sys.version_info >= (3, 8)'
        for device in {" ".join(worker.chip_devices)}; do
            test "$(stat -c %F:%t:%T $device)" = 'character special file:1:3'
            exec 9<>$device
        done
        test "$(sudo -n ls /proc/$$/fd/9)" = /proc/$$/fd/9
        printf '#!/bin/sh\\necho runs\\n' >/tmp/program && chmod +x /tmp/program && test "$(/tmp/program)" = runs
        ping -q -c 1 -W 5 {peer.internal_ip} >/dev/null
        test "$(getent ahostsv4 {peer.hostname} | cut -d' ' -f1 | sort -u)" = {peer.internal_ip}
        touch /var/cache/tpu-lab/. 2>/dev/null || sudo -n touch /var/cache/tpu-lab/.
        command -v rsync
        grep -x TPU_WORKER_HOSTNAMES={",".join(worker.peers)} /etc/tpu-lab/environment
        . /etc/os-release; echo "$PRETTY_NAME"
        """,
    )
    assert told.splitlines()[-1] in lab.backend.image(worker.runtime_version)


async def test_packages_and_https_are_reached_from_inside(lab: Lab) -> None:
    told = await lab.ssh(
        lab.pod[2],
        "set -e; sudo -n apt-get update -qq; sudo -n DEBIAN_FRONTEND=noninteractive apt-get install -y -qq tree "
        ">/dev/null; "
        "command -v tree; python3 -m venv venv; venv/bin/pip download -q --disable-pip-version-check --no-deps six; "
        "ls six-*.whl",
    )
    assert told.startswith("/usr/bin/tree\nsix-")


async def test_a_reboot_gives_a_new_boot_id_and_keeps_addresses_keys_and_disk(lab: Lab) -> None:
    worker = lab.pod[3]
    before = await lab.ssh(worker, "touch kept; cat /proc/sys/kernel/random/boot_id")
    keys = await lab.backend.guest_attributes(worker)
    await lab.ssh(worker, "sudo -n shutdown -r 0", check=False)
    status = lab.backend.directory(worker) / "status.json"
    await until(lambda: (now := containers.parse_status(shared.read(status))).ready and now.boot_id != before.strip())
    after = await lab.ssh(worker, "test -e kept; cat /proc/sys/kernel/random/boot_id")
    assert after.strip() == containers.parse_status(shared.read(status)).boot_id
    assert await lab.backend.guest_attributes(worker) == keys


async def test_a_maintenance_event_moves_external_addresses_and_nothing_else(lab: Lab) -> None:
    old = lab.pod[4:6]
    unused = str(lab.backend.networks.external[500])
    # One takes the other's address, so that all must be given up before any is taken.
    new = [replace(old[0], external_ip=unused), replace(old[1], external_ip=old[0].external_ip)]
    await lab.backend.halt(old)
    assert not await shared.ssh_answers(old[1].external_ip)
    await lab.backend.boot(new)
    lab.pod[4:6] = new
    await lab.trust(lab.pod)
    told = await lab.everywhere(new, "hostname; ip -o -4 address show | grep -o 'inet [0-9.]*' | sort")
    for worker, text in zip(new, told, strict=True):
        expected = sorted(f"inet {address}" for address in ("127.0.0.1", worker.internal_ip, worker.external_ip))
        assert text.splitlines() == [worker.hostname, *expected]
    assert not await shared.ssh_answers(old[1].external_ip)


async def test_published_keys_come_and_go_and_leave_foreign_lines(lab: Lab) -> None:
    worker, key = lab.pod[6], (lab.folder / "key.pub").read_text().strip()
    await lab.ssh(worker, "echo 'ssh-rsa FOREIGN mine' >>.ssh/authorized_keys")
    both = replace(worker, metadata={"ssh-keys": f"tpu:{key}\nada:{key}"})
    await lab.backend.publish([both])
    assert await lab.ssh(both, "sudo -n id -un", user="ada") == "root\n"
    await lab.backend.publish([worker])
    assert "Permission denied" in await lab.ssh(worker, "true", user="ada", check=False)
    assert "google-sudoers" not in await lab.ssh(worker, "id -nG ada")
    text = await lab.ssh(worker, "cat .ssh/authorized_keys")
    assert text == f"ssh-rsa FOREIGN mine\n# Added by Google\n{key}\n"


async def test_a_killed_worker_stays_down_until_it_is_booted(lab: Lab) -> None:
    worker = lab.pod[7]
    await lab.ssh(worker, "touch kept")
    await lab.backend.kill([worker])
    await lab.backend.kill([worker])
    await lab.backend.halt([worker])
    name = containers.container_name(lab.backend.instance, worker)
    assert (await lab.backend._found())[name].status == "exited"
    assert not await shared.ssh_answers(worker.internal_ip)
    await lab.backend.boot([worker])
    assert await lab.ssh(worker, "test -e kept && echo kept") == "kept\n"


async def test_a_worker_without_external_address_is_reached_inside_and_reaches_out(lab: Lab) -> None:
    worker = replace(lab.pod[8], external_ip="")
    await lab.backend.boot([worker])
    told = await lab.ssh(worker, "ip -o -4 address show | grep -c 'scope global'; ip -4 route show default")
    count, route = told.splitlines()
    assert count == "1"
    assert str(lab.backend.networks.internal[1]) in route


async def test_a_worker_that_cannot_boot_is_named_with_the_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = make_pod(lab.backend, "", 1, node_id="2", first=100)[0]

    def withhold(worker: WorkerSpec) -> None:
        lab.backend.directory(worker).mkdir(parents=True)

    monkeypatch.setattr(lab.backend, "_write_metadata", withhold)
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"pod2 worker 0: the worker's container ended with code 78 .*TPU_OPS_STATE"):
        await lab.backend.boot([broken])
    assert time.monotonic() - start < 20
    await lab.backend.prune(lab.pod)
    names = set(await lab.backend._found())
    assert names == {containers.container_name(lab.backend.instance, worker) for worker in lab.pod}
    assert {path.name for path in shared.entries(shared.worker_directories(lab.backend.instance))} == names


async def test_removed_workers_leave_nothing(lab: Lab) -> None:
    gone = lab.pod[15]
    await lab.backend.remove([gone])
    await lab.backend.remove([gone])
    assert containers.container_name(lab.backend.instance, gone) not in await lab.backend._found()
    assert not lab.backend.directory(gone).exists()
    assert await lab.backend.guest_attributes(gone) == {}
    del lab.pod[15]


async def test_a_second_lab_killed_in_the_middle_of_a_boot_recovers_beside_the_first(lab: Lab, state: Path) -> None:
    instance = f"u{os.getpid()}"
    script = f"""
import asyncio
from pathlib import Path
from tests.lab_workers.test_boot import make_pod
from tpu_ops.lab.workers import ContainerBackend

backend = ContainerBackend({instance!r})
key = Path({str(state / "key.pub")!r}).read_text().strip()
asyncio.run(backend.boot(make_pod(backend, key, 3, node_id="1")))
"""
    try:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=Path(__file__).parents[2])
        label = f"label={networks.LABEL}={instance}"
        await until(lambda: bool(lab.backend.engine.call("ps", "-a", "-q", "--filter", label).stdout))
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        second = ContainerBackend(instance)
        assert not second.networks.internal.overlaps(lab.backend.networks.internal)
        assert not second.networks.external.overlaps(lab.backend.networks.external)
        pod = make_pod(second, (state / "key.pub").read_text().strip(), 3, node_id="1")
        await second.boot(pod)
        other = Lab(second, state / "second", pod)
        other.folder.mkdir()
        (other.folder / "key").symlink_to(state / "key")
        await other.trust(pod)
        assert await other.everywhere(pod, "hostname") == [worker.hostname for worker in pod]
        held = await asyncio.to_thread(removal.leftovers, instance)
        assert len(held) == 3 + 2 + 3
    finally:
        removed = await asyncio.to_thread(removal.teardown, instance)
        assert await asyncio.to_thread(removal.leftovers, instance) == []
    assert removed == held
    assert await lab.ssh(lab.pod[0], "hostname") == f"{lab.pod[0].hostname}\n"
