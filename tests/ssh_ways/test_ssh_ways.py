"""Plain ssh and its kin by the installed config, first contact, jumps and Identity-Aware Proxy, on real workers."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ssh_ways.conftest import Person
from tests.support.desk import Desk, Lab, await_no_masters
from tpu_ops.ssh import masters

pytestmark = pytest.mark.lab

#: What sshd tells a session of its connection: the address it came from first.
CAME_FROM = "set -- $SSH_CONNECTION; echo $1"


@pytest.fixture(scope="module")
def at_home(desk_with) -> Person:
    """A person who has installed the fleet's ssh config."""
    desk: Person = desk_with(zones=["us-central2-b"])
    desk.do("tpu_ops", "ssh-config", "--install", *desk.file_option("--file"))
    return desk


def address(desk: Desk, host: str, kind: str = "internal_ip") -> str:
    """Return a worker's address as the fleet lists it."""
    return next(str(row[kind]) for row in desk.json("tpu_ops", "list", "--json") if row["host"] == host)


# --- what a person's own commands do with the installed config ------------------------------------------------------


def test_ssh_logs_in_by_name(at_home, lab):
    done = at_home.do("ssh", *at_home.file_option(), "gate-w0", "hostname; id -un")
    assert done.split() == [lab.inside("gate-w0", "hostname").strip(), "tpu"]


def test_scp_sftp_and_rsync_copy_by_name(at_home, tmp_path):
    (tmp_path / "a b").write_text("text")
    option = at_home.file_option()
    at_home.do("scp", "-q", *option, str(tmp_path / "a b"), "gate-w0:by-scp")
    at_home.do("sftp", "-q", *option, "-b", "-", "gate-w0", stdin=f"get by-scp {tmp_path}/by-sftp\n")
    shell = " ".join(["ssh", *option])
    at_home.do("rsync", "-a", "-e", shell, f"{tmp_path}/by-sftp", "gate-w0:by-rsync")
    assert at_home.do("ssh", *option, "gate-w0", "cat by-scp by-rsync") == "texttext"


def test_vs_code_finds_the_workers_and_opens_its_tunnel(at_home, lab):
    """It lists the hosts of the config and of what that includes, and runs ssh -T -D PORT HOST with a shell's lines."""
    included = [line.split('"')[1] for line in at_home.own_config.read_text().splitlines() if "Include" in line]
    assert "Host gate-w0 gate\n" in Path(included[0]).read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [*at_home.entry, "ssh", *at_home.file_option(), "-T", "-D", str(port), "gate-w0", "sh"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=at_home.environ, stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"echo ready\n")
        assert process.stdout.readline() == b"ready\n"
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"\x05\x01\x00")  # SOCKS 5, one way to authenticate: none
            assert client.recv(2) == b"\x05\x00"
        process.stdin.close()


@pytest.mark.skipif(not shutil.which("mosh"), reason="mosh is not installed here")
def test_mosh_connects_by_name(at_home, lab):
    lab.inside("gate-w0", "sh", "-c", "apt-get update -qq && apt-get install -y -qq mosh >/dev/null")
    command = (
        "stty rows 24 cols 80; mosh --server='mosh-server new -l LC_ALL=C.UTF-8' gate-w0 -- sh -c 'hostname >by-mosh'"
    )
    if not at_home.entry:
        command = command.replace("mosh ", f"mosh --ssh='ssh -F {at_home.own_config}' ", 1)
    at_home.do("script", "-qec", command, "/dev/null", TERM="xterm", LC_ALL="C.UTF-8")
    assert lab.inside("gate-w0", "cat", "/home/tpu/by-mosh") == lab.inside("gate-w0", "hostname")


def test_sessions_share_one_connection_with_the_commands(at_home, lab):
    port = "set -- $SSH_CONNECTION; echo $2"
    ports = {at_home.do("ssh", *at_home.file_option(), "gate-w0", port).strip() for _ in range(2)}
    ports.add(at_home.do("tpu_ops", "ssh", "gate", "--", port).strip())
    assert len(ports) == 1


