"""The short playbooks on real workers: each does what it says, and refuses what it must."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.desk import Desk, Lab
from tests.support.slice_index import Hook, serving

pytestmark = pytest.mark.lab

POD = ["pod-w0", "pod-w1"]
#: An archive of one package that grows a version when `$1` says so. Its index is written by hand: what usually writes
#: it is not on workers.
SAMPLE = """
set -e
mkdir -p /srv/sample/build/DEBIAN && cd /srv/sample
printf '%s\\n' 'Package: sample' "Version: $1" 'Architecture: all' 'Maintainer: nobody <nobody@example.org>' \
    'Description: sample' > build/DEBIAN/control
dpkg-deb --build build sample.deb >/dev/null
{ cat build/DEBIAN/control; echo Filename: ./sample.deb; echo Size: $(stat -c %s sample.deb)
  echo SHA256: $(sha256sum sample.deb | cut -d' ' -f1); } > Packages
echo 'deb [trusted=yes] file:/srv/sample ./' > /etc/apt/sources.list.d/sample.list
"""


@pytest.fixture(scope="module")
def desk(desk: Desk) -> Desk:
    """A shell whose lab has a configured pod, and a bare node with a blank disk."""
    # Changes nothing if the tests of test_converging.py ran before.
    desk.do("ansible-playbook", "site.yml", "--tags", "base,python,jax,launcher", timeout=1800)
    desk.do("tpu_ops", "create", "solo", "--type", "v4-8", "--zone", "us-central2-b")
    Lab(desk).attach_disk("solo")
    return desk


@pytest.fixture(scope="module")
def lab(desk: Desk) -> Lab:
    return Lab(desk)


def play(desk: Desk, name: str, *argv: str, node: str = "pod") -> tuple[int, str]:
    """Run a playbook on a node; return its exit code and what it said, in one line per message."""
    done = desk.try_("ansible-playbook", f"playbooks/{name}", "--limit", f"node_{node}", *argv)
    return done.returncode, re.sub(r"\n +", " ", done.stdout) + done.stderr


def recap(said: str) -> dict[str, dict[str, int]]:
    """Return what Ansible counted at the end, by host."""
    rows = re.findall(r"^(\S+) +: (ok=.*)$", said, re.MULTILINE)
    return {host: {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", row)} for host, row in rows}


@contextlib.contextmanager
def a_run(desk: Desk) -> Iterator[None]:
    # A name is a run's for good.
    name = f"sleeper-{secrets.token_hex(4)}"
    desk.do("tpu_ops", "train", "pod", "--detach", "--name", name, "--", "sleep", "3600")
    try:
        yield
    finally:
        desk.do("tpu_ops", "stop", name)


def boots(lab: Lab) -> dict[str, str]:
    return {host: lab.inside(host, "cat", "/proc/sys/kernel/random/boot_id") for host in POD}


def test_verify_counts_the_chips_of_the_slice_and_adds_up_over_all_of_them(desk, lab):
    code, said = play(desk, "verify.yml")
    assert code == 0, said
    measured = re.search(r"pod: 8 chips \(cpu\), 8 devices on 2 workers.*right, \S+ ms, bus bandwidth (\S+) GB/s", said)
    assert measured, said
    assert float(measured[1]) > 0
    assert {row["changed"] for row in recap(said).values()} == {0}
    assert [lab.inside(host, "ls", "-A", "/home/tpu/.ansible_async").strip() for host in POD] == ["", ""]


def test_verify_names_the_worker_that_others_wait_for_and_ends_in_time(desk, lab):
    lab.inside("pod-w1", "mv", "/opt/venvs/jax", "/opt/venvs/away")
    try:
        code, said = play(desk, "verify.yml", "--extra-vars", "verify_timeout=30")
    finally:
        lab.inside("pod-w1", "mv", "/opt/venvs/away", "/opt/venvs/jax")
    assert code == 2
    assert "pod-w1: /opt/venvs/jax/bin/python: No such file or directory" in said
    assert re.search(r"pod-w0: (exited with|still waiting)", said)
    assert "bus bandwidth" not in said
    assert "all_reduce" not in lab.inside("pod-w0", "ps", "axww")


def test_verify_refuses_a_part_of_a_slice(desk):
    done = desk.try_("ansible-playbook", "playbooks/verify.yml", "--limit", "pod-w1")
    assert done.returncode == 2
    assert "--limit leaves out pod-w0" in re.sub(r"\s+", " ", done.stdout)


def test_nothing_is_verified_or_upgraded_while_a_run_is_on(desk, lab):
    before = boots(lab)
    with a_run(desk):
        for name, words in (
            ("verify.yml", "a run is active on pod-w0, pod-w1"),
            ("upgrade.yml", "a run is active on pod-w0, pod-w1"),
        ):
            code, said = play(desk, name)
            assert code == 2, said
            assert words in said
            assert {row["changed"] for row in recap(said).values()} == {0}
        code, said = play(desk, "facts.yml")
        assert (code, said.count("a run is active")) == (0, 2)
    assert boots(lab) == before


def test_facts_show_each_worker_and_what_is_different(desk, lab):
    code, said = play(desk, "facts.yml")
    assert code == 0, said
    for host in POD:
        assert re.search(rf"{host}: v4-16 us-central2-b READY, 4 chips, .*jax \d.*, launcher .*, idle", said), said
    assert "do not differ" in said
    lab.inside("pod-w1", "useradd", "--uid", "4321", "mallory")
    code, said = play(desk, "facts.yml")
    assert (code, "do not differ" in said) == (0, False)
    assert re.search(r"pod-w[01]: person mallory: (none, others user id 4321|user id 4321, others none)", said)
    assert {row["changed"] for row in recap(said).values()} == {0}


#: As dpkg leaves it when it is killed: unpacked, and not yet written into its list of packages.
CUT_SHORT = "dpkg-query --status sed | sed 's/^Status:.*/Status: install ok unpacked/' > /var/lib/dpkg/updates/0000"


def version(lab: Lab, host: str) -> str:
    return lab.inside(host, "dpkg-query", "-W", "-f", "${Version}", "sample")


def test_upgrade_stops_at_a_worker_that_fails_and_goes_on_there_when_run_again(desk, lab):
    """dpkg was killed on the first worker, which wants a reboot as well; the second cannot be upgraded at first."""
    for host in POD:
        lab.inside(host, "sh", "-c", SAMPLE, "sh", "1")
        lab.inside(host, "dpkg", "-i", "/srv/sample/sample.deb")
        lab.inside(host, "sh", "-c", SAMPLE, "sh", "2")
    lab.inside("pod-w0", "bash", "-euo", "pipefail", "-c", CUT_SHORT)
    lab.inside("pod-w0", "touch", "/run/reboot-required")
    lab.inside("pod-w1", "sh", "-c", "echo '{' > /etc/apt/apt.conf.d/99broken")
    before = boots(lab)
    code, said = play(desk, "upgrade.yml")
    assert code == 2, said
    assert "pod-w0 is done (1 of 2): packages upgraded, rebooted" in said
    assert "pod-w1 failed: Refresh the package lists: apt cannot read all of its sources: Syntax error" in said
    assert "Done: pod-w0. Once that is fixed, continue with --limit pod-w1" in said
    middle = boots(lab)
    assert (middle["pod-w0"] != before["pod-w0"], middle["pod-w1"]) == (True, before["pod-w1"])
    assert [version(lab, host) for host in POD] == ["2", "1"]
    assert lab.inside("pod-w0", "sh", "-c", "ls /var/lib/dpkg/updates; dpkg --audit") == ""

    lab.inside("pod-w1", "rm", "/etc/apt/apt.conf.d/99broken")
    code, said = play(desk, "upgrade.yml")
    assert code == 0, said
    assert "pod-w0 is done (1 of 2): packages as they were, not rebooted" in said
    assert "pod-w1 is done (2 of 2): packages upgraded, not rebooted" in said
    assert [version(lab, host) for host in POD] == ["2", "2"]
    assert boots(lab) == middle


def test_upgrade_stops_before_the_second_worker_where_the_first_fails(desk, lab):
    """The first has an archive that cannot be read, which is named."""
    lab.inside("pod-w0", "sh", "-c", "echo 'deb [trusted=yes] file:/srv/none ./' > /etc/apt/sources.list.d/none.list")
    try:
        code, said = play(desk, "upgrade.yml")
    finally:
        lab.inside("pod-w0", "rm", "/etc/apt/sources.list.d/none.list")
    assert code == 2
    assert re.search(r"pod-w0 failed: Refresh the package lists: apt cannot read .*file:/srv/none", said)
    assert "Done: none. Once that is fixed, continue with --limit pod-w0,pod-w1" in said
    assert "pod-w1 is done" not in said


#: Starts something under the name of runs when apt has read its lists, as somebody may while packages are upgraded.
BUSY = 'APT::Update::Post-Invoke {"systemd-run --quiet --unit tpu-run.service sleep 3600 || true";};'


def test_a_run_that_began_during_the_upgrade_is_not_rebooted_away(desk, lab):
    lab.inside("pod-w0", "sh", "-c", f"echo '{BUSY}' > /etc/apt/apt.conf.d/99busy")
    before = boots(lab)
    try:
        code, said = play(desk, "upgrade.yml", "--extra-vars", "upgrade_reboot=always")
        assert code == 2
        assert "pod-w0 failed: Reboot and wait, unless a run has started" in said
        assert "a run has started on it" in said
        assert boots(lab) == before
        lab.inside("pod-w0", "systemctl", "is-active", "tpu-run.service")
    finally:
        lab.inside("pod-w0", "sh", "-c", "rm /etc/apt/apt.conf.d/99busy; systemctl stop tpu-run.service")
    # The name is free for the next run.
    lab.inside("pod-w0", "systemd-run", "--quiet", "--wait", "--unit", "tpu-run.service", "true")


#: Takes a chip's device file away at each boot, as a kernel for which its driver was not built does.
UNDRIVEN = """
printf '%s\n' '[Unit]' 'Before=ssh.service' '[Service]' 'Type=oneshot' \
    'ExecStart=/bin/sh -c "umount /dev/accel1; rm /dev/accel1"' '[Install]' 'WantedBy=multi-user.target' \
    > /etc/systemd/system/undriven.service && systemctl enable undriven.service
