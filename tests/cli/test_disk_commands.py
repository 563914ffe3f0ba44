"""`tpu_ops disk` against a real API process."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from tests.support import actions
from tests.support.commands import failed
from tests.support.fleet import ZONE
from tests.support.lab_api import PATIENCE
from tpu_ops.cloud import client

OTHER = "europe-west4-b"
READ_ONLY, READ_WRITE = "READ_ONLY", "READ_WRITE"


#: Plays ssh to a worker: its disks and mounts are below $WORKER, in `before` at the first look, and in `after` later.
#: Without that directory, no worker answers.
SSH = r"""#!/bin/sh
for last; do :; done
case "$*" in
*"-O check"*) exit 1 ;;
*"-f -N"*) exit 0 ;;
*persistent-disk*)
    [ -e "$WORKER" ] || { echo "ssh: connect to host box port 22: No route to host" >&2; exit 255; }
    at="$WORKER/before"; [ ! -e "$WORKER/looked" ] || at="$WORKER/after"; touch "$WORKER/looked"
    exec sh -c "$(printf %s "$last" | sed "s#/dev/disk/by-id#$at#; s#/proc/self/mountinfo#$at/mountinfo#")" ;;
esac
exit 255
"""
#: A playbook on this machine: each role writes what it is given.
SITE = """\
- name: Try
  hosts: all
  gather_facts: false
  tasks:
    - name: Play the role disks
      put:
        content: "{{ disks_mounts | to_json }}"
        path: "{{ playbook_dir }}/{{ inventory_hostname }}.json"
      tags: [disks]
    - name: Play another role
      put: {content: x, path: "{{ playbook_dir }}/other"}
      tags: [other]
"""
LOCAL = (
    "ansible_connection: local\nansible_become: false\nansible_python_interpreter: '{{ ansible_playbook_python }}'\n"
)
#: Character devices that play disks, with their numbers.
DEVICES = (("/dev/null", "1:3"), ("/dev/zero", "1:5"))


@pytest.fixture(autouse=True)
def worker(tmp_path, monkeypatch):
    """Returns a function that sets what all workers see, at the first look and later: disk number -> mount point."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WORKER", str(tmp_path / "worker"))

    def sees(before, after):
        for when, mounts in (("before", before), ("after", after)):
            folder = tmp_path / "worker" / when
            folder.mkdir(parents=True)
            (folder / "google-persistent-disk-0").symlink_to("/dev/full")
            lines = ["1 1 8:1 / / rw - ext4 /dev/sda1 rw"]
            for (device, numbers), (number, path) in zip(DEVICES, mounts.items(), strict=False):
                (folder / f"google-persistent-disk-{number}").symlink_to(device)
                if path:
                    lines.append(f"2 1 {numbers} / {path} rw - ext4 {device} rw")
            (folder / "mountinfo").write_text("\n".join(lines) + "\n")

    return sees


@pytest.fixture
def site(fleet):
    """Writes the fleet's playbook; returns a function that returns what the role disks was given on a worker."""
    actions.give_put(fleet.path)
    (fleet.path / "site.yml").write_text(SITE)
    (fleet.path / "inventory" / "group_vars").mkdir()
    (fleet.path / "inventory" / "group_vars" / "all.yml").write_text(LOCAL)

    def given(host):
        assert not (fleet.path / "other").exists()
        return json.loads((fleet.path / f"{host}.json").read_text())

    return given


@pytest.fixture(autouse=True)
def _endpoints(fleet, monkeypatch):
    """Points Compute Engine's client to the API as well; no fault outlives its test."""
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", fleet.api.rest)
    monkeypatch.setattr(client, "FIRST_DELAY", 0.02)
    yield
    fleet.api.clear_faults()


