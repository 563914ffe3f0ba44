"""A project's settings in Compute Engine, as values: the metadata of the whole project, and firewall rules."""

from __future__ import annotations

import ipaddress
import re
from base64 import b64encode
from typing import Any

from tpu_ops.lab.api.wire import Json

#: Maximum size in bytes of one value, and of all keys and values together.
LARGEST_VALUE, LARGEST = 256 * 1024, 512 * 1024

_KEY = re.compile(r"[a-zA-Z0-9_-]{1,128}")
#: Form of the names of disks and firewall rules.
NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
#: Fields of a firewall rule that the client sets.
_FIELDS = (
    "allowed",
    "denied",
    "description",
    "destinationRanges",
    "direction",
    "disabled",
    "logConfig",
    "name",
    "network",
    "priority",
    "sourceRanges",
    "sourceServiceAccounts",
    "sourceTags",
    "targetServiceAccounts",
    "targetTags",
)
#: Fields of an ingress rule that say where traffic comes from.
_SOURCES = ("sourceRanges", "sourceServiceAccounts", "sourceTags")


class ComputeError(Exception):
    """An error that the lab's Compute Engine answers to a request.

    Args:
        status: HTTP status.
        reason: The field ``reason`` of the JSON error.
        message: The text of the error, one sentence.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


def not_found(path: str) -> ComputeError:
    """Return the error for a resource that does not exist."""
    return ComputeError(404, "notFound", f"The resource '{path}' was not found")


def _invalid(field: str, value: object, why: str) -> ComputeError:
    return ComputeError(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


class Project:
    """What the state keeps of a project in Compute Engine.

    Args:
        data: The result of `json`; empty for a new project.

    Attributes:
        items: The project's metadata.
        firewalls: Name -> firewall rule.
    """

    def __init__(self, data: Json) -> None:
        self.items: dict[str, str] = dict(data.get("items", {}))
        self._changes = int(data.get("changes", 0))
        self.firewalls: dict[str, Json] = dict(data.get("firewalls", {}))

    def json(self) -> Json:
        """Return the JSON for the state file."""
        return {"items": dict(self.items), "changes": self._changes, "firewalls": dict(self.firewalls)}

    def metadata(self) -> Json:
        """Return the metadata in the API's form, with the fingerprint that a change of it has to name."""
        items = [{"key": key, "value": value} for key, value in self.items.items()]
        return {"kind": "compute#metadata", "fingerprint": self._fingerprint(), "items": items}

    def set_metadata(self, body: Json) -> None:
        """Replace all metadata.

        Raises:
            ComputeError: 412 if the fingerprint is not the current one; 400 if an entry is not valid.
        """
        items: dict[str, str] = {}
        for item in body.get("items", []):
            key, value = item.get("key"), item.get("value", "")
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise _invalid("metadata.items[].key", key, f"Must be a match of regex '{_KEY.pattern}'")
            if key in items:
                raise ComputeError(400, "invalid", f"Metadata has duplicate key: {key}")
            if not isinstance(value, str) or len(value.encode()) > LARGEST_VALUE:
                raise ComputeError(413, "metadataTooLarge", f"Value for key '{key}' is too large")
            items[key] = value
        if sum(len(key) + len(value.encode()) for key, value in items.items()) > LARGEST:
            raise ComputeError(413, "metadataTooLarge", "The metadata is too large")
        if body.get("fingerprint") != self._fingerprint():
            raise ComputeError(
                412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint."
            )
        self.items = items
        self._changes += 1

    def _fingerprint(self) -> str:
        return b64encode(f"lab{self._changes or ''}".encode()).decode()


def firewall(body: Json, project: str, networks: set[str]) -> Json:
    """Return a valid firewall rule with all its defaults; the network is its path.

    Args:
        body: The client's request.
        project: Id of the project.
        networks: Names of the project's networks.

    Raises:
        ComputeError: A value is not valid.
    """
    rule: Json = {key: body[key] for key in _FIELDS if body.get(key) not in (None, [], "")}
    if not NAME.fullmatch(str(rule.get("name", ""))):
        raise _invalid("resource.name", rule.get("name", ""), f"Must be a match of regex '{NAME.pattern}'")
    rule["network"] = _network(str(rule.get("network", "global/networks/default")), project, networks)
    actions = [key for key in ("allowed", "denied") if key in rule]
    if len(actions) != 1:
        raise ComputeError(400, "invalid", "Exactly one of the fields allowed and denied must be specified.")
    rule[actions[0]] = [_protocol(entry) for entry in rule[actions[0]]]
    usual: Json = {"direction": "INGRESS", "priority": 1000, "disabled": False, "logConfig": {"enable": False}}
    rule = usual | rule
    if rule["direction"] == "INGRESS" and not any(key in rule for key in _SOURCES):
        rule["sourceRanges"] = ["0.0.0.0/0"]
    for key in ("sourceRanges", "destinationRanges"):
        _check_ranges(key, rule.get(key, []))
    return rule


def _network(text: str, project: str, networks: set[str]) -> str:
    path, _, name = text.rpartition("/networks/")
    named = re.fullmatch(r"(?:.*projects/([^/]+)/)?global", path)
    if named is None:
        raise _invalid("resource.network", text, "The URL is malformed.")
    full = f"projects/{named[1] or project}/global/networks/{name}"
    if named[1] not in (None, project) or name not in networks:
        raise not_found(full)
    return full


def _protocol(entry: Json) -> Json:
    name = str(entry.get("IPProtocol", "")).lower()
    if not re.fullmatch(r"[a-z]{2,8}|\d{1,3}", name):
        raise _invalid("resource.allowed[].IPProtocol", name, "Must be a protocol.")
    ports = [str(port) for port in entry.get("ports", [])]
    for port in ports:
        match = _PORTS.fullmatch(port)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < 65536:
            raise _invalid("resource.allowed[].ports", port, "Must be a port or a range of ports.")
    return {"IPProtocol": name, **({"ports": ports} if ports else {})}


def _check_ranges(field: str, ranges: list[Any]) -> None:
    versions = set()
    for index, text in enumerate(ranges):
        try:
            versions.add(ipaddress.ip_network(text).version)
        except ValueError as failure:
            raise _invalid(f"resource.{field}[{index}]", text, "Must be a valid CIDR address range.") from failure
    if len(versions) > 1:
        raise _invalid(f"resource.{field}", ", ".join(ranges), "IPv4 and IPv6 ranges cannot be combined in one rule.")
