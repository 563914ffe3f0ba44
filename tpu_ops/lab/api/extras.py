"""Further HTTP routes on the REST port, for requests that only the lab offers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable

from aiohttp import web

from tpu_ops.lab.api import capacity, compute, compute_projects_routes, faults, methods, nodes, storage_routes
from tpu_ops.lab.api.catalogue import RUNTIME_VERSIONS
from tpu_ops.lab.api.errors import ApiError, invalid
from tpu_ops.lab.api.rest import json_response, read_json
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import WorkerSpec


def _container_of(service: Service) -> Callable[[WorkerSpec], str]:
    """Return a function from a worker to the name of its container.

    The name is empty if the lab runs no containers.
    """
    instance = getattr(service.backend, "instance", None)
    if instance is None:
        return lambda worker: ""
    from tpu_ops.lab.containers import container_name

    return lambda worker: container_name(instance, worker)


async def _images(service: Service, versions: Iterable[str]) -> dict[str, str]:
    """Return runtime version -> description of its container image; the container engine might be queried."""
    return {version: await asyncio.to_thread(service.backend.image, version) for version in sorted(set(versions))}


def add_routes(app: web.Application, service: Service) -> None:
    """Add the routes ``/lab/...`` to the REST application."""

    async def preempt(http: web.Request) -> web.Response:
        name = (await read_json(http)).get("node")
        if not isinstance(name, str):
            raise invalid("node: the full name of a node is missing")
        operation = await nodes.preempt(service, name)
        task = service.running.get(operation.name)
        if task is not None:
            await asyncio.wait({task})
        return json_response(service.state.nodes.get(name).text("v2"))

    async def workers(http: web.Request) -> web.Response:
        container = _container_of(service)
        images = await _images(service, (node.body["runtimeVersion"] for node in service.state.nodes))
        found: list[Json] = [
            {
                "node": node.name,
                "state": node.state,
                "index": worker.index,
                "hostname": worker.hostname,
                "container": container(worker),
                "image": images[worker.runtime_version],
                "internal_ip": worker.internal_ip,
                "external_ip": worker.external_ip,
            }
            for node in service.state.nodes
            for worker in node.workers()
        ]
        return json_response(json.dumps({"workers": found}))

    async def info(http: web.Request) -> web.Response:
        networks = service.backend.networks
        images = await _images(service, RUNTIME_VERSIONS)
        return json_response(
            json.dumps(
                {
                    "projects": list(service.projects),
                    "seconds": service.seconds,
                    "state": str(service.store.path),
                    "backend": type(service.backend).__name__,
                    "networks": {"internal": str(networks.internal), "external": str(networks.external)},
                    "images": images,
                    "nodes": len(service.state.nodes),
                    "queued_resources": len(service.state.queued),
                }
            )
        )

    app.router.add_post("/lab/preempt", preempt)
    app.router.add_get("/lab/workers", workers)
    app.router.add_get("/lab/info", info)
    _add_capacity(app, service)
    _add_faults(app, service.faults)


def _add_capacity(app: web.Application, service: Service) -> None:
    """Add the routes that show and change the capacity of the lab's cloud."""

    def shown() -> web.Response:
        return json_response(json.dumps(capacity.shown(service.state)))

    async def change(http: web.Request) -> web.Response:
        body, before = await read_json(http), service.state.capacity
        service.declare(capacity.changed(before, body))
        try:
            await service.store.flush()
        except ApiError:
            service.declare(before)
            raise
        return shown()

    async def show(http: web.Request) -> web.Response:
        return shown()

    app.router.add_get("/lab/capacity", show)
    app.router.add_post("/lab/capacity", change)


def _add_faults(app: web.Application, kept: faults.Faults) -> None:
    """Add the routes with which tests inject faults into the API and read how many requests it has received."""
    known = methods.NAMES | storage_routes.NAMES | compute.NAMES | compute_projects_routes.NAMES

    def shown() -> web.Response:
        return json_response(json.dumps({"faults": [fault.json() for fault in kept.queue]}))

    async def show(http: web.Request) -> web.Response:
        return shown()

    async def add(http: web.Request) -> web.Response:
        kept.queue.append(faults.parse(await read_json(http), known))
        return shown()

    async def clear(http: web.Request) -> web.Response:
        kept.remove()
        return shown()

    async def requests(http: web.Request) -> web.Response:
        return json_response(json.dumps(kept.requests()))

    async def forget(http: web.Request) -> web.Response:
        kept.forget_requests()
        return json_response(json.dumps(kept.requests()))

    app.router.add_get("/lab/faults", show)
    app.router.add_post("/lab/faults", add)
    app.router.add_delete("/lab/faults", clear)
    app.router.add_get("/lab/requests", requests)
    app.router.add_delete("/lab/requests", forget)