"""


def test_the_upgrade_ends_at_a_worker_that_has_lost_a_chip_over_its_reboot(desk, lab):
    lab.inside("pod-w0", "sh", "-c", UNDRIVEN)
    before = boots(lab)
    try:
        code, said = play(desk, "upgrade.yml", "--extra-vars", "upgrade_reboot=always upgrade_chips_timeout=5")
    finally:
        lab.inside("pod-w0", "find", "/etc/systemd/system", "-name", "undriven.service", "-delete")
    assert code == 2, said
    assert "pod-w0 failed: Check that no chips are missing: 3 of 4 chips have a device file" in said
    assert "(/dev/accel0, /dev/accel2, /dev/accel3; before" in said
    assert "Done: none. Once that is fixed, continue with --limit pod-w0,pod-w1" in said
    assert boots(lab)["pod-w1"] == before["pod-w1"]


#: Keeps one line for each boot.
COUNT = """
printf '%s\n' '[Service]' 'Type=oneshot' 'ExecStart=/bin/sh -c "echo boot >> /var/lib/boots"' '[Install]' \
    'WantedBy=multi-user.target' > /etc/systemd/system/count.service && systemctl enable count.service
"""


def test_each_worker_is_rebooted_once_has_its_chips_and_takes_runs_again(desk, lab):
    """The chip that was lost above is back, as with the previous kernel."""
    lab.inside("pod-w1", "sh", "-c", COUNT)
    code, said = play(desk, "upgrade.yml", "--extra-vars", "upgrade_reboot=always")
    assert code == 0, said
    assert said.count("rebooted") == len(POD)
    assert lab.inside("pod-w1", "cat", "/var/lib/boots").split() == ["boot"]
    assert lab.inside("pod-w0", "sh", "-c", "echo /dev/accel*").split() == [f"/dev/accel{chip}" for chip in range(4)]
    with a_run(desk):
        pass


def test_a_run_has_what_its_project_lists_which_the_slice_downloads_once(desk, lab, tmp_path):
    code, sent = tmp_path / "drawing", Counter[str]()
    code.mkdir()
    (code / "requirements.txt").write_text("numpy\npillow\n")
    show = "import PIL, jax, numpy; print(PIL.__file__, jax.__version__, numpy.__file__)"

    def train(*argv: str, show: str = show) -> tuple[set[str], str]:
        name = f"drawing-{secrets.token_hex(4)}"
        words = ("--rank", "all", "--sync", str(code), *argv, "--", "python", "-c", show)
        done = desk.succeed("tpu_ops", "train", "pod", "--name", name, *words)
        return {line.partition("] ")[2] for line in done.stdout.splitlines()}, done.stderr

    with outer_index(lab, sent, "/home/tpu/.cache/uv"):
        found, said = train("--install")
    (line,) = found  # the same on both workers
    place = r"/home/tpu/tpu_ops/\.environments/drawing/\w+"
    assert re.fullmatch(rf"{place}/lib/\S+/PIL/__init__.py \S+ /opt/venvs/jax/lib/\S+", line), line
    assert re.search(rf": 1 package over the fleet's, digest \w+ of all, in {place} on 2 workers", said), said
    bytes_of = by_worker(desk, sent)
    assert bytes_of["pod-w0"] > 1_000_000
    assert bytes_of["pod-w1"] < bytes_of["pod-w0"] / 100
    # Later runs install by themselves, and there is nothing to do.
    again, said = train()
    assert (again, "already there" in said) == (found, True), said
    without, _ = train("--no-install", show="import sys; print(sys.prefix)")
    assert without == {"/opt/venvs/jax"}


def test_site_changes_no_environment_under_a_run(desk, lab):
    def site(*argv: str) -> tuple[int, str]:
        return play(desk, "python.yml", *argv)

    name = "/opt/venvs/jax/lib/python3*/site-packages/opt_einsum-*"
    with a_run(desk):
        code, said = site()
        assert (code, {row["changed"] for row in recap(said).values()}) == (0, {0}), said
        lab.inside("pod-w1", "sh", "-c", f"mkdir /srv/aside && mv {name} /srv/aside/")
        code, said = site()
        assert code == 2, said
        assert re.search(r"environment jax: not changed, since the run sleeper-\w+ is active on this worker", said)
        assert [recap(said)[host]["failed"] for host in POD] == [0, 1]
        lab.inside("pod-w1", "sh", "-c", f"! test -e {name}")
        code, said = site("--check")
        assert (code, "environment jax: not changed, since the run sleeper-" in said) == (0, True), said
    code, said = site()
    assert (code, recap(said)["pod-w1"]["changed"]) == (0, 1), said
    lab.inside("pod-w1", "sh", "-c", f"test -e {name}")


def disks(desk: Desk, **mount: Any) -> tuple[int, str]:
    return play(desk, "disks.yml", "--extra-vars", json.dumps({"disks_mounts": [mount]}), node="solo")


def test_disks_mounts_a_data_disk_and_nothing_else(desk, lab):
    wanted = {"device": "google-persistent-disk-1", "path": "/mnt/data", "format": True}
    code, said = disks(desk, **wanted, fstype="ext4")
    assert code == 0, said
    lab.inside("solo-w0", "mountpoint", "/mnt/data")
    code, said = disks(desk, **wanted)
    assert (code, recap(said)["solo-w0"]["changed"]) == (0, 0), said
    # The role base has not been here.
    lab.inside("solo-w0", "sh", "-c", "! test -e /etc/tpu_ops")


def test_disks_refuses_a_wrong_list_before_anything_changes(desk, lab):
    code, said = disks(desk, path="/mnt/other")
    assert code == 2
    assert "/mnt/other" in said
    lab.inside("solo-w0", "sh", "-c", "! test -e /mnt/other")


EXPORT = "/mnt/data/shared"


def mount_everywhere(desk: Desk) -> tuple[int, str]:
    """Have the bare node export a directory of its data disk, and all workers mount it."""
    disk = json.dumps({"device": "google-persistent-disk-1", "path": "/mnt/data", "format": True})
    variables = {
        "disks_mounts": "{{ [" + disk + "] if inventory_hostname == 'solo-w0' else [] }}",
        "nfs_server_kind": "ganesha",
        # Only so that the test need not wait for them.
        "nfs_grace_seconds": 1,
        "nfs_wait": 1,
        "nfs_exports": [{"path": EXPORT, "server": "solo-w0"}],
        "nfs_mounts": [{"path": "/mnt/shared", "export": EXPORT}],
    }
    return play(desk, "site.yml", "--tags", "disks,nfs", "--extra-vars", json.dumps(variables), node="*")


def units(lab: Lab) -> set[str]:
    """Return what the mount units of the pod's workers name as their source."""
    shown = (lab.inside(host, "cat", "/etc/systemd/system/mnt-shared.mount") for host in POD)
    return {found for text in shown for found in re.findall(r"^What=(.*)$", text, re.MULTILINE)}


