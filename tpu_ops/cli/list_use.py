"""What `tpu_ops list --use` shows of each worker: who holds its chips, and what these do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud.node import Node
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import preparations, usage, usage_lines

#: The state of a node whose workers can be asked.
_READY = "READY"


def ask(fleet: Fleet, nodes: Sequence[Node]) -> Mapping[str, str]:
    """Ask the workers of the READY nodes for the use of their chips; warn of workers that do not answer.

    Returns:
        Worker -> its use, see `words`.
    """
    ready = {node.full_name for node in nodes if node.state == _READY}
    labels = {worker.host: worker.label for worker in fleet.workers if worker.node.full_name in ready}
    replies, now = usage.of_fleet(fleet, list(labels)), time.time()
    silent = [reply for reply in replies.values() if not reply.ok]
    if problem := preparations.problem_of(silent, fleet.settings.state_dir):
        output.warning(str(problem))
    return {host: words(usage.of_reply(labels[host], reply, now).rows) for host, reply in replies.items()}


def words(rows: Sequence[usage.Row]) -> str:
    """Return the use of one worker, as in ``exp-7 of ada: HBM 12/32 GiB, duty 96 %``."""
    holders = {row.owner: row for row in rows if row.person}.values()
    names = texts.some([f"{row.run or 'no run'} of {row.person}" for row in holders])
    return ": ".join(filter(None, (names, usage_lines.use_words(rows))))
