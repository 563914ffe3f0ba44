"""Firewall rules that let ssh or mosh in from given address ranges, and from nowhere else."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence

from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.operations import Progress
from tpu_ops.errors import UsageError

#: Service -> protocol and port, or range of ports.
SERVICES = {"ssh": ("tcp", "22"), "mosh": ("udp", "60000-61000")}
#: Ranges that contain all addresses.
EVERYWHERE = ("0.0.0.0/0", "::/0")

#: Maximum length of a rule's name.
_LONGEST = 63
#: Fields of a rule besides its ranges -> the API's default. Another value changes what the rule lets in.
_DEFAULTS: Json = {
    "direction": "INGRESS",
    "priority": 1000,
    "disabled": False,
    "denied": [],
    "destinationRanges": [],
    "sourceServiceAccounts": [],
    "sourceTags": [],
    "targetServiceAccounts": [],
    "targetTags": [],
}
#: Fields that do not change what a rule lets in; they stay when it is replaced.
_KEPT = ("description", "logConfig")


def sources(texts: Sequence[str], where: str) -> list[str]:
    """Return the address ranges that the user named, checked and without duplicates.

    Args:
        texts: The ranges as CIDR, or single addresses.
        where: Where the user named them, for an error.

    Raises:
        UsageError: A text is no range; the ranges are of both IPv4 and IPv6; or they contain all addresses, but the
            user did not write one of `EVERYWHERE`.
    """
    ranges = list(dict.fromkeys(_range(text, where) for text in texts))
    if len({one.version for one in ranges}) > 1:
        what = "one rule cannot have IPv4 and IPv6 ranges"
        raise UsageError(what, where=where, fix="run the command once for each: the rule for IPv6 has its own name")
    # A rule has ranges of one version only, which collapse_addresses expects.
    joined = [str(one) for one in ipaddress.collapse_addresses(ranges)]  # type: ignore[type-var]
    if joined[0] in EVERYWHERE and joined[0] not in texts:
        what = f"{', '.join(texts)} lets in every address"
        raise UsageError(what, where=where, fix=f"name a narrower range; if you mean all addresses, write {joined[0]}")
    return [str(one) for one in ranges]


def _range(text: str, where: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        fix = "write addresses as CIDR, as in 203.0.113.7/32 for a single one"
        with contextlib.suppress(ValueError):
            meant = ipaddress.ip_network(text, strict=False)
            fix = f"did you mean {meant}?" if str(meant) not in EVERYWHERE else fix
        raise UsageError(f"{text!r} is not a range of addresses: {exc}", where=where, fix=fix) from exc


def rule(service: str, project: str, network: str, ranges: Sequence[str]) -> Json:
    """Return the rule that lets a service in from address ranges.

    Args:
        service: A key of `SERVICES`.
        project: Id of the network's project.
        network: Name of the network.
        ranges: The result of `sources`.
    """
    protocol, port = SERVICES[service]
    end = "-v6" if ":" in ranges[0] else ""
    return {
        "name": f"tpu-ops-{service}-{network}"[: _LONGEST - len(end)].rstrip("-") + end,
        "description": f"{service} to all machines of the network, made by tpu_ops",
        "network": f"projects/{project}/global/networks/{network}",
        "direction": "INGRESS",
        "allowed": [{"IPProtocol": protocol, "ports": [port]}],
        "sourceRanges": list(ranges),
    }


def differences(existing: Json, wanted: Json) -> dict[str, tuple[str, str]]:
    """Return the fields in which two rules let in other traffic -> both values as text."""
    found = {}
    for key in ("network", "allowed", "sourceRanges", *_DEFAULTS):
        values = _value(existing, key), _value(wanted, key)
        if values[0] != values[1]:
            found[key] = values
    return found


def _value(one: Json, key: str) -> str:
    """Return a field of a rule as text that does not depend on the form in which the API writes the field."""
    value = one.get(key) or _DEFAULTS.get(key, [])
    if key == "network":
        return str(value).rpartition("/")[2]
    if key == "sourceRanges":
        return ", ".join(sorted(str(ipaddress.ip_network(text)) for text in value)) or "none"
    if key in ("allowed", "denied"):
        entries = (f"{entry['IPProtocol'].lower()}:{','.join(entry.get('ports', ['all']))}" for entry in value)
        return ", ".join(sorted(entries)) or "none"
    return (", ".join(sorted(value)) or "none") if isinstance(value, list) else str(value)


def find(compute: Compute, wanted: Json) -> Json | None:
    """Return the existing rule with the name of a rule, or None.

    Raises:
        ApiError: The API refused or did not answer.
    """
    try:
        path, what = _place(wanted)
        return compute.call("GET", path, what)
    except ApiError as exc:
        if exc.status != "NOT_FOUND":
            raise
        return None


def create(compute: Compute, wanted: Json, *, timeout: float, progress: Progress) -> None:
    """Create a rule.

    Raises:
        ApiError: The API refused; the status is ALREADY_EXISTS if a rule of this name exists.
    """
    path, what = _place(wanted)
    operation = compute.call("POST", path.rpartition("/")[0], what, body=wanted)
    compute.wait(operation, path.partition("/firewalls")[0], what, timeout=timeout, progress=progress)


def replace(compute: Compute, existing: Json, wanted: Json, *, timeout: float, progress: Progress) -> None:
    """Replace all of a rule but its description and its logging.

    Raises:
        ApiError: The API refused.
    """
    path, what = _place(wanted)
    body = wanted | {key: existing[key] for key in _KEPT if key in existing}
    # PUT, and not PATCH: a patch would keep sources and targets that the new rule does not have.
    operation = compute.call("PUT", path, what, body=body)
    compute.wait(operation, path.partition("/firewalls")[0], what, timeout=timeout, progress=progress)


def _place(wanted: Json) -> tuple[str, str]:
    project = wanted["network"].split("/")[1]
    return f"projects/{project}/global/firewalls/{wanted['name']}", f"firewall rule {wanted['name']}, project {project}"
