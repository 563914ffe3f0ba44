"""The backend that runs the lab's workers as containers, through the container engine's command line.

All containers and networks have the lab's name and label, so that two labs can run at the same time, and each lab can
be removed completely. Each worker has a directory in the lab's directory, which its guest agent also uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tpu_ops.errors import OpsError
from tpu_ops.lab import containers, disks, networks, shared
from tpu_ops.lab.backend import BackendError, Networks, WorkerSpec
from tpu_ops.lab.containers import Container, container_name
from tpu_ops.lab.engine import Engine, find, reason
from tpu_ops.lab.image import build
from tpu_ops.lab.removal import PARALLEL, container_names, remove_containers

BOOT_TIMEOUT = 180.0
HALT_SECONDS = 30
PUBLISH_SECONDS = 10.0


class ContainerBackend:
    """Runs the workers of one lab as containers (`tpu_ops.lab.backend.Backend`).

    Args:
        instance: Name of the lab.
        engine: The container engine; None means the first one that answers.

    Raises:
        UsageError: No container engine answers.
        OpsError: The engine cannot create the lab's networks.
    """

    def __init__(self, instance: str, engine: Engine | None = None) -> None:
        self.instance = instance
        self.engine = engine or find()
        self._directories = shared.worker_directories(instance)
        self._storage = shared.storage_directory(instance)
        self._networks = networks.ensure(self.engine, instance)
        self._slots = asyncio.Semaphore(PARALLEL)
        self._disks = disks.Attachments(disks.directory(instance))

    @property
    def networks(self) -> Networks:
        """The two networks of the lab, which exist as long as the lab."""
        return self._networks

    def image(self, runtime_version: str) -> str:
        """Return a description, for users, of the container image of a runtime version."""
        return build.describe(self.engine, runtime_version)

    def directory(self, worker: WorkerSpec) -> Path:
        """Return the directory that the lab and a worker's guest agent share."""
        return self._directories / container_name(self.instance, worker)

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        """Create and start these workers with exactly the addresses of their specs; return when each worker serves ssh.

        Raises:
            BackendError: A worker did not start; the other workers might have started.
        """
        with _as_backend_error():
            images = {
                version: await build.ensure(self.engine, version)
                for version in sorted({worker.runtime_version for worker in workers})
            }
            self._networks = await asyncio.to_thread(networks.ensure, self.engine, self.instance)
            found = await self._found()
            await self._allow_inotify(len({container_name(self.instance, worker) for worker in workers} - set(found)))
            await self._disks.attach(self._by_name(workers))
        layout = containers.cgroup_layout()
        self._storage.mkdir(parents=True, exist_ok=True, mode=0o700)

        async def create(worker: WorkerSpec) -> None:
            self._write_metadata(worker)
            name = container_name(self.instance, worker)
            if name not in found:
                image = images[worker.runtime_version]
                cgroup = containers.cgroup_args(layout, image.systemd)
                args = containers.create_args(
                    self.instance,
                    worker,
                    image=image.tag,
                    directory=self.directory(worker),
                    storage=self._storage,
                    cgroup=cgroup,
                )
                done = await self.engine.run(*args, check=False)
                # A command that a killed API process has left running might have created this container first.
                if done.code and "already in use" not in done.stderr:
                    raise BackendError(f"{name} could not be created: {reason(done.stderr)}")

        async def leave(worker: WorkerSpec) -> None:
            container = found.get(container_name(self.instance, worker))
            for kind in containers.wrong_networks(self.instance, worker, container)[0] if container else ():
                await self.engine.run(*containers.disconnect_args(self.instance, worker, kind))

        async def join(worker: WorkerSpec) -> None:
            container = found[container_name(self.instance, worker)]
            for kind in containers.wrong_networks(self.instance, worker, container)[1]:
                await self.engine.run(*containers.connect_args(self.instance, worker, kind))
            if container.status == "paused":
                await self.engine.run("unpause", container.name)
            elif container.status not in ("running", "restarting"):
                (self.directory(worker) / "status.json").unlink(missing_ok=True)
                await self.engine.run("start", container.name)

        # Release the old addresses of all workers before a new address is assigned, so that workers can swap addresses.
        await self._each(workers, create)
        found = await self._found()
        await self._each(workers, leave)
        found = await self._found()
        await self._each(workers, join)
        await self._each(workers, self._wait_until_it_serves, slots=False)
        await self._release()

    async def halt(self, workers: Sequence[WorkerSpec]) -> None:
        """Shut these workers down and keep their boot disks. Workers that do not run are left unchanged."""

        async def stop(name: str) -> None:
            await self.engine.run("stop", "-t", str(HALT_SECONDS), name, timeout=HALT_SECONDS + 60)

        await self._end(workers, stop)

    async def kill(self, workers: Sequence[WorkerSpec]) -> None:
        """Kill these workers, as a preemption does; their boot disks are kept until `remove`."""

        async def kill(name: str) -> None:
            if (await self.engine.run("kill", name, check=False)).code:
                # While a container restarts, it has no process to kill. `stop` prevents that the engine starts it
                # again.
                await self.engine.run("stop", "-t", "0", name)

        await self._end(workers, kill)

    async def _end(self, workers: Sequence[WorkerSpec], end: Callable[[str], Awaitable[None]]) -> None:
        with _as_backend_error():
            found = await self._found()

        async def one(worker: WorkerSpec) -> None:
            container = found.get(container_name(self.instance, worker))
            if container is None or container.status not in ("running", "restarting", "paused"):
                return
            if container.status == "paused":
                await self.engine.run("unpause", container.name)
            await end(container.name)
            (self.directory(worker) / "status.json").unlink(missing_ok=True)

        await self._each(workers, one)

    async def remove(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove these workers and their boot disks. Workers that do not exist are skipped."""
        with _as_backend_error():
            found = await self._found()

        async def one(worker: WorkerSpec) -> None:
            name = container_name(self.instance, worker)
            if name in found:
                await self.engine.run("rm", "-f", "-v", name)
            shared.remove_directory(self.directory(worker))

        await self._each(workers, one)
        await self._release(self._by_name(workers))

    async def publish(self, workers: Sequence[WorkerSpec]) -> None:
        """Attach and detach data disks, and pass the workers' metadata to their guest agents.

        Return when the running workers have applied the metadata, or after at most `PUBLISH_SECONDS`.

        Raises:
            BackendError: A disk could not be attached.
        """
        with _as_backend_error():
            await self._disks.attach(self._by_name(workers))
        await self._publish(workers)
        await self._release()

    async def forget_disk(self, source: str) -> None:
        """Remove the file of a disk that no worker uses.

        Raises:
            BackendError: The file cannot be removed.
        """
        with _as_backend_error():
            await self._disks.forget(source)

    async def _publish(self, workers: Sequence[WorkerSpec]) -> None:
        for worker in workers:
            self._write_metadata(worker)
        deadline = asyncio.get_running_loop().time() + PUBLISH_SECONDS
        for worker in workers:
            content = self._metadata(worker)
            while (status := self._status(worker)).ready and not containers.serves(status, content):
                if asyncio.get_running_loop().time() > deadline:
                    return
                await asyncio.sleep(0.1)  # polls the agent's status until the deadline
            self._complain_of_disks(worker)

    async def guest_attributes(self, worker: WorkerSpec) -> dict[str, dict[str, str]]:
        """Return the attributes that the worker's guest agent published: namespace -> key -> value."""
        return containers.parse_attributes(shared.read(self.directory(worker) / "guest_attributes.json"))

    async def prune(self, workers: Sequence[WorkerSpec]) -> None:
        """Remove all workers of this lab except these, and detach the data disks that these workers do not use."""
        keep = {container_name(self.instance, worker) for worker in workers}
        with _as_backend_error():
            extra = sorted(set(await self._found()) - keep)
            await remove_containers(self.engine, extra)
        for path in shared.entries(self._directories):
            if path.name not in keep:
                shared.remove_directory(path)
        self._disks.count(self._by_name(workers))
        await self._release()

    async def _found(self) -> dict[str, Container]:
        """Return name -> container for all containers of the lab."""
        names = await container_names(self.engine, self.instance)
        if not names:
            return {}
        # The command fails if a container was just removed, but still describes the other containers.
        shown = await self.engine.run("container", "inspect", *names, check=False)
        described = [containers.parse_container(entry) for entry in json.loads(shown.stdout or "[]")]
        return {container.name: container for container in described}

    async def _each(
        self, workers: Iterable[WorkerSpec], act: Callable[[WorkerSpec], Awaitable[None]], *, slots: bool = True
    ) -> None:
        """Call a function for every worker (with `slots`, at most `PARALLEL` at a time); raise all failures as one.

        Raises:
            BackendError: The function failed for a worker; the text describes up to three failures.
        """

        async def guarded(worker: WorkerSpec) -> None:
            async with self._slots if slots else contextlib.nullcontext():
                await act(worker)

        workers = list(workers)
        results = await asyncio.gather(*(guarded(worker) for worker in workers), return_exceptions=True)
        failures = []
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, OpsError | BackendError | OSError):
                failures.append(f"{worker.node} worker {worker.index}: {result}")
            elif result is not None:
                raise result
        if failures:
            more = f" (and {len(failures) - 3} more)" if len(failures) > 3 else ""
            raise BackendError("; ".join(failures[:3]) + more)

    async def _release(self, gone: Iterable[str] = ()) -> None:
        with _as_backend_error():
            await self._disks.release(gone)

    def _by_name(self, workers: Iterable[WorkerSpec]) -> dict[str, WorkerSpec]:
        return {container_name(self.instance, worker): worker for worker in workers}

    def _metadata(self, worker: WorkerSpec) -> bytes:
        return containers.metadata_file(worker, self._disks.devices(worker))

    def _write_metadata(self, worker: WorkerSpec) -> None:
        shared.replace(self.directory(worker) / "metadata.json", self._metadata(worker))

    def _complain_of_disks(self, worker: WorkerSpec) -> None:
        """Raise BackendError if a worker's guest agent could not create the devices of the worker's data disks."""
        if worker.disks and (fault := self._status(worker).disk_fault):
            raise BackendError(f"{worker.node} worker {worker.index}: data disk {fault}")

    def _status(self, worker: WorkerSpec) -> containers.Status:
        return containers.parse_status(shared.read(self.directory(worker) / "status.json"))

    async def _wait_until_it_serves(self, worker: WorkerSpec) -> None:
        """Return once a worker has applied its metadata and accepts logins, and its sshd answers on its address."""
        name, content = container_name(self.instance, worker), self._metadata(worker)
        loop = asyncio.get_running_loop()
        deadline, look = loop.time() + BOOT_TIMEOUT, loop.time() + 3
        address = worker.external_ip or worker.internal_ip
        while not (containers.serves(self._status(worker), content) and await shared.ssh_answers(address)):
            if loop.time() > look:
                look = loop.time() + 3
                await self._complain_if_down(name)
            if loop.time() > deadline:
                raise BackendError(
                    f"sshd did not serve on {address} within {BOOT_TIMEOUT:.0f} s; last lines of the worker's journal: "
                    f"{await self._journal(name)}"
                )
            await asyncio.sleep(0.1)  # polls the agent's status until the deadline
        self._complain_of_disks(worker)

    async def _complain_if_down(self, name: str) -> None:
        """Raise BackendError if a worker's container was removed, has ended, or restarts after an error."""
        container = (await self._found()).get(name)
        if container is None:
            raise BackendError("the worker's container was removed during the boot")
        if container.status == "running" or (container.status == "restarting" and container.exit_code == 0):
            return
        await self.engine.run("stop", "-t", "0", name, check=False)
        hint = ""
        if container.exit_code == containers.STATE_UNSEEN:
            hint = (
                f" (the container does not see {self._directories}: "
                "set TPU_OPS_STATE to a directory that the engine shares)"
            )
        logs = await self.engine.run("logs", "--tail", "5", name, check=False)
        said = " / ".join((logs.stdout + logs.stderr).split("\n")[-6:]).strip(" /")
        raise BackendError(f"the worker's container ended with code {container.exit_code}{hint}: {said or 'no output'}")

    async def _journal(self, name: str) -> str:
        shown = await self.engine.run(
            "exec", name, "journalctl", "--no-pager", "-o", "cat", "-n", "8", check=False, timeout=20
        )
        return " / ".join((shown.stdout or shown.stderr).strip().splitlines()) or "empty"

    async def _allow_inotify(self, new: int) -> None:
        running = await self.engine.run("ps", "-q", "--filter", f"label={networks.LABEL}")
        await asyncio.to_thread(shared.allow_inotify, len(running.stdout.split()) + new)


@contextlib.contextmanager
def _as_backend_error() -> Iterator[None]:
    """Turn an OpsError in the block into the BackendError that the API expects."""
    try:
        yield
    except OpsError as exc:
        raise BackendError(str(exc)) from exc
