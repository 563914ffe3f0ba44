"""Nodes of the Cloud TPU API as plain dictionaries; changes to them as operations.

A node's dictionary has only JSON types and is read from the raw protobuf: the wrappers around it cost fifteen
times as much. Text in it is as the API gave it: data, and not to be trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.errors import printable

Json = dict[str, Any]

#: (project, zone); the zone ``-`` stands for all zones.
Scope = tuple[str, str]

#: What a scope answered: its nodes and the locations that could not be reached, or the error that it ended with.
Answer = tuple[list[Json], list[str]] | ApiError

#: Nodes per answer of a list; the API's largest.
PAGE_SIZE = 1000

#: Failures of one project or zone among several that leave the rest of the fleet worth listing.
_PARTIAL = ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")

#: How a service may refuse the zone ``-``. Of a location that it does not know Cloud TPU says PERMISSION_DENIED, with
#: this text (seen in dstackai/gpuhunt issue 98).
_NO_WILDCARD = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
_UNKNOWN_WILDCARD = "Location - is not found"

_NODE_NAME = re.compile(
    r"projects/(?P<project>[a-z0-9][a-z0-9.:-]{0,99})/locations/(?P<zone>[a-z][a-z0-9-]{0,99})"
    r"/nodes/(?P<name>[a-z][a-z0-9_-]{0,99})"
)


@dataclass(frozen=True)
class Listing:
    """The nodes that the API listed, and what it could not list.

    Attributes:
        nodes: One dictionary per node (`node_data`).
        unanswered: What could not be listed.
        warnings: That, and what was left out, in words.
    """

    nodes: tuple[Json, ...]
    unanswered: tuple[Scope, ...] = ()
    warnings: tuple[str, ...] = ()


def list_nodes(
    tpu: Tpu, projects: Sequence[str], zones: Sequence[str] = (), *, strict_permissions: bool = False
) -> Listing:
    """List the nodes of several projects, all zones of them or those named, concurrently.

    All zones are asked for at once as ``locations/-``. The reference of v2 does not say so in words; it has a field
    for locations that could not be reached (cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/list)
    as such lists have (google.aip.dev/159), and public programs rely on it, over REST and as
    ``gcloud compute tpus tpu-vm list --zone=-``. Where it is refused all the same, the zones are asked one by one.

    Args:
        tpu: The client.
        projects: Project ids.
        zones: Zones; all where none is named.
        strict_permissions: Whether one project or zone that cannot be listed is an error.

    Raises:
        ApiError: No project and zone could be listed, one does not exist, or any could not be and that is an error.
    """
    named = list(dict.fromkeys((project, zone) for project in projects for zone in (zones or ("-",))))
    answers = _answers(tpu, named)
    refused = [scope for scope, answer in answers.items() if scope[1] == "-" and _refuses_wildcard(answer)]
    for (project, _), found in zip(refused, tpu.concurrently(lambda scope: _zones(tpu, scope), refused), strict=True):
        if found:
            del answers[project, "-"]
            answers |= _answers(tpu, [(project, zone) for zone in found])
    return combine(answers, named, strict_permissions=strict_permissions)


def _answers(tpu: Tpu, scopes: Sequence[Scope]) -> dict[Scope, Answer]:
    return dict(zip(scopes, tpu.concurrently(lambda scope: _list_scope(tpu, *scope), scopes), strict=True))


def _refuses_wildcard(answer: Answer) -> bool:
    return isinstance(answer, ApiError) and (answer.status in _NO_WILDCARD or _UNKNOWN_WILDCARD in answer.what)


def _zones(tpu: Tpu, scope: Scope) -> list[str]:
    """Return the zones of a project; none where it does not say."""
    try:
        return locations(tpu, scope[0])
    except ApiError:
        return []


def _list_scope(tpu: Tpu, project: str, zone: str) -> Answer:
    """Return what one scope answers, all pages of it or the error that one of them ended with."""
    parent = f"projects/{project}/locations/{zone}"
    nodes: list[Json] = []
    unreachable: list[str] = []
    token = ""
    try:
        while True:
            request = {"parent": parent, "page_size": PAGE_SIZE, "page_token": token}
            # The pager's own next pages would be without retries.
            page = _raw(tpu.call("list_nodes", request, _place(project, zone)).pages.__next__())
            nodes.extend(node_data(node) for node in page.nodes)
            unreachable.extend(page.unreachable)
            token = page.next_page_token
            if not token:
                break
    except ApiError as exc:
        return exc
    return _out_of_reach(project, zone) if unreachable and zone != "-" else (nodes, unreachable)


def combine(answers: Mapping[Scope, Answer], named: Collection[Scope], *, strict_permissions: bool = False) -> Listing:
    """Given what each scope answered, return the whole listing.

    Args:
        answers: Of each scope.
        named: Those of them that the fleet's settings name; the API named the others.
        strict_permissions: Whether any failure is an error.

    Raises:
        ApiError: All scopes failed, or one of them in a way that means that it is named wrongly, or any did and that
            is an error.
    """
    failures: dict[Scope, ApiError] = {}
    nodes: dict[str, Json] = {}
    warnings: list[str] = []
    for scope, answer in answers.items():
        if isinstance(answer, ApiError):
            failures[scope] = answer
            if answer.status not in _PARTIAL and scope in named:
                raise answer
            continue
        for node in answer[0]:
            if split_name(node["name"]):
                nodes[node["name"]] = node
            else:
                warnings.append(
                    f"project {scope[0]}: a node is left out: its name {node['name'][:200]!r} has no known form"
                )
        for location in answer[1]:
            lost = printable(location.rsplit("/", 1)[-1])
            failures[scope[0], lost] = _out_of_reach(scope[0], lost)
    if failures and (strict_permissions or failures.keys() >= answers.keys()):
        raise next(iter(failures.values()))
    return Listing(tuple(nodes.values()), tuple(failures), (*_in_words(failures), *warnings))


def _out_of_reach(project: str, zone: str) -> ApiError:
    what = "the API could not reach this location"
    return ApiError(what, status="UNAVAILABLE", where=_place(project, zone), fix="try again later")


def _in_words(failures: Mapping[Scope, ApiError]) -> list[str]:
    """Return one warning for each failure, and a single one for the zones of a project that failed alike."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (project, zone), failure in failures.items():
        alike.setdefault((project, failure.what, failure.fix), []).append(zone)
    return [
        f"{_place(project, *zones)}: not listed: {what}{f' ({fix})' if fix else ''}"
        for (project, what, fix), zones in alike.items()
    ]


