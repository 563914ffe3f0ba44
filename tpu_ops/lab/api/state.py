"""The API's state in memory: the resources by name, and the pools of workers' addresses."""

from __future__ import annotations

import bisect
import json
import secrets
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any, Generic, TypeVar

from tpu_ops.lab.api.addresses import RESERVED, Pool
from tpu_ops.lab.api.capacity import Capacity
from tpu_ops.lab.api.compute_projects import Project
from tpu_ops.lab.api.errors import ApiError, not_found
from tpu_ops.lab.api.names import ANY_LOCATION, Location
from tpu_ops.lab.api.records import DiskRecord, NodeRecord, OperationRecord, QueuedRecord, Record
from tpu_ops.lab.api.store import FORMAT, FORMAT_VERSION
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import Networks

R = TypeVar("R", bound=Record)


class Collection(Generic[R]):
    """All records of one kind, for example nodes, sorted by full name."""

    def __init__(self, records: list[R]) -> None:
        self._records = {record.name: record for record in records}
        self._names = sorted(self._records)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[R]:
        return iter([self._records[name] for name in self._names])

    def get(self, name: str) -> R:
        """Return the record with this full name.

        Raises:
            ApiError: NOT_FOUND; no record has this name.
        """
        record = self._records.get(name)
        if record is None:
            raise not_found(name)
        return record

    def find(self, name: str) -> R | None:
        """Return the record with this full name; None if it does not exist."""
        return self._records.get(name)

    def add(self, record: R) -> R:
        """Add a record and return it; no other record must have its name."""
        self._records[record.name] = record
        bisect.insort(self._names, record.name)
        return record

    def remove(self, name: str) -> None:
        """Remove the record with this full name, if it exists."""
        if self._records.pop(name, None) is not None:
            del self._names[bisect.bisect_left(self._names, name)]

    def below(self, location: Location, after: str = "") -> Iterator[R]:
        """Yield a location's records whose names come after the given name; the zone ``-`` means all zones."""
        prefix = f"projects/{location.project}/locations/"
        if location.zone != ANY_LOCATION:
            prefix += f"{location.zone}/"
        for index in range(bisect.bisect_right(self._names, max(prefix, after)), len(self._names)):
            name = self._names[index]
            if not name.startswith(prefix):
                return
            yield self._records[name]


class State:
    """All resources of the lab's cloud.

    Args:
        networks: The networks of the workers' addresses.
        data: The parsed JSON of the state file; None for a new state.

    Raises:
        ValueError: The JSON is no valid state.
    """

    def __init__(self, networks: Networks, data: Json | None = None) -> None:
        data = data or {}
        try:
            self.nodes = Collection([NodeRecord.from_file(entry) for entry in data.get("nodes", [])])
            self.queued = Collection([QueuedRecord.from_file(entry) for entry in data.get("queued_resources", [])])
            self.operations = Collection([OperationRecord.from_file(entry) for entry in data.get("operations", [])])
            self.disks = Collection([DiskRecord.from_file(entry) for entry in data.get("disks", [])])
            self.projects = {name: Project(entry) for name, entry in data.get("projects", {}).items()}
            self.capacity = Capacity.from_file(data.get("capacity", {}))
            for node in self.nodes:
                node.workers()
            for queued in self.queued:
                queued.specs()
            internal = [address for node in self.nodes for address in node.internal_ips]
            external = [address for node in self.nodes for address in node.external_ips if address]
            self.internal = Pool(networks.internal, internal, rotate=False)
            self.external = Pool(networks.external, external, int(data.get("next_external", RESERVED)), rotate=True)
        except (ApiError, TypeError, KeyError, AttributeError, IndexError, ValueError) as failure:
            raise ValueError(f"the file is damaged ({type(failure).__name__}: {failure})") from failure

    def renumber(self, networks: Networks) -> None:
        """Assign new addresses to workers whose addresses are outside these networks.

        The lab's networks can have other subnets after they were created again.
        """
        for node in self.nodes:
            if any(IPv4Address(address) not in networks.internal for address in node.internal_ips):
                node.internal_ips = self.internal.take(len(node.internal_ips))
                node.touch()
            if any(IPv4Address(address) not in networks.external for address in node.external_ips if address):
                node.external_ips = self.external.take(len(node.external_ips))
                node.touch()

    def text(self) -> str:
        """Return the content of the state file; only changed records are rendered again."""
        parts: dict[str, Any] = {
            "nodes": self.nodes,
            "queued_resources": self.queued,
            "operations": self.operations,
            "disks": self.disks,
        }
        lists = [
            f'"{key}": [' + ",\n".join(record.file_text() for record in records) + "]" for key, records in parts.items()
        ]
        head = {"format": FORMAT, "version": FORMAT_VERSION, "next_external": self.external.cursor}
        lists.append(f'"projects": {json.dumps({name: one.json() for name, one in self.projects.items()})}')
        lists.append(f'"capacity": {json.dumps(self.capacity.json())}')
        return json.dumps(head)[:-1] + ",\n" + ",\n".join(lists) + "}\n"

    def new_node_id(self) -> str:
        """Return a new node's id: a random positive int64 as decimal digits, so that no two ids are equal."""
        return str(secrets.randbelow(2**63 - 10**17) + 10**17)

    def new_operation_name(self, location: Location) -> str:
        """Return an unused name for an operation."""
        return location.child("operations", f"operation-{secrets.token_hex(12)}")
