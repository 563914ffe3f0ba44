"""Write any fleet as a state file, without creating it through an API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_fleet(path: Path, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a state file for a fleet of any size and state; an API process that gets this file serves the fleet.

    Args:
        path: The state file.
        nodes: The fields of each node as in the API's JSON, by full name. ``acceleratorType`` is required; the default
            of ``state`` is READY, that of ``runtimeVersion`` is ``tpu-ubuntu2204-base``; ``networkConfig`` ``{}``
            leaves out external addresses.

    Raises:
        ApiError: The API would not accept a name or a field.
        OSError: The file cannot be written.
    """
    # Importing the wire definitions takes most of a second, so it is done only here.
    from tpu_ops.lab.api.names import split
    from tpu_ops.lab.api.nodes import complete
    from tpu_ops.lab.api.records import NodeRecord, timestamp
    from tpu_ops.lab.api.state import State
    from tpu_ops.lab.backend import NoWorkers

    state = State(NoWorkers.networks)
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