def internal_addresses(desk: Desk) -> dict[str, str]:
    return {row["host"]: row["internal_ip"] for row in desk.json("tpu_ops", "list", "--json")}


def test_clients_of_a_server_that_was_made_anew_under_another_address_read_its_files(desk, lab):
    """The server dies, and is created again with its data disk; another node has got its address."""
    # Mounted by a test above.
    keep = f"mountpoint -q /mnt/data; mkdir {EXPORT}; echo thesis > {EXPORT}/thesis.tex; sync"
    lab.inside("solo-w0", "sh", "-ec", keep)
    before = internal_addresses(desk)["solo-w0"]
    desk.do(*lab.engine, "kill", lab.containers["solo-w0"])
    code, said = mount_everywhere(desk)
    counts = recap(said)
    assert (code != 0, counts["solo-w0"]["unreachable"]) == (True, 1), said
    assert [counts[host]["failed"] for host in POD] == [1, 1]
    assert f"/mnt/shared: the server solo-w0 does not answer at {before}:2049" in said
    assert units(lab) == {f"{before}:{EXPORT}"}

    desk.do("tpu_ops", "delete", "solo", "--yes")
    for node in ("late", "solo"):
        desk.do("tpu_ops", "create", node, "--type", "v4-8", "--zone", "us-central2-b")
    lab.attach_disk("solo")
    del lab.containers  # the new worker has another one
    lab.inside("solo-w0", "apt-get", "-q", "update")
    lab.inside("pod-w1", "apt-get", "-q", "install", "--yes", "libnfs-utils")
    code, said = mount_everywhere(desk)
    assert code == 0, said
    addresses = internal_addresses(desk)
    after = addresses["solo-w0"]
    assert after != before
    assert units(lab) == {f"{after}:{EXPORT}"}
    exports = lab.inside("solo-w0", "cat", "/etc/ganesha/tpu_ops.conf")
    assert sorted(re.findall(r"Clients = ([^;]+);", exports)) == sorted(addresses.values())
    assert lab.inside("pod-w1", "nfs-cat", f"nfs://{after}{EXPORT}/thesis.tex?version=4") == "thesis\n"


