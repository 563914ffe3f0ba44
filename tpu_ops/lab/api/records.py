"""The records of the API's state: nodes, disks, queued resources and operations.

A record can be rendered for both API versions and for the state file. Renderings are cached until `touch` is called.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from google.longrunning import operations_pb2

from tpu_ops.cloud.accelerators import AcceleratorType, accelerator_type
from tpu_ops.lab.api import wire
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.names import Location, split
from tpu_ops.lab.api.wire import Json, Message
from tpu_ops.lab.backend import DataDisk, WorkerSpec

#: Port that the API reports for every network endpoint.
PORT = 8470


def by_number(name: str) -> str:
    """Return a resource's full name with the project's number instead of its id.

    The real API uses this form when a resource refers to another one. The lab derives the number from the project's id.
    """
    collection, project, rest = name.split("/", 2)
    return f"{collection}/{10**11 + zlib.crc32(project.encode())}/{rest}"


def timestamp(seconds: float) -> str:
    """Return a time in the API's format (RFC 3339, UTC)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Record:
    """A resource of the API's state, with its full name."""

    name: str

    def __post_init__(self) -> None:
        self._rendered: dict[str, Any] = {}

    @cached_property
    def location(self) -> Location:
        """The project and zone of the resource."""
        return split(self.name)[0]

    @cached_property
    def short(self) -> str:
        """The last part of the resource's name."""
        return split(self.name)[1]

    def touch(self) -> None:
        """Discard the cached renderings; to be called after each change of the record."""
        self._rendered.clear()

    def pb(self, api: str) -> Message:
        """Return the resource as a protobuf message of one API version. The message is cached: copy it to change it."""
        if api not in self._rendered:
            self._rendered[api] = self._render(api)
        return self._rendered[api]

    def text(self, api: str) -> str:
        """Return the resource as JSON text of one API version."""
        key = f"{api} text"
        if key not in self._rendered:
            self._rendered[key] = wire.json_text(self.pb(api))
        text: str = self._rendered[key]
        return text

    def file_text(self) -> str:
        """Return the record as JSON for the state file."""
        if "file" not in self._rendered:
            self._rendered["file"] = json.dumps({entry.name: getattr(self, entry.name) for entry in fields(self)})
        text: str = self._rendered["file"]
        return text

    @classmethod
    def from_file(cls, data: Json) -> Self:
        """Create a record from the parsed JSON of `file_text`.

        Raises:
            TypeError: A field is missing or unknown.
        """
        return cls(**data)

    def _render(self, api: str) -> Message:
        raise NotImplementedError


@dataclass
class NodeRecord(Record):
    """A TPU node.

    Attributes:
        body: The node's internal JSON, without state, health and endpoints.
        state: Name of the state in Node.State.
        internal_ips: The internal address of each worker; also kept while the node is stopped.
        external_ips: The external address of each worker; an empty string if the worker has none.
        health: Name of the node's health in Node.Health, or empty.
        health_description: The reason for bad health, or empty.
        disk_numbers: Source of each data disk -> the disk's number, which stays the same while the disk is attached.
    """

    body: Json
    state: str
    internal_ips: list[str]
    external_ips: list[str]
    health: str = ""
    health_description: str = ""
    disk_numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.number_disks()

    def number_disks(self) -> None:
        """Assign a number to every data disk: its current number, or else the lowest free number."""
        sources = [disk["sourceDisk"] for disk in self.body.get("dataDisks", [])]
        kept = {source: number for source, number in self.disk_numbers.items() if source in sources}
        free = (number for number in range(1, len(sources) + len(kept) + 1) if number not in kept.values())
        self.disk_numbers = {source: kept.get(source) or next(free) for source in sources}

    @property
    def accelerator(self) -> AcceleratorType:
        """The node's accelerator type."""
        return accelerator_type(self.body["acceleratorType"])

    @property
    def wants_external(self) -> bool:
        """Whether the node's workers have external addresses while they run."""
        return bool(self.body.get("networkConfig", {}).get("enableExternalIps", False))

    @property
    def queued(self) -> str:
        """Name of the queued resource that created the node, or empty."""
        name: str = self.body.get("queuedResource", "")
        return name

    def workers(self) -> list[WorkerSpec]:
        """Return the specification of each worker for the backend."""
        accelerator, peers = self.accelerator, tuple(self.internal_ips)
        chips = tuple(f"{accelerator.device_files}{chip}" for chip in range(accelerator.chips_per_worker))
        return [
            WorkerSpec(
                project=self.location.project,
                zone=self.location.zone,
                node=self.short,
                node_id=str(self.body["id"]),
                index=index,
                peers=peers,
                external_ip=self.external_ips[index],
                runtime_version=self.body["runtimeVersion"],
                accelerator_type=accelerator.name,
                chip_devices=chips,
                metadata=dict(self.body.get("metadata", {})),
                disks=self._disks(),
            )
            for index in range(len(peers))
        ]

    def _disks(self) -> tuple[DataDisk, ...]:
        disks = self.body.get("dataDisks", [])
        return tuple(
            DataDisk(disk["sourceDisk"], self.disk_numbers[disk["sourceDisk"]], disk.get("mode") == "READ_ONLY")
            for disk in disks
        )

    def _render(self, api: str) -> Message:
        body = {**self.body, "name": self.name, "state": self.state}
        body["apiVersion"] = "V2" if api == "v2" else "V2_ALPHA1"
        if self.queued:
            body["queuedResource"] = by_number(self.queued)
        if self.health:
            body |= {"health": self.health, "healthDescription": self.health_description}
        node = wire.parse(body, wire.message(api, "Node")())
        # A node that is still being created has no endpoints yet.
        if self.state != "CREATING":
            for internal, external in zip(self.internal_ips, self.external_ips, strict=True):
                endpoint = node.network_endpoints.add(ip_address=internal, port=PORT)
                if external:
                    endpoint.access_config.external_ip = external
        return node


