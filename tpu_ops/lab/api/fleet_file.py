"""Write a state file of the lab's API for any fleet, without creating the nodes through the API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_ops.lab.backend import Networks, NoWorkers


def write_fleet(path: Path, nodes: Mapping[str, Mapping[str, Any]], networks: Networks = NoWorkers.networks) -> None:
    """Write a state file with these nodes; an API process that is started with this file serves the nodes.

    Args:
        path: The state file.
        nodes: Full name of each node -> the node's fields, as in the API's JSON. ``acceleratorType`` is required. The
            default of ``state`` is READY, the default of ``runtimeVersion`` is ``tpu-ubuntu2204-base``. If
            ``networkConfig`` is ``{}``, the workers have no external addresses.
        networks: The networks of the workers' addresses.

    Raises:
        ApiError: A node's name or field is invalid for the API.
        OSError: The file cannot be written.
    """
    # Imported only here: importing google-cloud-tpu takes most of a second.
    from tpu_ops.lab.api.names import split
    from tpu_ops.lab.api.nodes import complete
    from tpu_ops.lab.api.records import NodeRecord, timestamp
    from tpu_ops.lab.api.state import State

    state = State(networks)
    for name, fields in nodes.items():
        body = complete(split(name)[0], {"runtimeVersion": "tpu-ubuntu2204-base", **fields})
        body = {"id": state.new_node_id(), "createTime": timestamp(time.time()), **body}
        condition = str(body.pop("state", "READY"))
        record = NodeRecord(name, body, condition, [], [])
        record.health = "HEALTHY" if condition == "READY" else ""
        workers = record.accelerator.workers
        record.internal_ips = state.internal.take(workers)
        running = record.wants_external and condition == "READY"
        record.external_ips = state.external.take(workers) if running else [""] * workers
        state.nodes.add(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(state.text())
