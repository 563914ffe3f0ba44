"""A part of the Compute Engine API, on the REST port: persistent disks, and the operations that change them.

Disks are in the state file. Operations are not: a client that waits for one across a restart of the API gets NOT_FOUND.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler as Handling

from tpu_ops.lab.api.catalogue import ZONES
from tpu_ops.lab.api.compute_projects import NAME
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.faults import Target
from tpu_ops.lab.api.names import ANY_LOCATION, Location
from tpu_ops.lab.api.records import DiskRecord, NodeRecord, timestamp
from tpu_ops.lab.api.rest import json_response, read_json
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import BackendError, disk_resource

#: Type of a disk -> its minimum size in GB.
TYPES = {
    "pd-standard": 10,
    "pd-balanced": 10,
    "pd-ssd": 10,
    "pd-extreme": 500,
    "hyperdisk-balanced": 4,
    "hyperdisk-ml": 4,
    "hyperdisk-extreme": 64,
    "hyperdisk-throughput": 2048,
}
#: Type and size in GB of a disk if the client sets none.
DEFAULT_TYPE, DEFAULT_SIZE = "pd-standard", 500
#: Maximum size of a disk in GB.
LARGEST = 65536
#: Maximum number of disks on one page of a list.
PAGE_LIMIT = 500
#: Number of operations that are kept.
_KEPT = 1000

#: Status code -> the field ``reason`` of an error, as far as clients read it.
_REASONS = {Code.NOT_FOUND: "notFound", Code.ALREADY_EXISTS: "alreadyExists", Code.PERMISSION_DENIED: "forbidden"}


class InUseError(ApiError):
    """A disk cannot be deleted, since a node uses it."""

    def __init__(self, disk: str, user: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, f"The disk resource '{disk}' is already being used by '{user}'")


@dataclass
class Operation:
    """An operation of Compute Engine. It is done when it begins, but only further requests say so.

    Attributes:
        name: Its name, unique in project and zone.
        project: Id of the project.
        zone: The zone.
        kind: What it does, ``insert`` or ``delete``.
        target: Path of the resource that it changes.
        began: When it began, in seconds since 1970.
    """

    name: str
    project: str
    zone: str
    kind: str
    target: str
    began: float

    def json(self, origin: str, *, done: bool) -> Json:
        """Return the operation in the API's form."""
        place = f"{origin}projects/{self.project}/zones/{self.zone}"
        return {
            "kind": "compute#operation",
            "id": str(_number(self.name)),
            "name": self.name,
            "zone": place,
            "operationType": self.kind,
            "targetLink": f"{origin}{self.target}",
            "targetId": str(_number(self.target)),
            "status": "DONE" if done else "RUNNING",
            "progress": 100 if done else 0,
            "insertTime": timestamp(self.began),
            "startTime": timestamp(self.began),
            **({"endTime": timestamp(self.began)} if done else {}),
            "selfLink": f"{place}/operations/{self.name}",
        }


