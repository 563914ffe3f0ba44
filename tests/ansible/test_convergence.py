"""Workers that a playbook configures: real Ansible, on hosts that are this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.test_configure import PUT, REFUSED, SERVED, fleet, write
from tpu_ops import config
from tpu_ops.ansible import convergence
from tpu_ops.cli.configure import Progress
from tpu_ops.errors import HostError
from tpu_ops.fleet import view

__all__ = ["fleet"]


def test_inputs_of_site_yml_are_checked_before_they_are_needed(fleet, monkeypatch, capsys):
    """On one worker of each node, as before the first change; a site.yml that looks for nothing is good enough."""
    variables = {"credentials_entries": [{"kind": "wandb", "person": "ada", "from_env": "NO_SUCH_KEY"}]}
    (fleet.path / "inventory" / "group_vars" / "node_pod.yml").write_text(json.dumps(variables))
    for name, value in fleet.environ().items():
        monkeypatch.setenv(name, value)
    known = view.current(config.load())
    with pytest.raises(HostError, match=r"site\.yml would fail on these workers") as caught:
        convergence.rehearse(known, known.workers, Progress)
    said = capsys.readouterr().err
    assert (caught.value.where, "NO_SUCH_KEY" in said) == ("pod-w0", True), said
    write(fleet, PUT)
    convergence.rehearse(known, known.workers, Progress)
    assert not (fleet.path / "pod-w0").exists()


@pytest.mark.parametrize("broken", [False, True])
def test_an_nfs_server_gets_the_addresses_of_recreated_workers(fleet, monkeypatch, capsys, logged, broken):
    here = "when: inventory_hostname == 'solo-w0', tags: nfs"
    failing = f"    - {{name: Serve, ansible.builtin.fail: {{msg: no kernel}}, {here}}}\n"
    write(fleet, SERVED + PUT + (failing if broken else ""))
    for name, value in fleet.environ().items():
        monkeypatch.setenv(name, value)
    known = view.current(config.load())
    new = [worker for worker in known.workers if worker.host.startswith("pod")]
    convergence.converge(known, new, Progress)
    said = capsys.readouterr().err
    assert "letting new workers mount NFS from solo-w0" in logged.messages
    assert (fleet.path / "exports").read_text() == "pod-w0 pod-w1 solo-w0"
    # Of the server nothing else is changed.
    assert sorted(path.name for path in fleet.path.glob("*-w?")) == ["pod-w0", "pod-w1"]
    refuses = "solo-w0 may refuse mounts to new workers; correct the error above and run"
    assert ("no kernel" in said, refuses in logged.text) == (broken, broken)


def test_a_recovery_whose_mounts_were_refused_gets_further_the_next_time(fleet, monkeypatch):
    write(fleet, SERVED + REFUSED + PUT)
    for name, value in fleet.environ().items():
        monkeypatch.setenv(name, value)
    known = view.current(config.load())
    new = [worker for worker in known.workers if worker.host.startswith("pod")]
    with pytest.raises(HostError, match=r"site\.yml failed on these workers"):
        convergence.converge(known, new, Progress)
    convergence.converge(known, new, Progress)
    assert sorted(path.name for path in fleet.path.glob("*-w?")) == ["pod-w0", "pod-w1"]


@pytest.mark.parametrize(
    ("server", "exported", "command"),
    [
        ("pod-w0", "", "tpu_ops configure pod-w0 --tags nfs"),
        ("filer", "", "ansible-playbook -i '/my fleet/inventory/tpu_vm.yml' /tool/site.yml --tags nfs --limit filer"),
        # The other host is in one of those that the shell names.
        ("filer", "a.yml,b.yml", "ansible-playbook /tool/site.yml --tags nfs --limit filer"),
    ],
)
def test_the_suggested_nfs_command_is_limited_to_the_server(
    monkeypatch: pytest.MonkeyPatch, server: str, exported: str, command: str
) -> None:
    settings: Any = SimpleNamespace(file=Path("/my fleet/inventory/tpu_vm.yml"))
    monkeypatch.setenv("ANSIBLE_INVENTORY", exported)
    fleet = SimpleNamespace(workers=[SimpleNamespace(host="pod-w0")])
    monkeypatch.setattr(view, "known", lambda _: fleet)
    assert convergence.letting_in([server], settings, Path("/tool/site.yml")) == f"`{command}`"
