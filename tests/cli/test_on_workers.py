"""Commands after workers have moved, and a member without credentials, on real workers of a lab of its own.

The tests of this module build on one another: each finds the pod where the one before left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desk import ZONE, Desk, Lab, lab_up
from tests.support.fleet import ROOT
from tests.support.published import Member, web
from tpu_ops.host import build

pytestmark = pytest.mark.lab

#: What the roles launcher and users do, as far as this needs it. $1 is the program's digest, $2 ada's public key.
SETUP = r"""
set -eu
install -D -m 0755 /tmp/tpu-host "/usr/local/lib/tpu_ops/$1/tpu-host"
ln -sf "/usr/local/lib/tpu_ops/$1/tpu-host" /usr/local/sbin/tpu-host
mkdir -p /etc/tpu_ops
echo '{"environment_files": ["/etc/tpu-lab/environment"]}' >/etc/tpu_ops/launcher.json
groupadd --system tpu-run
useradd --create-home --shell /bin/bash --groups tpu-run ada
usermod --password '*' ada
install -d -m 0700 -o ada /home/ada/.ssh
echo "$2" >/home/ada/.ssh/authorized_keys
chown ada /home/ada/.ssh/authorized_keys
echo '%tpu-run ALL=(root) NOPASSWD: /usr/local/sbin/tpu-host ""' >/etc/sudoers.d/tpu_ops
chmod 0440 /etc/sudoers.d/tpu_ops
"""


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """The shell of a person who has the API: a fleet of a pod of two workers and a single host."""
    # Sockets have short names.
    run = Path("/tmp") / f"tpu-ops-views-{os.getpid()}"
    try:
        with lab_up("views", tmp_path_factory.mktemp("views") / "state", XDG_RUNTIME_DIR=str(run)) as desk:
            for name, kind in (("pod", "v4-16"), ("solo", "v4-8")):
                desk.do("tpu_ops", "create", name, "--type", kind, "--zone", "us-central2-b")
            yield desk
    finally:
        for path in run.parent.glob(f"{run.name}*"):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(admin: Desk) -> Lab:
    """The lab behind the admin's commands."""
    return Lab(admin)


