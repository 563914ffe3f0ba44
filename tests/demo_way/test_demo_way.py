"""The main job, step by step in order, with assertions on what each step did.

The tests of this module build on one another: they share a lab like that of the demo, with a pod of two workers where
the demo has four. Runs on four workers are tested in tests/runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

from tests.support.desk import Lab, lab_name
from tests.support.fleet import ROOT
from tests.support.folded import lines_of
from tests.support.wheel import installed, succeed
from tpu_ops.lab.engine import find as find_engine
from tpu_ops.ssh import tunnels

pytestmark = pytest.mark.lab

NAME = lab_name("way")
LABEL = f"label=tpu-ops.lab={NAME}"
POD = [f"pod-w{index}" for index in range(2)]
TRAIN = ("tpu_ops", "train", "pod", "--sync", "examples/digits")


def greets(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def test_create_boots_every_worker_that_the_type_has(desk):
    desk.do(
        "tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b", "--runtime", "tpu-ubuntu2204-base"
    )
    desk.do("tpu_ops", "create", "solo", "--type", "v2-8", "--zone", "us-central1-f")
    rows = desk.workers()
    assert [row["host"] for row in rows] == [*POD, "solo-w0"]
    assert {row["state"] for row in rows} == {"READY"}
    assert all(greets(row["external_ip"]) for row in rows)
    running = desk.engine("ps", "-q", "--filter", LABEL).split()
    assert len(running) == len(rows)


def test_each_worker_is_a_host_of_its_own(desk):
    containers = desk.containers()
    boot_ids, machine_ids, keys = set(), set(), set()
    for container in containers.values():
        boot_ids.add(desk.inside(container, "cat", "/proc/sys/kernel/random/boot_id"))
        machine_ids.add(desk.inside(container, "cat", "/etc/machine-id"))
        keys.add(desk.inside(container, "cat", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1])
        chips = desk.inside(container, "sh", "-c", "stat -c '%F %t:%T' /dev/accel*").splitlines()
        assert chips == ["character special file 1:3"] * 4
        assert desk.inside(container, "cat", "/proc/1/comm").strip() == "systemd"
    assert len(boot_ids) == len(machine_ids) == len(keys) == len(containers) == 3


def test_creating_it_again_finds_it_there(desk):
    before = {row["host"]: row["node_id"] for row in desk.workers()}
    desk.do(
        "tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b", "--runtime", "tpu-ubuntu2204-base"
    )
    assert {row["host"]: row["node_id"] for row in desk.workers()} == before


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("create", "x", "--type", "v4-12", "--zone", "us-central2-b"), 3, ["v4-12"]),
        (("create", "x", "--type", "v2-8", "--zone", "us-central2-b"), 3, ["v2-8", "us-central2-b"]),
        (("create", "x", "--type", "v4-8", "--zone", "mars-north1-a"), 3, ["mars-north1-a"]),
        (("create", "pod", "--type", "v4-8", "--zone", "us-central2-b"), 3, ["pod"]),
        (("run", "nowhere", "--", "true"), 2, ["nowhere"]),
        (("train", "pod-w1", "--", "true"), 2, ["pod-w1"]),
        (("delete", "nowhere", "--yes"), 2, ["nowhere"]),
        (("list", "--state", "SLEEPY"), 2, ["SLEEPY"]),
    ],
)
def test_bad_input_ends_with_one_message_and_the_documented_code(desk, argv, code, words):
    done = desk.try_("tpu_ops", *argv)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    assert all(word in done.stderr for word in words)
    assert len(desk.workers()) == 3


def test_a_project_that_does_not_exist_is_an_error_and_no_empty_fleet(desk):
    done = desk.try_("tpu_ops", "list", TPU_OPS_PROJECT="nobodys")
    assert (done.returncode, "nobodys" in done.stderr) == (3, True)
    done = desk.try_("ansible-inventory", "--graph", TPU_OPS_PROJECT="nobodys")
    assert done.returncode != 0
    assert "nobodys" in done.stderr


def test_ansible_sees_the_same_fleet_in_groups(desk):
    listing = desk.json("ansible-inventory", "--list")
    assert sorted(listing["_meta"]["hostvars"]) == [*POD, "solo-w0"]
    for group, hosts in {
        "node_pod": POD,
        "node_solo": ["solo-w0"],
        "zone_us_central2_b": POD,
        "zone_us_central1_f": ["solo-w0"],
        "type_v4_16": POD,
        "type_v2_8": ["solo-w0"],
        "state_ready": [*POD, "solo-w0"],
    }.items():
        assert sorted(listing[group]["hosts"]) == hosts


@pytest.mark.parametrize(
    "midst",
    [
        pytest.param("pgrep -x dpkg", id="packages are installed"),
        pytest.param("test -e /etc/ssh/authorized_keys.d/ada", id="keys are written"),
        pytest.param("test -e /opt/venvs/jax/pyvenv.cfg", id="an environment is filled"),
    ],
)
def test_site_yml_dies_in_its_midst(desk, midst):
    """What has been begun on the worker goes on beside the next run, which is to complete the rest."""
    watch = (*find_engine(desk.environ).command, "exec", desk.containers()["pod-w0"])
    until = ("timeout", "1200", "sh", "-c", f"until {midst}; do sleep 0.1; done")
    with desk.begun("ansible-playbook", "site.yml", "--limit", "pod-w0") as run, desk.begun(*watch, *until) as seen:
        while seen.poll() is None:
            assert run.poll() is None, "the run ended before"
            time.sleep(0.1)  # polls both
        assert (seen.returncode, run.poll()) == (0, None)
        os.killpg(run.pid, signal.SIGKILL)


def test_site_yml_configures_the_fleet_after_runs_that_died(desk, tmp_path):
    rows = desk.playbook(tmp_path, "site.yml")
    assert sorted(rows) == [*POD, "solo-w0"]
    assert all(row["changed"] > 0 and not row["failures"] and not row["unreachable"] for row in rows.values())


def test_every_worker_has_the_same_environment(desk):
    versions = "import jax, jaxlib, sklearn; print(jax.__version__, jaxlib.__version__, sklearn.__version__)"
    seen = {desk.inside(name, "/opt/venvs/jax/bin/python", "-c", versions) for name in desk.containers().values()}
    assert len(seen) == 1


def test_a_person_of_group_vars_logs_in_and_may_start_runs_but_nothing_else(desk):
    rows = desk.json("tpu_ops", "run", "pod", "--json", "--", "id", "-un")
    assert {row["stdout"].strip() for row in rows} == {"tpu"}
    ada = {"TPU_OPS_USER": "ada"}
    desk.do("tpu_ops", "refresh", **ada)
    try:
        rows = json.loads(desk.do("tpu_ops", "run", "pod", "--json", "--", "id", "-un", **ada))
        assert {row["stdout"].strip() for row in rows} == {"ada"}
        refused = desk.try_("tpu_ops", "run", "pod-w0", "--", "sudo", "-n", "id", **ada)
        assert refused.returncode == 1
        log = desk.do("tpu_ops", "train", "pod", "--rank", "all", "--", "id", "-un", **ada)
        assert [lines_of(log, rank) for rank in range(2)] == [["ada"]] * 2
    finally:
        desk.do("tpu_ops", "refresh")


async def output_of(code: str, server: str, token: str) -> str:
    """Run a cell in a new notebook of a server, as editors do, and return what the cell prints."""
    message = {
        "channel": "shell",
        "header": {"msg_id": "1", "msg_type": "execute_request", "session": "test", "username": "", "version": "5.3"},
        "parent_header": {},
        "metadata": {},
        "content": {"code": code, "silent": False},
    }
    said = ""
    async with aiohttp.ClientSession(server, headers={"Authorization": f"token {token}"}) as session:
        async with session.post("/api/kernels", json={}) as answer:
            kernel = (await answer.json())["id"]
        async with asyncio.timeout(120), session.ws_connect(f"/api/kernels/{kernel}/channels") as channels:
            await channels.send_json(message)
            while (found := await channels.receive_json())["msg_type"] != "execute_reply":
                said += found["content"].get("text", "") + "".join(found["content"].get("traceback", ()))
    return said


def test_a_person_s_notebook_runs_the_fleet_s_jax_and_keeps_runs_off_the_chips_until_it_ends(desk):
    ada, worker = {"TPU_OPS_USER": "ada"}, desk.containers()["solo-w0"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    desk.do("tpu_ops", "refresh", **ada)
    command = ["tpu_ops", "jupyter", "solo", port, "--no-lab"]
    process = subprocess.Popen(command, cwd=ROOT, env=desk.environ | ada, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        address = next(line.split()[0] for line in process.stderr if line.startswith("http://"))
        server, token = address.split("/?token=")
        code = "import jax; chip = open('/dev/accel0'); print(jax.__file__, jax.devices())"
        said = asyncio.run(output_of(code, server, token))
        assert re.search(r"^/opt/venvs/jax/.*CpuDevice", said), said
        assert re.search(r"solo-w0 +ada +none .*/home/ada/", desk.do("tpu_ops", "who", "solo"))
        refused = desk.try_("tpu_ops", "train", "solo", "--", "true")
        assert (refused.returncode, "chips are held by pid" in refused.stderr) == (1, True)
        assert "ask ada to end it" in refused.stderr
        # Nobody else on the worker sees the token, or can open the server's socket.
        assert token not in desk.inside(worker, "ps", "axwwe")
        assert desk.inside(worker, "stat", "-c", "%U %a", "/run/tpu-jupyter-ada").split() == ["ada", "700"]
    finally:
        process.terminate()
        end = process.communicate(timeout=60)[1]
        desk.do("tpu_ops", "refresh")
    assert (process.returncode, "solo-w0: jupyter has ended" in end) == (0, True), end
    assert "kernel.py" not in desk.inside(worker, "ps", "axww")
    assert "free: solo-w0" in desk.succeed("tpu_ops", "who", "solo").stderr
    detached_is_found_again(desk, command, port, ada)


def listens(port, wanted):
    """Wait until a tunnel is open at a port, or until ssh has ended after the process that opened it."""
    patience = time.monotonic() + 30
    while tunnels.listens(port) != wanted:
        assert time.monotonic() < patience, f"port {port}"
        time.sleep(0.1)


def detached_is_found_again(desk, command, port, ada):
    """Leave the notebook server running, ask for it again, lose the process of its tunnel, and end it."""
    command = [*command, "--detach"]
    try:
        first = desk.succeed(*command, **ada).stderr
        (url,) = re.findall(r"http://localhost\S+", first)
        again = desk.succeed(*command, **ada).stderr
        assert (url in again, "jupyter is running there already" in again, "installs" in again) == (True, True, False)
        refused = desk.try_("tpu_ops", "tensorboard", "solo", port, "--logdir", "runs", **ada)
        assert (refused.returncode, f"port {port} leads to jupyter on solo-w0" in refused.stderr) == (2, True)
        (record,) = Path(desk.environ["TPU_OPS_STATE"]).rglob(f"tunnels/{port}")
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        listens(int(port), False)
        assert url in desk.succeed(*command, **ada).stderr
    finally:
        ended = desk.succeed("tpu_ops", "jupyter", "solo", "--stop", **ada).stderr
    assert (f"the tunnel at port {port} has ended" in ended, "jupyter has ended" in ended) == (True, True), ended
    listens(int(port), False)
    with desk.begun("tpu_ops", "tunnel", "solo", "22", port) as process:
        listens(int(port), True)
        with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as connection:
            assert connection.recv(4) == b"SSH-"
        process.kill()
        listens(int(port), False)


def losses_of(log: str) -> list[float]:
    """Return the losses that rank 0 has printed, epoch by epoch."""
    return [float(value) for value in re.findall(r"^\[0\] epoch \d loss ([0-9.]+)", log, re.MULTILINE)]


def test_training_learns_on_two_processes_and_a_later_attempt_goes_on_from_its_checkpoint(desk):
    log = desk.do(*TRAIN, "--", "python", "train.py", "--epochs", "5")
    assert re.search(r"^\[0\] process 0 of 2, 1 of 2 devices$", log, re.MULTILINE)
    losses = losses_of(log)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    again = ("--recover", "--max-failures", "1", "--shell", "--")
    fails_at_first = "python train.py --epochs $((3 * TPU_OPS_ATTEMPT - 1)) && exit $((2 - TPU_OPS_ATTEMPT))"
    log = desk.do(*TRAIN, *again, fails_at_first)
    assert "[0] going on from the checkpoint of epoch 2" in log.splitlines()
    assert losses_of(log) == losses, "the curve is that of an undisturbed training"
    rows = desk.json(
        *("tpu_ops", "run", "pod-w0", "--json", "--"),
        *("sh", "-c", "cd tpu_ops/digits && exec python evaluate.py"),
    )
    result = json.loads(rows[0]["stdout"])
    assert (result["epoch"], result["test_rows"]) == (5, 360)
    assert result["test_accuracy"] > 0.9


def test_the_training_ends_with_an_epoch_when_it_is_stopped(desk):
    desk.do(*TRAIN, "--detach", "--name", "endless", "--", "python", "train.py", "--epochs", "100000")
    desk.do("sh", "-c", "tpu_ops logs endless --follow | grep -m 1 '^.0. epoch 2 '")
    desk.do("tpu_ops", "stop", "endless", "--grace", "120")
    log = desk.do("tpu_ops", "logs", "pod", "--rank", "all")
    assert re.search(r"^\[0-1\] asked to end: epoch \d+ was the last$", log, re.MULTILINE)
    (run,) = json.loads(desk.try_("tpu_ops", "status", "endless", "--json").stdout)
    assert [(rank["state"], rank["exit"]) for rank in run["ranks"]] == [("stopped", {"code": 0})] * 2


def test_a_rank_of_the_training_that_raises_ends_all_at_once(desk):
    done = desk.try_(*TRAIN, "--", "python", "train.py", "--epochs", "100000", "--checkpoint", "/proc/none/digits.npz")
    assert done.returncode == 1
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/proc/none'" in done.stdout
    assert re.search(r"^rank \d \(pod-w\d\) failed first: exit code 1$", done.stderr, re.MULTILINE), done.stderr
    assert "Shutdown barrier" not in done.stdout + done.stderr


def test_the_run_leaves_nothing_running(desk):
    for container in desk.containers().values():
        assert desk.inside(container, "sh", "-c", "systemctl list-units --no-legend --all 'tpu-run*'").strip() == ""
        assert "train.py" not in desk.inside(container, "ps", "axww")


def test_a_failing_rank_fails_the_run_and_ends_the_others(desk):
    script = "import os, sys, time\nif os.environ['TPU_OPS_RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    start = time.monotonic()
    done = desk.try_("tpu_ops", "train", "pod", "--", "python", "-c", script)
    assert done.returncode == 1
    assert "rank 1 (pod-w1) failed: exit code 7" in done.stderr
    assert time.monotonic() - start < 90
    for container in desk.containers().values():
        assert "time.sleep(600)" not in desk.inside(container, "ps", "axww")


def test_a_detached_run_goes_on_and_is_stopped_by_name(desk):
    desk.do("tpu_ops", "train", "pod", "--detach", "--name", "sleeper", "--", "sleep", "3600")
    containers = [name for host, name in desk.containers().items() if host in POD]
    assert all("sleep 3600" in desk.inside(name, "ps", "axww") for name in containers)
    refused = desk.try_("tpu_ops", "train", "pod", "--", "true")
    assert refused.returncode == 1
    assert "sleeper" in refused.stderr
    desk.do("tpu_ops", "stop", "sleeper")
    assert not any("sleep 3600" in desk.inside(name, "ps", "axww") for name in containers)


@pytest.mark.index
def test_a_researcher_gets_a_result_with_the_installed_wheel_alone(desk, tmp_path):
    """From an empty directory to a file of the training here; the node is configured by another fleet's site.yml."""
    place, home = tmp_path / "fleet", tmp_path / "home"
    home.mkdir()
    there = {name: value for name, value in desk.environ.items() if name in ("TPU_OPS_STATE", "TPU_OPS_LAB")}
    there |= {"HOME": str(home), "PATH": f"{installed(tmp_path, home)}:{desk.environ['PATH']}"}
    words = ("--project", "lab", "--key", desk.environ["TPU_OPS_PRIVATE_KEY"], "--packages", "scikit-learn")
    succeed("tpu_ops", "init", place, *words, cwd=home, **there)
    there |= json.loads(succeed("tpu_ops", "lab", "env", "--json", cwd=place, **there))

    def tpu_ops(*argv: str | Path) -> str:
        return succeed("tpu_ops", *argv, cwd=place, **there)

    assert there["TPU_OPS_FLEET"] == str(place)
    assert "solo-w0" in tpu_ops("list")
    tpu_ops("configure", "solo")
    train = ("--sync", ROOT / "examples/digits", "--install", "--fetch", "checkpoints")
    log = tpu_ops("train", "solo", "--name", "result", *train, "--", "python", "train.py", "--epochs", "2")
    assert "[0] epoch 2 " in log
    assert (place / "result/checkpoints/digits.npz").is_file()
    said = tpu_ops("invite", "ada", "--no-configure")
    assert "Host solo" in said


