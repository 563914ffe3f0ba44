"""Action that gives values of this worker to all others, and returns the values that all have given.

It is for plays that each worker runs on itself (`tpu_ops configure --on-workers`); the controller passes the values on.
All workers wait until each one has given its values or has dropped out. The first exchanges of all workers belong
together, then the second ones, and so on: a task with this action must have no condition that differs between workers.
In a play of the controller there is nothing to do, since `hostvars` has the values of all hosts.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

#: Variable with the path of the socket of the program that talks to the controller (tpu_ops/ansible/worker_play.py).
VARIABLE = "TPU_OPS_EXCHANGE"


class ActionModule(ActionBase):  # type: ignore[misc] # Ansible ships no types
    """Exchanges values with the other workers. Its only option is `values`, a mapping."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `fleet`: worker -> the values that it has given to this exchange; nothing in a controller's play."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        place = os.environ.get(VARIABLE)
        if not place:
            return result | {"changed": False, "skipped": True}
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rwb") as stream:
            connection.connect(place)
            stream.write(json.dumps(self._task.args["values"]).encode() + b"\n")
            stream.flush()
            answer = stream.readline()
        if not answer:
            raise AnsibleError("the connection to the controller ended")
        # Equal values of several workers are sent once.
        fleet = {host: values for values, hosts in json.loads(answer) for host in hosts}
        return result | {"changed": False, "fleet": dict(sorted(fleet.items()))}