@pytest.fixture(scope="module")
def member(admin: Desk, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """The shell of ada, who has a key that the workers accept, and neither credentials nor an endpoint."""
    person = Member(tmp_path_factory.mktemp("ada"), projects=["lab"])
    program, digest = build.build(person.home / "cache")
    config = admin.json("tpu_ops", "refresh", "--json")["ssh_config"]
    for host in ("pod-w0", "pod-w1", "solo-w0"):
        admin.do("scp", "-q", "-F", config, str(program), f"{host}:/tmp/tpu-host")
    public = person.key.with_suffix(".pub").read_text().strip()
    admin.do("tpu_ops", "run", "pod,solo", "--", "sudo", "sh", "-c", SETUP, "sh", digest, public)
    run = Path(f"{admin.environ['XDG_RUNTIME_DIR']}-ada")
    own = {"PATH": admin.environ["PATH"], "XDG_RUNTIME_DIR": str(run), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    return Desk(person.environ(**own) | {"STORAGE_EMULATOR_HOST": admin.environ["STORAGE_EMULATOR_HOST"]})


def listed(lab: Lab) -> int:
    """Return how often the nodes were listed since this was last asked."""
    count = lab.requests("lab").get("ListNodes", 0)
    lab.forget_requests()
    return count


def test_a_disk_is_mounted_on_all_workers_and_unmounted_before_it_is_detached(admin, lab):
    zone = ("--zone", "us-central2-b")
    admin.do("tpu_ops", "disk", "create", "filled", "--size", "10", *zone)
    mount = ("--mount", "/mnt/filled")
    made = admin.json("tpu_ops", "disk", "attach", "filled", "solo", *mount, "--format", "--json")
    assert (made["outcome"], made["mounted"]) == ("attached", "/mnt/filled")
    lab.inside("solo-w0", "sh", "-ec", "mountpoint -q /mnt/filled; echo text >/mnt/filled/file")
    # A file that is open keeps the disk mounted, so that it stays attached as well.
    hold = "exec 3</mnt/filled/file; exec sleep 600"
    admin.do(*lab.engine, "exec", "--detach", lab.containers["solo-w0"], "sh", "-c", hold)
    refused = admin.try_("tpu_ops", "disk", "detach", "filled", "solo")
    assert refused.returncode == 1, refused.stderr
    lab.inside("solo-w0", "mountpoint", "-q", "/mnt/filled")
    lab.inside("solo-w0", "pkill", "-x", "sleep")
    gone = admin.json("tpu_ops", "disk", "detach", "filled", "solo", "--json")
    assert gone["unmounted"] == ["/mnt/filled"]
    lab.inside("solo-w0", "sh", "-c", "! mountpoint -q /mnt/filled && ! grep /mnt/filled /etc/fstab")
    assert "dataDisks" not in lab.node("solo", ZONE)

    # A pod reads what was written.
    admin.do("tpu_ops", "disk", "attach", "filled", "pod", *mount)
    for host in ("pod-w0", "pod-w1"):
        assert lab.inside(host, "cat", "/mnt/filled/file") == "text\n"
        lab.inside(host, "sh", "-c", "! touch /mnt/filled/other 2>/dev/null")
    admin.do("tpu_ops", "disk", "detach", "filled", "pod")
    for host in ("pod-w0", "pod-w1"):
        lab.inside(host, "sh", "-c", "! mountpoint -q /mnt/filled")
    admin.do("tpu_ops", "disk", "delete", "filled", "--yes")
    assert admin.json("tpu_ops", "disk", "list", "--json") == []


def test_the_doctor_tries_the_access_to_a_bucket_from_a_worker(admin, member, lab):
    """The lab's metadata server gives workers no token, and its storage wants none."""
    admin.do("tpu_ops", "bucket", "create", "near-workers", "--region", "us-central2")

    def access(*names):
        buckets = [word for name in names for word in ("--bucket", name)]
        done = admin.try_("tpu_ops", "doctor", "pod", *buckets, "--write", "--json")
        return {row["check"]: row for row in json.loads(done.stdout)}["bucket_access"]

    (fault,) = access("near-workers")["faults"]
    assert (fault["worker"], "the metadata server gives no token" in fault["problem"]) == ("pod-w0", True)
    # Each session of ssh reads this file when its connection is opened.
    lab.inside("pod-w0", "sh", "-c", f"echo STORAGE_EMULATOR_HOST={lab.rest} >>/etc/environment")
    admin.hang_up()
    lab.forget_requests()
    found = access("near-workers")
    assert (found["passed"], found["workers"]) == (True, ["pod-w0"]), found
    asked = lab.requests("lab")
    assert [asked[f"storage.objects.{verb}"] for verb in ("list", "insert", "delete")] == [1, 1, 1]
    lab.fault(method="storage.objects.insert", code="PERMISSION_DENIED")
    (fault,) = access("near-workers")["faults"]
    assert "near-workers" in fault["problem"]
    lab.clear_faults()
    lab.inside("pod-w0", "sed", "-i", "/STORAGE_EMULATOR_HOST/d", "/etc/environment")
    admin.hang_up()


MOVED = "address    pod-w1 external: "


def test_run_finds_workers_that_were_stopped_and_started_and_asks_nobody_when_they_answer(admin, member, lab, tmp_path):
    assert admin.succeed("tpu_ops", "run", "pod", "--", "true").stderr == ""
    lab.restart_node("pod")
    listed(lab)
    done = admin.succeed("tpu_ops", "run", "pod", "--", "true")
    assert "asking the API for" in done.stderr
    assert MOVED in done.stderr
    assert listed(lab) == 1
    # The masters are open, and open the sessions themselves: an ssh would fail.
    (tmp_path / "ssh").symlink_to("/bin/false")
    again = admin.succeed("tpu_ops", "run", "pod", "--", "true", PATH=f"{tmp_path}:{admin.environ['PATH']}")
    assert (again.stderr, listed(lab)) == ("", 0)


def test_ssh_finds_a_worker_that_was_stopped_and_started(admin, member, lab):
    lab.restart_node("pod")
    done = admin.succeed("tpu_ops", "ssh", "pod-w1", "--", "hostname")
    assert "pod-w1 does not answer: asking the API for its address" in done.stderr
    assert MOVED in done.stderr
    assert done.stdout.strip().endswith("-w-1")


def test_train_finds_the_workers_after_maintenance(admin, member, lab):
    admin.do("tpu_ops", "lab", "maintenance", "pod")
    listed(lab)
    done = admin.succeed("tpu_ops", "train", "pod", "--rank", "all", "--", "sh", "-c", "echo rank $TPU_WORKER_ID")
    assert MOVED in done.stderr
    assert sorted(line.split("rank ")[-1] for line in done.stdout.splitlines()) == ["0", "1"]
    assert listed(lab) == 1


def test_a_tunnel_leads_to_a_port_of_a_worker_also_after_its_address_has_changed(admin, member, lab):
    def serve():
        command = "echo here >/run/page; exec systemd-run --quiet python3 -m http.server 8123 -b 127.0.0.1 -d /run"
        lab.inside("pod-w1", "sh", "-c", command)

    def page():
        until = time.monotonic() + 180
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=5) as found,
            ):
                return found.read()
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.3)  # polls until the deadline

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve()
    command = ["tpu_ops", "tunnel", "pod-w1", "8123", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=admin.environ, stderr=subprocess.PIPE, text=True)
    try:
        assert page() == b"here\n"
        lab.restart_node("pod")
        serve()
        assert page() == b"here\n"
    finally:
        process.terminate()
        said = process.communicate(timeout=30)[1]
    assert (process.returncode, "; trying again" in said) == (0, True)


