"""Converts the protobuf of a node into a `Node` with checked fields.

Names and addresses are used in file names, ssh configuration and group names, so only those of the documented form are
accepted. Fields that are printed become one line without control characters; labels and descriptions can be any text.
The resulting node always has the form that a published snapshot requires (`tpu_ops.fleet.publishing.documents`).

The raw protobuf message is read, since reading the client library's wrapper takes fifteen times as long.
"""

from __future__ import annotations

from typing import Any

from tpu_ops.cloud import forms
from tpu_ops.cloud.accelerators import AcceleratorType, accelerator_type
from tpu_ops.cloud.names import split_name
from tpu_ops.cloud.node import Node
from tpu_ops.errors import CloudError, printable


def node(raw: Any) -> Node:
    """Convert a raw google.cloud.tpu.v2.Node to a `Node`, without the values of its metadata, which may be secret.

    Raises:
        CloudError: The node's resource name does not have the documented form.
    """
    parts = split_name(raw.name)
    if parts is None:
        raise CloudError(
            "the API returned a node whose name does not have the documented form",
            where=f"node {raw.name!r}",
            fix="check that the endpoint is the Cloud TPU API, and whether there is a newer tpu_ops",
        )
    project, zone, name = parts
    kind, endpoints, scheduling = _kind(raw.accelerator_type), raw.network_endpoints, raw.scheduling_config
    interfaces, number = len(raw.network_configs), str(raw.id)
    return Node(
        name=name,
        project=project,
        zone=zone,
        node_id=number if raw.id and forms.ID.fullmatch(number) else "",
        accelerator_type=_line(raw.accelerator_type),
        runtime_version=_line(raw.runtime_version),
        state=enum_name(raw, "state", "STATE_UNSPECIFIED"),
        health=enum_name(raw, "health", "HEALTH_UNSPECIFIED"),
        health_description=_prose(raw.health_description),
        internal_ips=_addresses([one.ip_address for one in endpoints], interfaces, kind),
        external_ips=_addresses([one.access_config.external_ip for one in endpoints], interfaces, kind),
        chips=kind.chips if kind else 0,
        chips_per_worker=kind.chips_per_worker if kind else 0,
        topology=_line(raw.accelerator_config.topology) or (kind.topology if kind else ""),
        labels={_prose(key): _prose(value) for key, value in sorted(raw.labels.items())},
        symptoms=tuple(_symptom(symptom) for symptom in raw.symptoms),
        queued_resource=_line(raw.queued_resource.rsplit("/", 1)[-1]),
        multislice=raw.multislice_node,
        preemptible=scheduling.preemptible or scheduling.spot,
        spot=scheduling.spot,
        reserved=scheduling.reserved,
        data_disks=tuple(
            {"source": _prose(disk.source_disk), "mode": enum_name(disk, "mode")} for disk in raw.data_disks
        ),
        service_account=_line(raw.service_account.email),
        create_time=time_of(raw, "create_time"),
        metadata_keys=tuple(sorted(map(_line, raw.metadata))),
    )


def has_workers(node: Any) -> bool:
    """Return whether a raw google.cloud.tpu.v2.Node has workers that a user could log in to.

    The API also lists nodes of API version 1, which have no such workers; gcloud leaves these nodes out as well.
    """
    return not enum_name(node, "api_version").startswith("V1")


def _kind(name: str) -> AcceleratorType | None:
    """Return the properties of an accelerator type; None if the table does not contain it."""
    try:
        return accelerator_type(name)
    except ValueError:
        return None


def _line(text: str) -> str:
    return printable(text)[: forms.LINE]


def _prose(text: str) -> str:
    return text[: forms.PROSE]


def _symptom(raw: Any) -> dict[str, str]:
    return {
        "worker_id": _prose(raw.worker_id),
        "type": enum_name(raw, "symptom_type"),
        "details": _prose(raw.details),
        "create_time": time_of(raw, "create_time"),
    }


def _addresses(listed: list[str], interfaces: int, kind: AcceleratorType | None) -> tuple[str, ...]:
    """Return one address per worker. With several network interfaces, the endpoints of a worker are adjacent."""
    several = interfaces > 1 and len(listed) % interfaces == 0
    step = interfaces if several and not (kind and len(listed) == kind.workers) else 1
    return tuple(forms.address(text) for text in listed[::step])


def enum_name(raw: Any, field: str, unknown: str = "") -> str:
    """Return the name of the value that an enum field of a message has.

    Args:
        raw: The message.
        field: The name of the enum field.
        unknown: The result for an invalid number. A valid number without a name in the installed client library is
            returned as digits.
    """
    number = getattr(raw, field)
    value = raw.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    word = value.name if value else str(number)
    return word if not unknown or forms.WORD.fullmatch(word) else unknown


def time_of(message: Any, field: str) -> str:
    """Return a time field of a message as RFC 3339; empty if the time is missing or out of range."""
    try:
        return str(getattr(message, field).ToJsonString()) if message.HasField(field) else ""
    except ValueError:
        return ""