def test_new_addresses_are_found_and_the_host_keys_are_the_old_ones(desk):
    known_hosts = desk.ssh_config().parent / "known_hosts"
    before, keys = {row["host"]: row["external_ip"] for row in desk.workers("pod")}, known_hosts.read_text()
    desk.do("tpu_ops", "lab", "maintenance", "pod")
    changes = desk.do("tpu_ops", "refresh")
    after = {row["host"]: row["external_ip"] for row in desk.workers("pod")}
    assert not set(before.values()) & set(after.values())
    assert all(address in changes for address in [*before.values(), *after.values()])
    assert not any(greets(address) for address in before.values())
    rows = desk.json("tpu_ops", "run", "pod", "--json", "--", "hostname")
    assert len({row["stdout"].strip() for row in rows}) == 2
    assert known_hosts.read_text() == keys
    options = desk.do("ssh", "-F", str(known_hosts.parent / "ssh_config"), "-G", "pod-w0")
    assert "stricthostkeychecking true" in options
    assert f"userknownhostsfile {known_hosts}" in options


def test_a_restarted_pod_is_found_again_and_a_second_site_yml_changes_nothing(desk, tmp_path):
    """Nobody refreshes by hand: the command that meets the old addresses does, and all others go on from there."""
    before = {row["host"]: row["external_ip"] for row in desk.workers("pod")}
    # As any client of the API does; tpu_ops does not hear of it.
    Lab(desk).restart_node("pod")
    done = desk.try_("tpu_ops", "run", "pod", "--json", "--", "hostname")
    assert done.returncode == 0, done.stderr
    assert len({row["stdout"] for row in json.loads(done.stdout)}) == 2
    after = {row["host"]: row["external_ip"] for row in desk.workers("pod")}
    assert not set(before.values()) & set(after.values())
    assert all(address in done.stderr for address in [*before.values(), *after.values()])
    config = str(desk.ssh_config())
    assert desk.do("ssh", "-F", config, "pod-w1", "hostname")
    rows = desk.playbook(tmp_path, "site.yml")
    assert {host: row["changed"] for host, row in rows.items()} == dict.fromkeys([*POD, "solo-w0"], 0)
    assert not any(row["failures"] or row["unreachable"] for row in rows.values())