def test_status_and_logs_find_the_workers_of_a_run_that_ended(admin, member, lab):
    admin.do("tpu_ops", "train", "pod", "--name", "told", "--", "echo", "it was here")
    lab.restart_node("pod")
    status = admin.succeed("tpu_ops", "status", "told")
    assert MOVED in status.stderr
    assert "succeeded" in status.stdout + status.stderr
    assert "it was here" in admin.do("tpu_ops", "logs", "told")


def test_a_node_that_is_stopped_or_gone_is_said_by_its_name(admin, member, lab):
    admin.do("tpu_ops", "run", "solo", "--", "true")
    admin.do("tpu_ops", "lab", "preempt", "solo")
    done = admin.try_("tpu_ops", "run", "solo,pod-w0", "--", "true")
    assert done.returncode == 4
    assert "state      solo: READY -> PREEMPTED" in done.stderr
    assert "its node is PREEMPTED now" in done.stdout
    assert "pod-w0" not in done.stderr
    done = admin.try_("tpu_ops", "train", "solo", "--", "true")
    assert (done.returncode, "PREEMPTED" in done.stderr) == (4, True)


def test_a_member_reads_what_is_published_anywhere(admin, member, lab, tmp_path):
    assert member.try_("tpu_ops", "list").returncode == 3
    file = tmp_path / "published.json"
    admin.do("tpu_ops", "snapshot", "--publish", str(file))
    assert lab.call("POST", "storage/v1/b?project=lab", {"name": "views"})[0] == 200
    admin.do("tpu_ops", "snapshot", "--publish", "gs://views/fleet.json", "--cached")
    member.do("tpu_ops", "refresh", "--from", str(file))
    place = member.succeed("tpu_ops", "run", "pod-w0", "--", "id", "-un")
    assert (place.stdout.strip(), place.stderr) == ("ada", "")
    member.do("tpu_ops", "refresh", "--from", "gs://views/fleet.json")
    with web({"/fleet.json": (200, {}, file.read_bytes())}) as address:
        member.do("tpu_ops", "refresh", "--from", f"{address}/fleet.json")
    assert member.try_("tpu_ops", "refresh").returncode == 3
    member.do("tpu_ops", "refresh", "--from", str(file))


def test_a_member_reads_what_is_published_on_a_host(admin, member, tmp_path):
    """By their own ssh config: ssh looks for it by the password file, so that a stand-in names this one."""
    config = Path(admin.json("tpu_ops", "refresh", "--json")["ssh_config"])
    file = tmp_path / "published.json"
    admin.do("tpu_ops", "snapshot", "--publish", str(file))
    admin.do("scp", "-q", "-F", str(config), str(file), "pod-w0:/tmp/published.json")
    admin.do(
        "tpu_ops",
        "run",
        "pod-w0",
        "--",
        "sudo",
        "install",
        "-D",
        "/tmp/published.json",
        "/var/lib/tpu_ops/snapshot.json",
    )
    address = admin.json("tpu_ops", "list", "--json", "--name", "pod")[0]["external_ip"]
    own = tmp_path / "config"
    own.write_text(
        f"Host bastion\n  HostName {address}\n  User ada\n  IdentityFile {member.environ['HOME']}/.ssh/id_ed25519\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {tmp_path}/known\n"
        f"  ControlMaster auto\n  ControlPath {member.environ['XDG_RUNTIME_DIR']}/%C\n  ControlPersist 20\n"
    )
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {own} "$@"\n')
    ssh.chmod(0o755)
    done = member.succeed("tpu_ops", "refresh", "--from", "ssh:bastion", PATH=f"{ssh.parent}:{member.environ['PATH']}")
    assert "at ssh:bastion" in done.stdout
    member.do("tpu_ops", "refresh", "--from", str(file))