def master(desk: Person, host: str) -> str:
    """Return the process that holds the connection to a worker."""
    done = desk.succeed("ssh", *desk.file_option(), "-O", "check", host)
    found = re.search(r"pid=(\d+)", done.stderr)
    assert found, done.stderr
    return found[1]


def test_a_connection_whose_process_was_killed_is_opened_anew(at_home):
    def process() -> str:
        at_home.do("tpu_ops", "run", "gate-w0", "--", "true")
        return master(at_home, "gate-w0")

    at_home.hang_up()
    first = process()
    os.kill(int(first), signal.SIGKILL)
    second = process()
    assert second != first
    assert process() == second


def test_a_connection_to_an_address_that_was_left_is_ended(at_home):
    at_home.hang_up()
    at_home.do("ssh", *at_home.file_option(), "gate-w0", "true")
    mux = Path(at_home.environ["XDG_RUNTIME_DIR"], "tpu_ops", "mux")
    assert len(list(mux.iterdir())) == 1
    process = master(at_home, "gate-w0")
    text = at_home.do("tpu_ops", "ssh-config", "--print")
    control = text.partition("Host gate-w0 gate\n")[2].partition("ControlPath ")[2].split()[0]
    external = address(at_home, "gate-w0", "external_ip")
    masters.end_left([(external, f"{control}-of-another"), ("198.51.100.7", control)], user="tpu", mux=mux)
    assert master(at_home, "gate-w0") == process
    masters.end_left([(external, control)], user="tpu", mux=mux)
    await_no_masters(mux)


def test_ssh_goes_on_when_the_directory_of_the_connections_has_gone_with_the_last_session(at_home):
    at_home.hang_up()
    run = Path(at_home.environ["XDG_RUNTIME_DIR"])
    shutil.rmtree(run)
    assert at_home.do("ssh", *at_home.file_option(), "gate-w0", "echo in") == "in\n"
    assert len(list(run.glob("tpu_ops/mux/*"))) == 1
    at_home.hang_up()
    shutil.rmtree(run)
    run.write_text("no directory")
    try:
        assert at_home.do("ssh", *at_home.file_option(), "gate-w0", "echo in") == "in\n"
    finally:
        run.unlink()


def test_another_machine_under_the_same_address_is_refused_in_words(at_home, lab):
    """Its key is swapped on the worker's disk: what another machine at its address would look like."""
    swap = "cd /etc/ssh && for f in ssh_host_*_key*; do mv $f /root/; done && ssh-keygen -A -q && systemctl restart ssh"
    back = "cd /root && mv ssh_host_*_key* /etc/ssh/ && systemctl restart ssh"
    at_home.hang_up()
    lab.inside("gate-w0", "sh", "-c", swap)
    try:
        plain = at_home.try_("ssh", *at_home.file_option(), "-o", "BatchMode=yes", "gate-w0", "true")
        told = at_home.try_("tpu_ops", "run", "gate", "--", "true")
    finally:
        lab.inside("gate-w0", "sh", "-c", back)
    assert (plain.returncode, "IDENTIFICATION HAS CHANGED" in plain.stderr) == (255, True)
    assert told.returncode == 4
    assert "a key other than the known one" in told.stdout + told.stderr
    assert at_home.do("ssh", *at_home.file_option(), "gate-w0", "echo back") == "back\n"


# --- what the person's own config says of all hosts -------------------------------------------------------------------


#: With each of these alone Ansible once failed on the workers or waited for ever.
OF_ALL_HOSTS = """\
Host *
    RequestTTY force
    RemoteCommand true
    SessionType none
    StdinNull yes
    ForkAfterAuthentication yes
    HostName 192.0.2.1
    Port 2222
    ProxyCommand false
    PubkeyAuthentication no
    HostKeyAlgorithms ssh-rsa
    AddressFamily inet6
    BindAddress 192.0.2.1
"""


