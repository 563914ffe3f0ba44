"""The program that runs a playbook on the worker itself, with the test in place of the controller."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import ROOT

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Give values
      exchange: {values: {own: "{{ own }}", place: "{{ inventory_dir }}"}}
      register: given
      tags: [never, on_workers]
    - name: Show those of another worker
      ansible.builtin.debug: {msg: "{{ given.fleet['b'].own }} {{ group_names }}"}
"""
ORDER = {
    "playbook": "play",
    "options": ["--tags=all,on_workers"],
    "inventories": [
        "all: {vars: {own: common}}",
        "all: {hosts: {a: {ansible_connection: local}}, children: {pod: {hosts: {a: }}}}",
    ],
    "extras": ["own: s3cret"],
}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program, which has got its order."""
    plugins = tmp_path / "playbooks" / "action_plugins"
    plugins.mkdir(parents=True)
    shutil.copy(ROOT / "roles/facts/action_plugins/exchange.py", plugins)
    (tmp_path / "playbooks" / "play.yml").write_text(PLAY)
    (tmp_path / "ansible.cfg").write_text("")
    # As a process that a shell starts in the background, it begins with SIGINT ignored.
    background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    argv = [*background, sys.executable, "-m", "tpu_ops.ansible.worker_play", "/nonexistent", str(tmp_path)]
    pipe = subprocess.PIPE
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, text=True) as process:
        send(process, ORDER)
        yield process
        process.kill()


def send(worker: subprocess.Popen[str], line: Any) -> None:
    assert worker.stdin
    worker.stdin.write(json.dumps(line) + "\n")
    worker.stdin.flush()


def next_line(worker: subprocess.Popen[str], kind: str) -> Any:
    """Return the content of the next line of a kind."""
    assert worker.stdout
    for line in worker.stdout:
        found = json.loads(line)
        if kind in found:
            return found[kind]
    raise AssertionError(worker.stderr.read() if worker.stderr else "")


def test_variables_are_removed_before_the_last_line_and_values_are_exchanged(
    worker: subprocess.Popen[str],
) -> None:
    given = next_line(worker, "exchange")
    place = Path(given.pop("place"))
    assert (given, place.is_dir(), place.parent.stat().st_mode & 0o077) == ({"own": "s3cret"}, True, 0)
    send(worker, [[given, ["a"]], [{"own": "other"}, ["b"]]])
    assert next_line(worker, "step")["outcome"] == "ok"
    assert next_line(worker, "step")["report"] == ["other ['pod']"]
    outcome = next_line(worker, "outcome")
    assert (outcome["hosts"]["a"]["ok"], outcome["failures"], outcome["code"]) == (2, [], 0)
    assert not place.parent.exists()


def test_without_its_controller_the_playbook_ends_and_variables_are_removed(
    worker: subprocess.Popen[str],
) -> None:
    place = Path(next_line(worker, "exchange")["place"])
    _, errors = worker.communicate(timeout=60)  # closes the input
    assert (worker.returncode, errors) == (1, "the playbook was ended, since the controller has gone\n")
    assert not place.parent.exists()


def test_an_error_ends_the_program_with_its_message_while_the_controller_waits(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tpu_ops.ansible.worker_play", "/nonexistent", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        send(process, ORDER | {"inventories": ["all:", None]})
        assert process.stderr
        said = process.stderr.read()  # the input is still open
        assert process.wait() == 1
    assert said.splitlines()[-1].startswith("TypeError: ")