def _place(project: str, *zones: str) -> str:
    """Name a project and zones of it in words."""
    named = ", ".join(zone for zone in zones if zone != "-")
    return f"project {project}{f', zone {named}' if named else ''}"


def get_node(tpu: Tpu, name: str) -> Json:
    """Return the node of a resource name.

    Raises:
        ApiError: NOT_FOUND where there is none.
    """
    return node_data(_raw(tpu.call("get_node", {"name": name}, _short(name))))


def create_node(tpu: Tpu, parent: str, node_id: str, node: Json) -> str:
    """Begin to create a node; return the operation's name.

    Args:
        tpu: The client.
        parent: ``projects/P/locations/Z``.
        node_id: The node's short name.
        node: Fields of google.cloud.tpu.v2.Node.

    Raises:
        ApiError: The API refused.
    """
    request = {"parent": parent, "node_id": node_id, "node": node}
    return _operation(tpu.call("create_node", request, _short(f"{parent}/nodes/{node_id}"), repeat=False))


def delete_node(tpu: Tpu, name: str) -> str:
    """Begin to delete a node; return the operation's name."""
    return _operation(tpu.call("delete_node", {"name": name}, _short(name), repeat=False))


def start_node(tpu: Tpu, name: str) -> str:
    """Begin to start a stopped node; return the operation's name."""
    return _operation(tpu.call("start_node", {"name": name}, _short(name), repeat=False))


def stop_node(tpu: Tpu, name: str) -> str:
    """Begin to stop a node; return the operation's name."""
    return _operation(tpu.call("stop_node", {"name": name}, _short(name), repeat=False))


@dataclass(frozen=True)
class Published:
    """What a worker publishes of itself as guest attributes.

    Attributes:
        host_keys: Key type -> base64 blob; empty where it publishes none.
        instance_name: Its name as a Compute Engine instance, or empty.
    """

    host_keys: dict[str, str]
    instance_name: str = ""


def published(tpu: Tpu, name: str, worker_count: int, *, instance_names: bool = False) -> list[Published]:
    """Return what each worker of a node publishes, in order.

    Args:
        tpu: The client.
        name: The node's resource name.
        worker_count: How many workers it has.
        instance_names: Whether their instance names are asked for as well.

    Raises:
        ApiError: The API refused.
    """
    path = "" if instance_names else "hostkeys/"
    answers = _published(tpu, name, path, [""])
    if len(answers) != worker_count:
        # The answer names no worker, so it is of use only when every worker is in it.
        answers = [(_published(tpu, name, path, [str(index)]) or [Published({})])[0] for index in range(worker_count)]
    return answers