@contextlib.contextmanager
def outer_index(lab: Lab, sent: Counter[str], *removed: str, hook: Hook = lambda *_: None) -> Iterator[str]:
    """Have the pod's workers use an index on this machine that counts its bytes, and remove paths; yield its URL."""
    gateway = lab.inside("pod-w0", "sh", "-c", "ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p'").strip()
    # One that an earlier playbook started has the files already.
    lab.inside("pod-w0", "sh", "-c", "systemctl stop tpu_ops-slice-index.service || true")
    with serving(gateway, "", sent, hook=hook) as url:
        for host in POD:
            text = f'[[index]]\nurl = "{url}/simple"\ndefault = true\n'
            lab.inside(host, "sh", "-c", f"mkdir -p /etc/uv && printf %s '{text}' > /etc/uv/uv.toml")
            lab.inside(host, "rm", "-rf", *removed)
        try:
            yield f"{url}/simple"
        finally:
            for host in POD:
                lab.inside(host, "rm", "-rf", "/etc/uv", "/opt/venvs/tools", "/var/cache/uv-own")


def fill_tools(desk: Desk, lab: Lab, hook: Hook = lambda *_: None) -> tuple[dict[str, int], str, str]:
    """Install uv and an environment on the pod; return each worker's outer bytes, the digest, and what was said."""
    sent: Counter[str] = Counter()
    with outer_index(lab, sent, "/opt/venvs/tools", "/opt/uv", "/var/cache/uv-own", hook=hook) as url:
        variables = {
            "base_pip_index_url": url,
            "python_environments": [{"name": "tools", "requirements": ["numpy", "six"]}],
            "python_share_downloads": True,
            "python_uv_cache_dir": "/var/cache/uv-own",
        }
        code, said = play(desk, "site.yml", "--tags", "python", "--extra-vars", json.dumps(variables))
    assert code == 0, said
    (digest,) = re.findall(r"tools (\w+) on 2 workers", said)
    return by_worker(desk, sent), digest, said


