"""The disks of Compute Engine as plain data: listed, created and deleted."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.node import Json
from tpu_ops.errors import UsageError, printable

#: Type of a new disk if the user names none.
DEFAULT_TYPE = "pd-balanced"

_TYPE = re.compile(r"(?:pd|hyperdisk)-[a-z0-9-]{1,40}")
#: Resource name of a disk in a zone; a node's data disk has this form, or a URL that ends with it.
_SOURCE = re.compile(r"projects/(?P<project>[^/]+)/zones/(?P<zone>[^/]+)/disks/(?P<name>[^/]+)")


class DiskPlace(NamedTuple):
    """What identifies a disk: its project, zone and short name."""

    project: str
    zone: str
    name: str

    @property
    def source(self) -> str:
        """The disk's resource name."""
        return f"projects/{self.project}/zones/{self.zone}/disks/{self.name}"

    @property
    def where(self) -> str:
        """The disk in words."""
        return f"disk {self.name}, zone {self.zone}, project {self.project}"


class Disk(NamedTuple):
    """A disk.

    Attributes:
        name: Short name.
        project: Project id.
        zone: The zone; for a regional disk, the region.
        size: Size in GB.
        kind: Type, as in ``pd-balanced``.
        status: As the API names it, for example ``READY``.
        users: Instances that use the disk, as ``projects/P/zones/Z/instances/I``.
        created: Creation time, RFC 3339.
        regional: Whether it is a regional disk, which nodes cannot use.
    """

    name: str
    project: str
    zone: str
    size: int
    kind: str
    status: str = "READY"
    users: tuple[str, ...] = ()
    created: str = ""
    regional: bool = False

    @property
    def place(self) -> DiskPlace:
        """What identifies the disk."""
        return DiskPlace(self.project, self.zone, self.name)


def disk_place(source: str) -> DiskPlace | None:
    """Return the disk that a node's data disk names; None if the name has another form."""
    match = _SOURCE.search(source)
    return DiskPlace(match["project"], match["zone"], match["name"]) if match else None


def check_type(kind: str) -> str:
    """Return a disk's type after checking its form.

    Raises:
        UsageError: No type has this form.
    """
    if not _TYPE.fullmatch(kind):
        fix = "use a type of Compute Engine, as in pd-balanced, pd-ssd or hyperdisk-balanced"
        raise UsageError(f"{kind!r:.80} is not a type of disks", where="--type", fix=fix)
    return kind


def list_disks(compute: Compute, project: str) -> tuple[list[Disk], list[str]]:
    """Return the disks of a project in all zones, and one sentence for each zone that could not be listed.

    Raises:
        ApiError: The API refused or did not answer.
    """
    found: list[Disk] = []
    warnings: list[str] = []
    where = f"disks of project {project}"
    # With partial success, a zone that does not answer does not hide the others.
    for page in compute.list(f"projects/{project}/aggregated/disks", where, {"returnPartialSuccess": "true"}):
        for scope, answer in page.get("items", {}).items():
            found += [_disk(project, raw) for raw in answer.get("disks", [])]
            code = answer.get("warning", {}).get("code", "NO_RESULTS_ON_PAGE")
            if code != "NO_RESULTS_ON_PAGE":
                warnings.append(f"project {project}, {printable(scope)}: disks not listed: {printable(str(code))}")
        warnings += [
            f"project {project}, {printable(str(one))}: disks not listed" for one in page.get("unreachables", [])
        ]
    return sorted(found, key=lambda disk: disk.place), warnings


def find(compute: Compute, place: DiskPlace) -> Disk | None:
    """Return a disk; None if it does not exist.

    Raises:
        ApiError: The API refused or did not answer.
    """
    try:
        return _disk(place.project, compute.call("GET", f"{zone_of(place)}/disks/{place.name}", place.where))
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return None
        raise


def create(compute: Compute, place: DiskPlace, *, size: int, kind: str) -> Json:
    """Begin to create a blank disk of this size in GB; return the operation.

    Raises:
        ApiError: The API refused or did not answer; ALREADY_EXISTS if a disk has this name.
    """
    zone = zone_of(place)
    body: Json = {"name": place.name, "sizeGb": str(size), "type": f"{zone}/diskTypes/{kind}"}
    return compute.call("POST", f"{zone}/disks", place.where, body=body)


def delete(compute: Compute, place: DiskPlace) -> Json:
    """Begin to delete a disk with its data; return the operation.

    Raises:
        ApiError: The API refused or did not answer.
    """
    return compute.call("DELETE", f"{zone_of(place)}/disks/{place.name}", place.where)


def zone_of(place: DiskPlace) -> str:
    """Return the path of a disk's zone."""
    return f"projects/{place.project}/zones/{place.zone}"


def _disk(project: str, raw: Any) -> Disk:
    return Disk(
        name=printable(str(raw.get("name", ""))),
        project=project,
        zone=printable(_last(raw.get("zone") or raw.get("region") or "")),
        size=int(raw.get("sizeGb") or 0),
        kind=printable(_last(raw.get("type") or "")),
        status=printable(str(raw.get("status", ""))),
        users=tuple(printable(str(user)[max(str(user).find("projects/"), 0) :]) for user in raw.get("users", [])),
        created=printable(str(raw.get("creationTimestamp", ""))),
        regional=not raw.get("zone"),
    )


def _last(url: str) -> str:
    return str(url).rpartition("/")[2]