@pytest.fixture(scope="module")
def configuring(desk_with) -> Person:
    """A person with an ssh config of their own, whose fleet has a small playbook."""
    desk: Person = desk_with()
    if not desk.entry:
        pytest.skip("no password file of the test's own can be put in place here, and ssh reads no other config")
    copy = "{name: Write, ansible.builtin.copy: {content: in, dest: /tmp/written, mode: '0600'}}"
    play = f"- {{name: Try, hosts: all, gather_facts: false, tasks: [{copy}]}}\n"
    Path(desk.environ["TPU_OPS_FLEET"], "site.yml").write_text(play)
    (desk.home / ".ssh").mkdir(mode=0o700)
    return desk


@pytest.mark.parametrize("lines", [OF_ALL_HOSTS, "Misspelt yes\n"], ids=["all hosts", "misspelt"])
def test_ansible_reaches_workers_whatever_the_persons_config_says(configuring, lines):
    configuring.own_config.write_text(lines)
    for command in (["ansible", "node_gate", "-m", "ansible.builtin.ping"], ["tpu_ops", "configure", "gate"]):
        configuring.hang_up()
        configuring.do(*command)


def test_ansible_logs_in_with_the_agent_of_the_persons_config(configuring, tmp_path):
    agent = str(tmp_path / "agent")
    configuring.own_config.write_text(f"Host *\n    IdentityAgent {agent}\n    Misspelt yes\n")
    key = configuring.environ["TPU_OPS_PRIVATE_KEY"]
    ping = ["ansible", "node_gate", "-m", "ansible.builtin.ping"]
    with subprocess.Popen(["ssh-agent", "-D", "-a", agent], stdout=subprocess.DEVNULL) as process:
        try:
            while not Path(agent).is_socket():
                time.sleep(0.01)  # until it listens
            configuring.hang_up()
            assert configuring.try_(*ping, TPU_OPS_PRIVATE_KEY="").returncode == 4
            configuring.do("ssh-add", "-q", key, SSH_AUTH_SOCK=agent)
            assert "pong" in configuring.do(*ping, TPU_OPS_PRIVATE_KEY="")
        finally:
            process.terminate()


# --- first contact ----------------------------------------------------------------------------------------------------


@pytest.fixture
def unpublished(lab):
    """Guest attributes cannot be had."""
    lab.fault(method="GetGuestAttributes", code="NOT_FOUND", message="guest attributes are disabled")
    yield
    lab.clear_faults()


def fingerprints(lab: Lab, host: str) -> set[str]:
    """Return the fingerprints of a worker's host keys, as its own ssh-keygen shows them."""
    shown = lab.inside(host, "sh", "-c", "for f in /etc/ssh/ssh_host_*.pub; do ssh-keygen -lf $f; done")
    return {line.split()[1] for line in shown.splitlines()}


