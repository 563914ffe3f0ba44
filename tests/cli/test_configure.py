"""`tpu_ops configure`: real ansible-runner and real Ansible, on hosts that are this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest

from tests.support import actions
from tests.support.nodes import node
from tests.support.published import Member, document
from tests.support.vault import PASSWORD, vaulted

#: The hosts are this machine: what is proved here is the way to Ansible and back, not ssh.
VARIABLES = (
    "ansible_connection: local\nansible_become: false\nansible_python_interpreter: '{{ ansible_playbook_python }}'\n"
)
PLAY = """\
- name: Try
  hosts: all
  gather_facts: false
  tasks:
"""
#: Writes a file with a module of Ansible: about a second of processor time for each host.
COPY = """\
    - name: Write a file
      ansible.builtin.copy: {content: x, dest: "{{ playbook_dir }}/{{ inventory_hostname }}", mode: "0600"}
      tags: [write]
"""
#: Writes the same file with the action `put`, which starts no process.
PUT = """\
    - name: Write a file
      put: {content: x, path: "{{ playbook_dir }}/{{ inventory_hostname }}"}
      tags: [write]
"""
SECRET = "token-6f1d"


@pytest.fixture
def fleet(tmp_path):
    """A fleet directory with a playbook of its own, of two pods; nobody is asked for it."""
    member = Member(tmp_path, snapshot=str(tmp_path / "published.json"))
    (tmp_path / "published.json").write_text(document([node(), node("solo", node_id="2", count=1)]).text())
    (member.path / "inventory" / "group_vars").mkdir()
    (member.path / "inventory" / "group_vars" / "all.yml").write_text(VARIABLES)
    actions.give_put(member.path)
    return member


def write(member: Member, tasks: str) -> None:
    """Write the fleet's playbook."""
    (member.path / "site.yml").write_text(PLAY + tasks)


def command(*argv: str, name: str = "configure") -> list[str]:
    """Return the words of a command."""
    return [sys.executable, "-m", "tpu_ops.cli.main", name, *argv]


def run(
    member: Member, words: list[str], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    environ = member.environ(**variables)
    return subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def configure(member: Member, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `tpu_ops configure`."""
    return run(member, command(*argv), None, **variables)


def drift(member: Member, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `tpu_ops drift`."""
    return run(member, command(*argv, name="drift"))


def test_the_playbook_runs_on_the_target_and_tells_what_changed(fleet):
    write(fleet, PUT)
    first = configure(fleet, "pod", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["hosts"]["pod-w1"]["changed"] == 1
    assert "pod-w[0-1]: changed: Write a file" in first.stderr
    assert sorted(path.name for path in fleet.path.glob("*-w?")) == ["pod-w0", "pod-w1"]
    second = configure(fleet)
    assert "solo-w0: changed: Write a file" in second.stderr, second.stderr
    assert [line.split() for line in second.stdout.splitlines()] == [
        ["HOST", "OK", "CHANGED", "FAILED", "UNREACHABLE", "SKIPPED"],
        ["pod-w0", "1", "0", "0", "0", "0"],
        ["pod-w1", "1", "0", "0", "0", "0"],
        ["solo-w0", "1", "1", "0", "0", "0"],
    ]


def test_check_changes_nothing_and_tags_choose(fleet):
    write(fleet, PUT)
    done = configure(fleet, "pod-w0", "--check", "--tags", "write")
    assert "pod-w0: would change: Write a file" in done.stderr
    done = configure(fleet, "--fleet", str(fleet.path), "--limit", "pod-w0", "--skip-tags", "write")
    assert done.returncode == 2
    assert "no task ran: no tag or no host matches" in done.stderr
    assert not (fleet.path / "pod-w0").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("plugin: tpu_vm\n", False),
        ("projects: [mine]\n", True),
        ("snapshot: gs://a/b\n", True),
        (": broken\n- x", True),
    ],
)
def test_configure_names_its_fleet_only_if_the_directory_has_another_fleet_in_use(fleet, tmp_path, text, named):
    other = tmp_path / "other" / "inventory" / "tpu_vm.yml"
    other.parent.mkdir(parents=True)
    other.write_text(text)
    # The tag is unknown, so no playbook runs.
    words = command("--tags", "unknown")
    said = f"using fleet {fleet.path} (TPU_OPS_FLEET), not the fleet of this directory"
    write(fleet, PUT)
    assert (said in run(fleet, words, other.parent).stderr) == named
    assert said not in run(fleet, [*words, "--fleet", str(fleet.path)], other.parent).stderr


def test_drift_names_workers_and_paths_and_only_these_workers_are_configured(fleet):
    write(fleet, COPY)
    (fleet.path / "pod-w0").write_text("x")
    (fleet.path / "pod-w0").chmod(0o600)
    found = drift(fleet, "pod")
    assert (found.returncode, found.stdout.splitlines()) == (
        1,
        ["pod-w1: Write a file", f"  {fleet.path}/pod-w1", "pod-w0: as site.yml would make it"],
    )
    assert not (fleet.path / "pod-w1").exists()
    write(fleet, PUT)
    done = configure(fleet, "pod", "--drifted", "--json")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["hosts"]) == ["pod-w1"]
    done = configure(fleet, "pod", "--drifted", "--json")
    assert "no worker differs: pod-w[0-1]" in done.stderr
    assert json.loads(done.stdout)["hosts"] == {}


