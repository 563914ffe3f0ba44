"""Workers that configure themselves, and what is said of those that drift, on real workers.

The tests build on one another: each finds the pod as the one before left it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.desk import Desk, Lab
from tests.support.fleet import ROOT
from tpu_ops.ansible import boot

pytestmark = pytest.mark.lab

POD = ["pod-w0", "pod-w1"]
BOOTS = (
    *("dawn", "--type", "v4-8", "--zone", "us-central2-b"),
    *("--configure-at-boot", "gs://converge-boot/bundles"),
)
#: What breaks on a worker -> the commands. Each is a thing that a role keeps.
BREAKS = {
    "base : Install the common packages": "dpkg --remove --force-depends htop",
    "base : Rotate logs every hour": "systemctl disable --now logrotate.timer",
    "shell : Configure tmux": "rm /etc/tmux.conf",
    "users : Create or correct accounts": "usermod --shell /bin/sh ada",
    "/etc/ssh/authorized_keys.d/ada": "echo '# nobody' > /etc/ssh/authorized_keys.d/ada",
    "/etc/sudoers.d/tpu_ops-people": "echo '# more' >> /etc/sudoers.d/tpu_ops-people",
    "jax: + scikit-learn": "/opt/uv/bin/uv pip uninstall --python /opt/venvs/jax/bin/python scikit-learn",
    "tcmalloc : Remove TCMalloc from LD_PRELOAD": (
        "echo LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 >> /etc/environment"
    ),
    "/etc/tpu_ops/launcher.json": "rm /etc/tpu_ops/launcher.json",
    "launcher : Compile the launcher": "rm /usr/local/lib/tpu_ops/*/tpu-host.*.zip",
}


@pytest.fixture(scope="module")
def lab(desk: Desk) -> Lab:
    return Lab(desk)


def configuring(desk: Desk, *argv: str) -> subprocess.Popen[str]:
    """Start `tpu_ops configure` for the pod; return once a worker has changed something."""
    process = subprocess.Popen(
        ["tpu_ops", "configure", "pod", "--on-workers", *argv],
        cwd=ROOT,
        env=desk.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    said = []
    for line in process.stderr:
        said.append(line)
        if ": changed: " in line:
            break
    assert process.poll() is None, said
    # Nobody may wait for a reader.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process


def until_idle(lab: Lab, host: str) -> None:
    """Wait until no play runs on a worker and its directory in memory is gone."""
    until = time.monotonic() + 90
    look = "pgrep --full '[w]orker_play|[a]nsible-playbook' || true; ls /run | grep tpu_ops-configure || true"
    while left := lab.inside(host, "sh", "-c", look).strip():
        assert time.monotonic() < until, left
        time.sleep(0.5)  # polls until the deadline


def holders(lab: Lab, host: str, *places: str) -> str:
    """Return the files that contain the secret."""
    secret = lab.desk.environ["OWN_SECRET"]
    found = f"grep --recursive --files-with-matches --no-messages {secret} {' '.join(places)} || true"
    return lab.inside(host, "sh", "-c", found)


def test_a_node_configures_itself_at_its_first_boot_and_the_controller_has_nothing_to_add(desk, lab):
    desk.do("tpu_ops", "bucket", "create", "converge-boot", "--region", "us-central2")
    desk.do("tpu_ops", "create", *BOOTS)
    done = desk.succeed("tpu_ops", "configure", "dawn", "--json")
    assert "waiting until dawn-w0 have configured themselves" in done.stderr
    assert [row["changed"] for row in json.loads(done.stdout)["hosts"].values()] == [0], done.stderr
    assert json.loads(lab.inside("dawn-w0", "cat", f"{boot.STATE}/{boot.FILE}")) == {"state": "done", "failures": []}
    assert holders(lab, "dawn-w0", "/run", "/var", "/tmp", "/root", "/home", "/etc", "/usr/local") == ""
    desk.do("tpu_ops", "delete", "dawn", "--yes")


def test_a_controller_that_dies_leaves_workers_without_a_play_and_without_secrets(desk, lab):
    process = configuring(desk)
    for host in POD:
        assert "/tpu_ops-configure-" in holders(lab, host, "/run")
        assert "drwx------" in lab.inside(host, "sh", "-c", "ls -ld /run/tpu_ops-configure-*")
    process.kill()
    process.wait()
    for host in POD:
        until_idle(lab, host)
        assert holders(lab, host, "/run", "/var", "/tmp", "/root", "/home", "/etc", "/usr/local") == ""


def test_running_it_again_configures_bare_workers_and_the_controller_has_nothing_to_add(desk, lab):
    done = desk.succeed("tpu_ops", "configure", "pod", "--on-workers", "--json")
    hosts = json.loads(done.stdout)["hosts"]
    assert {host: (row["failed"], row["changed"] > 5) for host, row in hosts.items()} == dict.fromkeys(POD, (0, True))
    assert "pod-w[0-1]: changed: " in done.stderr, "equal steps of several workers are one line"
    again = desk.json("tpu_ops", "configure", "pod", "--no-on-workers", "--json")
    assert [row["changed"] for row in again["hosts"].values()] == [0, 0]
    for host in POD:
        assert holders(lab, host, "/run", "/var", "/tmp", "/root", "/home", "/etc", "/usr/local") == ""


def test_a_worker_that_is_lost_costs_only_itself(desk, lab):
    lab.inside("pod-w0", "rm", "/etc/tmux.conf")
    lab.inside("pod-w1", "rm", "/etc/tmux.conf")
    process = configuring(desk)
    lab.inside("pod-w1", "pkill", "-KILL", "--full", "^sshd: tpu@notty")
    assert process.wait(timeout=180) == 4
    until_idle(lab, "pod-w1")
    # The other worker went on to the end: the next test finds no difference there.
    lab.inside("pod-w0", "test", "-f", "/etc/tmux.conf")


def test_drift_names_every_thing_that_somebody_broke_and_who_is_clean(desk, lab):
    lab.inside("pod-w1", "sh", "-ec", "\n".join(BREAKS.values()))
    done = desk.try_("tpu_ops", "drift", "pod", "--on-workers", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["clean"] == ["pod-w0"]
    assert {row["host"] for row in found["differences"]} == {"pod-w1"}
    named = "\n".join(f"{row['role']} : {row['task']} {row['changes']}" for row in found["differences"])
    assert [name for name in BREAKS if name not in named] == []
    (shell,) = (row for row in found["differences"] if row["role"] == "shell")
    assert shell["changes"] == ["/etc/tmux.conf 0:0 0644"]


def test_only_workers_that_drifted_are_configured_and_are_clean_then(desk):
    done = desk.succeed("tpu_ops", "configure", "pod", "--drifted", "--json")
    assert list(json.loads(done.stdout)["hosts"]) == ["pod-w1"]
    assert "pod-w1: to be configured" in done.stderr
    assert desk.do("tpu_ops", "drift", "pod") == "pod-w[0-1]: as site.yml would make them\n"


def test_faulty_variables_are_named_with_the_controllers_file_and_change_nothing(desk, lab):
    file = Path(desk.environ["TPU_OPS_FLEET"], "inventory/group_vars/all/own.yml")
    variables = file.read_text()
    file.write_text(variables + "launcher_ports: [1, 2, 3]\n")
    lab.inside("pod-w0", "mv", "/etc/tmux.conf", "/etc/tmux.away")
    try:
        done = desk.try_("tpu_ops", "configure", "pod", "--on-workers")
    finally:
        file.write_text(variables)
        lab.inside("pod-w0", "mv", "--no-clobber", "/etc/tmux.away", "/etc/tmux.conf")
    assert done.returncode == 1
    assert f"{os.path.relpath(file, ROOT)}:4" in done.stderr or f"{file}:4" in done.stderr, done.stderr
    assert "launcher_ports" in done.stderr
    assert ": changed: " not in done.stderr


def test_a_playbook_that_workers_cannot_run_themselves_is_refused(desk):
    done = desk.try_("tpu_ops", "configure", "pod", "--on-workers", "--playbook", "verify")
    assert done.returncode == 2
    assert "only disks, python, site, users can run on workers" in done.stderr