def on_a_terminal(desk: Desk, answer: str, *argv: str) -> tuple[int, str]:
    """Run a command whose input is a terminal, answer its question, and return its exit code and all it printed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*desk.entry, *argv], env=desk.environ, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    os.close(theirs)
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + 60
    while b"[y/N]" not in said:
        assert select.select([process.stdout], [], [], deadline - time.monotonic())[0], said
        more = os.read(process.stdout.fileno(), 65536)
        assert more, said
        said += more
    os.write(ours, answer.encode())
    rest = process.stdout.read()
    os.close(ours)
    return process.wait(60), (said + rest).decode()


def test_host_keys_are_trusted_on_first_contact_once_a_person_says_so(desk_with, lab, unpublished):
    desk = desk_with(proxy_jump="gate")
    assert "`tpu_ops refresh --trust-first gate`" in desk.try_("tpu_ops", "refresh").stderr
    refused = desk.try_("tpu_ops", "run", "gate", "--", "true")
    assert refused.returncode == 4
    assert "`tpu_ops refresh --trust-first gate`" in refused.stdout
    told = desk.try_("tpu_ops", "ssh", "gate", "--", "true")
    assert (told.returncode, "port 22" in told.stderr) == (4, False)
    assert "`tpu_ops refresh --trust-first gate`" in told.stderr.partition("error: ")[2]
    told = desk.try_("tpu_ops", "refresh", "--trust-first", "inner")
    assert told.returncode == 4
    assert "no host key is known for the jump host gate-w0: use --trust-first gate first" in told.stderr
    code, said = on_a_terminal(desk, "n\n", "tpu_ops", "refresh", "--trust-first", "gate")
    assert (code, "not confirmed" in said) == (1, True)
    code, said = on_a_terminal(desk, "y\n", "tpu_ops", "refresh", "--trust-first", "gate")
    assert code == 0
    assert set(re.findall(r"SHA256:\S+", said)) <= fingerprints(lab, "gate-w0")
    assert desk.do("tpu_ops", "run", "gate", "--", "echo", "in") == "in\n"
    # The workers behind it are asked by their own way, through it.
    shown = desk.json("tpu_ops", "refresh", "--trust-first", "inner", "--yes", "--json")["contacted"]
    assert [row["worker"] for row in shown] == ["inner-w0", "inner-w1"]
    assert all(row["fingerprint"] in fingerprints(lab, row["worker"]) for row in shown)
    assert desk.do("tpu_ops", "run", "inner", "--", "true")


def test_a_worker_that_does_not_answer_is_named_and_the_other_one_is_trusted(desk_with, lab, unpublished):
    desk = desk_with(connect_with=["internal"])
    lab.inside("inner-w1", "systemctl", "stop", "ssh.socket", "ssh.service")
    try:
        told = desk.try_("tpu_ops", "refresh", "--trust-first", "inner", "--yes", "--json")
    finally:
        lab.inside("inner-w1", "systemctl", "start", "ssh.service")
    assert told.returncode == 4
    rows = json.loads(told.stdout)
    assert [row["worker"] for row in rows["contacted"]] == ["inner-w0"]
    assert "Connection refused" in rows["silent"]["inner-w1"]
    known = Path(rows["known_hosts"]).read_text()
    assert known.count("trusted-on-first-contact") == 1


def test_a_host_key_published_later_is_compared_with_the_trusted_one(desk_with, lab):
    desk = desk_with(connect_with=["internal"])
    lab.fault(method="GetGuestAttributes", code="NOT_FOUND", message="guest attributes are disabled")
    try:
        desk.do("tpu_ops", "refresh", "--trust-first", "inner", "--yes")
    finally:
        lab.clear_faults()
    file = Path(desk.json("tpu_ops", "refresh", "--json")["known_hosts"])
    assert "trusted-on-first-contact" not in file.read_text()
    assert "ecdsa" in file.read_text()
    # Another machine had answered then: its key stands where the worker's own should.
    alias = f"tpu-{address(desk, 'inner-w0', 'node_id')}-w"
    one, two = (line for line in file.read_text().splitlines() if line.startswith(alias) and "ed25519" in line)
    swapped = [f"{one.split()[0]} ssh-ed25519 {two.split()[2]} trusted-on-first-contact", two]
    file.write_text("".join(f"{line}\n" for line in swapped))
    before = file.read_text()
    told = desk.try_("tpu_ops", "refresh")
    assert (told.returncode, "trusted on first contact" in told.stderr) == (1, True)
    assert file.read_text() == before


# --- through a jump ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind(desk_with) -> Person:
    """A person whose fleet has a worker as jump, and whose own ssh config includes it."""
    desk: Person = desk_with(proxy_jump="gate-w0")
    desk.do("tpu_ops", "ssh-config", "--install", *desk.file_option("--file"))
    return desk


def test_everything_reaches_the_inner_workers_from_the_jump(behind, lab, launcher):
    gate = address(behind, "gate-w0")
    shown = behind.json("tpu_ops", "run", "inner", "--json", "--", "sh", "-c", CAME_FROM)
    assert json.dumps(shown).count(gate) == 2
    assert behind.do("ssh", *behind.file_option(), "inner-w1", CAME_FROM).strip() == gate
    assert behind.do("tpu_ops", "ssh", "inner-w1", "--", CAME_FROM).strip() == gate
    module = ["-m", "ansible.builtin.raw", "-a", CAME_FROM]
    assert behind.do("ansible", "node_inner", *module).splitlines().count(gate) == 2
    assert behind.do("ansible", "node_inner", "-m", "ansible.builtin.ping").count("pong") == 2
    told = behind.do("tpu_ops", "train", "inner", "--rank", "all", "--", "sh", "-c", "echo rank $TPU_WORKER_ID")
    assert sorted(line.split("rank ")[-1] for line in told.splitlines()) == ["0", "1"]


def test_files_are_copied_through_the_jump(behind, tmp_path, launcher):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.sh").write_text("cat main.sh")
    behind.do("scp", "-q", *behind.file_option(), str(tmp_path / "code" / "main.sh"), "inner-w1:there")
    assert behind.do("ssh", *behind.file_option(), "inner-w1", "cat there") == "cat main.sh"
    told = behind.do("tpu_ops", "train", "inner", "--sync", str(tmp_path / "code"), "--", "sh", "main.sh")
    assert "cat main.sh" in told


def test_ansible_opens_connections_through_the_jump_as_well(behind):
    behind.hang_up()
    assert behind.do("ansible", "all", "-m", "ansible.builtin.ping").count("pong") == 3


def test_the_jump_is_reached_directly_and_never_through_itself(behind):
    came_from = behind.do("ssh", *behind.file_option(), "gate-w0", CAME_FROM).strip()
    assert came_from not in {address(behind, "gate-w0"), address(behind, "gate-w0", "external_ip")}


def test_a_jump_that_is_away_is_said(behind, lab):
    behind.hang_up()
    lab.inside("gate-w0", "systemctl", "stop", "ssh.socket", "ssh.service")
    try:
        told = behind.try_("tpu_ops", "run", "inner", "--", "true")
    finally:
        lab.inside("gate-w0", "systemctl", "start", "ssh.service")
    assert told.returncode == 4
    assert f"{address(behind, 'gate-w0', 'external_ip')} port 22: Connection refused" in told.stdout + told.stderr


def connections(lab: Lab) -> set[str]:
    """Return what is connected to the jump's sshd."""
    lines = lab.inside("gate-w0", "ss", "-Htn", "state", "established", "sport", "=", ":22").splitlines()
    # Columns are as wide as the longest address needs.
    return {" ".join(line.split()) for line in lines}