def test_a_worker_on_which_the_comparison_fails_is_unknown_and_configured_too(fleet):
    broken = "    - {name: Break, ansible.builtin.fail: {msg: no}, when: inventory_hostname == 'pod-w1'}\n"
    write(fleet, "    - {name: Say, ansible.builtin.debug: {msg: x}}\n" + broken)
    done = drift(fleet, "pod", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        1,
        {"clean": ["pod-w0"], "unknown": ["pod-w1"], "differences": []},
    )
    assert "pod-w1: failed: Break" in done.stderr
    assert list(json.loads(configure(fleet, "pod", "--drifted", "--json").stdout)["hosts"]) == ["pod-w1"]


def test_drift_names_tags_and_nodes_that_cannot_be_compared(fleet):
    nodes = [node(), node("stopped", node_id="2", count=1, state="STOPPED")]
    (fleet.path.parent / "published.json").write_text(document(nodes).text())
    write(fleet, PUT)
    for argv, said in ((("--tags", "writ"), "no task of site.yml has the tag writ"), (("stopped",), "is STOPPED")):
        done = drift(fleet, *argv)
        assert (done.returncode != 0, said in done.stderr, done.stdout) == (True, True, ""), done.stderr


def test_workers_do_not_run_a_playbook_of_the_fleets_own_on_themselves(fleet):
    write(fleet, PUT)
    for command_of in (configure, drift):
        done = command_of(fleet, "pod", "--on-workers")
        assert (done.returncode, "a playbook of the fleet's own may need the controller" in done.stderr) == (2, True)
    assert not (fleet.path / "pod-w0").exists()


def test_only_site_yml_is_compared(fleet):
    write(fleet, PUT)
    (fleet.path / "playbooks").mkdir()
    (fleet.path / "playbooks" / "other.yml").write_text(PLAY + PUT)
    done = configure(fleet, "--drifted", "--playbook", "other")
    assert (done.returncode, "error: only site.yml is compared" in done.stderr) == (2, True)


def test_a_comparison_that_did_not_run_is_an_error_and_no_clean_worker(fleet):
    write(fleet, "    - name: [\n")
    for done in (drift(fleet), configure(fleet, "--drifted")):
        assert done.returncode == 2
        assert "error: Ansible did not run the playbook" in done.stderr
        assert "YAML" in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"LANG": "xx_XX.UTF-8"}], ids=str)
def test_a_locale_that_ansible_refuses_is_replaced_for_it(fleet, variables):
    write(fleet, PUT + "    - {name: Grüße, ansible.builtin.debug: {msg: schön}, tags: [other]}\n")
    done = configure(fleet, "pod-w0", "--tags", "write,other", **variables)
    assert done.returncode == 0, done.stderr
    assert "schön" in done.stderr
    assert (fleet.path / "pod-w0").exists()


def test_an_exported_inventory_without_this_fleet_is_refused(fleet, tmp_path):
    write(fleet, PUT)
    servers = tmp_path / "servers.yml"
    servers.write_text(json.dumps({"all": {"hosts": {"db": {"ansible_connection": "local"}}}}))
    done = configure(fleet, ANSIBLE_INVENTORY=str(servers))
    assert done.returncode == 2, done.stderr
    assert f"at:  {servers}, and the fleet's file is {fleet.path}/inventory/tpu_vm.yml" in done.stderr
    assert not list(fleet.path.glob("db"))
    own = f"{fleet.path}/inventory/tpu_vm.yml,{servers}"
    assert configure(fleet, "pod-w0", ANSIBLE_INVENTORY=own).returncode == 0
    assert [path.name for path in fleet.path.glob("*") if path.name in ("db", "pod-w0")] == ["pod-w0"]


