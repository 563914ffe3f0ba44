"""Runs a playbook on the worker itself, for a controller that waits at the other end of the connection.

`receiver` starts it. It reads one line of JSON, the order, and writes lines of JSON: each step or message of the
playbook, values for the other workers (see `exchange`), and at the end the outcome. If its input ends before, the
controller has gone, and the playbook ends after the running task.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tpu_ops.ansible import playbook, scratch
from tpu_ops.ansible.playbook import Project, Said, Step

#: Directory in memory for the variables, which may be secret. They never reach a disk.
_MEMORY = "/run"
#: Variable with the path of the socket of the action `exchange`.
EXCHANGE = "TPU_OPS_EXCHANGE"


class Controller:
    """The controller, which sends the order and the answers to exchanges, and takes what this worker writes.

    Args:
        source: The controller's lines.
        sink: Where lines for the controller go.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        #: Whether the playbook has ended: then the end of the input interrupts nothing.
        self.done = False

    def order(self) -> Any:
        """Return the order; None if the controller has gone. From then on, the end of the input is an interrupt."""
        line = self._source.readline()
        threading.Thread(target=self._listen, daemon=True).start()
        return json.loads(line) if line else None

    def _listen(self) -> None:
        for line in self._source:
            self._answers.put(line)
        if not self.done:
            _thread.interrupt_main()

    def write(self, kind: str, content: Any) -> None:
        """Write one line; nothing if the controller has gone."""
        with self._writing, contextlib.suppress(BrokenPipeError):
            self._sink.write(json.dumps({kind: content}).encode() + b"\n")
            self._sink.flush()

    def serve(self, server: socket.socket) -> None:
        """Pass the values of each exchange to the controller, and its answer to the action."""
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:
                self.write("exchange", json.loads(stream.readline()))
                stream.write(self._answers.get())


def main() -> None:
    """Run the ordered playbook with its files in memory."""
    # Whoever started this may ignore SIGINT, and then the end of the input would interrupt nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # If an error ends this program while a thread reads sys.stdin, Python aborts. So the thread reads another object.
    controller = Controller(open(0, "rb", closefd=False), sys.stdout.buffer)  # noqa: SIM115 - it is open to the end
    try:
        with scratch.directory({"XDG_RUNTIME_DIR": _MEMORY}) as private:
            order = controller.order()
            outcome = _run(controller, order, Path(sys.argv[2]), private) if order else None
            controller.done = True
    except KeyboardInterrupt:
        sys.exit("the playbook was ended, since the controller has gone")
    except OSError as exc:
        sys.exit(f"the playbook was not run to its end: {exc}")
    # The controller closes the connection after this line, so the directory with the variables is removed before.
    if outcome:
        controller.write("outcome", dataclasses.asdict(outcome))


def _run(controller: Controller, order: Mapping[str, Any], root: Path, private: Path) -> playbook.Outcome:
    """Write the order's files and run its playbook.

    Args:
        controller: The controller.
        order: The attributes of `on_workers.Order`.
        root: The directory of the playbooks and roles.
        private: A directory that only this user can read.
    """
    inventory, extras = private / "inventory", []
    inventory.mkdir()
    for number, text in enumerate(order["inventories"]):
        (inventory / f"{number}.yml").write_text(text)
    for number, text in enumerate(order["extras"]):
        (private / f"extra{number}.yml").write_text(text)
        extras += ["-e", f"@{private}/extra{number}.yml"]
    project = Project(root, root / "ansible.cfg", inventory)
    # Ansible's and ansible-runner's own files contain variables too: keep them in memory.
    environ = os.environ | {
        "ANSIBLE_HOME": str(private / "home"),
        "ANSIBLE_INVENTORY_ENABLED": "yaml",
        "XDG_CACHE_HOME": str(private / "cache"),
        "XDG_RUNTIME_DIR": str(private),
        EXCHANGE: str(private / "exchange"),
    }
    server = socket.socket(socket.AF_UNIX)
    server.bind(environ[EXCHANGE])
    server.listen(1)
    threading.Thread(target=controller.serve, args=(server,), daemon=True).start()

    def told(note: Step | Said) -> None:
        controller.write("step" if isinstance(note, Step) else "said", dataclasses.asdict(note))

    options = [*extras, *order["options"]]
    return playbook.run(project, project.playbook(order["playbook"]), options=options, told=told, environ=environ)


if __name__ == "__main__":
    main()
