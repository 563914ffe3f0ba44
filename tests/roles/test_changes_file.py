"""What the callback writes of a real run of ansible-playbook, in check mode and then in earnest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.callback_plugins.changes_file import details

ROOT = Path(__file__).resolve().parents[2]

PLAYBOOK = """
- hosts: localhost
  gather_facts: false
  tasks:
    - name: Take it out
      preload_entries: { files: ["{{ place }}/*.conf"], library: libx }
    - name: Make a file
      managed_files:
        files:
          - { path: "{{ place }}/kept", content: k, owner: "{{ uid }}", group: "{{ gid }}" }
          - { path: "{{ place }}/more", content: m, owner: "{{ uid }}", group: "{{ gid }}" }
    - name: Close
      ansible.builtin.file: { path: "{{ place }}/{{ item }}", mode: "0600" }
      loop: [one.conf, three.conf]
"""


def run(playbook: Path, *arguments: str) -> dict[str, Any]:
    """Run a playbook with the callback and return what it wrote."""
    record = playbook.with_suffix(".json")
    config = playbook.with_name("ansible.cfg")
    config.write_text("[defaults]\n")
    libraries = ":".join(str(ROOT / "roles" / name / "library") for name in ("facts", "tcmalloc"))
    environ = os.environ | {
        "ANSIBLE_CONFIG": str(config),
        "ANSIBLE_HOME": str(playbook.parent / "home"),
        "ANSIBLE_LIBRARY": libraries,
        "ANSIBLE_MODULE_UTILS": str(ROOT / "roles" / "facts" / "module_utils"),
        "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tools" / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "changes_file",
        "ANSIBLE_PIPELINING": "1",
        "CHANGES_FILE": str(record),
    }
    variables = {"place": str(playbook.parent / "place"), "uid": str(os.getuid()), "gid": str(os.getgid())}
    variables |= {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", "localhost,", "-e", json.dumps(variables), *arguments, str(playbook)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(record.read_text().splitlines()[-1])
    return found


def test_each_change_of_a_task_is_recorded_in_check_mode_as_well(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for name in ("one", "two"):
        (place / f"{name}.conf").write_text("LD_PRELOAD=/usr/lib/libx.so\n")
        (place / f"{name}.conf").chmod(0o644)
    for name in ("kept", "three.conf"):
        (place / name).write_text("k")
        (place / name).chmod(0o600 if name == "three.conf" else 0o644)
    playbook = tmp_path / "converge.yml"
    playbook.write_text(PLAYBOOK)
    checked, done = run(playbook, "--check"), run(playbook)
    assert (checked["check"], done["check"], done["playbook"]) == (True, False, "converge.yml")
    assert done["changed"] == [
        ["Close", "localhost", [], ["one.conf"]],
        ["Make a file", "localhost", [f"{place}/more"], []],
        ["Take it out", "localhost", [], [f"{place}/one.conf", f"{place}/two.conf"]],
    ]
    assert checked["changed"] == done["changed"]
    assert len(done["ran"]) == 3


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"actions": ["mount /a", "enable a"], "changed_paths": ["/a"]}, ["mount /a", "enable a"]),
        ({"added": ["a.crt"], "removed": ["b.crt"]}, ["a.crt", "b.crt"]),
        ({"missing_pythons": ["3.12"], "environments": {}}, ["3.12"]),
        ({"missing_pythons": ["3.12"], "environments": {"jax": {"plan": ["~ Python 3.12"]}}}, ["jax: ~ Python 3.12"]),
        (
            {"environments": {"jax": {"plan": ["+ numpy==2", "~ jax==1"]}, "other": {"plan": []}}},
            ["jax: + numpy==2", "jax: ~ jax==1"],
        ),
        # Another module's words.
        ({"files": "a", "environments": ["a"], "stdout": "x"}, []),
    ],
)
def test_changes_are_found_in_the_results_of_modules(values: dict[str, Any], named: list[str]) -> None:
    assert details(values) == named