def test_any_host_of_the_persons_own_config_may_be_the_jump(desk_with, lab):
    before = connections(lab)
    desk = desk_with(proxy_jump="tpu@bastion", connect_with=["internal"])
    if not desk.entry:
        pytest.skip("no password file of the test's own can be put in place here, and ssh reads no other config")
    gate = address(desk, "gate-w0")
    desk.own_config.parent.mkdir(mode=0o700)
    desk.own_config.write_text(
        f"Host bastion\n    HostName {address(desk, 'gate-w0', 'external_ip')}\n"
        f"    IdentityFile {desk.environ['TPU_OPS_PRIVATE_KEY']}\n    StrictHostKeyChecking yes\n"
    )
    told = desk.try_("tpu_ops", "run", "inner", "--", "true")
    assert told.returncode == 4
    assert "log in there once yourself: ssh " in told.stdout + told.stderr
    text = desk.own_config.read_text().replace("StrictHostKeyChecking yes", "StrictHostKeyChecking accept-new")
    desk.own_config.write_text(text)
    desk.do("tpu_ops", "ssh-config", "--install")
    assert desk.do("ssh", "inner-w0", CAME_FROM).strip() == gate
    shown = desk.json("tpu_ops", "run", "inner,gate", "--json", "--", "sh", "-c", CAME_FROM)
    assert json.dumps(shown).count(gate) == 3
    module = ["-m", "ansible.builtin.raw", "-a", CAME_FROM]
    assert desk.do("ansible", "all", *module).splitlines().count(gate) == 3
    # One connection to the jump carries all of them; the other one is the jump's own as a worker.
    assert len(connections(lab) - before) == 2