@pytest.fixture
def disk(fleet, tpu_ops):
    """Runs a subcommand of `tpu_ops disk` that succeeds, and returns its JSON."""

    def run(*argv):
        code, out, err = tpu_ops("disk", *argv, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def source(fleet, name, zone=ZONE):
    return f"projects/{fleet.project}/zones/{zone}/disks/{name}"


def attached(fleet, node):
    """Return the disks of a node as the API has them: (name, mode)."""
    return [
        (one["sourceDisk"].rpartition("/")[2], one["mode"])
        for one in fleet.api.node(node, fleet.location()).get("dataDisks", [])
    ]


def create(disk, *names, zone=ZONE):
    for name in names:
        disk("create", name, "--size", "10", "--zone", zone)


def test_the_life_of_a_disk(fleet, tpu_ops, disk, worker):
    worker({}, {1: ""})
    fleet.create("box")
    assert disk("create", "data", "--size", "20", "--type", "pd-ssd", "--zone", ZONE)["outcome"] == "created"
    assert disk("create", "data", "--size", "20", "--type", "pd-ssd", "--zone", ZONE)["outcome"] == "already there"
    failed(tpu_ops("disk", "create", "data", "--size", "30", "--zone", ZONE), 3, "with 20 GB and type pd-ssd, not 30")
    code, out, err = tpu_ops("disk", "list")
    assert code == 0
    assert out.splitlines()[1].split(maxsplit=5) == [
        *("data", ZONE, "pd-ssd", "20", "GB"),
        "nothing: costs money without a node",
    ]
    assert "1 disk without a node: data (20 GB, us-central2-b)" in err

    assert disk("attach", "data", "box")["outcome"] == "attached"
    assert attached(fleet, "box") == [("data", READ_WRITE)]
    assert disk("attach", "data", "box", "--mode", "rw")["outcome"] == "already there"
    (row,) = disk("list")
    assert row["nodes"] == [{"node": f"{fleet.location()}/nodes/box", "mode": "rw"}]
    assert (row["size_gb"], row["unused"]) == (20, False)
    failed(
        tpu_ops("disk", "delete", "data", "--yes"), 2, "attached to box (rw)", "`tpu_ops disk detach data box` first"
    )

    assert disk("detach", "data", "box")["outcome"] == "detached"
    assert disk("detach", "data", "box")["outcome"] == "not attached"
    failed(tpu_ops("disk", "delete", "data"), 2, "--yes")
    assert disk("delete", "data", "--yes")["outcome"] == "deleted"
    assert disk("list") == []
    failed(tpu_ops("disk", "delete", "data", "--yes"), 2, "no disk is called 'data'")


def test_a_dry_run_changes_nothing(fleet, disk, worker):
    worker({}, {})
    fleet.create("box")
    disk("create", "data", "--size", "10", "--zone", ZONE, "--dry-run")
    assert disk("list") == []
    create(disk, "data")
    disk("attach", "data", "box", "--dry-run")
    disk("delete", "data", "--dry-run")
    assert attached(fleet, "box") == []
    disk("attach", "data", "box")
    disk("detach", "data", "box", "--dry-run")
    assert attached(fleet, "box") == [("data", READ_WRITE)]


def test_attach_and_detach_keep_the_other_disks(fleet, disk, worker):
    worker({}, {})
    others = [{"sourceDisk": source(fleet, name), "mode": READ_ONLY} for name in ("first", "last")]
    fleet.create("pod", "v4-16", dataDisks=others)
    create(disk, "data")
    assert disk("attach", "data", "pod")["mode"] == "ro"
    assert attached(fleet, "pod") == [("first", READ_ONLY), ("last", READ_ONLY), ("data", READ_ONLY)]
    disk("detach", "first", "pod")
    assert attached(fleet, "pod") == [("last", READ_ONLY), ("data", READ_ONLY)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("here", "pod", "--mode", "rw"), ("several workers cannot write to one disk", "--mode ro")),
        (("there", "box"), ("only have disks of its own zone", OTHER)),
        (("taken", "box"), ("node owner has the disk, read-write", "tpu_ops disk detach taken owner")),
        (("taken", "pod"), ("node owner has the disk, read-write",)),
        (("read", "box", "--mode", "rw"), ("node reader has the disk, read-only", "--mode ro")),
        (("taken", "owner", "--mode", "ro"), ("has the disk already, read-write", "tpu_ops disk detach taken owner")),
        (("nowhere", "box"), ("no disk is called 'nowhere'", "there", "here, read, taken")),
        (("here", "nobody"), ("no node is called 'nobody'",)),
    ],
)
def test_impossible_attachments_are_refused_before_the_request(fleet, tpu_ops, disk, argv, words):
    create(disk, "here", "taken", "read")
    create(disk, "there", zone=OTHER)
    fleet.create("box")
    fleet.create("pod", "v4-16")
    fleet.create("owner", dataDisks=[{"sourceDisk": source(fleet, "taken"), "mode": READ_WRITE}])
    fleet.create("reader", dataDisks=[{"sourceDisk": source(fleet, "read"), "mode": READ_ONLY}])
    fleet.api.forget_requests()
    failed(tpu_ops("disk", "attach", *argv), 2, *words[:1], *words[-1:])
    assert "UpdateNode" not in fleet.api.requests(fleet.project)


