"""Nodes of the Cloud TPU API as plain dictionaries; changes to them as operations.

A node's dictionary has only JSON types and is read from the raw protobuf: the wrappers around it cost fifteen
times as much. Text in it is as the API gave it: data, and not to be trusted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.pages import pages
from tpu_ops.errors import printable

Json = dict[str, Any]

#: (project, zone); the zone ``-`` stands for all zones.
Place = tuple[str, str]

#: What a place answered: its nodes and the locations that could not be reached, or the error that it ended with.
Answer = tuple[list[Json], list[str]] | ApiError

#: Nodes per answer of a list; the API's largest.
PAGE_SIZE = 1000

#: Failures of one project or zone among several that leave the rest of the fleet worth listing.
_PARTIAL = ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")

#: How a service may refuse the zone ``-``. Of a location that it does not know Cloud TPU says PERMISSION_DENIED, with
#: this text (seen in dstackai/gpuhunt issue 98).
_NO_WILDCARD = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
_UNKNOWN_WILDCARD = "Location - is not found"

#: How it may refuse a zone that it does not know, and how many of those that it knows are named then.
_UNKNOWN_PLACE, _MOST_ZONES = ("PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT"), 8

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
    unanswered: tuple[Place, ...] = ()
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
    refused = [place for place, answer in answers.items() if place[1] == "-" and _refuses_wildcard(answer)]
    for (project, _), found in zip(refused, tpu.concurrently(lambda place: _zones(tpu, place), refused), strict=True):
        if found:
            del answers[project, "-"]
            answers |= _answers(tpu, [(project, zone) for zone in found])
    return combine(answers, named, strict_permissions=strict_permissions)


def _answers(tpu: Tpu, places: Sequence[Place]) -> dict[Place, Answer]:
    return dict(zip(places, tpu.concurrently(lambda place: _list_place(tpu, *place), places), strict=True))


def _refuses_wildcard(answer: Answer) -> bool:
    return isinstance(answer, ApiError) and (answer.status in _NO_WILDCARD or _UNKNOWN_WILDCARD in answer.what)


def _zones(tpu: Tpu, place: Place) -> list[str]:
    """Return the zones of a project; none where it does not say."""
    try:
        return locations(tpu, place[0])
    except ApiError:
        return []


def _of_zones(project: str, zone: str, known: Sequence[str]) -> str:
    """Return what to do about a zone that a project does not have."""
    there = difflib.get_close_matches(zone, known, n=_MOST_ZONES, cutoff=0.3) or sorted(known)[:_MOST_ZONES]
    more = ", ..." if len(known) > len(there) else ""
    return f"project {project} has no such zone: see `zones` (TPU_OPS_ZONES); it has {', '.join(there)}{more}"


def _list_place(tpu: Tpu, project: str, zone: str) -> Answer:
    """Return what one place answers, all pages of it or the error that one of them ended with."""
    nodes: list[Json] = []
    unreachable: list[str] = []
    try:
        for page in _pages(tpu, "list_nodes", project, zone):
            nodes.extend(node_data(node) for node in page.nodes)
            unreachable.extend(page.unreachable)
    except ApiError as exc:
        known = _zones(tpu, (project, zone)) if zone != "-" and exc.status in _UNKNOWN_PLACE else []
        if known and zone not in known:
            exc.fix = _of_zones(project, zone, known)
        return exc
    return _out_of_reach(project, zone) if unreachable and zone != "-" else (nodes, unreachable)


def combine(answers: Mapping[Place, Answer], named: Collection[Place], *, strict_permissions: bool = False) -> Listing:
    """Given what each place answered, return the whole listing.

    Args:
        answers: Of each place.
        named: Those of them that the fleet's settings name; the API named the others.
        strict_permissions: Whether any failure is an error.

    Raises:
        ApiError: All places failed, or one of them in a way that means that it is named wrongly, or any did and that
            is an error.
    """
    failures: dict[Place, ApiError] = {}
    nodes: dict[str, Json] = {}
    warnings: list[str] = []
    for place, answer in answers.items():
        if isinstance(answer, ApiError):
            failures[place] = answer
            if answer.status not in _PARTIAL and place in named:
                raise answer
            continue
        for node in answer[0]:
            if split_name(node["name"]):
                before = nodes.get(node["name"], node)["node_id"]
                if before != node["node_id"]:
                    ids = f"{before or 'none'} and {node['node_id'] or 'none'}"
                    warnings.append(f"{_short(node['name'])}: listed twice, with the ids {ids}; the last one is taken")
                nodes[node["name"]] = node
            else:
                warnings.append(
                    f"project {place[0]}: a node is left out: its name {node['name'][:200]!r} has no known form"
                )
        for location in answer[1]:
            lost = printable(location.rsplit("/", 1)[-1])
            failures[place[0], lost] = _out_of_reach(place[0], lost)
    if failures and (strict_permissions or failures.keys() >= answers.keys()):
        raise next(iter(failures.values()))
    return Listing(
        tuple(nodes.values()), tuple(failures), (*_in_words(failures), *warnings, *_shared_ids(nodes.values()))
    )


def _shared_ids(nodes: Iterable[Json]) -> list[str]:
    """Return a warning for each node that has another one's id: host keys are bound to ids."""
    owners: dict[str, str] = {}
    pairs = [(node, owners.setdefault(node["node_id"] or node["name"], node["name"])) for node in nodes]
    return [
        f"{_short(node['name'])}: has the id {node['node_id']} of {_short(owner)}, too, so that its host keys pass for "
        "that one's"
        for node, owner in pairs
        if owner != node["name"]
    ]


