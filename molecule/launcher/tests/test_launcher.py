"""What a member of the group is allowed to do, and nothing more."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

MARKER = "0123456789abcdef"
PROBE = f"""echo '{{"marker": "{MARKER}", "action": "probe"}}' | sudo -n /usr/local/sbin/tpu-host"""

PY_SPY = "/usr/local/lib/tpu_ops/py-spy"

TAG = "import sys; print(sys.implementation.cache_tag)"

Rita = Callable[[str], Any]


@pytest.fixture
def rita(host: Host, ssh: Callable[..., Any]) -> Rita:
    """Return a function that runs a command as a member of the group with a new login."""
    with host.sudo():
        host.check_output("usermod --append --groups tpu-run rita")
    return lambda command: ssh(command, user="rita")


def test_the_host_program_answers_a_member_s_probe(rita: Rita) -> None:
    done = rita(PROBE)
    assert done.returncode == 0, done.stderr
    _, marker, answer = done.stdout.strip().partition(MARKER)
    assert marker
    assert all(json.loads(answer)["probe"]["environment_files"].values())


def test_a_session_that_began_before_the_right_was_taken_away_has_it_no_more(host: Host) -> None:
    with host.sudo():
        host.run("gpasswd --delete rita tpu-run")
        # To sudo, a session is its group list.
        session = "setpriv --reuid=rita --regid=rita --groups=tpu-run"
        said = host.check_output(f"{session} sh -c {shlex.quote(PROBE)}")
        error = json.loads(said.strip().partition(MARKER)[2])["error"]
        assert error["kind"] == "denied"
        assert "rita is no longer allowed to use this worker's launcher" in error["message"]


def test_a_user_named_by_another_sudo_rule_needs_no_group(host: Host) -> None:
    with host.sudo():
        host.run("gpasswd --delete rita tpu-run")
        rule = "rita ALL=(root) NOPASSWD: /usr/local/sbin/tpu-host"
        host.check_output(f"(umask 337; echo '{rule}' >/etc/sudoers.d/zz-rita)")
        said = host.run(f"setpriv --reuid=rita --regid=rita --clear-groups sh -c {shlex.quote(PROBE)}")
        host.check_output("rm /etc/sudoers.d/zz-rita")
    assert json.loads(said.stdout.strip().partition(MARKER)[2])["ok"], said.stderr


@pytest.mark.parametrize(
    "command",
    ["id", "-s", "/usr/local/sbin/tpu-host --help", "-u tpu id", "LD_PRELOAD=x /usr/local/sbin/tpu-host"],
)
def test_sudo_gives_a_member_nothing_else(rita: Rita, command: str) -> None:
    done = rita(f"sudo -n {command}")
    assert done.returncode != 0
    assert "sudo:" in done.stderr


def test_the_rule_is_what_sudo_lists(rita: Rita) -> None:
    listed = rita("sudo -n -l").stdout.rpartition("following commands on")[2].splitlines()[1:]
    assert [line.strip() for line in listed] == ['(root) NOPASSWD: /usr/local/sbin/tpu-host ""']


def test_nobody_else_may_start_the_program(host: Host) -> None:
    with host.sudo():
        host.run("gpasswd --delete rita tpu-run")
        done = host.run("sudo -u rita sudo -n /usr/local/sbin/tpu-host")
    assert done.rc != 0
    assert "sudo:" in done.stderr


def test_only_root_writes_what_root_executes(host: Host) -> None:
    with host.sudo():
        path = host.check_output("readlink -f /usr/local/sbin/tpu-host")
        compiled = host.check_output(f"echo {path}.$(/usr/bin/python3 -c {shlex.quote(TAG)}).zip")
        way = host.check_output(f"namei --long --modes {path} {compiled} {PY_SPY}")
    assert path.startswith("/usr/local/lib/tpu_ops/")
    rows = [line.split() for line in way.splitlines()[1:]]
    assert all(row[1] == "root" and row[0][8] != "w" for row in rows if row[0].startswith(("-", "d"))), way


def test_the_program_is_the_one_that_was_brought(host: Host) -> None:
    with host.sudo():
        path = host.check_output("readlink -f /usr/local/sbin/tpu-host")
        digest = host.check_output(f"sha256sum {path}")
    assert digest.startswith(path.split("/")[-2])


def test_py_spy_shows_where_a_program_of_somebody_else_is(host: Host) -> None:
    assert host.check_output(f"{PY_SPY} --version").startswith("py-spy ")
    sleeps = "import time; slept = lambda: time.sleep(60); slept()"
    reads = f"setpriv --reuid=rita --clear-groups --inh-caps=-all,+sys_ptrace --ambient-caps=-all,+sys_ptrace {PY_SPY}"
    finds = f'{reads} dump --pid $0 2>/dev/null | grep "<lambda>"'
    with host.sudo():
        found = host.check_output(
            f"setpriv --reuid=rita --regid=rita --clear-groups /usr/bin/python3 -c {shlex.quote(sleeps)} & "
            f"timeout 20 sh -c 'until {finds}; do sleep 0.1; done' $!; kill $!"
        )
    assert "<lambda>" in found


def test_records_of_runs_are_changed_by_root_only(host: Host) -> None:
    with host.sudo():
        assert host.check_output("stat -c %U:%a /var/lib/tpu_ops/runs") == "root:755"


def test_runs_trust_the_authorities_of_the_worker(host: Host) -> None:
    file = host.file("/etc/tpu_ops/certificates.env")
    written = "# Written by Ansible; changes are lost.\nSSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt\n"
    assert file.content_string == written
    assert (file.user, file.group, file.mode) == ("root", "root", 0o644)


def test_shared_memory_outlives_the_last_ssh_session(rita: Rita, host: Host) -> None:
    assert rita("head -c 4096 /dev/zero > /dev/shm/proof").returncode == 0
    closed = host.run("timeout 30 sh -c 'while loginctl show-user rita >/dev/null 2>&1; do sleep 0.2; done'")
    assert closed.rc == 0, "logind still counts a session of rita after 30 s"
    with host.sudo():
        assert host.file("/dev/shm/proof").user == "rita"
        host.run("rm /dev/shm/proof")