def by_worker(desk: Desk, sent: Counter[str]) -> dict[str, int]:
    """Return the bytes that each worker of the pod has got from outside."""
    external = {row["host"]: row["external_ip"] for row in desk.json("tpu_ops", "list", "--json")}
    return {host: sent[external[host]] for host in POD}


def test_a_slice_downloads_once_and_does_without_worker_0(desk, lab):
    """In the second part, worker 0's server is killed while a package is on its way."""
    sent, digest, said = fill_tools(desk, lab)
    assert "from the source" not in said
    assert sent["pod-w0"] > 30_000_000  # uv and numpy
    assert sent["pod-w1"] < sent["pod-w0"] / 100

    killed: list[str] = []

    def kill(agent: str, path: str, so_far: int) -> None:
        # uv has another agent: it reads the package as well, to resolve the requirements.
        if not killed and agent.startswith("Python-urllib") and "numpy" in path and so_far > 4_000_000:
            killed.append(path)
            lab.inside("pod-w0", "systemctl", "kill", "--signal=KILL", "tpu_ops-slice-index.service")

    sent, without, said = fill_tools(desk, lab, kill)
    assert killed
    assert "downloaded from the source, and not from worker 0 of the slice" in said
    assert sent["pod-w1"] > 10_000_000
    assert without == digest