def test_a_disk_that_is_only_read_can_be_shared(fleet, disk):
    create(disk, "data")
    for name in ("one", "two"):
        fleet.create(name)
        disk("attach", "data", name, "--mode", "ro")
    (row,) = disk("list")
    assert [(use["node"].rpartition("/")[2], use["mode"]) for use in row["nodes"]] == [("one", "ro"), ("two", "ro")]


def test_a_change_that_another_machine_overwrites_is_made_again(fleet, disk):
    create(disk, "mine", "theirs")
    fleet.create("box")
    # While this command waits for its operation, another machine writes a list that it read before.
    fleet.api.fault(method="GetOperation", project=fleet.project, seconds=1, times=1)
    result = []
    command = threading.Thread(target=lambda: result.append(disk("attach", "mine", "box")))
    command.start()
    deadline = time.monotonic() + PATIENCE
    while ("mine", READ_WRITE) not in attached(fleet, "box"):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    theirs = [{"sourceDisk": source(fleet, "theirs"), "mode": READ_WRITE}]
    fleet.api.done("PATCH", f"v2/{fleet.location()}/nodes/box?updateMask=dataDisks", {"dataDisks": theirs})
    command.join(60)
    assert result[0]["outcome"] == "attached"
    assert attached(fleet, "box") == [("theirs", READ_WRITE), ("mine", READ_WRITE)]


@pytest.mark.parametrize("method", ["compute.disks.insert", "compute.disks.delete", "UpdateNode"])
def test_a_lost_answer_does_not_end_a_command(fleet, disk, method, worker):
    worker({}, {})
    fleet.create("box")
    fleet.api.fault(method=method, project=fleet.project, code="UNAVAILABLE", times=1)
    create(disk, "data")
    disk("attach", "data", "box")
    disk("detach", "data", "box")
    disk("delete", "data", "--yes")
    assert disk("list") == []
    assert fleet.api.requests(fleet.project)[method] >= 2


def test_a_list_sends_two_requests_for_each_project(fleet, disk):
    create(disk, "data")
    fleet.api.forget_requests()
    disk("list")
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1, "compute.disks.aggregatedList": 1}


@pytest.fixture
def unused(fleet, disk):
    """A fleet with one node, a disk of it, and two disks without a node, of which one is in another zone."""
    create(disk, "idle", "used")
    create(disk, "away", zone=OTHER)
    fleet.create("box")
    disk("attach", "used", "box")
    return fleet


