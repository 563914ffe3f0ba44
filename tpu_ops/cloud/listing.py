"""List the nodes of several projects and zones together, and report the projects and zones that could not be listed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_ops.cloud import parsing, queued_resources, setups
from tpu_ops.cloud.client import RETRIED, ApiError, Tpu
from tpu_ops.cloud.names import split_name
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.cloud.setups import Setup
from tpu_ops.cloud.zones import locations, pages_of, zones_in_words
from tpu_ops.errors import printable

#: A place is a project and a zone; the zone ``-`` means all zones of the project.
Place = tuple[str, str]


@dataclass
class Answered:
    """The API's answer for a place: its nodes, or its queued resources.

    Attributes:
        nodes: The nodes in the place, if nodes were requested.
        unreachable: Locations that the API could not reach.
        misnamed: Resource names of nodes that are left out, since they do not have the documented form.
        queued: The queued resources in the place, if these were requested.
        setups: Resource name of each node -> how it was set up, if this was requested.
    """

    nodes: list[Node] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    misnamed: list[str] = field(default_factory=list)
    queued: list[QueuedResource] = field(default_factory=list)
    setups: dict[str, Setup] = field(default_factory=dict)


#: The API's answer for a place, or its error.
Answer = Answered | ApiError
#: What is listed: the API's method, and the function that adds a page of its answer to the answer for a place.
Question = tuple[str, Callable[[Any, Answered], None]]

#: Status codes of errors for one project or zone after which the other projects and zones are still listed.
_PARTIAL = ("PERMISSION_DENIED", "INTERNAL", "UNKNOWN", *RETRIED)

#: Status codes and texts of refusals of the zone ``-``. Cloud TPU answers PERMISSION_DENIED for an unknown location,
#: with one of these texts (seen in dstackai/gpuhunt issue 98, and with the reason LOCATION_POLICY_VIOLATED).
_NO_WILDCARD = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
_UNKNOWN_WILDCARD = ("Location - is not found", "denied on 'locations/-'")

#: Status codes of refusals of an unknown zone, and the maximum number of known zones that an error lists.
_UNKNOWN_PLACE, _MOST_ZONES = ("PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT"), 8


@dataclass(frozen=True)
class Listing:
    """The nodes that the API listed, and the places that could not be listed.

    Attributes:
        nodes: The nodes, in the order of their full names.
        unanswered: Places that could not be listed.
        warnings: One sentence for each place that could not be listed, and for each node that was left out.
    """

    nodes: tuple[Node, ...]
    unanswered: tuple[Place, ...] = ()
    warnings: tuple[str, ...] = ()


class QueuedListing(NamedTuple):
    """The queued resources that the API listed, and the places that could not be listed.

    Attributes:
        queued: The queued resources, in the order of their full names.
        unanswered: Places that could not be listed.
        warnings: One sentence for each place that could not be listed, and for each queued resource that was left out.
        denied: The places among ``unanswered`` that the user has no permission to list.
    """

    queued: tuple[QueuedResource, ...] = ()
    unanswered: tuple[Place, ...] = ()
    warnings: tuple[str, ...] = ()
    denied: tuple[Place, ...] = ()


def list_nodes(
    tpu: Tpu, projects: Sequence[str], zones: Sequence[str] = (), *, strict_permissions: bool = False
) -> Listing:
    """List the nodes of several projects concurrently, in all zones or in the given ones.

    All zones of a project are requested at once as ``locations/-``. The reference of API v2 does not document this. But
    the answer has a field for unreachable locations, as lists over all locations have (google.aip.dev/159;
    cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/list). Public programs rely on ``locations/-``,
    over REST and as ``gcloud compute tpus tpu-vm list --zone=-``. If the API refuses ``locations/-``, the zones are
    requested one by one.

    Args:
        tpu: The client.
        projects: Project ids.
        zones: Zones; all if empty.
        strict_permissions: Whether a single project or zone that cannot be listed is an error.

    Raises:
        ApiError: Nothing could be listed, a project or zone does not exist, or any failed with ``strict_permissions``.
    """
    named = list(dict.fromkeys((project, zone) for project in projects for zone in (zones or ("-",))))
    return combine(_answers(tpu, named, ("list_nodes", read)), named, strict_permissions=strict_permissions)


def list_set_up(tpu: Tpu, projects: Sequence[str]) -> tuple[Listing, dict[str, Setup]]:
    """List the nodes of several projects like `list_nodes`, in all zones.

    Returns:
        The listing, and how each node was set up, by its resource name.

    Raises:
        ApiError: Nothing could be listed, or a project does not exist.
    """
    named = [(project, "-") for project in dict.fromkeys(projects)]
    answers = _answers(tpu, named, ("list_nodes", _read_set_up))
    found = {
        name: one for answer in answers.values() if isinstance(answer, Answered) for name, one in answer.setups.items()
    }
    return combine(answers, named), found


def list_queued(tpu: Tpu, projects: Sequence[str], zones: Sequence[str] = ()) -> QueuedListing:
    """List the queued resources of several projects concurrently, in all zones or in the given ones.

    Raises:
        ApiError: Nothing could be listed, or a project or zone does not exist.
    """
    named = list(dict.fromkeys((project, zone) for project in projects for zone in (zones or ("-",))))
    answers = _answers(tpu, named, ("list_queued_resources", _read_queued))
    listing = combine(answers, named)
    found = [one for answer in answers.values() if isinstance(answer, Answered) for one in answer.queued]
    denied = tuple(
        place
        for place, answer in answers.items()
        if isinstance(answer, ApiError) and answer.status == "PERMISSION_DENIED"
    )
    queued = tuple(sorted(found, key=lambda one: one.full_name))
    return QueuedListing(queued, listing.unanswered, listing.warnings, denied)


def _answers(tpu: Tpu, named: Sequence[Place], question: Question) -> dict[Place, Answer]:
    """Return the answer for each place; if the API refuses the zone ``-`` of a project, for each of its zones."""
    answers = _each(tpu, named, question)
    refused = [place for place, answer in answers.items() if place[1] == "-" and _refuses_wildcard(answer)]
    for (project, _), found in zip(refused, tpu.concurrently(lambda place: _zones(tpu, place), refused), strict=True):
        if found:
            del answers[project, "-"]
            answers |= _each(tpu, [(project, zone) for zone in found], question)
    return answers


def _each(tpu: Tpu, places: Sequence[Place], question: Question) -> dict[Place, Answer]:
    return dict(zip(places, tpu.concurrently(lambda place: _list_place(tpu, *place, question), places), strict=True))


def _refuses_wildcard(answer: Answer) -> bool:
    if not isinstance(answer, ApiError):
        return False
    return answer.status in _NO_WILDCARD or any(text in answer.what for text in _UNKNOWN_WILDCARD)


def _zones(tpu: Tpu, place: Place) -> list[str]:
    """Return the zones of a project; empty if the API does not list them."""
    try:
        return locations(tpu, place[0])
    except ApiError:
        return []


def _of_zones(project: str, zone: str, known: Sequence[str]) -> str:
    """Return the fix for a zone that a project does not have."""
    there = difflib.get_close_matches(zone, known, n=_MOST_ZONES, cutoff=0.3) or sorted(known)[:_MOST_ZONES]
    more = ", ..." if len(known) > len(there) else ""
    return f"project {project} has no such zone: see `zones` (TPU_OPS_ZONES); it has {', '.join(there)}{more}"


def _list_place(tpu: Tpu, project: str, zone: str, question: Question) -> Answer:
    """Return the API's answer for one place, combined from all pages, or the error of one page."""
    found, (method, add) = Answered(), question
    try:
        for page in pages_of(tpu, method, project, zone):
            add(page, found)
    except ApiError as exc:
        known = _zones(tpu, (project, zone)) if zone != "-" and exc.status in _UNKNOWN_PLACE else []
        if known and zone not in known:
            exc.fix = _of_zones(project, zone, known)
        return exc
    return _out_of_reach(project, zone) if found.unreachable and zone != "-" else found