@dataclass
class DiskRecord(Record):
    """A disk of Compute Engine. Its name has the form of all records, with ``locations`` where the API has ``zones``.

    Attributes:
        body: The fields that the state keeps: id, size, short name of the type, creation time, description, labels.
    """

    body: Json

    @property
    def source(self) -> str:
        """The disk's resource name, by which nodes refer to it."""
        return f"projects/{self.location.project}/zones/{self.location.zone}/disks/{self.short}"


@dataclass
class QueuedRecord(Record):
    """A queued resource.

    Attributes:
        body: The queued resource's internal JSON, without state.
        state: Name of the state in QueuedResourceState.State.
        since: When the state was set, in seconds since the epoch.
        initiator: Name of the state's initiator in QueuedResourceState.StateInitiator.
        error: The google.rpc.Status of a failed queued resource, as JSON.
    """

    body: Json
    state: str
    since: float
    initiator: str = "USER"
    error: Json | None = None

    def specs(self) -> list[tuple[str, Json, bool]]:
        """Return the full name and the JSON of every requested node, and whether the node is part of a multislice."""
        found = []
        for spec in self.body["tpu"]["nodeSpec"]:
            parent = spec.get("parent") or self.location.name
            if (several := spec.get("multisliceParams")) is not None:
                prefix = several.get("nodeIdPrefix") or self.short
                shorts = [f"{prefix}-{index}" for index in range(several["nodeCount"])]
            else:
                shorts = [spec["nodeId"]]
            found += [(f"{parent}/nodes/{short}", spec["node"], "multisliceParams" in spec) for short in shorts]
        return found

    def _render(self, api: str) -> Message:
        state: Json = {"state": self.state, "stateInitiator": self.initiator}
        data = f"{self.state.lower()}Data"
        if self.state == "FAILED":
            state[data] = {"error": self.error}
        elif self.state != "WAITING_FOR_RESOURCES":
            state[data] = {}
        return wire.queued_message(api, {**self.body, "name": self.name, "state": state})


@dataclass
class OperationRecord(Record):
    """A long-running operation.

    Attributes:
        api: API version of the request that started the operation; its metadata and result have the same version.
        verb: What the operation does, for example ``create``.
        target: Full name of the resource that the operation changes.
        created: When the operation was created, in seconds since the epoch.
        ended: When the operation ended, in seconds since the epoch; 0 while the operation runs.
        args: Values that the function of the operation needs to continue after a restart.
        request_id: The client's idempotency key, or empty.
        cancel_requested: Whether a client has asked to cancel the operation.
        error: The google.rpc.Status of a failed operation, as JSON.
        response: JSON of the operation's result.
    """

    api: str
    verb: str
    target: str
    created: float
    ended: float = 0
    args: Json = field(default_factory=dict)
    request_id: str = ""
    cancel_requested: bool = False
    error: Json | None = None
    response: Json | None = None

    @property
    def done(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self.ended > 0

    def finish(self, now: float, *, response: Json | None = None, failure: ApiError | None = None) -> None:
        """End the operation with a result or an error."""
        self.ended, self.response = now, response
        self.error = {"code": failure.code.number, "message": failure.message} if failure else None
        self.touch()

    def _render(self, api: str) -> Message:
        operation = operations_pb2.Operation(name=self.name, done=self.done)
        metadata = {
            "createTime": timestamp(self.created),
            "target": self.target,
            "verb": self.verb,
            "cancelRequested": self.cancel_requested,
            "apiVersion": self.api,
        }
        if self.done:
            metadata["endTime"] = timestamp(self.ended)
        operation.metadata.Pack(wire.parse(metadata, wire.message(self.api, "OperationMetadata")()))
        if self.error is not None:
            operation.error.code, operation.error.message = self.error["code"], self.error["message"]
        elif self.response is not None:
            wire.parse(self.response, operation.response)
        return operation
