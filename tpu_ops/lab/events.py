"""Requests to a running lab's API: workers, the cloud's capacity, preemptions and maintenance events of nodes.

Also what the chips of workers do, in a file of each worker that its metrics service reads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tpu_ops.errors import CloudError, UsageError
from tpu_ops.lab import shared
from tpu_ops.lab.instance import Instance, call

#: Maximum duration of a maintenance event in seconds: every worker of the node shuts down and boots.
MAINTENANCE_TIMEOUT = 300.0
#: Seconds for which the API waits for the end of an operation before it answers a ``wait`` request.
_WAIT = 10


def workers(lab: Instance) -> list[dict[str, Any]]:
    """Return the lab's workers as the API lists them, with the node's resource name split into parts."""
    rows = call(lab, "GET", "/lab/workers")["workers"]
    if not isinstance(rows, list):
        raise CloudError(
            "the lab's API returned no list of workers",
            where="/lab/workers",
            fix="start the API again: `tpu_ops lab up`",
        )
    found = []
    for row in rows:
        _, project, _, zone, _, node = str(row["node"]).split("/")
        found.append({**row, "name": row["node"], "node": node, "zone": zone, "project": project})
    return found


def node_name(lab: Instance, node: str, zone: str | None) -> str:
    """Return the full name of the lab's node with this short name.

    Raises:
        UsageError: No node, or more than one node, has this short name.
    """
    found = {str(row["name"]) for row in workers(lab) if row["node"] == node and zone in (None, row["zone"])}
    if len(found) != 1:
        raise UsageError(
            f"{'no node' if not found else 'more than one node'} of the lab is named {node!r}",
            where=f"lab {lab.name!r}",
            fix="`tpu_ops lab status` lists the nodes; --zone selects one of several nodes with the same name",
        )
    return found.pop()


def set_chips(lab: Instance, target: str, zone: str | None, state: str, options: Mapping[str, Any]) -> list[str]:
    """Set what the chips of a node's workers, or of one worker, do; return the names of these workers.

    Args:
        lab: The lab.
        target: A node's name, or a worker's as in ``pod-w0``.
        zone: The node's zone, if several nodes share the name.
        state: One of `shared.CHIP_STATES`.
        options: ``first_id`` and ``two_cores``.

    Raises:
        UsageError: There are no such workers, or this lab runs none.
    """
    rows = [{**row, "host": f"{row['node']}-w{row['index']}"} for row in workers(lab)]
    found = [row for row in rows if target in (row["node"], row["host"]) and zone in (None, row["zone"])]
    if len({row["name"] for row in found}) != 1:
        raise UsageError(
            f"{'more than one node' if found else 'no node and no worker'} of the lab is named {target!r}",
            where=f"lab {lab.name!r}",
            fix="`tpu_ops lab status` lists the nodes; --zone selects one of several nodes with the same name",
        )
    if not all(row["container"] for row in found):
        raise UsageError("this lab has no containers, so its workers have no chips", where=f"lab {lab.name!r}")
    for row in found:
        shared.set_chips(shared.worker_directories(lab.name) / str(row["container"]), state, options)
    return [str(row["host"]) for row in found]


def preempt(lab: Instance, name: str) -> None:
    """Kill the workers of a node, as a preemption does.

    Raises:
        CloudError: The API refuses the request, for example because the node is not READY.
    """
    call(lab, "POST", "/lab/preempt", {"node": name})


def capacity(lab: Instance, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capacity of the lab's cloud as the API shows it, after replacing the parts that are given.

    Raises:
        CloudError: The API refuses the request, for example because a zone does not exist.
    """
    return call(lab, "POST", "/lab/capacity", parts) if parts else call(lab, "GET", "/lab/capacity")


def maintain(lab: Instance, name: str) -> None:
    """Simulate a maintenance event of a node; return when its workers serve again, with new addresses.

    Raises:
        CloudError: The API refuses the request, or the event failed or did not end in time.
    """
    operation = call(lab, "POST", f"/v2alpha1/{name}:simulateMaintenanceEvent", {})
    deadline = time.monotonic() + MAINTENANCE_TIMEOUT
    while not operation.get("done"):
        if time.monotonic() > deadline:
            raise CloudError(
                f"the maintenance event did not end within {MAINTENANCE_TIMEOUT:.0f} s",
                where=name,
                fix="`tpu_ops lab status` shows the node's state; the event continues",
            )
        operation = call(lab, "POST", f"/v2/{operation['name']}:wait", {"timeout": f"{_WAIT}s"}, timeout=_WAIT + 20)
    if failure := operation.get("error"):
        fix = "`tpu_ops lab status` shows the node's state"
        raise CloudError(f"the maintenance event failed: {failure}", where=name, fix=fix)
