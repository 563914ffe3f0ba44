"""The published snapshot: a fleet as one JSON document, for people with an ssh key and without cloud credentials.

Names, addresses and keys of a snapshot are written into ssh_config and known_hosts. A snapshot is therefore checked as
strictly as an answer of the API: a document with an invalid name, address or key is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud import aliases, forms
from tpu_ops.cloud.node import FORMS, Node, workers_of
from tpu_ops.errors import CloudError
from tpu_ops.protocol.values import is_number
from tpu_ops.ssh.known_hosts import Keys, valid_key

#: Format and version of a document; documents of other versions are rejected.
FORMAT, VERSION = "tpu_ops snapshot", 1

#: Beginning of every document. Anything that a login shell prints before this text is ignored.
BEGINNING = b'{\n "format": "tpu_ops snapshot"'

#: Maximum size of a document, in bytes.
LARGEST = 64 * 1024 * 1024

#: Seconds by which a document's time may lie in the future, since clocks differ.
AHEAD = 600.0

#: Earliest valid time of a document, in seconds since 1970: the year 2015.
EARLIEST = 1_420_070_400.0

_places = forms.texts(re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}"))


@dataclass(frozen=True)
class Document:
    """A fleet in its published form.

    Attributes:
        asked_at: When the API was asked, in seconds since 1970.
        projects: The fleet's projects.
        zones: The fleet's zones; empty means all.
        nodes: The fleet's nodes, in the order of their full names.
        host_keys: Worker's alias in known_hosts -> the worker's host keys.
        trusted_first: Aliases whose keys were trusted on first contact and not confirmed by a published key.
        unlisted: Pairs of project and zone that could not be listed at ``asked_at``: their nodes are older or missing.
    """

    asked_at: float
    projects: tuple[str, ...]
    zones: tuple[str, ...]
    nodes: tuple[Node, ...]
    host_keys: Mapping[str, Keys]
    trusted_first: frozenset[str] = frozenset()
    unlisted: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """Return the document as JSON."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "asked_at": self.asked_at,
            "scope": {"projects": sorted(self.projects), "zones": sorted(self.zones)},
            "nodes": [node.to_json() for node in self.nodes],
            "host_keys": {alias: dict(sorted(keys.items())) for alias, keys in sorted(self.host_keys.items())},
            **({"trusted_first": sorted(self.trusted_first)} if self.trusted_first else {}),
            **({"unlisted": sorted(self.unlisted)} if self.unlisted else {}),
        }
        return json.dumps(value, indent=1) + "\n"


def document(
    asked_at: float,
    projects: tuple[str, ...],
    zones: tuple[str, ...],
    nodes: tuple[Node, ...],
    keys: Mapping[str, Keys],
    *,
    trusted_first: Set[str] = frozenset(),
    unlisted: Iterable[tuple[str, str]] = (),
) -> Document:
    """Return the document of these nodes, with the known host keys of their workers only."""
    own = {worker.host_key_alias for worker in workers_of(nodes) if worker.node.node_id} & keys.keys()
    kept = {alias: keys[alias] for alias in sorted(own)}
    return Document(asked_at, projects, zones, nodes, kept, frozenset(own & trusted_first), tuple(unlisted))


def parse(data: bytes, where: str, now: float) -> Document:
    """Return the document that some JSON data contains.

    Args:
        data: JSON of at most LARGEST bytes.
        where: Source of the data, for an error.
        now: Current time, in seconds since 1970.

    Raises:
        CloudError: The data is not a valid document; the error names the invalid part.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _wrong("the file is not JSON", where) from exc
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _wrong(f'the file does not say "format": "{FORMAT}"', where)
    if value.get("version") != VERSION:
        version = value.get("version")
        raise CloudError(
            f"the snapshot has version {version!r:.20}, this program reads {VERSION}",
            where=where,
            fix="update tpu_ops here or where the snapshot is published",
        )
    try:
        return _document(value, now)
    except _WrongError as exc:
        raise _wrong(str(exc), where) from exc


def publishable(found: Document, now: float) -> str:
    """Return the text of a document for publication, after checking that its readers accept it.

    Args:
        found: The document.
        now: Current time, in seconds since 1970.

    Raises:
        CloudError: Readers would reject the document; the error names the invalid part.
    """
    text = found.text()
    try:
        _document(json.loads(text), now)
    except _WrongError as exc:
        raise CloudError(
            f"this fleet's snapshot cannot be published: {exc}",
            where="its nodes as the API lists them",
            fix="`tpu_ops refresh` may warn about this node; exclude the node with projects or zones in "
            "inventory/tpu_vm.yml",
        ) from exc
    return text


class _WrongError(Exception):
    """A part of a document is invalid; the error's text names this part."""


