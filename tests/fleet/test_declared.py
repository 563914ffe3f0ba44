"""nodes.yml: what its entries declare, and how its faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.fleet import declared
from tpu_ops.fleet.declared import Declared

WHOLE = """
nodes:
  - name: dev
    type: v4-8
    keep: true
  - name: sweep-[1-2]
    type: v5litepod-16
    zones: [europe-west4-b, us-central1-a]
    project: other
    spot: true
    runtime: custom
    network: training
    subnetwork: workers
    internal_only: true
    service_account: tpu@lab.iam.gserviceaccount.com
    scopes: [https://www.googleapis.com/auth/devstorage.read_only]
    labels: {team: vision, round: 3}
    metadata: {enable-oslogin: false}
    startup_script: scripts/boot.sh
    disks: [data:ro]
    queued: true
    valid_until: 12h
"""


def read(tmp_path: Path, text: str, projects: tuple[str, ...] = ("lab", "other")) -> tuple[Declared, ...]:
    file = tmp_path / "nodes.yml"
    file.write_text(text)

    def content(path: Path) -> str:
        return path.read_bytes().decode()

    return declared.read(file, projects, content)


def test_an_entry_declares_a_node_for_each_name_of_its_set(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "boot.sh").write_text("#!/bin/sh\n")
    dev, first, second = read(tmp_path, WHOLE.replace("keep: true", "project: lab\n    keep: true"))
    assert (dev.key, dev.spot, dev.zones, dev.keep, dev.line) == (("lab", "dev"), None, (), True, 3)
    assert (dev.wish.runtime_version, dev.given) == (
        "tpu-ubuntu2204-base",
        frozenset(("name", "type", "project", "keep")),
    )
    assert (first.key, second.key, first.line) == (("other", "sweep-1"), ("other", "sweep-2"), 7)
    assert (first.zones, first.spot, first.keep) == (("europe-west4-b", "us-central1-a"), True, False)
    wish = first.wish
    assert (wish.runtime_version, wish.network, wish.subnetwork, wish.internal_only) == (
        "custom",
        "training",
        "workers",
        True,
    )
    assert wish.labels == {"team": "vision", "round": "3"}
    assert wish.metadata == {"enable-oslogin": "false", "startup-script": "#!/bin/sh\n"}
    assert (wish.disks, wish.queued, wish.valid_until) == ({"data": "ro"}, True, 12 * 3600)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("name: dev\n  type: v4-8\n  spots: true", "line 4: unknown key 'spots', did you mean 'spot'?"),
        ("name: dev", "line 2: the entry has no type"),
        ("type: v4-8", "line 2: the entry has no name"),
        ("name: Dev\n  type: v4-8", "line 2: name: 'Dev' cannot be a node's name"),
        ("name: 'a-[1-'\n  type: v4-8", "line 2: name: not a node set"),
        ("name: 7\n  type: v4-8", "line 2: name: expected a node set"),
        ("name: dev\n  type: v9-8", "line 3: type: there is no default runtime version for 'v9-8': set `runtime`"),
        ("name: dev\n  type: v4-8\n  zones: [US]", "line 4: zones: expected a list of zones"),
        ("name: dev\n  type: v4-8\n  project: away", "line 4: project: 'away' is not a project of this fleet"),
        ("name: dev\n  type: v4-8\n  spot: yes please", "line 4: spot: expected true or false"),
        ("name: dev\n  type: v4-8\n  spot: true\n  reserved: true", "line 5: a node is either spot or reserved"),
        ("name: dev\n  type: v4-8\n  scopes: [x]", "line 2: scopes belong to a service account"),
        ("name: dev\n  type: v4-8\n  valid_until: 1h", "line 2: only a queued resource can end while it waits"),
        (
            "name: dev\n  type: v4-8\n  queued: true\n  valid_until: soon",
            "line 5: valid_until: 'soon' is not a duration",
        ),
        ("name: dev\n  type: v4-8\n  metadata: {ssh-keys: x}", "line 4: metadata: tpu_ops writes the entry ssh-keys"),
        ("name: dev\n  type: v4-8\n  startup_script: no.sh", "no.sh cannot be read: No such file or directory"),
        ("name: dev\n  type: v4-8\n  disks: [data]", "line 4: disks: expected a list of disks with their modes"),
        ("name: dev\n  type: v4-8\n  disks: [data:ro, data:rw]", "line 4: disks: a disk is listed twice"),
        ("name: dev\n  type: v4-16\n  disks: [data:rw]", "line 2: several workers cannot write to one disk"),
        ("name: dev-[1-2]\n  type: v4-8\n  disks: [data:rw]", "line 4: several nodes cannot write to one disk"),
        ("name: dev\n  type: v4-8\n- name: dev\n  type: v4-8", "line 4: dev is declared in line 2 too"),
        ("name: dev-[1-4]\n  type: v4-8\n- name: dev-[3-5]\n  type: v4-8", "line 4: dev-3, dev-4 are declared in line"),
        (
            "name: a\n  type: v4-8\n  disks: [d:ro]\n- name: b\n  type: v4-8\n  disks: [d:rw]",
            "line 5: disk d is used in",
        ),
        ("dev", "line 2: 'dev' is only a name"),
        ("7", "line 2: expected a declared node"),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_line(tmp_path: Path, entry: str, fault: str) -> None:
    with pytest.raises(UsageError) as wrong:
        read(tmp_path, f"nodes:\n- {entry}\n", ("lab",))
    assert fault in str(wrong.value)
    assert wrong.value.where == str(tmp_path / "nodes.yml")


def test_all_faults_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as wrong:
        read(tmp_path, "nodes:\n- {name: Dev, type: v4-8}\n- {name: b, typ: v4-8}\nnode: 1\n", ("lab",))
    assert [text.partition(":")[0] for text in wrong.value.details] == ["line 2", "line 3", "line 3", "line 4"]


@pytest.mark.parametrize(
    ("text", "projects", "fault"),
    [
        ("# nothing\n", ("lab",), "the file has no list `nodes`"),
        ("nodes:\n- {name: dev, type: v4-8}\n", ("lab", "other"), "the fleet has not exactly one"),
    ],
)
def test_what_the_file_must_say(tmp_path: Path, text: str, projects: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        read(tmp_path, text, projects)


def test_a_missing_file_is_an_error_and_an_empty_list_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="declares no nodes"):
        declared.read(tmp_path / "nodes.yml", ("lab",), Path.read_text)
    assert read(tmp_path, "nodes: []\n", ("lab",)) == ()
