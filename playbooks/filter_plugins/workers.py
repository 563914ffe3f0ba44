"""Filters that describe workers in lines for users; no side effects, so that their tests are tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: The maximum number of differences that are shown for one worker.
SHOWN = 12
#: User ids of people's accounts; the range ends below `nobody` (Debian Policy 9.2.2).
PEOPLE = range(1000, 60000)
#: Python packages whose versions are shown, found by paths such as `name-version.dist-info` below an environment.
_PACKAGE = re.compile(r"/(?P<name>[^/]+)-(?P<version>[^-/]+)\.dist-info/")
_LAUNCHER = re.compile(r"^/usr/local/lib/tpu_ops/(?P<digest>[^/]+)/tpu-host$")


def programs(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the names and versions of a worker's programs for training, given its facts."""
    found = {"Python": ".".join(str(part) for part in facts["python"]["version_info"][:3])}
    for path in facts["worker"]["files"]:
        if match := _PACKAGE.search(path):
            found[match["name"]] = match["version"]
        elif match := _LAUNCHER.match(path):
            found["launcher"] = match["digest"]
    return found


def people(facts: Mapping[str, Any]) -> dict[str, int]:
    """Given a worker's facts, return name -> user id of the people with an account on it."""
    return {name: entry["uid"] for name, entry in facts["worker"]["accounts"].items() if entry["uid"] in PEOPLE}


def group_ids(facts: Mapping[str, Any]) -> dict[str, int]:
    """Given a worker's facts, return the names and ids of groups that have people as members, except people's own."""
    worker, persons = facts["worker"], people(facts)
    return {
        name: worker["gids"][name]
        for name, members in worker["groups"].items()
        if name not in persons and persons.keys() & set(members)
    }


def data_mounts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a worker's mounted data disks and shares, given its facts: path -> type."""
    kept = re.compile(r"^(ext[234]|xfs|btrfs|nfs4?|fuse\..+)$")
    usual = re.compile(r"^/(boot(/.*)?|etc/.*|proc/.*|snap/.*|sys/.*|run/.*|dev/.*)?$")
    mounts = facts["worker"]["mounts"]
    return {
        mount["target"]: mount["fstype"]
        for mount in mounts
        if kept.match(mount["fstype"]) and not usual.match(mount["target"])
    }


def worker_line(variables: Mapping[str, Any]) -> str:
    """Return a description of a worker in one line, given its variables and facts."""
    facts = variables["ansible_facts"]
    worker = facts["worker"]
    run = worker["units"].get("tpu-run.service", {}).get("active", "inactive")
    parts = ["not part of a node"]
    if "tpu_node_label" in variables:
        parts = [
            f"{variables['tpu_accelerator_type']} {variables['tpu_zone']} {variables['tpu_state']}",
            f"{variables.get('tpu_chips_per_worker', 0)} chips",
        ]
    parts += [
        f"{facts['distribution']} {facts['distribution_version']} {facts['architecture']}",
        *(f"{name} {version}" for name, version in sorted(programs(facts).items(), key=lambda item: item[0].lower())),
        f"{len(worker['packages'])} packages",
        f"people {' '.join(sorted(people(facts))) or 'none'}",
    ]
    if worker["hugepages"]:
        parts.append(f"hugepages {worker['hugepages']}")
    if mounts := data_mounts(facts):
        parts.append("mounts " + " ".join(sorted(mounts)))
    parts.append("idle" if run in {"inactive", "failed"} else "a run is active")
    return ", ".join(parts)


def traits(facts: Mapping[str, Any]) -> dict[str, str]:
    """Given a worker's facts, return the properties that should be equal on all workers of a node: name -> value."""
    worker = facts["worker"]
    found = {
        "system": f"{facts['distribution']} {facts['distribution_version']} {facts['architecture']}",
        "hugepages": worker["hugepages"],
    }
    found |= programs(facts)
    found |= {f"package {name}": version for name, version in worker["packages"].items()}
    found |= {f"person {name}": f"user id {uid}" for name, uid in people(facts).items()}
    found |= {f"group {name}": f"group id {gid}" for name, gid in group_ids(facts).items()}
    found |= {f"mount {path}": kind for path, kind in data_mounts(facts).items()}
    return found


def differences(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Given the facts of a node's workers, return a line for each property in which one differs from the majority."""
    owned = {host: traits(facts) for host, facts in workers.items()}
    lines = []
    usual = {}
    for name in sorted({name for found in owned.values() for name in found}):
        counts = Counter(found.get(name, "none") for found in owned.values())
        if len(counts) > 1:
            usual[name] = counts.most_common(1)[0][0]
    for host, found in owned.items():
        other = [name for name, value in usual.items() if found.get(name, "none") != value]
        lines += [f"{host}: {name}: {found.get(name, 'none')}, others {usual[name]}" for name in other[:SHOWN]]
        if len(other) > SHOWN:
            lines.append(f"{host}: and {len(other) - SHOWN} more")
    return lines


def worker_lines(hosts: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each worker and then a line for each difference between workers of one node.

    Args:
        hosts: The hosts of the play that answered.
        hostvars: The hosts' variables, which include the facts of the role `facts`.
    """
    nodes: dict[str, dict[str, Mapping[str, Any]]] = {}
    lines = []
    for host in hosts:
        variables = hostvars[host]
        # Some hosts, such as file servers, are not part of a node.
        if "tpu_node_label" in variables:
            nodes.setdefault(str(variables["tpu_node_label"]), {})[host] = variables["ansible_facts"]
        lines.append(f"{host}: {worker_line(variables)}")
    found = [line for _, workers in sorted(nodes.items()) for line in differences(workers)]
    return lines + (found or ["workers of a node do not differ"])


class FilterModule:
    """Filters of the playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"worker_lines": worker_lines}