@pytest.mark.parametrize(("option", "name"), [("--tags", "wirte"), ("--skip-tags", "users,wirte")])
def test_a_tag_that_no_task_has_is_refused_and_nothing_runs(fleet, option, name):
    done = configure(fleet, option, name)
    assert done.returncode == 2
    assert "no task of site.yml has the tag wirte" in done.stderr
    assert f"at:  {option} {name}\n  fix: use some of base, buckets, credentials, disks, " in done.stderr
    assert "Gathering" not in done.stdout + done.stderr
    done = configure(fleet, "--playbook", "users", option, name)
    assert (done.returncode, f"fix: leave out {option}: users.yml has no tags" in done.stderr) == (2, True), done.stderr


def test_tags_of_dynamically_included_tasks_are_accepted(fleet):
    (fleet.path / "inner.yml").write_text(PUT.replace("    - ", "- ", 1).replace("\n      ", "\n  "))
    include = "    - {name: Include, ansible.builtin.include_tasks: inner.yml, tags: always}\n"
    write(fleet, include + PUT.replace("[write]", "[other]").replace("{{ inventory_hostname }}", "not"))
    done = configure(fleet, "pod", "--tags", "write")
    assert done.returncode == 0, done.stderr
    assert "warning: no task of site.yml has the tag write, unless the playbook includes tasks" in done.stderr
    assert (fleet.path / "pod-w1").exists()
    assert not (fleet.path / "not").exists()


def test_a_failure_is_printed_once_with_hosts_and_reason(fleet):
    write(
        fleet,
        '    - name: Refuse\n      ansible.builtin.fail: {msg: "{{ inventory_hostname }} has no disk"}\n'
        "      when: tpu_node == 'pod'\n",
    )
    done = configure(fleet)
    assert done.returncode == 1
    assert "pod-w[0-1]: failed: Refuse\n" in done.stderr
    assert done.stderr.count("has no disk") == 1
    assert "  fix: correct the error and run the same command again" in done.stderr


def test_without_sudo_configure_names_the_needed_rights(fleet, tmp_path):
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n")
    sudo.chmod(0o755)
    write(fleet, COPY)
    (fleet.path / "inventory" / "group_vars" / "all.yml").write_text(
        VARIABLES.replace("become: false", "become: true")
        + f"ansible_become_exe: {sudo}\nansible_become_user: nobody\n"
    )
    done = configure(fleet, "pod")
    assert (done.returncode, done.stderr.count("  fix: ")) == (1, 1), done.stderr
    assert "  fix: configuring workers needs full passwordless sudo on them: " in done.stderr


