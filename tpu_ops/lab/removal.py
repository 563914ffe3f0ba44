"""Find and remove all parts of a lab, in the container engine and on this machine.

The parts are found by the lab's label and directory; the API's state file is not used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from tpu_ops.lab import containers, disks, networks, shared
from tpu_ops.lab.engine import Engine, find
from tpu_ops.lab.image import bootstrap

#: Maximum number of concurrent commands of the container engine; on two cores, more commands would not be faster.
PARALLEL = 4


async def container_names(engine: Engine, instance: str) -> list[str]:
    """Return the names of all containers of a lab, running or not."""
    shown = await engine.run("ps", "-a", "--filter", f"label={networks.LABEL}={instance}", "--format", "{{.Names}}")
    return shown.stdout.split()


async def remove_containers(engine: Engine, names: Sequence[str]) -> None:
    """Remove the containers with these names, at most `PARALLEL` at a time."""
    slots = asyncio.Semaphore(PARALLEL)

    async def remove(name: str) -> None:
        async with slots:
            await engine.run("rm", "-f", "-v", name)

    await asyncio.gather(*(remove(name) for name in names))


async def _network_names(engine: Engine, instance: str) -> list[str]:
    label = f"label={networks.LABEL}={instance}"
    return (await engine.run("network", "ls", "--filter", label, "--format", "{{.Name}}")).stdout.split()


async def _teardown(engine: Engine, instance: str) -> list[str]:
    removed = []
    # A command of a killed API process might still create a container: repeat until no container is left.
    while names := await container_names(engine, instance):
        await remove_containers(engine, names)
        removed += [f"container {name}" for name in names]
    for name in await _network_names(engine, instance):
        shown = json.loads((await engine.run("network", "inspect", name)).stdout)[0]
        for guest in shown.get("Containers") or shown.get("containers") or {}:
            await engine.run("network", "disconnect", "--force", name, guest, check=False)
        await engine.run("network", "rm", name)
        removed.append(f"network {name}")
    for path in shared.entries(shared.worker_directories(instance)):
        shared.remove_directory(path)
        removed.append(f"directory {path}")
    return removed + await asyncio.to_thread(disks.remove_all, disks.directory(instance))


async def _leftovers(engine: Engine, instance: str) -> list[str]:
    left = [f"container {name}" for name in await container_names(engine, instance)]
    left += [f"network {name}" for name in await _network_names(engine, instance)]
    left += [disks.described(loop) for loop in disks.loops(disks.directory(instance))]
    return left + [f"directory {path}" for path in shared.entries(shared.worker_directories(instance))]


def teardown(instance: str, engine: Engine | None = None) -> list[str]:
    """Remove all parts of a lab, even incomplete ones; return descriptions of what was removed.

    The parts are found by the lab's label and directory, whatever the API's state file contains. The images and the
    download cache are kept, since all labs share them.

    Raises:
        UsageError: No container engine answers.
        EngineError: The container engine failed to remove a part.
    """
    return asyncio.run(_teardown(engine or find(), instance))


def leftovers(instance: str, engine: Engine | None = None) -> list[str]:
    """Return descriptions of the remaining parts of a lab; empty after `teardown`."""
    return asyncio.run(_leftovers(engine or find(), instance))


async def _instances(engine: Engine) -> list[str]:
    ids = (await engine.run("ps", "-a", "-q", "--filter", f"label={networks.LABEL}")).stdout.split()
    found: set[str] = set()
    for each in ids:
        # Inspect each container separately: if one has just been removed, a common command would fail for all
        # containers.
        shown = await engine.run(
            "inspect",
            "--type",
            "container",
            "--format",
            f'{{{{index .Config.Labels "{networks.LABEL}"}}}}',
            each,
            check=False,
        )
        found.update(shown.stdout.split())
    return sorted(found)


def instances(engine: Engine | None = None) -> list[str]:
    """Return the names of all labs that have containers, also of labs with another TPU_OPS_STATE.

    Raises:
        UsageError: No container engine answers.
        EngineError: A command of the container engine failed.
    """
    return asyncio.run(_instances(engine or find()))


async def _remove_shared(engine: Engine) -> list[str]:
    listing = await engine.run("image", "ls", "--filter", f"label={bootstrap.LABEL}", "--format", "{{.ID}}")
    removed = []
    for image in dict.fromkeys(listing.stdout.split()):
        await engine.run("image", "rm", "--force", image)
        removed.append(f"image {image}")
    volumes = await engine.run("volume", "ls", "--quiet", "--filter", f"name=^{containers.CACHE_VOLUME}$")
    for volume in volumes.stdout.split():
        await engine.run("volume", "rm", volume)
        removed.append(f"volume {volume}")
    return removed


def remove_shared(engine: Engine | None = None) -> list[str]:
    """Remove the workers' images and the download cache; return what was removed.

    Raises:
        UsageError: No container engine answers.
        EngineError: A worker still uses an image or the cache.
    """
    return asyncio.run(_remove_shared(engine or find()))