class Routes:
    """Handlers of HTTP requests for disks and their operations."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._operations: OrderedDict[tuple[str, str, str], Operation] = OrderedDict()
        #: The client's idempotency key with the target -> the operation that it began.
        self._requests: dict[tuple[str, str], Operation] = {}

    def answering(self, method: str, answer: Callable[[web.Request], Awaitable[Json]]) -> Handling:
        """Return the handler of a route, which applies faults and turns errors into the form of Compute Engine."""

        async def handle(http: web.Request) -> web.Response:
            place = http.match_info
            try:
                await self._service.faults.meet(Target(method, place["project"], place.get("zone", ANY_LOCATION)))
                self._check_place(place["project"], place.get("zone"))
                found = await answer(http)
                await self._service.store.settle()
            except ApiError as failure:
                return _refused(failure)
            except Exception as failure:
                logging.getLogger(__name__).exception("%s failed", method)
                return _refused(ApiError(Code.INTERNAL, f"the lab's API failed: {failure}"))
            return json_response(json.dumps(found))

        return handle

    def _check_place(self, project: str, zone: str | None) -> None:
        self._service.check_project(project)
        if zone is not None and zone not in ZONES:
            raise invalid(f"Invalid value for field 'zone': '{zone}'. Unknown zone.")

    async def zone(self, http: web.Request) -> Json:
        """Return a zone."""
        name = http.match_info["zone"]
        project = f"{_origin(http)}projects/{http.match_info['project']}"
        region = f"{project}/regions/{name.rsplit('-', 1)[0]}"
        link = f"{project}/zones/{name}"
        return {"kind": "compute#zone", "name": name, "status": "UP", "region": region, "selfLink": link}

    async def insert(self, http: web.Request) -> Json:
        """Create a disk."""
        body = await read_json(http)
        location = _location(http)
        name = body.get("name", "")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise invalid(f"Invalid value for field 'resource.name': '{name}'. Must be 1 to 63 of a-z, 0-9 and '-'.")
        target = f"projects/{location.project}/zones/{location.zone}/disks/{name}"
        if earlier := self._repeated(http, target):
            return earlier.json(_origin(http), done=False)
        full_name = location.child("disks", name)
        if full_name in self._service.state.disks:
            raise ApiError(Code.ALREADY_EXISTS, f"The resource '{target}' already exists")
        record = DiskRecord(full_name, _checked(body))
        self._service.state.disks.add(record)
        return await self._done(http, location, "insert", target, lambda: self._service.state.disks.remove(full_name))

    async def get(self, http: web.Request) -> Json:
        """Return a disk."""
        return self._json(_origin(http), self._find(http))

    async def list_zone(self, http: web.Request) -> Json:
        """List the disks of a zone."""
        page, token = _page(http, self._service.state.disks.below(_location(http)))
        answer: Json = {"kind": "compute#diskList", "items": [self._json(_origin(http), record) for record in page]}
        return answer | ({"nextPageToken": token} if token else {})

    async def aggregated(self, http: web.Request) -> Json:
        """List the disks of all zones of a project."""
        location = Location(http.match_info["project"], ANY_LOCATION)
        page, token = _page(http, self._service.state.disks.below(location))
        scopes: dict[str, list[Json]] = {f"zones/{zone}": [] for zone in sorted(ZONES)}
        for record in page:
            scopes[f"zones/{record.location.zone}"].append(self._json(_origin(http), record))
        items = {scope: {"disks": disks} if disks else _nothing(scope) for scope, disks in scopes.items()}
        answer: Json = {"kind": "compute#diskAggregatedList", "items": items}
        return answer | ({"nextPageToken": token} if token else {})

    async def delete(self, http: web.Request) -> Json:
        """Delete a disk that no node uses, with its data."""
        location, short = _location(http), http.match_info["disk"]
        target = f"projects/{location.project}/zones/{location.zone}/disks/{short}"
        if earlier := self._repeated(http, target):
            return earlier.json(_origin(http), done=False)
        record = self._find(http)
        if users := self._users(record):
            raise InUseError(target, users[0].name)
        try:
            await self._service.backend.forget_disk(target)
        except BackendError as failure:
            raise ApiError(Code.INTERNAL, str(failure)) from failure
        self._service.state.disks.remove(record.name)
        return await self._done(http, location, "delete", target, lambda: self._service.state.disks.add(record))

    async def operation(self, http: web.Request) -> Json:
        """Return an operation, or wait for it."""
        location, name = _location(http), http.match_info["operation"]
        found = self._operations.get((location.project, location.zone, name))
        if found is None:
            path = f"projects/{location.project}/zones/{location.zone}/operations/{name}"
            raise ApiError(Code.NOT_FOUND, f"The resource '{path}' was not found")
        return found.json(_origin(http), done=True)

    def _find(self, http: web.Request) -> DiskRecord:
        location, short = _location(http), http.match_info["disk"]
        record = self._service.state.disks.find(location.child("disks", short))
        if record is None:
            path = f"projects/{location.project}/zones/{location.zone}/disks/{short}"
            raise ApiError(Code.NOT_FOUND, f"The resource '{path}' was not found")
        return record

    def _users(self, record: DiskRecord) -> list[NodeRecord]:
        """Return the nodes that a disk is attached to."""
        return [
            node
            for node in self._service.state.nodes
            for disk in node.body.get("dataDisks", [])
            if disk_resource(disk["sourceDisk"]) == record.source
        ]

    def _json(self, origin: str, record: DiskRecord) -> Json:
        place = f"{origin}projects/{record.location.project}/zones/{record.location.zone}"
        # A worker is an instance in a project of Google's own.
        users = [
            f"{origin}projects/tpu-tenant/zones/{record.location.zone}/instances/{worker.hostname}"
            for node in self._users(record)
            for worker in node.workers()
        ]
        return {
            "kind": "compute#disk",
            **record.body,
            "name": record.short,
            "zone": place,
            "type": f"{place}/diskTypes/{record.body['type']}",
            "status": "READY",
            "selfLink": f"{place}/disks/{record.short}",
            **({"users": users} if users else {}),
        }

    def _repeated(self, http: web.Request, target: str) -> Operation | None:
        """Return the operation that an earlier request with the same idempotency key has begun, or None."""
        return self._requests.get((http.query.get("requestId", ""), target))

    async def _done(
        self, http: web.Request, location: Location, kind: str, target: str, undo: Callable[[], object]
    ) -> Json:
        """Store a change that was made, and return its operation.

        Raises:
            ApiError: RESOURCE_EXHAUSTED; the change cannot be stored, and was reverted.
        """
        self._service.store.changed()
        try:
            await self._service.store.flush()
        except ApiError:
            undo()
            self._service.store.changed()
            raise
        name = f"operation-{secrets.token_hex(12)}"
        found = Operation(name, location.project, location.zone, kind, target, time.time())
        self._operations[location.project, location.zone, name] = found
        if request := http.query.get("requestId"):
            self._requests[request, target] = found
        if len(self._operations) > _KEPT:
            old = self._operations.popitem(last=False)[1]
            self._requests = {key: kept for key, kept in self._requests.items() if kept is not old}
        return found.json(_origin(http), done=False)


def _checked(body: Json) -> Json:
    """Return the fields of a new disk that the state keeps.

    Raises:
        ApiError: INVALID_ARGUMENT; a value is not valid.
    """
    kind = str(body.get("type") or DEFAULT_TYPE).rpartition("/")[2]
    if kind not in TYPES:
        raise invalid(f"Invalid value for field 'resource.type': '{kind}'. The types are {', '.join(TYPES)}.")
    size = str(body.get("sizeGb", DEFAULT_SIZE))
    if not size.isdecimal() or not TYPES[kind] <= int(size) <= LARGEST:
        raise invalid(f"Disk size: '{size} GB' of {kind} must be from {TYPES[kind]} GB to {LARGEST} GB.")
    kept = {key: body[key] for key in ("description", "labels") if body.get(key)}
    number = str(secrets.randbelow(2**63 - 10**17) + 10**17)
    return {"id": number, "sizeGb": size, "type": kind, "creationTimestamp": timestamp(time.time()), **kept}


def _nothing(scope: str) -> Json:
    text = f"There are no results for scope '{scope}' on this page."
    return {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": text, "data": [{"key": "scope", "value": scope}]}}


def _page(http: web.Request, records: Iterator[DiskRecord]) -> tuple[list[DiskRecord], str]:
    """Return a page of a sorted list, and the token of the next page: the name of the page's last disk."""
    size = http.query.get("maxResults", "")
    limit = min(int(size), PAGE_LIMIT) if size.isdecimal() and int(size) else PAGE_LIMIT
    last = http.query.get("pageToken", "")
    found = [record for record in records if record.name > last]
    return found[:limit], found[limit - 1].name if len(found) > limit else ""