def test_a_member_trains_fetches_results_logs_in_and_runs_playbooks(admin, member, tmp_path):
    notice = tmp_path / "notice"
    end = ("--fetch", "my result", "--fetch-to", str(tmp_path / "at the end"), "--notify", f"cat >'{notice}'")
    done = member.succeed(
        *("tpu_ops", "train", "pod", "--name", "adas", *end, "--", "sh", "-c"),
        "id -un; echo rank $TPU_WORKER_ID; echo of $TPU_WORKER_ID >'my result'",
    )
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["ada", "0"]
    assert (tmp_path / "at the end/my result").read_text() == "of 0\n"
    told = json.loads(notice.read_text())
    assert [told[key] for key in ("run_id", "state", "exit_code", "targets")] == ["adas", "succeeded", 0, ["pod"]]
    assert "adas" in member.do("tpu_ops", "status")
    member.do("tpu_ops", "fetch", "adas", "my result", str(tmp_path / "hers"), "--rank", "all")
    assert [(tmp_path / f"hers/rank-{rank}/my result").read_text() for rank in range(2)] == ["of 0\n", "of 1\n"]
    # Another account reads them through sudo; of a worker, a path starts in one's own home.
    admin.do("tpu_ops", "fetch", "adas", "my result", str(tmp_path / "copy"))
    assert (tmp_path / "copy/my result").read_text() == "of 0\n"
    member.do("tpu_ops", "fetch", "pod-w1", "my result", str(tmp_path / "one"))
    assert (tmp_path / "one/my result").read_text() == "of 1\n"
    assert "No such file" in admin.try_("tpu_ops", "fetch", "pod-w1", "my result", str(tmp_path)).stderr
    assert "ada" in member.do("tpu_ops", "logs", "adas")
    detached = member.succeed("tpu_ops", "train", "pod", "--name", "adas-2", "--detach", "--", "sleep", "600")
    assert "adas-2" in detached.stderr
    assert "adas-2" in member.do("tpu_ops", "who", "pod")
    member.do("tpu_ops", "stop", "adas-2")
    assert member.do("tpu_ops", "ssh", "pod-w1", "--", "hostname").strip().endswith("-w-1")
    fleet = f"{member.environ['TPU_OPS_FLEET']}/inventory/tpu_vm.yml"
    pinged = member.do("ansible", "-i", fleet, "node_pod", "-m", "ansible.builtin.ping")
    assert pinged.count("pong") == 2


def test_a_member_finds_workers_that_moved_once_that_is_published(admin, member, lab, tmp_path):
    file = Path(member.json("tpu_ops", "snapshot", "--json")["source"])
    lab.restart_node("pod")
    done = member.try_("tpu_ops", "run", "pod", "--", "true")
    assert done.returncode == 4
    assert f"reading {file} again for their addresses" in done.stderr
    assert "its address is as published" in done.stdout
    admin.do("tpu_ops", "snapshot", "--publish", str(file))
    done = member.succeed("tpu_ops", "run", "pod", "--", "id", "-un")
    assert (done.stdout.split()[-1], MOVED in done.stderr) == ("ada", True)


def test_clush_takes_the_node_set_and_the_ssh_config(admin, member):
    for desk in (admin, member):
        config = desk.json("tpu_ops", "refresh", "--json")["ssh_config"]
        hosts = desk.do("tpu_ops", "inventory", "--format", "nodeset", "pod").strip()
        told = desk.do("clush", "-w", hosts, "-o", f"-F {config}", "hostname")
        assert sorted(line.split(":")[0] for line in told.splitlines()) == ["pod-w0", "pod-w1"]