def test_a_person_without_tpu_ops_logs_in_by_the_texts_of_an_invitation(desk_with):
    """The home has nothing but the person's key and the two texts; the inner workers are behind a jump."""
    desk = desk_with(proxy_jump="gate")
    if not desk.entry:
        pytest.skip("no password file of the test's own can be put in place here, and ssh reads no other config")
    key = Path(desk.environ["TPU_OPS_PRIVATE_KEY"])
    variables = desk.folder / "fleet" / "inventory" / "group_vars" / "all.yml"
    variables.parent.mkdir()
    variables.write_text(json.dumps({"users_people": [{"name": "tpu", "keys": [key.with_suffix(".pub").read_text()]}]}))
    told = desk.json("tpu_ops", "invite", "tpu", "--no-configure", "--json")
    assert told["workers"] == ["gate-w0", "inner-w0", "inner-w1"]
    desk.own_config.parent.mkdir(mode=0o700)
    desk.own_config.write_text(told["ssh_config"])
    (desk.own_config.parent / "known_hosts").write_text(told["known_hosts"])
    shutil.copy(key, desk.own_config.parent / "id_ed25519")
    gate = address(desk, "gate-w0")
    assert desk.do("ssh", "-o", "BatchMode=yes", "gate", "id -un") == "tpu\n"
    for host in ("inner-w0", "inner-w1"):
        assert desk.do("ssh", "-o", "BatchMode=yes", host, CAME_FROM).strip() == gate
    # Without the known key of a worker, ssh asks nothing and refuses.
    (desk.own_config.parent / "known_hosts").write_text(told["known_hosts"].replace("-w0 ", "-w9 "))
    assert "Host key verification failed" in desk.try_("ssh", "-o", "BatchMode=yes", "gate", "true").stderr


# --- through Identity-Aware Proxy -------------------------------------------------------------------------------------


def test_everything_reaches_the_inner_workers_through_iap(desk_with, lab, tmp_path, launcher):
    """A stand-in plays gcloud's tunnel; the connection then comes from the worker itself."""
    desk = desk_with(iap=True)
    (tmp_path / "bin").mkdir()
    gcloud = tmp_path / "bin" / "gcloud"
    script = Path(__file__).with_name("gcloud.py")
    gcloud.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    gcloud.chmod(0o755)
    tunnels = tmp_path / "tunnels"
    desk.environ.update(
        PATH=f"{gcloud.parent}:{desk.environ['PATH']}",
        TUNNELS=str(tunnels),
        ENGINE=json.dumps(lab.engine),
        CONTAINERS=json.dumps(list(lab.containers.values())),
    )
    desk.do("tpu_ops", "ssh-config", "--install", *desk.file_option("--file"))
    shown = desk.json("tpu_ops", "run", "inner", "--json", "--", "sh", "-c", CAME_FROM)
    assert json.dumps(shown).count("127.0.0.1") == 2
    names = [lab.inside(host, "hostname").strip() for host in ("inner-w0", "inner-w1")]
    assert sorted(tunnels.read_text().split()) == names
    assert desk.do("ssh", *desk.file_option(), "inner-w1", CAME_FROM).strip() == "127.0.0.1"
    told = desk.do("tpu_ops", "train", "inner", "--rank", "all", "--", "sh", "-c", "echo rank $TPU_WORKER_ID")
    assert sorted(line.split("rank ")[-1] for line in told.splitlines()) == ["0", "1"]
    assert sorted(tunnels.read_text().split()) == names
    desk.hang_up()
    module = ["-m", "ansible.builtin.raw", "-a", CAME_FROM]
    assert desk.do("ansible", "node_inner", *module).splitlines().count("127.0.0.1") == 2
    assert desk.do("ansible", "node_gate", *module).splitlines().count("127.0.0.1") == 0
    assert desk.do("ssh", *desk.file_option(), "gate-w0", "echo in") == "in\n"
    assert sorted(tunnels.read_text().split()) == sorted(names * 2)


def test_a_tunnel_that_cannot_be_opened_is_said(desk_with, lab, tmp_path):
    desk = desk_with(iap=True)
    (tmp_path / "gcloud").write_text(
        "#!/bin/sh\necho 'ERROR: (gcloud.compute.start-iap-tunnel) [4033: not authorized].' >&2\nexit 1\n"
    )
    (tmp_path / "gcloud").chmod(0o755)
    told = desk.try_("tpu_ops", "run", "inner", "--", "true", PATH=f"{tmp_path}:{desk.environ['PATH']}")
    assert told.returncode == 4
    assert "4033: not authorized" in told.stdout + told.stderr
