"""Conversion between the protobuf messages of both API versions and the lab's internal JSON.

The protobuf classes are from google-cloud-tpu. The internal JSON of a resource is the JSON of v2, plus the fields that
exist only in v2alpha1. Only this module handles differences between the versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu as v2
from google.cloud.tpu_v2alpha1.types import cloud_tpu as v2alpha1
from google.protobuf import json_format

from tpu_ops.lab.api.errors import invalid

Json = dict[str, Any]
#: Type of a protobuf message; the protobuf package has no more precise type.
Message = Any

VERSIONS = {"v2": v2, "v2alpha1": v2alpha1}

OPERATION = "google.longrunning.Operation"
#: Method of google.cloud.tpu.<version>.Tpu -> its response message. The request message is <method>Request.
METHODS = {
    "ListNodes": "ListNodesResponse",
    "GetNode": "Node",
    "CreateNode": OPERATION,
    "DeleteNode": OPERATION,
    "StopNode": OPERATION,
    "StartNode": OPERATION,
    "UpdateNode": OPERATION,
    "ListQueuedResources": "ListQueuedResourcesResponse",
    "GetQueuedResource": "QueuedResource",
    "CreateQueuedResource": OPERATION,
    "DeleteQueuedResource": OPERATION,
    "ResetQueuedResource": OPERATION,
    "GenerateServiceIdentity": "GenerateServiceIdentityResponse",
    "ListAcceleratorTypes": "ListAcceleratorTypesResponse",
    "GetAcceleratorType": "AcceleratorType",
    "ListRuntimeVersions": "ListRuntimeVersionsResponse",
    "GetRuntimeVersion": "RuntimeVersion",
    "GetGuestAttributes": "GetGuestAttributesResponse",
}
#: Methods that exist only in v2alpha1 -> their response messages.
ALPHA_METHODS = {
    "SimulateMaintenanceEvent": OPERATION,
    "PerformMaintenance": OPERATION,
    "PerformMaintenanceQueuedResource": OPERATION,
    "ListReservations": "ListReservationsResponse",
}

#: Fields of a Node that only the API sets, not the client.
NODE_OUTPUT = (
    "name",
    "state",
    "healthDescription",
    "createTime",
    "networkEndpoints",
    "health",
    "id",
    "apiVersion",
    "symptoms",
    "queuedResource",
    "multislice",
    "multisliceNode",
    "upcomingMaintenance",
)


def methods(api: str) -> dict[str, str]:
    """Return method -> response message for all methods of one API version."""
    return METHODS | ALPHA_METHODS if api == "v2alpha1" else METHODS


def message(api: str, name: str) -> Callable[..., Message]:
    """Return the protobuf class of the message with this name in one API version."""
    found: Callable[..., Message] = getattr(VERSIONS[api], name).pb()
    return found


def request_class(api: str, method: str) -> Callable[..., Message]:
    """Return the protobuf class of a method's request."""
    return message(api, f"{method}Request")


def to_json(value: Message) -> Json:
    """Return a protobuf message as a dictionary in its JSON form."""
    found: Json = json_format.MessageToDict(value)
    return found


def json_text(value: Message) -> str:
    """Return a protobuf message as JSON text."""
    return json.dumps(to_json(value))


def parse(value: Json, into: Message) -> Message:
    """Fill a protobuf message from JSON and return it; unknown fields, which newer clients might send, are ignored.

    Raises:
        ApiError: INVALID_ARGUMENT; a value has the wrong type.
    """
    try:
        return json_format.ParseDict(value, into, ignore_unknown_fields=True)
    except json_format.ParseError as failure:
        raise invalid(f"Invalid JSON payload received. {failure}") from failure


@dataclass(frozen=True)
class Page:
    """One page of a list, which gRPC and REST render in different forms.

    Attributes:
        response: Name of the list's response message.
        field: The response message's field for the records, as in the protobuf.
        items: Records with the methods ``pb(api)`` and ``text(api)``.
        token: Token of the next page; empty on the last page.
        unreachable: Names of locations that could not be listed.
    """

    response: str
    field: str
    items: tuple[Any, ...]
    token: str
    unreachable: tuple[str, ...] = ()

    def without(self, locations: tuple[str, ...]) -> Page:
        """Return a copy of the page without the records of these locations, which it names as unreachable."""
        lost = tuple(f"{location}/" for location in locations)
        items = tuple(item for item in self.items if not item.name.startswith(lost))
        return replace(self, items=items, unreachable=locations)

    def message(self, api: str) -> Message:
        """Return the page as a protobuf message of one API version."""
        response = message(api, self.response)()
        getattr(response, self.field).extend(item.pb(api) for item in self.items)
        response.next_page_token = self.token
        if self.unreachable:
            response.unreachable.extend(self.unreachable)
        return response

    def text(self, api: str) -> str:
        """Return the page as JSON text of one API version."""
        head, *rest = self.field.split("_")
        parts = []
        if self.items:
            inner = ",".join(item.text(api) for item in self.items)
            parts.append(f'"{head}{"".join(part.title() for part in rest)}":[{inner}]')
        if self.token:
            parts.append(f'"nextPageToken":{json.dumps(self.token)}')
        if self.unreachable:
            parts.append(f'"unreachable":{json.dumps(self.unreachable)}')
        return "{" + ",".join(parts) + "}"


def node_input(node: Message) -> Json:
    """Return the fields that a client can set, from a Node message of either API version."""
    body = to_json(node)
    return {key: value for key, value in body.items() if key not in NODE_OUTPUT}


def queued_input(queued: Message) -> Json:
    """Return the internal JSON of a QueuedResource message that a client has sent in either API version."""
    body = to_json(queued)
    for key in ("name", "createTime", "state"):
        body.pop(key, None)
    for spec in body.get("tpu", {}).get("nodeSpec", []):
        _rename(spec, "multiNodeParams", "multisliceParams")
        spec["node"] = {key: value for key, value in spec.get("node", {}).items() if key not in NODE_OUTPUT}
    return body


def queued_message(api: str, body: Json) -> Message:
    """Return the QueuedResource message of one API version for a queued resource's internal JSON."""
    if api == "v2alpha1":
        specs = [dict(spec) for spec in body.get("tpu", {}).get("nodeSpec", [])]
        for spec in specs:
            _rename(spec, "multisliceParams", "multiNodeParams")
        body = {**body, "tpu": {**body.get("tpu", {}), "nodeSpec": specs}}
    return parse(body, message(api, "QueuedResource")())


def _rename(data: Json, old: str, new: str) -> None:
    if old in data:
        data[new] = data.pop(old)