def shown(tpu_ops, *argv):
    """Return the disks in the output of `tpu_ops list`, and its messages."""
    code, out, err = tpu_ops("list", *argv)
    assert code == 0, err
    return [line.split()[0] for line in out.partition("DISK WITHOUT")[2].splitlines()[1:]], err


def test_list_shows_the_disks_without_a_node(unused, tpu_ops):
    found, err = shown(tpu_ops)
    assert found == ["away", "idle"]
    assert "2 disks that no node uses cost money: `tpu_ops disk delete NAME`" in err
    assert "\n\nDISK WITHOUT" in tpu_ops("list")[1]
    assert shown(tpu_ops, "--zone", ZONE)[0] == ["idle"]
    assert shown(tpu_ops, "--name", "box")[0] == []
    unused.write(zones=[OTHER])
    assert shown(tpu_ops)[0] == ["away"], "nodes are listed in the fleet's zones only"


def test_the_disks_of_a_zone_without_an_answer_are_not_called_unused(unused, tpu_ops):
    unused.write(zones=[ZONE, OTHER])
    unused.api.fault(method="ListNodes", zone=ZONE, code="INTERNAL", message="lost")
    assert shown(tpu_ops)[0] == ["away"]


def test_list_asks_for_disks_once_and_only_to_show_them(unused, tpu_ops):
    method = "compute.disks.aggregatedList"
    for argv, count in (([], 1), (["--json"], None), (["--cached"], None), (["--queued"], None), (["--cost"], None)):
        unused.api.forget_requests()
        assert tpu_ops("list", *argv)[0] == 0
        assert unused.api.requests(unused.project).get(method) == count, argv
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json")[1])] == ["box-w0"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"code": "PERMISSION_DENIED"}, ""),
        ({"code": "INTERNAL", "message": "lost"}, "warning: whether a disk costs money without a node is unknown: "),
        ({"code": "UNAVAILABLE"}, "warning: whether a disk costs money without a node is unknown: "),
    ],
)
def test_list_works_without_an_answer_of_compute_engine(unused, tpu_ops, fault, words):
    unused.write(request_timeout=1)
    unused.api.fault(method="compute.disks.aggregatedList", project=unused.project, **fault)
    code, out, err = tpu_ops("list")
    assert (code, "box-w0" in out, "DISK" in out) == (0, True, False)
    assert [line.startswith(words) for line in err.splitlines() if "disk" in line] == [True] * bool(words)


def test_missing_rights_for_disks_are_explained(fleet, tpu_ops):
    fleet.api.fault(method="compute.disks.aggregatedList", project=fleet.project, code="PERMISSION_DENIED")
    failed(tpu_ops("disk", "list"), 3, "PERMISSION_DENIED", "Compute Viewer")


def test_disks_and_nodes_are_never_taken_from_different_services(fleet, tpu_ops, monkeypatch):
    monkeypatch.delenv("TPU_OPS_REST_ENDPOINT")
    failed(tpu_ops("disk", "list"), 2, "both endpoints", "TPU_OPS_REST_ENDPOINT")
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", "http://compute.example:80")
    failed(tpu_ops("disk", "list"), 2, "TPU_OPS_REST_ENDPOINT", "loopback")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("create", "Data", "--size", "10", "--zone", ZONE), "cannot be a disk's name"),
        (("create", "data", "--size", "10", "--zone", ZONE, "--type", "ssd"), "not a type of disks"),
        (("create", "data", "--size", "10"), "no zone is given"),
    ],
)
def test_wrong_arguments_are_explained(tpu_ops, argv, words):
    failed(tpu_ops("disk", *argv), 2, words)


def test_mount_mounts_the_new_device_by_the_role_disks_alone(fleet, disk, worker, site):
    worker({1: "/mnt/old"}, {1: "/mnt/old", 2: ""})
    create(disk, "data")
    fleet.create("box", dataDisks=[{"sourceDisk": source(fleet, "old"), "mode": READ_WRITE}])
    assert disk("attach", "data", "box", "--mount", "/mnt/data", "--format")["mounted"] == "/mnt/data"
    assert attached(fleet, "box") == [("old", READ_WRITE), ("data", READ_WRITE)]
    assert site("box-w0") == [{"device": "google-persistent-disk-2", "path": "/mnt/data", "format": True}]