def test_a_failure_is_printed_even_if_the_table_has_no_reader(fleet):
    write(fleet, "    - {name: Break, ansible.builtin.fail: {msg: no space here}}\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command("pod"), env=fleet.environ(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert done.returncode == 1, done.stderr
    assert "pod-w[0-1]: failed: Break\n  no space here\n" in done.stderr
    assert "  fix: correct the error and run the same command again" in done.stderr


def test_a_failure_that_the_play_itself_mends_is_none(fleet):
    write(
        fleet,
        "    - block: [{name: Fail, ansible.builtin.fail: {msg: no}}]\n"
        "      rescue: [{name: Go on, ansible.builtin.debug: {msg: yes}}]\n",
    )
    done = configure(fleet, "pod", "--json")
    assert (done.returncode, json.loads(done.stdout)["failures"]) == (0, [])


def test_a_failure_repeated_in_a_rescue_is_printed_once(fleet):
    write(
        fleet,
        "    - block: [{name: Install, ansible.builtin.fail: {msg: no disk}}]\n"
        "      rescue: [{name: Say why, ansible.builtin.fail: {msg: '{{ ansible_failed_result.msg }}'}}]\n",
    )
    done = configure(fleet, "pod", "--json")
    failures = json.loads(done.stdout)["failures"]
    assert sorted((step["host"], step["task"]) for step in failures) == [("pod-w0", "Say why"), ("pod-w1", "Say why")]
    assert (done.returncode, done.stderr.count("no disk")) == (1, 1)


def test_a_warning_of_a_task_is_printed_once(fleet):
    (fleet.path / "action_plugins" / "warn.py").write_text(
        "from ansible.plugins.action import ActionBase\n\n\nclass ActionModule(ActionBase):\n"
        "    def run(self, tmp=None, task_vars=None):\n"
        "        return {'warnings': ['users_people[0]: ada: nodes: the inventory has no podd']}\n"
    )
    write(fleet, "    - {name: Warn, warn: {}}\n")
    done = configure(fleet, "pod")
    assert done.stderr.count("warning: users_people[0]: ada: nodes: the inventory has no podd\n") == 1, done.stderr


def test_hosts_that_do_not_answer_are_code_4(fleet):
    write(fleet, COPY)
    variables = "ansible_connection: ssh\nansible_ssh_retries: 0\nansible_ssh_args: -o ProxyCommand=/bin/false\n"
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(variables)
    done = configure(fleet)
    assert done.returncode == 4, done.stderr
    assert "error: 1 host did not answer\n  at:  solo-w0" in done.stderr
    assert "fix: `tpu_ops list`" in done.stderr
    assert (fleet.path / "pod-w1").exists()


def test_refused_logins_and_silent_hosts_are_distinguished(fleet, tmp_path):
    write(fleet, COPY)
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\necho 'ada@34.0.1.0: Permission denied (publickey).' >&2\nexit 255\n")
    refuses.chmod(0o700)
    variables = f"ansible_connection: ssh\nansible_ssh_retries: 0\nansible_ssh_executable: {refuses}\n"
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(variables)
    done = configure(fleet)
    assert done.returncode == 4, done.stderr
    assert "error: login was refused on 1 host\n  at:  solo-w0\n  fix: you logged in as " in done.stderr
    silent = "ansible_connection: ssh\nansible_ssh_retries: 0\nansible_ssh_args: -o ProxyCommand=/bin/false\n"
    (fleet.path / "inventory" / "group_vars" / "node_pod.yml").write_text(silent)
    done = configure(fleet)
    assert done.returncode == 4, done.stderr
    assert "hosts did not answer" in done.stderr


CHANGED = "Host key for tpu-1-w0 has changed and you have requested strict checking.\\nHost key verification failed."


@pytest.mark.parametrize(
    ("said", "cause", "fix"),
    [
        ("command-line: line 0: Bad configuration option: foo", "Bad configuration option: foo", "ANSIBLE_SSH_ARGS"),
        (CHANGED, "a key other than the known one", "correct the cause; then run the same command again"),
        ("ssh: connect to host 34.0.1.0 port 22: Connection refused", "1 host did not answer\n", "`tpu_ops list`"),
    ],
)
def test_an_unreachable_host_is_reported_with_reason_and_fix(fleet, tmp_path, said, cause, fix):
    write(fleet, COPY)
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nprintf '{said}\\n' >&2\nexit 255\n")
    ssh.chmod(0o700)
    variables = f"ansible_connection: ssh\nansible_ssh_retries: 0\nansible_ssh_executable: {ssh}\n"
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(variables)
    done = configure(fleet, "solo")
    assert done.returncode == 4, done.stderr
    error, _, way = done.stderr.partition("error: ")[2].partition("fix: ")
    assert cause in error, error
    assert fix in way, way


#: What the role nfs does and tells, in short: whoever mounts tells which server the play leaves out.
SERVED = """\
    - name: Export
      put: {content: "{{ groups['all'] | join(' ') }}", path: "{{ playbook_dir }}/exports"}
      when: inventory_hostname == 'solo-w0'
      tags: [nfs]
    - name: Record which servers this run leaves out
      ansible.builtin.set_stats: {data: {nfs_left_out: [solo-w0]}}
      when: "'solo-w0' not in ansible_play_hosts_all"
      tags: [nfs]
"""


#: A mount that fails where the server was not told who may.
REFUSED = """\
    - name: Mount
      ansible.builtin.fail: {msg: access denied by server}
      when: inventory_hostname != 'solo-w0' and not (playbook_dir ~ '/exports') is file
      tags: [nfs]
"""


def test_a_skipped_nfs_server_is_named_with_the_command_that_updates_it(fleet):
    write(fleet, SERVED + PUT)
    done = configure(fleet, "pod")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(
        "solo-w0 serves NFS to these workers, but was not configured\n"
        "  if the addresses of these workers are new: `tpu_ops configure solo-w0 --tags nfs`\n"
    )
    for argv in ([], ["pod", "--check"]):
        assert "serves NFS" not in configure(fleet, *argv).stderr
    (fleet.path / "exports").unlink()
    write(fleet, SERVED + REFUSED)
    done = configure(fleet, "pod")
    assert "solo-w0 serves NFS to these workers, but was not configured\n" in done.stderr
    assert done.returncode == 1


def test_hosts_without_a_host_key_are_refused_with_the_way_out(fleet):
    (fleet.path.parent / "published.json").write_text(document([node()], {}).text())
    write(fleet, COPY)
    variables = "ansible_connection: ssh\nansible_ssh_retries: 0\nansible_ssh_args: -o ProxyCommand=/bin/false\n"
    (fleet.path / "inventory" / "group_vars" / "node_pod.yml").write_text(variables)
    done = configure(fleet)
    assert done.returncode == 4, done.stderr
    assert "fix: node pod publishes no host key: `tpu_ops refresh --trust-first pod`" in done.stderr


def test_a_fleet_without_workers_is_named_with_the_command_that_creates_a_node(fleet):
    write(fleet, PUT)
    (fleet.path.parent / "published.json").write_text(document([]).text())
    done = configure(fleet)
    assert done.returncode == 2
    assert "error: no task ran: the fleet has no workers" in done.stderr
    assert "fix: `tpu_ops create` creates a node" in done.stderr


@pytest.mark.parametrize("target", ["solo", "pod,solo"])
def test_a_node_that_does_not_serve_is_named_and_nothing_runs(fleet, target):
    write(fleet, PUT)
    away = node("solo", node_id="2", count=1, state="PREEMPTED")
    (fleet.path.parent / "published.json").write_text(document([node(), away]).text())
    done = configure(fleet, target)
    assert done.returncode == 4, done.stderr
    place = "--zone us-central2-b --project lab"
    anew = f"`tpu_ops delete solo {place}`, then `tpu_ops create solo --type v4-16 {place}`"
    fix = f"the node does not come back by itself: {anew}; or name"
    assert f"error: solo is PREEMPTED\n  at:  solo-w0\n  fix: {fix}" in done.stderr
    assert not list(fleet.path.glob("pod-w*"))


def test_hosts_of_other_names_are_meant_by_their_node(fleet):
    write(fleet, PUT)
    fleet.write(snapshot=str(fleet.path.parent / "published.json"), hostnames=["tpu_node ~ 'x' ~ tpu_worker_index"])
    done = configure(fleet, "solo", "--json")
    assert list(json.loads(done.stdout)["hosts"]) == ["solox0"], done.stderr
    done = configure(fleet, "pod-w0")
    assert done.returncode == 2
    assert "the target is not a whole node" in done.stderr


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (("nobody",), "no node or worker is called 'nobody'"),
        (("--playbook", "../site"), "no such playbook"),
        (("--playbook", "users"), "no such playbook"),
        (("pod", "--limit", "solo"), "the target is named twice"),
    ],
)
def test_an_unknown_target_or_playbook_or_a_second_target_is_refused(fleet, argv, what):
    write(fleet, PUT)
    done = configure(fleet, *argv)
    assert (done.returncode, what in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_an_invalid_playbook_is_reported_without_colours(fleet):
    (fleet.path / "site.yml").write_text("- hosts: [\n")
    done = configure(fleet)
    assert done.returncode == 2
    assert "Ansible did not run the playbook; see its output above" in done.stderr
    assert "site.yml" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a:\n  - b: 1\n   c: 2\n", "node_solo.yml:3:4: "),
        ("a: [\n", "node_solo.yml:2:1: "),
        ("a:\n\tb: 1\n", "node_solo.yml:2:1: "),
        ("a: \x01\n", "node_solo.yml: "),
    ],
)
def test_a_file_of_variables_that_is_no_yaml_is_named(fleet, text, where):
    write(fleet, PUT)
    (fleet.path / "inventory" / "group_vars" / "pod.yml").write_text("secret: !vault |\n  x\n")
    # Of somebody else: it is none of Ansible's.
    (fleet.path / "inventory" / "another").mkdir()
    (fleet.path / "inventory" / "another" / "file.yml").write_text("[")
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(text)
    done = configure(fleet, "solo")
    assert done.returncode != 0
    assert f"fix: correct {fleet.path}/inventory/group_vars/{where}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("whole", [True, False], ids=["file", "variable"])
