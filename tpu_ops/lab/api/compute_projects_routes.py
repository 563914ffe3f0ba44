"""A part of the Compute Engine API, on the REST port: requests for a project's metadata and its firewall rules.

Operations are done when they are answered. They are not in the state file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tpu_ops.lab.api.compute_projects import ComputeError, Project, firewall, not_found
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.faults import Target
from tpu_ops.lab.api.records import timestamp
from tpu_ops.lab.api.rest import json_response, read_json
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json

#: Number of operations that are kept.
_KEPT = 1000
#: Maximum number of firewall rules on one page of a list.
_PAGE = 500

Answer = Callable[["Routes", web.Request, str], Awaitable[Json]]


class Routes:
    """Handlers of HTTP requests for projects, their metadata and their firewall rules."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changing = asyncio.Lock()
        #: Project and name -> operation.
        self._operations: dict[tuple[str, str], Json] = {}
        #: Project and id of the client's request -> the operation that it began.
        self._requests: dict[tuple[str, str], Json] = {}

    def answering(self, method: str, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the handler of a route, which applies faults and turns errors into the form of Compute Engine."""

        async def handle(http: web.Request) -> web.Response:
            project = http.match_info["project"]
            try:
                await self._service.faults.meet(Target(method, project, ""))
                self._service.check_project(project)
                return json_response(json.dumps(await answer(self, http, project)))
            except ComputeError as failure:
                return _refused(failure)
            except ApiError as failure:
                code = failure.code
                return _refused(ComputeError(code.http, code.name.lower(), failure.message), status=code.name)
            except Exception as failure:
                logging.getLogger(__name__).exception("%s failed", method)
                return _refused(ComputeError(500, "internalError", f"the lab's API failed: {failure}"))

        return handle

    async def _get_project(self, http: web.Request, project: str) -> Json:
        # `gcloud compute tpus tpu-vm ssh` reads the project's ssh keys with this request, before it reads the node's.
        return {
            "kind": "compute#project",
            "id": str(_number(project)),
            "name": project,
            "commonInstanceMetadata": self._project(project).metadata(),
            "selfLink": f"{_origin(http)}projects/{project}",
        }

    async def _set_metadata(self, http: web.Request, project: str) -> Json:
        body = await read_json(http)
        return await self._change(
            http, project, "setMetadata", f"projects/{project}", lambda known: known.set_metadata(body)
        )

    async def _list_firewalls(self, http: web.Request, project: str) -> Json:
        size, last = http.query.get("maxResults", ""), http.query.get("pageToken", "")
        limit = min(int(size), _PAGE) if size.isdecimal() and int(size) else _PAGE
        rules = self._project(project).firewalls
        names = sorted(name for name in rules if name > last)
        items = [self._firewall_json(http, project, rules[name]) for name in names[:limit]]
        answer: Json = {"kind": "compute#firewallList", "id": f"projects/{project}/global/firewalls", "items": items}
        return answer | ({"nextPageToken": names[limit - 1]} if len(names) > limit else {})

    async def _get_firewall(self, http: web.Request, project: str) -> Json:
        name = http.match_info["firewall"]
        return self._firewall_json(http, project, _known(self._project(project), project, name))

    async def _insert_firewall(self, http: web.Request, project: str) -> Json:
        rule = firewall(await read_json(http), project, self._networks(project))
        path = f"projects/{project}/global/firewalls/{rule['name']}"

        def insert(known: Project) -> None:
            if rule["name"] in known.firewalls:
                raise ComputeError(409, "alreadyExists", f"The resource '{path}' already exists")
            known.firewalls[rule["name"]] = rule | {"creationTimestamp": timestamp(time.time())}

        return await self._change(http, project, "insert", path, insert)

    async def _update_firewall(self, http: web.Request, project: str) -> Json:
        """Replace a rule as a whole (PUT), or the fields that the client names (PATCH)."""
        name, body = http.match_info["firewall"], await read_json(http)
        path = f"projects/{project}/global/firewalls/{name}"

        def update(known: Project) -> None:
            old = _known(known, project, name)
            rule = firewall((old if http.method == "PATCH" else {}) | body, project, self._networks(project))
            for key in ("name", "network", "direction"):
                if rule[key] != old[key]:
                    raise ComputeError(
                        400, "invalid", f"Invalid value for field 'resource.{key}': it cannot be changed."
                    )
            known.firewalls[name] = rule | {"creationTimestamp": old["creationTimestamp"]}

        return await self._change(http, project, "patch" if http.method == "PATCH" else "update", path, update)

    async def _delete_firewall(self, http: web.Request, project: str) -> Json:
        name = http.match_info["firewall"]

        def delete(known: Project) -> None:
            _known(known, project, name)
            del known.firewalls[name]

        return await self._change(http, project, "delete", f"projects/{project}/global/firewalls/{name}", delete)

    async def _get_operation(self, http: web.Request, project: str) -> Json:
        name = http.match_info["operation"]
        if (project, name) not in self._operations:
            raise not_found(f"projects/{project}/global/operations/{name}")
        return self._operations[project, name]

    def _project(self, project: str) -> Project:
        return self._service.state.projects.setdefault(project, Project({}))

    def _networks(self, project: str) -> set[str]:
        """Return the names of a project's networks: the default one, and those of its nodes."""
        nodes = (node for node in self._service.state.nodes if node.location.project == project)
        return {"default", *(node.body["networkConfig"]["network"].rpartition("/")[2] for node in nodes)}

    def _firewall_json(self, http: web.Request, project: str, rule: Json) -> Json:
        origin = _origin(http)
        link = f"{origin}projects/{project}/global/firewalls/{rule['name']}"
        return {
            "kind": "compute#firewall",
            "id": str(_number(link)),
            **rule,
            "network": f"{origin}{rule['network']}",
            "selfLink": link,
        }

    async def _change(
        self, http: web.Request, project: str, kind: str, target: str, change: Callable[[Project], None]
    ) -> Json:
        """Make a change, store it, and return its operation; a repeated request returns the first one's operation.

        Raises:
            ComputeError: The change is not allowed.
            ApiError: RESOURCE_EXHAUSTED; the change cannot be stored, and was reverted.
        """
        async with self._changing:
            request = http.query.get("requestId", "")
            if request and (project, request) in self._requests:
                return self._requests[project, request]
            known = self._project(project)
            before = known.json()
            change(known)
            self._service.store.changed()
            try:
                await self._service.store.flush()
            except ApiError:
                self._service.state.projects[project] = Project(before)
                self._service.store.changed()
                raise
        name, now = f"operation-{secrets.token_hex(12)}", timestamp(time.time())
        found: Json = {
            "kind": "compute#operation",
            "id": str(_number(name)),
            "name": name,
            "operationType": kind,
            "targetLink": f"{_origin(http)}{target}",
            "targetId": str(_number(target)),
            "status": "DONE",
            "progress": 100,
            **dict.fromkeys(("insertTime", "startTime", "endTime"), now),
            "selfLink": f"{_origin(http)}projects/{project}/global/operations/{name}",
        }
        self._operations[project, name] = found
        if request:
            self._requests[project, request] = found
        for kept in (self._operations, self._requests):
            if len(kept) > _KEPT:
                del kept[next(iter(kept))]
        return found


def _known(project: Project, name: str, rule: str) -> Json:
    if rule not in project.firewalls:
        raise not_found(f"projects/{name}/global/firewalls/{rule}")
    return project.firewalls[rule]


def _origin(http: web.Request) -> str:
    return f"{http.scheme}://{http.host}/compute/v1/"


def _number(text: str) -> int:
    return 10**11 + zlib.crc32(text.encode())


def _refused(failure: ComputeError, **more: str) -> web.Response:
    each = {"message": failure.message, "domain": "global", "reason": failure.reason}
    error: dict[str, Any] = {"code": failure.status, "message": failure.message, "errors": [each], **more}
    return json_response(json.dumps({"error": error}), failure.status)


_PROJECT = "/compute/v1/projects/{project}"
_FIREWALL = f"{_PROJECT}/global/firewalls/{{firewall}}"
#: HTTP method, URL path -> name of the API method for faults, handler.
METHODS: dict[tuple[str, str], tuple[str, Answer]] = {
    ("GET", _PROJECT): ("compute.projects.get", Routes._get_project),
    ("POST", f"{_PROJECT}/setCommonInstanceMetadata"): (
        "compute.projects.setCommonInstanceMetadata",
        Routes._set_metadata,
    ),
    ("GET", f"{_PROJECT}/global/firewalls"): ("compute.firewalls.list", Routes._list_firewalls),
    ("POST", f"{_PROJECT}/global/firewalls"): ("compute.firewalls.insert", Routes._insert_firewall),
    ("GET", _FIREWALL): ("compute.firewalls.get", Routes._get_firewall),
    ("PATCH", _FIREWALL): ("compute.firewalls.patch", Routes._update_firewall),
    ("PUT", _FIREWALL): ("compute.firewalls.update", Routes._update_firewall),
    ("DELETE", _FIREWALL): ("compute.firewalls.delete", Routes._delete_firewall),
    ("GET", f"{_PROJECT}/global/operations/{{operation}}"): ("compute.globalOperations.get", Routes._get_operation),
    ("POST", f"{_PROJECT}/global/operations/{{operation}}/wait"): (
        "compute.globalOperations.wait",
        Routes._get_operation,
    ),
}
#: Names of the API methods.
NAMES = frozenset(name for name, _ in METHODS.values())


def add_routes(app: web.Application, service: Service) -> None:
    """Add the routes for projects, their metadata and their firewall rules."""
    routes = Routes(service)
    for (verb, path), (name, answer) in METHODS.items():
        app.router.add_route(verb, path, routes.answering(name, answer))