#: What site.yml leaves: the playbook of the projects alone has no package lists.
GIT = "apt-get update -qq && apt-get install -y -qq --no-install-recommends git openssh-client"


@pytest.fixture
def versioned(admin: Desk, lab: Lab, tmp_path: Path) -> tuple[Desk, str]:
    """The admin's shell in a fleet whose workers have one project, and the project's commit."""
    config = admin.json("tpu_ops", "refresh", "--json")["ssh_config"]
    source, bundle = str(tmp_path / "source"), tmp_path / "vision.bundle"
    admin.do("git", "init", "--quiet", "--initial-branch=main", source)
    (tmp_path / "source" / "README").write_text("first\n")
    admin.do("git", "-C", source, "add", "README")
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    admin.do("git", "-C", source, *who, "commit", "--quiet", "-m", "first")
    admin.do("git", "-C", source, "bundle", "create", "--quiet", str(bundle), "main")
    for host in ("pod-w0", "pod-w1"):
        admin.do("scp", "-q", "-F", config, str(bundle), f"{host}:/tmp/vision.bundle")
    admin.do("tpu_ops", "run", "pod", "--", "sudo", "sh", "-c", GIT)
    inventory = tmp_path / "fleet" / "inventory"
    (inventory / "group_vars").mkdir(parents=True)
    (inventory / "tpu_vm.yml").write_text("plugin: tpu_vm\n")
    (inventory / "group_vars" / "all.yml").write_text(
        "workspace_projects: [{ name: vision, url: /tmp/vision.bundle, ref: gone }]\n"
    )
    _, _, own = admin.environ["ANSIBLE_INVENTORY"].partition(",")
    more = {"TPU_OPS_FLEET": str(inventory.parent), "ANSIBLE_INVENTORY": f"{inventory / 'tpu_vm.yml'},{own}"}
    commit = admin.do("git", "-C", source, "rev-parse", "main").strip()
    return Desk(admin.environ | more, patience=admin.patience), commit


def test_git_brings_the_project_to_all_workers_and_never_over_local_changes(versioned, member, lab):
    desk, commit = versioned
    train = ("tpu_ops", "train", "pod", "--git", "main")
    plan = desk.json(*train, "--dry-run", "--json", "--", "true")
    assert (plan["cwd"], plan["code_digest"]) == ("/opt/workspaces/vision", commit)
    assert lab.inside("pod-w0", "find", "/opt", "-name", "vision") == ""
    done = desk.succeed(*train, "--name", "versioned", "--rank", "all", "--json", "--", "sh", "-c", "pwd; cat README")
    assert f"checked out vision in /opt/workspaces/vision on 2 workers: commit {commit}" in done.stderr
    assert json.loads(done.stdout)["code_digest"] == commit
    assert {"/opt/workspaces/vision", "first"} <= {line.split("] ")[-1] for line in done.stderr.splitlines()}
    for host in ("pod-w0", "pod-w1"):
        record = json.loads(lab.inside(host, "cat", "/var/lib/tpu_ops/runs/versioned/record.json"))
        assert (record["code_digest"], record["cwd"]) == (commit, "/opt/workspaces/vision")
    refused = member.try_(*train, "--", "true")
    assert refused.returncode == 1
    assert "--git configures workers" in refused.stderr
    assert "--sync DIR" in refused.stderr
    lab.inside("pod-w1", "sh", "-c", "echo mine >/opt/workspaces/vision/README")
    kept = desk.try_(*train, "--name", "kept", "--", "true")
    assert kept.returncode == 1
    assert "pod-w1: failed: workspace : Check out the projects at these commits" in kept.stderr
    assert "/opt/workspaces/vision has changed files: README. It stays at " in kept.stderr
    assert lab.inside("pod-w1", "cat", "/opt/workspaces/vision/README") == "mine\n"
    lab.inside("pod-w0", "test", "!", "-e", "/var/lib/tpu_ops/runs/kept")
    lab.inside("pod-w1", "git", "-C", "/opt/workspaces/vision", "checkout", "--quiet", "README")
    lab.inside("pod-w1", "chmod", "0700", "/opt/workspaces")
    closed = desk.try_(*train, "--", "true")
    assert closed.returncode == 1
    assert "you cannot enter /opt/workspaces/vision, where the run would start" in closed.stderr
    lab.inside("pod-w1", "chmod", "0755", "/opt/workspaces")
