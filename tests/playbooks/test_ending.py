"""An interrupted run of a playbook leaves no process of Ansible behind."""

from __future__ import annotations

import signal
import subprocess
import sys

from tpu_ops.ansible import playbook

#: In place of ansible-playbook, with a worker process that was just forked: it does not react to SIGTERM, and gets its
#: own session only when ansible-playbook is already ending. Prints the worker's number.
ANSIBLE = """
import os, signal
ending, asked = os.pipe()
away, ready = os.pipe()
worker = os.fork()
if not worker:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(ending, 1)
    os.setsid()
    os.write(ready, b"x")
    os.close(1)
    while True:
        signal.pause()
def end(*_):
    os.write(asked, b"x")
    os.read(away, 1)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print(worker, flush=True)
while True:
    signal.pause()
"""


def test_a_worker_process_that_ansible_is_just_starting_is_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", ANSIBLE], stdout=subprocess.PIPE, text=True) as ansible:
        assert ansible.stdout
        worker = int(ansible.stdout.readline())
        assert worker in {process.number for process in playbook._processes()}
        playbook._end(ansible.pid, lambda: ansible.wait(timeout=30))
        assert worker not in {process.number for process in playbook._processes()}
    assert ansible.returncode in (0, -signal.SIGTERM)
