"""Serves the lab's API as REST/JSON: HTTP requests are mapped to the handlers that gRPC calls, by Google's rules."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler as Handling

from tpu_ops.lab.api import wire
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.methods import MIXINS, TPU
from tpu_ops.lab.api.service import Handler, Service
from tpu_ops.lab.api.wire import Message, Page

_LOCATION = "projects/*/locations/*"
_NODE = f"{_LOCATION}/nodes/*"
_QUEUED = f"{_LOCATION}/queuedResources/*"
_OPERATION = f"{_LOCATION}/operations/*"

#: HTTP method, URL path (the part in braces is a field of the request and its pattern), API method, field of the
#: request that the body fills ("*": the whole request, "": no body).
RULES = (
    ("GET", f"{{parent={_LOCATION}}}/nodes", "ListNodes", ""),
    ("POST", f"{{parent={_LOCATION}}}/nodes", "CreateNode", "node"),
    ("GET", f"{{name={_NODE}}}", "GetNode", ""),
    ("DELETE", f"{{name={_NODE}}}", "DeleteNode", ""),
    ("PATCH", f"{{node.name={_NODE}}}", "UpdateNode", "node"),
    ("POST", f"{{name={_NODE}}}:stop", "StopNode", "*"),
    ("POST", f"{{name={_NODE}}}:start", "StartNode", "*"),
    ("POST", f"{{name={_NODE}}}:getGuestAttributes", "GetGuestAttributes", "*"),
    ("POST", f"{{name={_NODE}}}:simulateMaintenanceEvent", "SimulateMaintenanceEvent", "*"),
    ("POST", f"{{name={_NODE}}}:performMaintenance", "PerformMaintenance", "*"),
    ("GET", f"{{parent={_LOCATION}}}/queuedResources", "ListQueuedResources", ""),
    ("POST", f"{{parent={_LOCATION}}}/queuedResources", "CreateQueuedResource", "queued_resource"),
    ("GET", f"{{name={_QUEUED}}}", "GetQueuedResource", ""),
    ("DELETE", f"{{name={_QUEUED}}}", "DeleteQueuedResource", ""),
    ("POST", f"{{name={_QUEUED}}}:reset", "ResetQueuedResource", "*"),
    ("POST", f"{{name={_QUEUED}}}:performMaintenanceQueuedResource", "PerformMaintenanceQueuedResource", "*"),
    ("GET", f"{{parent={_LOCATION}}}/acceleratorTypes", "ListAcceleratorTypes", ""),
    ("GET", f"{{name={_LOCATION}/acceleratorTypes/*}}", "GetAcceleratorType", ""),
    ("GET", f"{{parent={_LOCATION}}}/runtimeVersions", "ListRuntimeVersions", ""),
    ("GET", f"{{name={_LOCATION}/runtimeVersions/*}}", "GetRuntimeVersion", ""),
    ("GET", f"{{parent={_LOCATION}}}/reservations", "ListReservations", ""),
    ("POST", f"{{parent={_LOCATION}}}:generateServiceIdentity", "GenerateServiceIdentity", "*"),
    ("GET", "{name=projects/*}/locations", "google.cloud.location.Locations.ListLocations", ""),
    ("GET", f"{{name={_LOCATION}}}", "google.cloud.location.Locations.GetLocation", ""),
    ("GET", f"{{name={_LOCATION}}}/operations", "google.longrunning.Operations.ListOperations", ""),
    ("GET", f"{{name={_OPERATION}}}", "google.longrunning.Operations.GetOperation", ""),
    ("DELETE", f"{{name={_OPERATION}}}", "google.longrunning.Operations.DeleteOperation", ""),
    ("POST", f"{{name={_OPERATION}}}:cancel", "google.longrunning.Operations.CancelOperation", "*"),
    ("POST", f"{{name={_OPERATION}}}:wait", "google.longrunning.Operations.WaitOperation", "*"),
)
#: API methods that are also served as version v1: gcloud lists locations and accelerator types with v1.
_V1 = ("Locations.ListLocations", "Locations.GetLocation", "ListAcceleratorTypes", "GetAcceleratorType")


@dataclass(frozen=True)
class Route:
    """A row of `RULES` for one API version, with the URL path as a regular expression."""

    verb: str
    pattern: re.Pattern[str]
    method: str
    field: str
    api: str
    request: Any
    body: str
    handler: Handler


def _routes() -> list[Route]:
    found = []
    for prefix, api in (("v2", "v2"), ("v2alpha1", "v2alpha1"), ("v1", "v2")):
        for verb, template, method, body in RULES:
            if prefix == "v1" and not method.endswith(_V1):
                continue
            # Every URL path in RULES has exactly one part in braces.
            field, path, rest = re.fullmatch(r"\{([a-z.]+)=([^}]+)\}(.*)", template).groups()  # type: ignore[union-attr]
            pattern = f"/{prefix}/({path.replace('*', '[^/:]+')}){re.escape(rest)}"
            mixin, _, name = method.rpartition(".")
            request: Any
            if mixin:
                request, _, handler = MIXINS[mixin][name]
            elif method in wire.methods(api):
                request, handler = wire.request_class(api, method), TPU[method]
            else:
                continue
            found.append(Route(verb, re.compile(pattern), name, field, api, request, body, handler))
    return found


def _snake(path: str) -> str:
    return re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", path)


def _query_value(descriptor: Any, text: str) -> Any:
    """Convert the text of a query parameter to the JSON value of a request's field."""
    if descriptor.type == descriptor.TYPE_BOOL:
        if text.lower() not in {"true", "false"}:
            raise invalid(f"{descriptor.name}: {text!r} is neither true nor false")
        return text.lower() == "true"
    if descriptor.type in (descriptor.TYPE_INT32, descriptor.TYPE_INT64) and not re.fullmatch(r"-?\d+", text):
        raise invalid(f"{descriptor.name}: {text!r} is not a number")
    return text


