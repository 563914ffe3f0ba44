"""The two container networks of a lab, with subnets that do not overlap other subnets on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from tpu_ops.errors import OpsError
from tpu_ops.lab.backend import Networks
from tpu_ops.lab.engine import Engine, EngineError

KINDS = ("internal", "external")
#: Key of the label on containers and networks that has the lab's name as its value.
LABEL = "tpu-ops.lab"
#: Kind of network -> the range of its possible subnets. The external range is reserved for benchmarks (RFC 2544): it is
#: not a private range, and no real host has an address in it.
POOLS = {"internal": IPv4Network("10.160.0.0/12"), "external": IPv4Network("198.18.0.0/15")}
#: Prefix length of a subnet: it has 1022 addresses, more than the number of workers that a machine can run.
PREFIX = 22


def network_name(instance: str, kind: str) -> str:
    """Return the name of a lab's network in the container engine."""
    return f"tpu-lab-{instance}-{kind}"


def candidates(instance: str, kind: str) -> Iterator[IPv4Network]:
    """Yield all subnets for a kind of network; which subnet is the first depends on the lab's name.

    A lab therefore usually gets the same subnet again after it was removed and created.
    """
    subnets = list(POOLS[kind].subnets(new_prefix=PREFIX))
    start = int.from_bytes(hashlib.sha256(f"{instance}/{kind}".encode()).digest()[:4], "big") % len(subnets)
    yield from subnets[start:]
    yield from subnets[:start]


def choose(instance: str, kind: str, taken: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first subnet for a lab's network that overlaps none of the taken subnets.

    Raises:
        OpsError: Every possible subnet overlaps a taken subnet.
    """
    taken = list(taken)
    for subnet in candidates(instance, kind):
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise OpsError(
        f"no free subnet of {POOLS[kind]} for the lab's {kind} network",
        fix="remove unused container networks, or a route that covers the whole range",
    )


def parse_routes(text: str) -> list[IPv4Network]:
    """Return the destinations of all routes in the text of /proc/net/route, except the default route."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 8:
            continue
        address, mask = (int.from_bytes(bytes.fromhex(word), "little") for word in (words[1], words[7]))
        if mask:
            found.append(IPv4Network((address & mask, mask.bit_count())))
    return found


def default_device(text: str) -> str:
    """Return the network device of the default route in the text of /proc/net/route; empty without such a route."""
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and words[1] == words[7] == "00000000":
            return words[0]
    return ""


def subnets_of(description: dict[str, Any]) -> list[IPv4Network]:
    """Return the IPv4 subnets in the description of a network by Docker or Podman."""
    entries = (description.get("IPAM") or {}).get("Config") or description.get("subnets") or []
    texts = [entry.get("Subnet") or entry.get("subnet") or "" for entry in entries]
    return [IPv4Network(text) for text in texts if text and ":" not in text]


def create_args(engine: Engine, instance: str, kind: str, subnet: IPv4Network, mtu: int) -> list[str]:
    """Return the container engine's arguments that create a lab's network."""
    option = "mtu" if engine.is_podman else "com.docker.network.driver.mtu"
    return [
        *("network", "create", "--driver", "bridge"),
        *("--subnet", str(subnet), "--gateway", str(subnet.network_address + 1)),
        *("--label", f"{LABEL}={instance}", "--label", f"{LABEL}.network={kind}"),
        *("--opt", f"{option}={mtu}", network_name(instance, kind)),
    ]


def ensure(engine: Engine, instance: str) -> Networks:
    """Return the lab's two networks; create them if they do not exist.

    Raises:
        OpsError: The container engine cannot create a network.
    """
    found = {}
    for kind in KINDS:
        found[kind] = _existing(engine, instance, kind) or _create(engine, instance, kind)
    return Networks(internal=found["internal"], external=found["external"])


def _existing(engine: Engine, instance: str, kind: str) -> IPv4Network | None:
    shown = engine.call("network", "inspect", network_name(instance, kind), check=False)
    if shown.code:
        return None
    subnets = subnets_of(json.loads(shown.stdout)[0])
    return subnets[0] if subnets else None


def _create(engine: Engine, instance: str, kind: str) -> IPv4Network:
    route_file = Path("/proc/net/route")
    table = route_file.read_text() if route_file.exists() else ""
    names = engine.call("network", "ls", "--format", "{{.Name}}").stdout.split()
    shown = engine.call("network", "inspect", *names, check=False).stdout if names else "[]"
    taken = parse_routes(table)
    for description in json.loads(shown or "[]"):
        taken += subnets_of(description)
    mtu_file = Path(f"/sys/class/net/{default_device(table) or 'lo'}/mtu")
    mtu = min(1500, int(mtu_file.read_text())) if mtu_file.exists() else 1500
    for _ in range(8):
        subnet = choose(instance, kind, taken)
        try:
            engine.call(*create_args(engine, instance, kind, subnet, mtu))
        except EngineError as exc:
            # Since the check above, another process might have taken the subnet or created this network.
            if existing := _existing(engine, instance, kind):
                return existing
            if "overlap" not in exc.what.lower() and "already" not in exc.what.lower():
                raise
            taken.append(subnet)
        else:
            return subnet
    raise OpsError(
        f"the engine refused eight subnets for {network_name(instance, kind)}", fix="look at the container engine's log"
    )
