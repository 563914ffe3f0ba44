"""A fleet as one JSON document, for people who have an ssh key and no cloud credentials.

Whoever reads one writes parts of it into ssh_config and known_hosts, so that it is checked at least as strictly as
what the API answers: names, addresses and keys have their form or the document is refused.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tpu_ops.cloud.nodes import split_name
from tpu_ops.errors import CloudError
from tpu_ops.fleet.model import Node, workers_of
from tpu_ops.fleet.ssh_files import Keys, valid_key

#: What a document says it is, and its version; one of another version is refused.
FORMAT, VERSION = "tpu_ops snapshot", 1

#: How every document begins: what a login shell prints before it is no part of it.
BEGINNING = b'{\n "format": "tpu_ops snapshot"'

#: Largest document that is read, in bytes.
LARGEST = 64 * 1024 * 1024

#: Seconds by which the clock of the machine that published may be ahead.
AHEAD = 600.0

#: Seconds since 1970 before which nobody published: 2015.
EARLIEST = 1_420_070_400.0

_ALIAS = re.compile(r"tpu-[0-9]{1,20}-w[0-9]{1,6}")
_NUMBER = re.compile(r"[0-9]{0,20}")
_WORD = re.compile(r"[A-Z0-9_]{1,64}")
_INSTANCE = re.compile(r"(?:[a-z][a-z0-9-]{0,62})?")
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}")

#: Lengths, in characters: of names, of texts in one line, of descriptions and labels.
_NAME, _LINE, _PROSE = 100, 256, 65536


@dataclass(frozen=True)
class Document:
    """What is published of a fleet.

    Attributes:
        asked_at: When the API was asked, seconds since 1970.
        projects: Projects that it was asked for.
        zones: Zones that it was asked for; empty means all.
        nodes: The fleet's nodes, in the order of their full names.
        host_keys: Alias -> host keys of its workers.
    """

    asked_at: float
    projects: tuple[str, ...]
    zones: tuple[str, ...]
    nodes: tuple[Node, ...]
    host_keys: Mapping[str, Keys]

    def text(self) -> str:
        """Return the document as JSON."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "asked_at": self.asked_at,
            "scope": {"projects": sorted(self.projects), "zones": sorted(self.zones)},
            "nodes": [node.to_json() for node in self.nodes],
            "host_keys": {alias: dict(sorted(keys.items())) for alias, keys in sorted(self.host_keys.items())},
        }
        return json.dumps(value, indent=1) + "\n"


def document(
    asked_at: float,
    projects: tuple[str, ...],
    zones: tuple[str, ...],
    nodes: tuple[Node, ...],
    keys: Mapping[str, Keys],
) -> Document:
    """Return the document of some nodes, with those of the known keys that are their workers'."""
    own = {worker.host_key_alias for worker in workers_of(nodes) if worker.node.node_id}
    return Document(asked_at, projects, zones, nodes, {alias: keys[alias] for alias in sorted(own & keys.keys())})