def test_mount_continues_after_a_command_that_only_attached_the_disk(fleet, disk, worker, site):
    worker({1: ""}, {1: ""})
    create(disk, "data")
    fleet.create("pod", "v4-16")
    disk("attach", "data", "pod")
    assert disk("attach", "data", "pod", "--mount", "/mnt/data")["outcome"] == "already there"
    expected = [{"device": "google-persistent-disk-1", "path": "/mnt/data", "read_only": True}]
    assert site("pod-w0") == site("pod-w1") == expected


def test_detach_unmounts_the_only_disk_first(fleet, disk, worker, site):
    worker({1: "/mnt/my\\040data"}, {})
    fleet.create("box", dataDisks=[{"sourceDisk": source(fleet, "data"), "mode": READ_WRITE}])
    assert disk("detach", "data", "box")["unmounted"] == ["/mnt/my data"]
    assert site("box-w0") == [{"path": "/mnt/my data", "state": "absent"}]
    assert attached(fleet, "box") == []


def test_detach_asks_which_of_several_mounted_disks_is_meant(fleet, tpu_ops, disk, worker, site):
    worker({1: "/mnt/a", 2: "/mnt/b"}, {1: "/mnt/a", 2: "/mnt/b"})
    both = [{"sourceDisk": source(fleet, name), "mode": READ_WRITE} for name in "ab"]
    fleet.create("box", dataDisks=both)
    failed(tpu_ops("disk", "detach", "a", "box"), 2, "/mnt/a, /mnt/b", "--unmount PATH")
    assert len(attached(fleet, "box")) == 2
    assert disk("detach", "a", "box", "--unmount", "/mnt/a")["unmounted"] == ["/mnt/a"]
    assert site("box-w0") == [{"path": "/mnt/a", "state": "absent"}]
    assert disk("detach", "b", "box", "--no-unmount")["unmounted"] == []
    assert attached(fleet, "box") == []


def test_a_disk_that_cannot_be_unmounted_stays_attached(fleet, tpu_ops, worker, site):
    worker({1: "/mnt/a"}, {})
    busy = "ansible.builtin.fail: {msg: process 7 (python) uses it}\n      tags: [disks]\n    - name: Later\n      "
    (fleet.path / "site.yml").write_text(SITE.replace("put:", f"{busy}put:", 1))
    fleet.create("box", dataDisks=[{"sourceDisk": source(fleet, "a"), "mode": READ_WRITE}])
    failed(tpu_ops("disk", "detach", "a", "box"), 1, "process 7 (python) uses it")
    assert attached(fleet, "box") == [("a", READ_WRITE)]


def test_detach_needs_an_answer_of_the_workers_without_no_unmount(fleet, tpu_ops, disk):
    fleet.create("box", dataDisks=[{"sourceDisk": source(fleet, "a"), "mode": READ_WRITE}])
    failed(tpu_ops("disk", "detach", "a", "box"), 4, "box-w0", "--no-unmount")
    assert attached(fleet, "box") == [("a", READ_WRITE)]
    disk("detach", "a", "box", "--no-unmount")
    assert attached(fleet, "box") == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--format",), "--mount PATH"),
        (("--mount", "/mnt/a", "--format", "--mode", "ro"), "cannot be formatted"),
    ],
)
def test_a_mount_that_cannot_be_is_refused_before_anything_is_attached(fleet, tpu_ops, disk, argv, words):
    create(disk, "data")
    fleet.create("box")
    failed(tpu_ops("disk", "attach", "data", "box", *argv), 2, words)
    assert attached(fleet, "box") == []