def _fill_query(request: Message, query: Any) -> None:
    """Set scalar fields and field masks of a request from query parameters; unknown parameters are ignored."""
    fields = {**request.DESCRIPTOR.fields_by_camelcase_name, **request.DESCRIPTOR.fields_by_name}
    values: dict[str, Any] = {}
    for key, text in query.items():
        descriptor = fields.get(key)
        if descriptor is None:
            continue
        if descriptor.message_type is None:
            values[descriptor.name] = _query_value(descriptor, text)
        elif descriptor.message_type.full_name == "google.protobuf.FieldMask":
            # Clients write the paths of a mask in snake_case or camelCase; the protobuf parser accepts only one of
            # these.
            getattr(request, descriptor.name).paths.extend(_snake(path.strip()) for path in text.split(",") if path)
    wire.parse(values, request)


def _set(request: Message, path: str, value: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        request = getattr(request, parent)
    setattr(request, last, value)


async def read_json(http: web.Request) -> Any:
    """Return the JSON object in an HTTP request's body; an empty object if there is no body.

    Raises:
        ApiError: INVALID_ARGUMENT; the body is not a JSON object.
    """
    content = await http.read()
    try:
        text = content.decode(http.charset or "utf-8")
        body = json.loads(text) if text.strip() else {}
    except (ValueError, LookupError) as failure:
        raise invalid(f"Invalid JSON payload received. {failure}") from failure
    except RecursionError as failure:
        raise invalid("Invalid JSON payload received. The JSON is nested too deeply") from failure
    if not isinstance(body, dict):
        raise invalid("Invalid JSON payload received. The JSON is not an object")
    return body


async def _build(http: web.Request, route: Route, name: str) -> Message:
    request = route.request()
    _fill_query(request, http.query)
    if route.body:
        into = request if route.body == "*" else getattr(request, route.body)
        wire.parse(await read_json(http), into)
        if route.body != "*":
            into.SetInParent()
    _set(request, route.field, name)
    return request


def json_response(text: str, status: int = 200) -> web.Response:
    """Return an HTTP response with this JSON text."""
    return web.Response(text=text, status=status, content_type="application/json", charset="utf-8")


def error_response(failure: ApiError) -> web.Response:
    """Return the HTTP response for an error, as JSON in the form of Google's APIs."""
    error = {"code": failure.code.http, "message": failure.message, "status": failure.code.name}
    return json_response(json.dumps({"error": error}), failure.code.http)


@web.middleware
async def errors(request: web.Request, handler: Handling) -> web.StreamResponse:
    """Turn errors, also for unknown paths, into JSON answers in the form of Google's APIs."""
    try:
        answer: web.StreamResponse = await handler(request)
    except ApiError as failure:
        return error_response(failure)
    except web.HTTPException as failure:
        if failure.status < 400:
            raise
        code = Code.NOT_FOUND if failure.status in (404, 405) else Code.INVALID_ARGUMENT
        return error_response(ApiError(code, f"{request.method} {request.path}: {failure.reason}"))
    return answer


def empty_application() -> web.Application:
    """Return a web application without routes, whose errors are JSON in the form of Google's APIs."""
    return web.Application(middlewares=[errors], client_max_size=16 * 1024 * 1024)


def application(service: Service) -> web.Application:
    """Return the web application that serves the API as REST/JSON."""
    routes = _routes()

    async def answer(http: web.Request) -> web.Response:
        for route in routes:
            match = route.pattern.fullmatch(http.path) if route.verb == http.method else None
            if match is not None:
                request = await _build(http, route, match[1])
                found = await service.call(route.method, route.handler, route.api, request)
                return json_response(found.text(route.api) if isinstance(found, Page) else wire.json_text(found))
        raise ApiError(Code.NOT_FOUND, f"{http.method} {http.path} is not a method of this API")

    app = empty_application()
    for prefix in ("v1", "v2", "v2alpha1"):
        app.router.add_route("*", f"/{prefix}/{{rest:.*}}", answer)
    return app


async def serve(app: web.Application, bind: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve a web application over HTTP; return its runner and its port.

    Raises:
        OSError: The port cannot be used.
    """
    runner = await _runner(app)
    await web.TCPSite(runner, bind, port).start()
    return runner, int(runner.addresses[0][1])


async def serve_socket(app: web.Application, listening: socket.socket) -> web.AppRunner:
    """Serve a web application over HTTP on a socket; return its runner."""
    runner = await _runner(app)
    await web.SockSite(runner, listening).start()
    return runner


async def _runner(app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)
    await runner.setup()
    return runner