def test_a_vault_without_its_password_is_refused_with_the_fix(fleet, tmp_path, whole):
    write(fleet, "    - {name: Open, ansible.builtin.assert: {that: secret == 's3cret'}}\n")
    text = vaulted("secret: s3cret\n") if whole else "secret: !vault |\n" + indent(vaulted("s3cret"), "  ")
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(text)
    done = configure(fleet, "solo")
    assert (done.returncode, "fix: export ANSIBLE_VAULT_PASSWORD_FILE=FILE" in done.stderr) == (
        2 if whole else 1,
        True,
    ), done.stderr
    (tmp_path / "password").write_text(PASSWORD)
    done = configure(fleet, "solo", ANSIBLE_VAULT_PASSWORD_FILE=str(tmp_path / "password"))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def looking(fleet, tmp_path):
    """A task that looks for the secret while Ansible runs, in every file of the run's own directory; that goes then."""
    runtime = tmp_path / "home" / "run"
    runtime.mkdir()
    yield (
        "    - name: Look\n      ansible.builtin.shell:\n"
        f"        cmd: test -s {runtime}/tpu_ops-configure-*/limit && grep -rl {SECRET} {runtime}/tpu_ops-configure-*\n"
        "      check_mode: false\n      register: found\n      failed_when: found.rc != 1 or found.stderr != ''\n"
    )
    assert list(runtime.glob("tpu_ops-configure-*")) == []