def _location(http: web.Request) -> Location:
    return Location(http.match_info["project"], http.match_info["zone"])


def _origin(http: web.Request) -> str:
    return f"{http.scheme}://{http.host}/compute/v1/"


def _number(text: str) -> int:
    return 10**11 + zlib.crc32(text.encode())


def _refused(failure: ApiError) -> web.Response:
    """Return the HTTP response for an error, in the form of Compute Engine."""
    reason = "resourceInUseByAnotherResource" if isinstance(failure, InUseError) else ""
    each = {"message": failure.message, "domain": "global", "reason": reason or _REASONS.get(failure.code, "invalid")}
    error = {
        "code": failure.code.http,
        "message": failure.message,
        "errors": [each],
        "status": failure.code.name,
    }
    return json_response(json.dumps({"error": error}), failure.code.http)


_ZONE = "/compute/v1/projects/{project}/zones/{zone}"
#: HTTP method, URL path, name of the API method for faults, name of the handler in `Routes`.
RULES = (
    ("GET", _ZONE, "compute.zones.get", "zone"),
    ("POST", f"{_ZONE}/disks", "compute.disks.insert", "insert"),
    ("GET", f"{_ZONE}/disks", "compute.disks.list", "list_zone"),
    ("GET", f"{_ZONE}/disks/{{disk}}", "compute.disks.get", "get"),
    ("DELETE", f"{_ZONE}/disks/{{disk}}", "compute.disks.delete", "delete"),
    ("GET", "/compute/v1/projects/{project}/aggregated/disks", "compute.disks.aggregatedList", "aggregated"),
    ("GET", f"{_ZONE}/operations/{{operation}}", "compute.zoneOperations.get", "operation"),
    ("POST", f"{_ZONE}/operations/{{operation}}/wait", "compute.zoneOperations.wait", "operation"),
)
#: Names of the API methods.
NAMES = frozenset(name for _, _, name, _ in RULES)


def add_routes(app: web.Application, service: Service) -> None:
    """Add the routes for disks and their operations."""
    routes = Routes(service)
    for verb, path, name, handler in RULES:
        app.router.add_route(verb, path, routes.answering(name, getattr(routes, handler)))
