"""Queued resources as plain data: requests for nodes that the API fulfils when it has capacity."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tpu_ops.cloud import parsing
from tpu_ops.cloud.accelerators import type_of
from tpu_ops.cloud.node import tier
from tpu_ops.errors import printable

#: States of a queued resource (google.cloud.tpu.v2.QueuedResourceState.State).
STATES = (
    "CREATING",
    "ACCEPTED",
    "PROVISIONING",
    "FAILED",
    "DELETING",
    "ACTIVE",
    "SUSPENDING",
    "SUSPENDED",
    "WAITING_FOR_RESOURCES",
)
#: States of a queued resource that only uses quota: it has no node and never gets one.
HUSK_STATES = ("FAILED", "SUSPENDED")

_NAME = re.compile(
    r"projects/(?P<project>[a-z0-9][a-z0-9.:-]{0,99})/locations/(?P<zone>[a-z][a-z0-9-]{0,99})"
    r"/queuedResources/(?P<name>[a-z][a-z0-9_-]{0,99})"
)


class QueuedNode(NamedTuple):
    """A node that a queued resource requests.

    Attributes:
        name: The node's short name.
        accelerator_type: As in ``v4-32``.
    """

    name: str
    accelerator_type: str


class QueuedResource(NamedTuple):
    """A queued resource.

    Attributes:
        name: Short name, unique within project and zone.
        project: Project id.
        zone: The zone.
        state: Name of google.cloud.tpu.v2.QueuedResourceState.State.
        created: Creation time, RFC 3339, UTC; empty if unknown.
        spot: Whether it requests spot nodes.
        nodes: The requested nodes.
        error: Why it has failed, or empty.
        reserved: Whether it requests nodes of a reservation.
    """

    name: str
    project: str
    zone: str
    state: str
    created: str = ""
    spot: bool = False
    nodes: tuple[QueuedNode, ...] = ()
    error: str = ""
    reserved: bool = False

    @property
    def full_name(self) -> str:
        """The resource name in the API."""
        return f"projects/{self.project}/locations/{self.zone}/queuedResources/{self.name}"

    @property
    def tier(self) -> str:
        """``spot``, ``reserved`` or ``on-demand``."""
        return tier(spot=self.spot, reserved=self.reserved)

    @property
    def is_husk(self) -> bool:
        """Whether the queued resource only uses quota: it has failed or was suspended."""
        return self.state in HUSK_STATES


def parsed(raw: Any) -> QueuedResource | None:
    """Convert a raw google.cloud.tpu.v2.QueuedResource; None if its name does not have the documented form."""
    match = _NAME.fullmatch(raw.name)
    if match is None:
        return None
    nodes: list[QueuedNode] = []
    schedules = [spec.node.scheduling_config for spec in raw.tpu.node_spec]
    for spec in raw.tpu.node_spec:
        config = spec.node.accelerator_config
        kind = spec.node.accelerator_type or type_of(parsing.enum_name(config, "type_"), config.topology)
        several = spec.multislice_params
        if several.node_count:
            prefix = several.node_id_prefix or match["name"]
            names = [f"{prefix}-{index}" for index in range(several.node_count)]
        else:
            names = [spec.node_id]
        nodes += [QueuedNode(printable(name), printable(kind)) for name in names]
    return QueuedResource(
        name=match["name"],
        project=match["project"],
        zone=match["zone"],
        state=parsing.enum_name(raw.state, "state", "STATE_UNSPECIFIED"),
        created=parsing.time_of(raw, "create_time"),
        spot=raw.HasField("spot") or any(one.spot or one.preemptible for one in schedules),
        nodes=tuple(nodes),
        error=printable(raw.state.failed_data.error.message),
        reserved=bool(raw.reservation_name) or any(one.reserved for one in schedules),
    )