def _out_of_reach(project: str, zone: str) -> ApiError:
    what = "the API could not reach this location"
    return ApiError(what, status="UNAVAILABLE", where=_worded(project, zone), fix="try again later")


def _in_words(failures: Mapping[Place, ApiError]) -> list[str]:
    """Return one warning for each failure, and a single one for the zones of a project that failed alike."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (project, zone), failure in failures.items():
        alike.setdefault((project, failure.what, failure.fix), []).append(zone)
    return [
        f"{_worded(project, *zones)}: not listed: {what}{f' ({fix})' if fix else ''}"
        for (project, what, fix), zones in alike.items()
    ]


def _worded(project: str, *zones: str) -> str:
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
class GuestAttributes:
    """What a worker says of itself as guest attributes.

    Attributes:
        host_keys: Key type -> base64 blob; empty where it says none.
        instance_name: Its name as a Compute Engine instance, or empty.
    """

    host_keys: dict[str, str]
    instance_name: str = ""


def guest_attributes(tpu: Tpu, name: str, worker_count: int, *, instance_names: bool = False) -> list[GuestAttributes]:
    """Return the guest attributes of each worker of a node, in order; empty where the API does not say.

    Args:
        tpu: The client.
        name: The node's resource name.
        worker_count: How many workers it has.
        instance_names: Whether their instance names are asked for as well.

    Raises:
        ApiError: The API refused.
    """
    path = "" if instance_names else "hostkeys/"
    answers = _guest_attributes(tpu, name, path, [""])
    if len(answers) != worker_count:
        # An answer names no worker: it is of use only where it has as many entries as workers were asked for.
        each = (_guest_attributes(tpu, name, path, [str(index)]) for index in range(worker_count))
        answers = [found[0] if len(found) == 1 else GuestAttributes({}) for found in each]
    return answers


def _guest_attributes(tpu: Tpu, name: str, path: str, worker_ids: list[str]) -> list[GuestAttributes]:
    request = {"name": name, "query_path": path, "worker_ids": worker_ids}
    answer = _raw(tpu.call("get_guest_attributes", request, _short(name)))
    return [
        GuestAttributes(
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
    where, request = _worded(project), {"name": f"projects/{project}", "page_size": PAGE_SIZE}

    def ask(token: str) -> Any:
        return tpu.call("list_locations", {**request, "page_token": token}, where)

    found = pages(ask, where=where, timeout=tpu.timeout)
    return sorted(location.location_id for page in found for location in page.locations)


def _names(tpu: Tpu, method: str, project: str, zone: str, read: Callable[[Any], Iterable[str]]) -> list[str]:
    return [name for page in _pages(tpu, method, project, zone) for name in read(page)]


def _pages(tpu: Tpu, method: str, project: str, zone: str) -> Iterator[Any]:
    """Return the raw pages of what a zone, or all of them, has."""
    where, request = _worded(project, zone), {"parent": f"projects/{project}/locations/{zone}", "page_size": PAGE_SIZE}

    def ask(token: str) -> Any:
        # The pager's own next pages would be without retries.
        return _raw(tpu.call(method, {**request, "page_token": token}, where).pages.__next__())

    return pages(ask, where=where, timeout=tpu.timeout)


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
