"""Any fleet as a state file, without asking an API to create it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_fleet(path: Path, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a state file for a fleet of any size and in any state; the API that is given the file then serves it.

    Args:
        path: The state file.
        nodes: Full name of each node -> its fields as in the API's JSON. ``acceleratorType`` is needed; ``state``
            is READY and ``runtimeVersion`` ``tpu-ubuntu2204-base`` where they are not given; ``networkConfig``
            ``{}`` leaves out external addresses.

    Raises:
        ApiError: A name or a field is not what the API would take.
        OSError: The file cannot be written.
    """
    # The wire definitions behind these take most of a second to import: only whoever writes a fleet waits for them.
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
