"""`tpu_ops invite`: real Ansible, on hosts that are this machine; and its ssh configuration, read by real ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import node
from tests.support.published import KEYS, Member, document
from tpu_ops.ansible import invitations
from tpu_ops.cloud.node import Worker, workers_of
from tpu_ops.errors import UsageError
from tpu_ops.fleet import selection
from tpu_ops.ssh.portable import Portable, portable

NODES = [node(), node("solo", node_id="2", count=1, state="READY"), node("spare", node_id="3", state="STOPPED")]
#: Stands for the role users.
USERS = """\
- name: Make accounts
  hosts: all
  gather_facts: false
  tasks:
    - name: Make them
      ansible.builtin.copy: {content: x, dest: "{{ playbook_dir }}/{{ inventory_hostname }}", mode: "0600"}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Member:
    """A fleet with a playbook of its own in place of users.yml, and with people."""
    member = Member(tmp_path, snapshot=str(tmp_path / "published.json"))
    (tmp_path / "published.json").write_text(document(NODES).text())
    (member.path / "playbooks").mkdir()
    (member.path / "site.yml").write_text(USERS)
    (member.path / "playbooks" / "users.yml").write_text(USERS)
    variables: dict[str, Any] = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "key": member.key.with_suffix(".pub").read_text(),
        "users_people": [{"name": "bob"}],
        "users_more_people": [
            {
                "name": "ada",
                "comment": "Ada Lovelace",
                "keys": ["{{ key }}"],
                "nodes": ["solo", "spare"],
                "sudo": "launcher",
            }
        ],
    }
    (member.path / "inventory" / "group_vars").mkdir()
    (member.path / "inventory" / "group_vars" / "all.yml").write_text(json.dumps(variables))
    return member


def invite(member: Member, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `tpu_ops invite`."""
    command = [sys.executable, "-m", "tpu_ops.cli.main", "invite", *words]
    return subprocess.run(command, env=member.environ(), capture_output=True, text=True, timeout=120, check=False)


def test_a_name_with_a_template_is_refused_and_not_evaluated(fleet: Member, tmp_path: Path) -> None:
    done = invite(fleet, f"{{{{ lookup('pipe', 'touch {tmp_path}/started') }}}}")
    assert done.returncode == 2
    assert "the login name is invalid" in done.stderr
    assert not (tmp_path / "started").exists()


def test_accounts_are_made_where_the_person_belongs_and_the_message_is_written(fleet: Member, tmp_path: Path) -> None:
    done = invite(fleet, "ada", "--json", "--file", str(tmp_path / "message"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (fleet.path / "playbooks").glob("*-w?")] == ["solo-w0"]
    assert "warning: spare is STOPPED and not in the message; run this command again once it is READY\n" in done.stderr
    told = json.loads(done.stdout)
    assert (told["workers"], told["not_running"], told["configured"]) == (["solo-w0"], ["spare"], True)
    text = (tmp_path / "message").read_text()
    assert text == told["message"]
    for part in (
        "Hello Ada Lovelace,\n",
        "the account ada on 1 TPU worker. You can log in, and start and stop training runs",
        "    solo: v4-16 in us-central2-b, solo-w0\n",
        told["ssh_config"].strip(),
        told["known_hosts"],
        "    ssh solo /opt/venvs/jax/bin/python --version\n",
        f"tpu_ops init my-fleet --snapshot {tmp_path}/published.json --user ada && cd my-fleet\n",
    ):
        assert part in text
    assert "Host solo-w0 solo\n    HostName 34.0.2.0\n    User ada\n" in told["ssh_config"]


def test_an_entry_without_a_key_is_refused_before_anything_changes(fleet: Member) -> None:
    done = invite(fleet, "bob")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: the entry has no key, so nobody could log in with it\n" in done.stderr
    assert "bob in users_people" in done.stderr
    assert list((fleet.path / "playbooks").glob("*-w?")) == []


def entry(**changes: Any) -> dict[str, Any]:
    """Return what the playbook tells of a person on one worker."""
    return {"entries": [{"state": "present", "keys": ["k"]} | changes]}


@pytest.mark.parametrize(
    ("here", "names", "said"),
    [
        ({"a-w0": entry()}, {"ada"}, ""),
        ({"a-w0": entry(), "b-w0": entry(state="absent")}, {"ada"}, ""),
        ({}, {"adda"}, "the person is not listed .*did you mean adda"),
        ({}, {"ada"}, "names only nodes that the fleet does not have"),
        ({"a-w0": entry(keys=[])}, {"ada"}, "has no key"),
        ({"a-w0": entry(state="absent")}, {"ada"}, "state: absent"),
    ],
)
def test_what_is_missing_in_an_entry_is_named(here: dict[str, Any], names: set[str], said: str) -> None:
    if said:
        with pytest.raises(UsageError, match=said):
            invitations._checked("ada", "users_people", here, names)
    else:
        assert list(invitations._checked("ada", "users_people", here, names)) == ["a-w0"]


def texts(member: Member, chosen: list[Worker]) -> Portable:
    """Return the texts for ada on workers of the pod and of a node without external addresses."""
    settings = member.settings()
    return portable(selection.ways_of(settings, INNER), settings, chosen, user="ada", keys=KEYS)


INNER = (node(), node("solo", node_id="2", count=1, external_ips=("",)))


def settled(config: Path, host: str) -> dict[str, str]:
    """Return the options that ssh takes for a host."""
    done = subprocess.run(["ssh", "-F", config, "-G", host], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.parametrize(
    ("options", "jump", "needs"),
    [
        ({"proxy_jump": "pod-w0"}, "pod-w0", ""),
        ({"proxy_jump": "eve@bastion.test:2222"}, "eve@bastion.test:2222", "an account on bastion.test"),
    ],
)
def test_ssh_understands_the_config_at_the_top_of_a_config_of_the_person(
    tmp_path: Path, options: dict[str, str], jump: str, needs: str
) -> None:
    found = texts(Member(tmp_path, **options), workers_of(INNER))
    assert needs in found.needs
    assert bool(needs) == bool(found.needs)
    (tmp_path / "config").write_text(f"{found.config}ForwardX11 yes\nHost other\n    User eve\n")
    (tmp_path / "known_hosts").write_text(found.known_hosts)
    for worker in workers_of(INNER):
        seen = settled(tmp_path / "config", worker.host)
        assert (seen["user"], seen["hostkeyalias"]) == ("ada", worker.host_key_alias)
        assert (seen["stricthostkeychecking"], seen["forwardx11"]) == ("true", "yes")
        assert seen.get("proxyjump", "") == (jump if worker.label == "solo" else "")
        lookup = ["ssh-keygen", "-F", worker.host_key_alias, "-f", str(tmp_path / "known_hosts")]
        assert worker.host_key_alias in subprocess.run(lookup, capture_output=True, text=True, check=True).stdout
    assert settled(tmp_path / "config", "solo")["hostname"] == "10.0.2.0"
    assert (settled(tmp_path / "config", "other")["user"], settled(tmp_path / "config", "other")["forwardx11"]) == (
        "eve",
        "yes",
    )


def test_a_worker_without_a_known_host_key_or_a_way_is_left_out(tmp_path: Path) -> None:
    member = Member(tmp_path, connect_with=["external"])
    chosen = [*workers_of(INNER), *workers_of([node("new", node_id="9", count=1)])]
    found = texts(member, chosen)
    assert found.left_out == {"solo-w0": "has no external address", "new-w0": "has no known host key"}
    assert "solo" not in found.config + found.known_hosts