def test_another_host_under_a_known_address_is_refused(desk):
    """Host-key checking is really on: with the keys of two workers exchanged, ssh to them fails."""
    known_hosts = desk.ssh_config().parent / "known_hosts"
    kept = known_hosts.read_text()
    swapped = re.sub(r"-w([01])\b", lambda match: f"-w{1 - int(match[1])}", kept)
    assert swapped != kept
    config = str(known_hosts.parent / "ssh_config")
    try:
        known_hosts.write_text(swapped)
        done = desk.try_("ssh", "-F", config, "-o", "ControlPath=none", "-o", "BatchMode=yes", "pod-w0", "true")
        assert done.returncode == 255
        assert "host key" in done.stderr.lower()
    finally:
        known_hosts.write_text(kept)
    desk.do("ssh", "-F", config, "-o", "ControlPath=none", "-o", "BatchMode=yes", "pod-w0", "true")


def test_a_killed_api_comes_back_with_the_fleet(desk):
    record = Path(desk.environ["TPU_OPS_STATE"]) / "lab" / NAME / "process.json"
    before = desk.workers()
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    done = desk.try_("tpu_ops", "list")
    assert done.returncode == 3
    desk.do("tpu_ops", "lab", "up")
    desk.environ |= desk.json("tpu_ops", "lab", "env", "--json")
    assert desk.workers() == before