def _published(tpu: Tpu, name: str, path: str, worker_ids: list[str]) -> list[Published]:
    request = {"name": name, "query_path": path, "worker_ids": worker_ids}
    answer = _raw(tpu.call("get_guest_attributes", request, _short(name)))
    return [
        Published(
            {entry.key: entry.value for entry in attributes.query_value.items if entry.namespace == "hostkeys"},
            next((entry.value for entry in attributes.query_value.items if entry.key == "hostname"), ""),
        )
        for attributes in answer.guest_attributes
    ]


def accelerator_types(tpu: Tpu, project: str, zone: str) -> list[str]:
    """Return the names of the accelerator types that a zone has, in the API's order."""
    return _names(tpu, "list_accelerator_types", project, zone, lambda page: [e.type_ for e in page.accelerator_types])


def runtime_versions(tpu: Tpu, project: str, zone: str) -> list[str]:
    """Return the names of the runtime versions that a zone has, in the API's order."""
    return _names(tpu, "list_runtime_versions", project, zone, lambda page: [e.version for e in page.runtime_versions])


def locations(tpu: Tpu, project: str) -> list[str]:
    """Return the zones that a project can use."""
    found: list[str] = []
    request = {"name": f"projects/{project}", "page_size": PAGE_SIZE, "page_token": ""}
    while True:
        page = tpu.call("list_locations", request, f"project {project}")
        found.extend(location.location_id for location in page.locations)
        if not page.next_page_token:
            return sorted(found)
        request["page_token"] = page.next_page_token


def _names(tpu: Tpu, method: str, project: str, zone: str, read: Callable[[Any], Iterable[str]]) -> list[str]:
    found: list[str] = []
    token = ""
    while True:
        request = {"parent": f"projects/{project}/locations/{zone}", "page_size": PAGE_SIZE, "page_token": token}
        page = _raw(tpu.call(method, request, f"project {project}, zone {zone}").pages.__next__())
        found.extend(read(page))
        token = page.next_page_token
        if not token:
            return found


def _raw(answer: Any) -> Any:
    """Return the protobuf behind an answer of google-cloud-tpu."""
    return type(answer).pb(answer)


def _operation(answer: Any) -> str:
    return str(answer.operation.name)


def split_name(name: str) -> tuple[str, str, str] | None:
    """Given a node's resource name, return project, zone and short name; None where its form is not the known one."""
    match = _NODE_NAME.fullmatch(name)
    return (match["project"], match["zone"], match["name"]) if match else None


def _short(name: str) -> str:
    """``projects/P/locations/Z/nodes/N`` in words."""
    _, project, _, zone, _, node = name.split("/")
    return f"node {node}, zone {zone}, project {project}"


def node_data(node: Any) -> Json:
    """Given a raw google.cloud.tpu.v2.Node, return its dictionary.

    Values of the node's metadata are left out: they may hold secrets.
    """
    endpoints = node.network_endpoints
    scheduling = node.scheduling_config
    return {
        "name": node.name,
        "node_id": str(node.id) if node.id else "",
        "accelerator_type": node.accelerator_type,
        "topology": node.accelerator_config.topology,
        "runtime_version": node.runtime_version,
        "state": _enum(node, "state", node.state),
        "health": _enum(node, "health", node.health),
        "health_description": node.health_description,
        "network_configs": len(node.network_configs),
        "internal_ips": [endpoint.ip_address for endpoint in endpoints],
        "external_ips": [endpoint.access_config.external_ip for endpoint in endpoints],
        "labels": dict(node.labels),
        "symptoms": [
            {
                "worker_id": symptom.worker_id,
                "type": _enum(symptom, "symptom_type", symptom.symptom_type),
                "details": symptom.details,
                "create_time": _time(symptom, "create_time"),
            }
            for symptom in node.symptoms
        ],
        "queued_resource": node.queued_resource,
        "multislice": node.multislice_node,
        "preemptible": scheduling.preemptible,
        "spot": scheduling.spot,
        "reserved": scheduling.reserved,
        "data_disks": [
            {"source": disk.source_disk, "mode": _enum(disk, "mode", disk.mode)} for disk in node.data_disks
        ],
        "service_account": node.service_account.email,
        "create_time": _time(node, "create_time"),
        "metadata_keys": sorted(node.metadata),
    }


def _enum(message: Any, field: str, number: int) -> str:
    """Return the name of an enum's number; the number itself where it is newer than the installed client."""
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    return value.name if value else str(number)


def _time(message: Any, field: str) -> str:
    """Return a time as RFC 3339; empty where there is none, or none of this calendar."""
    try:
        return str(getattr(message, field).ToJsonString()) if message.HasField(field) else ""
    except ValueError:
        return ""
