"""Waits until workers of a new node can be logged in to: they publish their host keys a while after it is READY."""

from __future__ import annotations

import time
from collections.abc import Collection

from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.fleet import hostkeys, update
from tpu_ops.fleet.model import Worker
from tpu_ops.fleet.view import Fleet

#: Seconds that a new node's guest agents get to publish their host keys, and between two looks.
KEYS_TIMEOUT, KEYS_DELAY = 180.0, 2.0


def known(settings: Settings, names: Collection[str], progress: Progress) -> tuple[Fleet, list[Worker]]:
    """Refresh the fleet until host keys of all workers of some nodes are known, or their time is over.

    Args:
        settings: Of the fleet.
        names: Resource names of the nodes.
        progress: Told what is waited for.

    Returns:
        The fleet, and the workers of these nodes that it has: none where the fleet does not list the nodes.
    """
    start = time.monotonic()
    while True:
        fleet, _ = update.refresh(settings)
        workers = [worker for worker in fleet.workers if worker.node.full_name in names]
        elapsed = time.monotonic() - start
        if not workers or hostkeys.has_keys(settings, workers) or elapsed > KEYS_TIMEOUT:
            return fleet, workers
        progress(elapsed, "waiting for its workers to publish their host keys")
        time.sleep(KEYS_DELAY)
