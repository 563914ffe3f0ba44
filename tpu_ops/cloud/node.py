"""A node and its workers as plain data. All packages use this form of the fleet.

`tpu_ops.cloud` converts API objects to this form; no other package sees a protobuf. `Node.to_json` converts it to JSON
types for snapshots and inventory caches.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from tpu_ops import texts
from tpu_ops.cloud import aliases, forms
from tpu_ops.cloud.names import split_name

Json = dict[str, Any]

#: States of a node whose workers can be reached and run commands (google.cloud.tpu.v2.Node.State).
SERVING_STATES = ("READY",)
#: States that a node does not leave by itself, and in which nothing runs on its workers.
TAKEN_STATES = ("PREEMPTED", "TERMINATED", "STOPPED")


def region_of(zone: str) -> str:
    """Return the region of a zone: the zone's name without its last part."""
    return zone.rsplit("-", 1)[0]


class Node(NamedTuple):
    """One TPU VM of the API, with all its workers.

    Attributes:
        name: Short name, unique within project and zone.
        project: Project id.
        zone: For example ``us-central2-b``.
        node_id: The API's numeric id, a string of digits. A later node of the same name has another id.
        accelerator_type: For example ``v4-32``.
        runtime_version: For example ``tpu-ubuntu2204-base``.
        state: Name of google.cloud.tpu.v2.Node.State, for example ``READY``.
        health: Name of google.cloud.tpu.v2.Node.Health.
        internal_ips: Internal address of each worker in order; empty string if it has none.
        external_ips: External address of each worker in order; empty string if it has none.
        chips: Chips of the whole slice; 0 if the table does not contain the accelerator type.
        chips_per_worker: Chips of each worker; 0 if the table does not contain the accelerator type.
        topology: For example ``2x2x4``; empty if unknown.
        labels: The API's labels: data, never a template.
        symptoms: One ``{"worker_id", "type", "details", "create_time"}`` per symptom.
        queued_resource: Short name of the queued resource that created the node, or empty.
        multislice: Whether the node is one of several slices that a queued resource created together.
        preemptible: Whether the node can be preempted (preemptible or spot).
        data_disks: One ``{"source", "mode"}`` per data disk.
        service_account: E-mail of the service account, or empty.
        create_time: RFC 3339, UTC.
        metadata_keys: Names of the node's metadata entries, without the values, which may be secret.
        instance_names: Name of each worker as a Compute Engine instance, in order; empty if not requested.
    """

    name: str
    project: str
    zone: str
    node_id: str
    accelerator_type: str
    runtime_version: str = ""
    state: str = "STATE_UNSPECIFIED"
    health: str = "HEALTH_UNSPECIFIED"
    health_description: str = ""
    internal_ips: tuple[str, ...] = ()
    external_ips: tuple[str, ...] = ()
    chips: int = 0
    chips_per_worker: int = 0
    topology: str = ""
    labels: Mapping[str, str] = MappingProxyType({})
    symptoms: tuple[Json, ...] = ()
    queued_resource: str = ""
    multislice: bool = False
    preemptible: bool = False
    spot: bool = False
    reserved: bool = False
    data_disks: tuple[Json, ...] = ()
    service_account: str = ""
    create_time: str = ""
    metadata_keys: tuple[str, ...] = ()
    instance_names: tuple[str, ...] = ()

    @property
    def slice_index(self) -> int | None:
        """Index of this slice, which its queued resource named ``<prefix>-<index>``; None for other nodes."""
        index = self.name.rpartition("-")[2]
        return int(index) if self.multislice and index.isascii() and index.isdecimal() else None

    @property
    def region(self) -> str:
        """The region of the node's zone."""
        return region_of(self.zone)

    @property
    def tier(self) -> str:
        """How the node's capacity is provided: ``spot`` (also for preemptible nodes), ``reserved`` or ``on-demand``."""
        return tier(spot=self.preemptible or self.spot, reserved=self.reserved)

    def age(self, now: float) -> float | None:
        """Return the seconds since the node was created; None if the API does not tell.

        Args:
            now: The present time, in seconds since 1970.
        """
        created = texts.moment(self.create_time)
        return None if created is None else max(0.0, now - created)

    @property
    def worker_count(self) -> int:
        """Number of workers for which the API lists endpoints."""
        return len(self.internal_ips)

    @property
    def full_name(self) -> str:
        """The node's resource name in the API."""
        return f"projects/{self.project}/locations/{self.zone}/nodes/{self.name}"

    def to_json(self) -> Json:
        """Return the node as a dictionary of JSON types."""
        copies = {key: tuple(map(dict, getattr(self, key))) for key in ("symptoms", "data_disks")}
        return {**self._asdict(), **copies, "labels": dict(self.labels)}

    @classmethod
    def from_json(cls, data: Json) -> Self:
        """Return the node, given the result of `to_json` or the parsed JSON text of it.

        The text may be written by other people and could contain ssh options: every field is checked against its form.

        Raises:
            ValueError: A field does not have its form; the message names the field.
        """
        if not isinstance(data, dict):
            raise ValueError("this is not a node")  # noqa: TRY004 - one error for all invalid data
        values: Json = {}
        for key, value in data.items():
            form = FORMS.get(key)
            if form is None:
                raise ValueError(f"{key!r:.80} is not a property of a node")
            if not form(value):
                raise ValueError(f"{key} does not have the form that it has in the API")
            values[key] = tuple(value) if type(value) is list else value
        try:
            made = cls(**values)
        except TypeError as exc:
            raise ValueError("one of its keys is missing") from exc
        if split_name(made.full_name) != (made.project, made.zone, made.name):
            raise ValueError("the node's name, project or zone does not have the form that it has in the API")
        count = made.worker_count
        if len(made.external_ips) not in (0, count) or len(made.instance_names) not in (0, count):
            raise ValueError("the node's number of addresses differs from its number of workers")
        return made


