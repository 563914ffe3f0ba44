"""The resources of the state. Each one can be rendered for both API versions and for the state file.

Renderings are cached until `touch` reports a change of the record.
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
    """Return a resource name in the form that the service uses for references from other resources.

    This form contains the project's number, which is derived from the project's id here.
    """
    collection, project, rest = name.split("/", 2)
    return f"{collection}/{10**11 + zlib.crc32(project.encode())}/{rest}"


def timestamp(seconds: float) -> str:
    """Return a time in the API's format (RFC 3339, UTC)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Record:
    """A resource under its full name."""

    name: str

    def __post_init__(self) -> None:
        self._rendered: dict[str, Any] = {}

    @cached_property
    def location(self) -> Location:
        """The project and zone of the resource."""
        return split(self.name)[0]

    @cached_property
    def short(self) -> str:
        """The last part of the name."""
        return split(self.name)[1]

    def touch(self) -> None:
        """Discard the cached renderings because the record has changed."""
        self._rendered.clear()

    def pb(self, api: str) -> Message:
        """Return the resource as a protobuf of one API version. It is shared: copy it before changing it."""
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
        """Return the record from the parsed result of `file_text`.

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
        body: Internal form of the Node, without state, health and endpoints.
        state: Name of Node.State.
        internal_ips: One address for each worker, from creation to deletion.
        external_ips: One address, or an empty string, for each worker.
        health: Name of Node.Health, or empty.
        health_description: The reason for bad health, or empty.
        disk_numbers: Number of each data disk by its source, unchanged while the disk is attached.
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
        """Give every data disk a number: its current one, or the lowest free one."""
        sources = [disk["sourceDisk"] for disk in self.body.get("dataDisks", [])]
        kept = {source: number for source, number in self.disk_numbers.items() if source in sources}
        free = (number for number in range(1, len(sources) + len(kept) + 1) if number not in kept.values())
        self.disk_numbers = {source: kept.get(source) or next(free) for source in sources}

    @property
    def accelerator(self) -> AcceleratorType:
        """The table entry of the accelerator type."""
        return accelerator_type(self.body["acceleratorType"])

    @property
    def wants_external(self) -> bool:
        """Whether running workers have external addresses."""
        return bool(self.body.get("networkConfig", {}).get("enableExternalIps", False))

    @property
    def queued(self) -> str:
        """Name of the queued resource that created the node, or empty."""
        name: str = self.body.get("queuedResource", "")
        return name

    def workers(self) -> list[WorkerSpec]:
        """Return the workers in the backend's form."""
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
class QueuedRecord(Record):
    """A queued resource.

    Attributes:
        body: Internal form of the QueuedResource, without state.
        state: Name of QueuedResourceState.State.
        since: When it entered this state, in seconds since the epoch.
        initiator: Name of QueuedResourceState.StateInitiator.
        error: The google.rpc.Status of a failed queued resource.
    """

    body: Json
    state: str
    since: float
    initiator: str = "USER"
    error: Json | None = None

    def specs(self) -> list[tuple[str, Json, bool]]:
        """Return full name, body and whether it is one of several slices, for every requested node."""
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
        api: API version of the request that started it, also used for its metadata and result.
        verb: The verb, for example ``create``.
        target: Full name of the resource.
        created: When it was created, in seconds since the epoch.
        ended: When it ended, in seconds since the epoch; 0 while it runs.
        args: Values that its effect needs to continue after a restart.
        request_id: The client's idempotency key, or empty.
        cancel_requested: Whether a client has asked to cancel it.
        error: The google.rpc.Status of a failed operation.
        response: JSON form of its result.
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