@pytest.mark.gcloud
def test_gcloud_reaches_all_workers_of_the_pod(desk):
    seen = desk.do(
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "tpu@pod", "--zone", "us-central2-b", "--worker", "all"),
        *("--command", "hostname", "--quiet"),
        HOME=desk.environ["TPU_OPS_STATE"],
    )
    assert len(set(re.findall(r"^t1v-n-\w+-w-\d$", seen, re.MULTILINE))) == 2


def test_delete_removes_the_node_and_its_container(desk):
    desk.do("tpu_ops", "delete", "solo", "--yes")
    assert [row["host"] for row in desk.workers()] == POD
    assert len(desk.engine("ps", "-aq", "--filter", LABEL).split()) == 2


def test_down_leaves_nothing(desk):
    folder = Path(desk.environ["TPU_OPS_STATE"]) / "lab" / NAME
    pid = json.loads((folder / "process.json").read_text())["pid"]
    desk.do("tpu_ops", "lab", "down")
    assert desk.engine("ps", "-aq", "--filter", LABEL) == ""
    assert desk.engine("network", "ls", "-q", "--filter", LABEL) == ""
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()
    assert str(folder) not in Path("/proc/mounts").read_text()
    again = desk.try_("tpu_ops", "lab", "down")
    assert again.returncode == 0
    listed = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in listed