def parse(data: bytes, where: str, now: float) -> Document:
    """Return the document that some bytes are.

    Args:
        data: At most LARGEST bytes.
        where: Where they are from, for an error.
        now: Seconds since 1970.

    Raises:
        CloudError: They are none, or something in it has not its form; names what.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _wrong("it is no JSON", where) from exc
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _wrong(f'it does not say "format": "{FORMAT}"', where)
    if value.get("version") != VERSION:
        version = value.get("version")
        raise CloudError(
            f"the snapshot has version {version!r:.20}, this program reads {VERSION}",
            where=where,
            fix="update tpu_ops here or where it is published",
        )
    try:
        return _document(value, now)
    except _WrongError as exc:
        raise _wrong(str(exc), where) from exc


class _WrongError(Exception):
    """Something has not its form; the text says what."""


def _wrong(what: str, where: str) -> CloudError:
    return CloudError(
        f"this is no snapshot of a fleet: {what}",
        where=where,
        fix="see that it is what `tpu_ops snapshot --publish` wrote",
    )


def _document(value: Mapping[str, Any], now: float) -> Document:
    asked_at = value.get("asked_at")
    if not isinstance(asked_at, int | float) or isinstance(asked_at, bool) or not _is_time(asked_at):
        raise _WrongError("asked_at is no time")
    if asked_at > now + AHEAD:
        raise _WrongError(f"it is of a time {(asked_at - now) / 60:.0f} min ahead of this machine's clock")
    scope = value.get("scope")
    if not isinstance(scope, dict) or not all(_list(scope.get(key), _place) for key in ("projects", "zones")):
        raise _WrongError("scope holds no lists of projects and zones")
    if not scope["projects"]:
        raise _WrongError("it names no project")
    entries = value.get("nodes")
    if not isinstance(entries, list):
        raise _WrongError("nodes is no list")
    nodes = [_node(entry, number) for number, entry in enumerate(entries)]
    _refuse_twice("name", (node.full_name for node in nodes))
    _refuse_twice("id", (node.node_id for node in nodes if node.node_id))
    return document(
        float(asked_at),
        tuple(scope["projects"]),
        tuple(scope["zones"]),
        tuple(sorted(nodes, key=lambda node: node.full_name)),
        _host_keys(value.get("host_keys")),
    )


def _is_time(seconds: float) -> bool:
    try:
        return math.isfinite(seconds) and seconds >= EARLIEST
    except OverflowError:  # an integer that no float holds
        return False


def _node(entry: Any, number: int) -> Node:
    """Return a node of the document; keys that a newer program added are passed over."""
    if not isinstance(entry, dict):
        raise _WrongError(f"node {number} is no node")
    values = {}
    for field in fields(Node):
        if field.name not in entry:
            continue
        if not _FORMS[field.name](entry[field.name]):
            raise _WrongError(f"node {number}: {field.name} has not the form it has in the API")
        values[field.name] = entry[field.name]
    try:
        node = Node.from_json(values)
    except ValueError as exc:
        raise _WrongError(f"node {number} is no node: one of its keys is missing") from exc
    if split_name(node.full_name) != (node.project, node.zone, node.name):
        raise _WrongError(f"node {number}: its name, project or zone has not the form it has in the API")
    count = node.worker_count
    if len(node.external_ips) not in (0, count) or len(node.instance_names) not in (0, count):
        raise _WrongError(f"node {number} has not as many addresses as workers")
    return node


def _host_keys(value: Any) -> dict[str, Keys]:
    if not isinstance(value, dict):
        raise _WrongError("host_keys is no mapping")
    for alias, keys in value.items():
        if not _ALIAS.fullmatch(alias):
            raise _WrongError("host_keys has a name that is no worker's")
        if not isinstance(keys, dict) or not keys:
            raise _WrongError(f"host_keys: {alias} has no keys")
        if not all(isinstance(blob, str) and valid_key(kind, blob) for kind, blob in keys.items()):
            raise _WrongError(f"host_keys: {alias} has what is no host key")
    return value


def _refuse_twice(what: str, values: Iterable[str]) -> None:
    values = list(values)
    if len(set(values)) < len(values):
        raise _WrongError(f"two nodes have one {what}")


# --- forms of what a node holds ------------------------------------------------------------------------------------


def _matches(form: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


def _list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(check(entry) for entry in value)


def _lists(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _list(value, check)


def _line(value: Any) -> bool:
    """A text in one line, without characters that a terminal takes for orders."""
    return isinstance(value, str) and len(value) <= _LINE and value.isprintable()


def _prose(value: Any) -> bool:
    """Any text, as the API may have it."""
    if not isinstance(value, str) or len(value) > _PROSE:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(_prose(key) and _prose(entry) for key, entry in value.items())


def _record(*keys: str) -> Callable[[Any], bool]:
    return lambda value: _texts(value) and set(value) == set(keys)


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _NAME


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**6


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _address(value: Any) -> bool:
    """No address, or one in the one form that each has."""
    if value == "":
        return True
    try:
        return isinstance(value, str) and "%" not in value and str(ipaddress.ip_address(value)) == value
    except ValueError:
        return False


_place = _matches(_PLACE)

#: What each field of a node may hold; names are looked at together.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "name": _name,
    "project": _name,
    "zone": _name,
    "node_id": _matches(_NUMBER),
    "accelerator_type": _line,
    "runtime_version": _line,
    "state": _matches(_WORD),
    "health": _matches(_WORD),
    "health_description": _prose,
    "internal_ips": _lists(_address),
    "external_ips": _lists(_address),
    "chips": _count,
    "chips_per_worker": _count,
    "topology": _line,
    "labels": _texts,
    "symptoms": _lists(_record("worker_id", "type", "details", "create_time")),
    "queued_resource": _line,
    "multislice": _flag,
    "preemptible": _flag,
    "spot": _flag,
    "reserved": _flag,
    "data_disks": _lists(_record("source", "mode")),
    "service_account": _line,
    "create_time": _line,
    "metadata_keys": _lists(_line),
    "instance_names": _lists(_matches(_INSTANCE)),
}
