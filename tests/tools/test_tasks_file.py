"""The callback by which the benchmark counts tasks."""

from __future__ import annotations

import json

from tests.support.desk import BIN, Desk, environment
from tests.support.fleet import ROOT

PLAY = """
- hosts: one,two
  gather_facts: false
  tasks:
    - name: Say
      ansible.builtin.debug:
    - name: Ask
      ansible.builtin.ping:
      when: inventory_hostname == 'two'
    - name: Write
      ansible.builtin.copy:
        content: kept
        dest: "{{ where }}/{{ inventory_hostname }}"
        mode: "0600"
"""


def test_tasks_are_counted_by_what_they_did(tmp_path):
    (tmp_path / "play.yml").write_text(PLAY)
    (tmp_path / "two").write_text("kept")
    (tmp_path / "two").chmod(0o600)
    desk = Desk(environment())
    desk.do(
        *(str(BIN / "ansible-playbook"), str(tmp_path / "play.yml"), "-i", "one,two,", "-e", f"where={tmp_path}"),
        *("-c", "local", "-e", "ansible_python_interpreter=/usr/bin/python3"),
        # The fleet's inventory plugin does not take a list of names.
        ANSIBLE_INVENTORY_ENABLED="host_list",
        ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "tools" / "callback_plugins"),
        ANSIBLE_CALLBACKS_ENABLED="tasks_file",
        TASKS_FILE=str(tmp_path / "tasks.json"),
    )
    builtin = "ansible.builtin"
    assert json.loads((tmp_path / "tasks.json").read_text()) == [
        {"task": "Say", "action": f"{builtin}.debug", "ran": 2, "changed": 0, "skipped": 0},
        {"task": "Ask", "action": f"{builtin}.ping", "ran": 1, "changed": 0, "skipped": 1},
        {"task": "Write", "action": f"{builtin}.copy", "ran": 2, "changed": 1, "skipped": 0},
    ]