def _wrong(what: str, where: str) -> CloudError:
    return CloudError(
        f"this is not a snapshot of a fleet: {what}",
        where=where,
        fix="check that `tpu_ops snapshot --publish` wrote it",
    )


def _document(value: Mapping[str, Any], now: float) -> Document:
    asked_at = value.get("asked_at")
    if not is_number(asked_at) or asked_at < EARLIEST:
        raise _WrongError("asked_at is not a time")
    if asked_at > now + AHEAD:
        raise _WrongError(f"the snapshot's time is {(asked_at - now) / 60:.0f} min ahead of this machine's clock")
    scope = value.get("scope")
    if not isinstance(scope, dict) or not all(_places(scope.get(key)) for key in ("projects", "zones")):
        raise _WrongError("scope has no lists of projects and zones")
    if not scope["projects"]:
        raise _WrongError("the snapshot names no project")
    entries = value.get("nodes")
    if not isinstance(entries, list):
        raise _WrongError("nodes is not a list")
    nodes = [_node(entry, number) for number, entry in enumerate(entries)]
    _refuse_twice("name", nodes, lambda node: node.full_name)
    _refuse_twice("id", nodes, lambda node: node.node_id)
    return document(
        float(asked_at),
        tuple(scope["projects"]),
        tuple(scope["zones"]),
        tuple(sorted(nodes, key=lambda node: node.full_name)),
        _host_keys(value.get("host_keys")),
        trusted_first=_trusted_first(value.get("trusted_first", [])),
        unlisted=_unlisted(value.get("unlisted", [])),
    )


def _node(entry: Any, number: int) -> Node:
    """Return a node of the document. Unknown keys are ignored: a newer tpu_ops can have written them."""
    if not isinstance(entry, dict):
        raise _WrongError(f"node {number} is not a node")
    try:
        return Node.from_json({key: value for key, value in entry.items() if key in FORMS})
    except ValueError as exc:
        raise _WrongError(f"node {number}: {exc}") from exc


def _host_keys(value: Any) -> dict[str, Keys]:
    if not isinstance(value, dict):
        raise _WrongError("host_keys is not a mapping")
    for alias, keys in value.items():
        if not aliases.node_id(alias):
            raise _WrongError("host_keys has a name that is not a worker's")
        if not isinstance(keys, dict) or not keys:
            raise _WrongError(f"host_keys: {alias} has no keys")
        if not all(isinstance(blob, str) and valid_key(kind, blob) for kind, blob in keys.items()):
            raise _WrongError(f"host_keys: {alias} has a value that is not a host key")
    return value


def _trusted_first(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(alias, str) and aliases.node_id(alias) for alias in value):
        raise _WrongError("trusted_first is not a list of workers")
    return frozenset(value)


def _unlisted(value: Any) -> list[tuple[str, str]]:
    if not forms.places(value):
        raise _WrongError("unlisted is not a list of projects with a zone of each")
    return [(project, zone) for project, zone in value]


def _refuse_twice(what: str, nodes: Iterable[Node], own: Callable[[Node], str]) -> None:
    """Reject nodes if two share a value that must be unique. ``own`` returns a node's value, or "" if it has none."""
    seen: dict[str, Node] = {}
    for node in nodes:
        other = seen.setdefault(own(node) or f"none of {node.full_name}", node)
        if other is not node:
            names = " and ".join(dict.fromkeys((other.full_name, node.full_name)))
            raise _WrongError(f"two nodes have the same {what}: {names}")