def test_no_secret_of_the_environment_is_left_in_a_file(fleet, looking):
    write(fleet, looking)
    done = configure(fleet, "solo", WANDB_API_KEY=f"{SECRET}-value")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encrypted", [True, False], ids=["vault", "plain"])
def test_secrets_of_credentials_variables_are_left_in_no_file(fleet, tmp_path, looking, encrypted):
    (fleet.path / "site.yml").write_text(PLAY.replace("tasks:", "roles: [facts, credentials]\n  post_tasks:") + looking)
    entries = json.dumps({"credentials_entries": [{"person": "root", "kind": "wandb", "secret": f"{SECRET}-value"}]})
    text = vaulted(entries) if encrypted else entries
    (fleet.path / "inventory" / "group_vars" / "node_solo.yml").write_text(text)
    (tmp_path / "password").write_text(PASSWORD)
    # The hosts are this machine, where nothing is to be written.
    done = configure(fleet, "solo", "--check", ANSIBLE_VAULT_PASSWORD_FILE=str(tmp_path / "password"))
    assert done.returncode == 0, done.stderr
    assert "would change: credentials : Write people's credentials" in done.stderr
    assert SECRET not in done.stdout + done.stderr


#: Tasks that go on: one that ends when it is told to, and one that does not, as what waits for an Ansible that is gone.
WAITS = {
    "told": "ansible.builtin.wait_for: {path: NEVER, timeout: 100}",
    "deaf": """ansible.builtin.command: {argv: [sh, -c, "trap '' TERM INT HUP; touch STARTED; sleep 100", NEVER]}""",
}


@pytest.mark.parametrize("kind", WAITS)
def test_an_interrupt_ends_ansible_and_leaves_nothing(fleet, tmp_path, kind):
    started = tmp_path / "started"
    begin = f"    - name: Begin\n      ansible.builtin.copy: {{content: x, dest: {started}, mode: '0600'}}\n"
    wait = WAITS[kind].replace("NEVER", str(fleet.path / "never")).replace("STARTED", str(started))
    write(fleet, (begin if kind == "told" else "") + f"    - name: Wait\n      {wait}\n")
    (tmp_path / "home" / "run").mkdir()
    with subprocess.Popen(
        command("solo"),
        env=fleet.environ(),
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background has its commands ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    ) as process:
        assert process.stderr
        while not started.exists():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 130, said
    assert list((tmp_path / "home" / "run").glob("tpu_ops-configure-*")) == []
    # The last of Ansible's forks may still be ending on a busy machine.
    deadline = time.monotonic() + 10
    while left := [line for line in _commands() if str(fleet.path) in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)  # polls the processes until the deadline


def _commands() -> list[str]:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