def read(page: Any, found: Answered) -> None:
    """Add the nodes of a raw google.cloud.tpu.v2.ListNodesResponse to the answer for a place."""
    for raw in filter(parsing.has_workers, page.nodes):
        if split_name(raw.name):
            found.nodes.append(parsing.node(raw))
        else:
            found.misnamed.append(raw.name)
    found.unreachable.extend(page.unreachable)


def _read_set_up(page: Any, found: Answered) -> None:
    """Add nodes to the answer for a place like `read`, and how each was set up."""
    read(page, found)
    found.setups |= {raw.name: setups.parsed(raw) for raw in filter(parsing.has_workers, page.nodes)}


def _read_queued(page: Any, found: Answered) -> None:
    """Add the queued resources of a raw google.cloud.tpu.v2.ListQueuedResourcesResponse to the answer for a place."""
    for raw in page.queued_resources:
        one = queued_resources.parsed(raw)
        if one:
            found.queued.append(one)
        else:
            found.misnamed.append(raw.name)
    found.unreachable.extend(page.unreachable)


def combine(answers: Mapping[Place, Answer], named: Collection[Place], *, strict_permissions: bool = False) -> Listing:
    """Return the whole listing, given the API's answer for each place.

    Args:
        answers: The API's answer for each place.
        named: The places in the fleet's settings. Other places in `answers` are zones that the API listed.
        strict_permissions: Whether any failure is an error.

    Raises:
        ApiError: All places failed, a place does not exist, or any failed with ``strict_permissions``.
    """
    failures: dict[Place, ApiError] = {}
    nodes: dict[str, Node] = {}
    warnings: list[str] = []
    for place, answer in answers.items():
        if isinstance(answer, ApiError):
            failures[place] = answer
            if answer.status not in _PARTIAL and place in named:
                raise answer
            continue
        for node in answer.nodes:
            before = nodes.get(node.full_name, node).node_id
            if before != node.node_id:
                ids = f"{before or 'none'} and {node.node_id or 'none'}"
                where = node_in_words(node.full_name)
                warnings.append(f"{where}: listed twice, with the ids {ids}; the node with the last id is used")
            nodes[node.full_name] = node
        warnings += [
            f"project {place[0]}: a node is left out: its name {name[:200]!r} does not have a known form"
            for name in answer.misnamed
        ]
        for location in answer.unreachable:
            lost = printable(location.rsplit("/", 1)[-1])
            failures[place[0], lost] = _out_of_reach(place[0], lost)
    if failures and (strict_permissions or failures.keys() >= answers.keys()):
        raise next(iter(failures.values()))
    listed = tuple(nodes[name] for name in sorted(nodes))
    return Listing(listed, tuple(failures), (*_in_words(failures), *warnings, *_shared_ids(listed)))


def _shared_ids(nodes: Iterable[Node]) -> list[str]:
    """Return a warning for each node with the same id as another node: host keys are bound to ids."""
    owners: dict[str, str] = {}
    pairs = [(node, owners.setdefault(node.node_id or node.full_name, node.full_name)) for node in nodes]
    return [
        f"{node_in_words(node.full_name)}: has the same id {node.node_id} as {node_in_words(owner)}, so ssh"
        " accepts the host keys of either for both"
        for node, owner in pairs
        if owner != node.full_name
    ]


def _out_of_reach(project: str, zone: str) -> ApiError:
    what = "the API could not reach this location"
    return ApiError(what, status="UNAVAILABLE", where=zones_in_words(project, zone), fix="try again later")


def _in_words(failures: Mapping[Place, ApiError]) -> list[str]:
    """Return one warning for each failure. Zones of the same project with the same failure share one warning."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (project, zone), failure in failures.items():
        alike.setdefault((project, failure.what, failure.fix), []).append(zone)
    return [
        f"{zones_in_words(project, *zones)}: not listed: {what}{f' ({fix})' if fix else ''}"
        for (project, what, fix), zones in alike.items()
    ]