#: The form of each field of a node.
FORMS: dict[str, forms.Form] = {
    "name": forms.name,
    "project": forms.name,
    "zone": forms.name,
    "node_id": forms.empty_or(forms.ID),
    "accelerator_type": forms.line,
    "runtime_version": forms.line,
    "state": forms.matches(forms.WORD),
    "health": forms.matches(forms.WORD),
    "health_description": forms.prose,
    "internal_ips": forms.addresses,
    "external_ips": forms.addresses,
    "chips": forms.count,
    "chips_per_worker": forms.count,
    "topology": forms.line,
    "labels": forms.mapping,
    "symptoms": forms.lists(forms.record("worker_id", "type", "details", "create_time")),
    "queued_resource": forms.line,
    "multislice": forms.flag,
    "preemptible": forms.flag,
    "spot": forms.flag,
    "reserved": forms.flag,
    "data_disks": forms.lists(forms.record("source", "mode")),
    "service_account": forms.line,
    "create_time": forms.line,
    "metadata_keys": forms.lists(forms.line),
    "instance_names": forms.lists(forms.empty_or(forms.INSTANCE)),
}


def tier(*, spot: bool, reserved: bool = False) -> str:
    """Return ``spot``, ``reserved`` or ``on-demand``."""
    return "spot" if spot else "reserved" if reserved else "on-demand"


def without_workers(node: Node) -> str:
    """Return words about a node without workers that follow its name in a sentence."""
    if node.state in SERVING_STATES:
        return f"is {node.state}, but the API lists no network endpoints for it"
    return f"is in state {node.state} and has no workers{' yet' if node.state == 'CREATING' else ''}"


class Worker(NamedTuple):
    """One host VM of a node.

    Attributes:
        host: Inventory host name, for example ``pod-w0``.
        node: The node that the worker belongs to.
        index: Number of the worker in its node, from 0, in the order of the API's network endpoints.
    """

    host: str
    node: Node
    index: int  # type: ignore[assignment]  # replaces tuple.index, which is not used

    @property
    def label(self) -> str:
        """The node's unique short label (`node_labels`), for example ``pod``."""
        return label_of(self.host)

    @property
    def internal_ip(self) -> str:
        """Internal address of the worker, or the empty string."""
        return self.node.internal_ips[self.index]

    @property
    def external_ip(self) -> str:
        """External address of the worker, or the empty string."""
        return self.node.external_ips[self.index] if self.index < len(self.node.external_ips) else ""

    @property
    def instance_name(self) -> str:
        """Name of the worker as a Compute Engine instance; the empty string if unknown."""
        return self.node.instance_names[self.index] if self.index < len(self.node.instance_names) else ""

    @property
    def host_key_alias(self) -> str:
        """Alias of this worker's keys in known_hosts: bound to the node's id, not to its address."""
        return aliases.of(self.node.node_id, self.index)


def label_of(host: str) -> str:
    """Given a worker's inventory host name, return its node's label."""
    return host.rsplit("-w", 1)[0]


def node_labels(nodes: Iterable[Node]) -> dict[str, str]:
    """Return the unique short label of each node by its full name. The argument is all listed nodes, before any filter.

    The label is the node's name if it is unique. Nodes that share a name become ``<name>.<zone>``, and
    ``<name>.<zone>.<project>`` if nodes still share that. A dot replaces the colon of a project such as
    ``example.com:p``, since neither patterns of Ansible nor paths of rsync can contain a colon.
    """
    nodes = list(nodes)
    by_name = Counter(node.name for node in nodes)
    by_zone = Counter((node.name, node.zone) for node in nodes)
    by_project = Counter((node.name, node.zone, _dotted(node.project)) for node in nodes)
    labels = {}
    for node in nodes:
        if by_name[node.name] == 1:
            labels[node.full_name] = node.name
        elif by_zone[node.name, node.zone] == 1:
            labels[node.full_name] = f"{node.name}.{node.zone}"
        else:
            dotted = _dotted(node.project)
            project = dotted if by_project[node.name, node.zone, dotted] == 1 else node.project
            labels[node.full_name] = f"{node.name}.{node.zone}.{project}"
    return labels


def _dotted(project: str) -> str:
    return project.replace(":", ".")


def workers_of(nodes: Iterable[Node], labels: Mapping[str, str] | None = None) -> list[Worker]:
    """Return every worker of some nodes, sorted by node label (`texts.natural`) and index.

    Args:
        nodes: All listed nodes, or some of them.
        labels: `node_labels` of all listed nodes; can be omitted if ``nodes`` are all listed nodes.
    """
    nodes = list(nodes)
    labels = node_labels(nodes) if labels is None else labels
    return [
        Worker(host=f"{labels[node.full_name]}-w{index}", node=node, index=index)
        for node in sorted(nodes, key=lambda node: texts.natural(labels[node.full_name]))
        for index in range(node.worker_count)
    ]
