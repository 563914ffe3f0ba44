"""Parsing of resource names: ``projects/P``, ``projects/P/locations/Z`` and the names of resources below these."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_ops.lab.api.errors import invalid

#: The zone in a request that lists all zones of a project.
ANY_LOCATION = "-"

_LOCATION = re.compile(r"^projects/(?P<project>[^/]+)/locations/(?P<zone>[^/]+)$")
_RESOURCE = re.compile(r"^(?P<parent>projects/[^/]+/locations/[^/]+)/(?P<collection>[A-Za-z]+)/(?P<id>[^/]+)$")
_NODE_ID = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
_QUEUED_ID = re.compile(r"^[A-Za-z0-9_.~+%-]{1,128}$")


@dataclass(frozen=True)
class Location:
    """A zone of a project. The zone is ``-`` in a request that lists all zones."""

    project: str
    zone: str

    @property
    def name(self) -> str:
        """The location's resource name."""
        return f"projects/{self.project}/locations/{self.zone}"

    def child(self, collection: str, short: str) -> str:
        """Return the full name of a resource in this location."""
        return f"{self.name}/{collection}/{short}"


def location(name: str, field: str = "parent") -> Location:
    """Split ``projects/P/locations/Z`` into project and zone.

    Raises:
        ApiError: INVALID_ARGUMENT; the name has another form.
    """
    match = _LOCATION.match(name)
    if match is None:
        raise invalid(f"{field}: {name!r} does not have the form projects/PROJECT/locations/ZONE")
    return Location(match["project"], match["zone"])


def resource(name: str, collection: str, field: str = "name") -> tuple[Location, str]:
    """Split a resource's full name into its location and its short name.

    Raises:
        ApiError: INVALID_ARGUMENT; the name has another form, or is not in this collection (for example ``nodes``).
    """
    match = _RESOURCE.match(name)
    if match is None or match["collection"] != collection:
        raise invalid(f"{field}: {name!r} does not have the form projects/PROJECT/locations/ZONE/{collection}/NAME")
    return location(match["parent"], field), match["id"]


def split(name: str) -> tuple[Location, str]:
    """Split a resource's full name into its location and its short name, if the name is known to be valid."""
    parent, _, short = name.rsplit("/", 2)
    return location(parent), short


def check_node_id(short: str, field: str = "node_id") -> str:
    """Return the short name of a new node if the name is valid (a DNS label).

    Raises:
        ApiError: INVALID_ARGUMENT; the name is not valid.
    """
    if not _NODE_ID.match(short):
        raise invalid(f"{field}: {short!r} must be 1 to 63 characters of a-z, 0-9 and '-', and begin with a letter")
    return short


def check_queued_id(short: str) -> str:
    """Return the short name of a new queued resource if the name is valid.

    Raises:
        ApiError: INVALID_ARGUMENT; the name is not valid.
    """
    if not _QUEUED_ID.match(short):
        raise invalid(f"queued_resource_id: {short!r} must be 1 to 128 characters of A-Z, a-z, 0-9 and _.~+%-")
    return short
