"""Wait for workers that configure themselves at their first boot (see `boot_bundles`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tpu_ops import texts
from tpu_ops.ansible import boot
from tpu_ops.cloud.node import SERVING_STATES
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet

#: Key of a node's metadata with the place of its bundle: such a node configures itself.
KEY = "tpu-ops-bundle"
#: Seconds for a worker's startup script to begin after the first contact, between two looks, and for site.yml.
_BEGIN, _PAUSE, _LONGEST = 60.0, 3.0, 3600.0

_log = logging.getLogger(__name__)


def wait(fleet: Fleet, hosts: Sequence[str]) -> None:
    """Wait until workers that configure themselves have done so, or have failed. Others are not waited for.

    Args:
        fleet: The fleet.
        hosts: The workers; empty means all.

    Raises:
        OpsError: The API could not be asked about silent workers.
    """
    workers = [worker for worker in fleet.workers if worker.host in hosts or not hosts]
    themselves = [
        worker.host for worker in workers if KEY in worker.node.metadata_keys and worker.node.state in SERVING_STATES
    ]
    left = _still_at_it(fleet, themselves, "--nonblock")
    if left:
        _log.info("waiting until %s have configured themselves", texts.folded(left))
    end = time.monotonic() + _BEGIN
    while left := _still_at_it(fleet, left, "--wait", str(int(_LONGEST))):
        # They answer, and their startup scripts have not begun.
        if time.monotonic() > end:
            return
        time.sleep(_PAUSE)


def _still_at_it(fleet: Fleet, hosts: Sequence[str], *how: str) -> list[str]:
    """Return the workers among some that have not configured themselves, without those that do not answer.

    Args:
        fleet: The fleet.
        hosts: The workers.
        how: Options of flock(1), which takes the lock that a worker holds while it configures itself.
    """
    argv = ["sudo", "-n", "flock", *how, f"{boot.STATE}/lock", "test", "-e", f"{boot.STATE}/{boot.FILE}"]
    results = contact.run(fleet, hosts, argv, _LONGEST) if hosts else {}
    return [result.host for result in results.values() if result.reached and not result.ok]
