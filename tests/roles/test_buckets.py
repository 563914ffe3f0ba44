"""The role buckets: faults in its list, and the units that it writes."""

from __future__ import annotations

import configparser
import shlex
from typing import Any

import pytest

from roles.buckets.filter_plugins import buckets
from roles.facts.module_utils import mount_points

DATA = {"bucket": "my-data", "path": "/mnt/my-data"}


def faults(*mounts: dict[str, Any]) -> str:
    found = buckets.buckets_faults(list(mounts), ["root", "ada"], ["root", "tpu-run"], ["/srv/disk"])
    return "; ".join(found)


@pytest.mark.parametrize(
    "mount",
    [
        DATA,
        {**DATA, "read_only": True, "owner": "ada", "group": "tpu-run", "mode": "0775"},
        {**DATA, "owner": "4711", "options": ["dir-cache-time=24h", "gcs-anonymous", "gcs-endpoint=http://h:1/v1/"]},
    ],
)
def test_valid_entries_have_no_faults(mount: dict[str, Any]) -> None:
    assert faults(mount) == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"path": "/etc/x"}, "path is not a directory in /mnt, /media, /srv or /data"),
        ({"path": "/mnt"}, "path is not a directory in"),
        ({"path": "/mnt/a b"}, "path is not a directory in"),
        ({"path": "/mnt/a/../../etc"}, "path is not a directory in"),
        ({"path": "/srv/disk/x"}, "/srv/disk is a mount of another role"),
        ({"bucket": "gs://my-data"}, "bucket 'gs://my-data' is not the name of a bucket"),
        ({"mode": "rwx"}, "mode 'rwx' is not octal"),
        ({"owner": "bob"}, "there is no owner bob on this node"),
        ({"group": "x; id"}, "there is no group x; id on this node"),
        ({"options": ["--a"]}, "options: '--a' is not a single option"),
        ({"options": ["a=$(id)"]}, "options: 'a=$(id)' is not a single option"),
        ({"options": ["uid=0"]}, "options: uid=0 is set by the role"),
    ],
)
def test_an_invalid_entry_is_named_with_its_fault(change: dict[str, Any], fault: str) -> None:
    assert f"buckets_mounts[0]: {(DATA | change)['path']}: {fault}" in faults(DATA | change)


def test_mount_points_must_not_be_equal_or_nested() -> None:
    assert "/mnt/my-data is listed twice" in faults(DATA, DATA)
    assert "one is inside the other" in faults(DATA, {**DATA, "path": "/mnt/my-data/x"})


def unit(mount: dict[str, Any], tool: str) -> tuple[configparser.ConfigParser, list[str]]:
    """Return a mount's unit, and the command that the shell in it executes."""
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.read_string(buckets.unit_text(mount, tool))
    shell, flag, command = shlex.split(parsed["Service"]["ExecStart"])
    assert (shell, flag) == ("/bin/sh", "-c")
    return parsed, shlex.split(command)[1:]


@pytest.mark.parametrize(
    ("tool", "kind", "rights", "read_only", "cached"),
    [
        ("rclone", "notify", {"--dir-perms=0775", "--file-perms=0664"}, "--read-only", "--dir-cache-time=60s"),
        ("gcsfuse", "forking", {"--dir-mode=775", "--file-mode=664"}, "ro", "--metadata-cache-ttl-secs=60"),
    ],
)
def test_a_unit_mounts_with_rights_and_a_short_cache(
    tool: str, kind: str, rights: set[str], read_only: str, cached: str
) -> None:
    mount = {**DATA, "mode": "0775", "owner": "4711", "group": "tpu-run", "options": ["x=1"]}
    parsed, words = unit(mount, tool)
    assert parsed["Service"]["Type"] == kind
    # A unit that names the run's unit would keep it loaded, and no run could start.
    assert "tpu-run" not in buckets.unit_text(mount | {"group": "root"}, tool)
    assert rights | {cached, "--uid=4711", "--gid=$$(getent group tpu-run | cut -d: -f3)"} <= set(words)
    assert read_only not in words
    assert read_only in unit({**mount, "read_only": True}, tool)[1]
    # An option of the entry follows those of the role, so that it takes precedence.
    assert words[-3:] == ["--x=1", ":gcs:my-data" if tool == "rclone" else "my-data", "/mnt/my-data"]


def test_units_have_the_names_of_systemd_and_left_ones_are_removed() -> None:
    name = buckets.unit_name("/mnt/my-data/x")
    assert name == f"tpu_ops-bucket-{mount_points.unit_name('/mnt/my-data/x', 'service')}"
    files = {entry["path"]: entry for entry in buckets.buckets_files([], "rclone", [name])}
    assert {path: entry["state"] for path, entry in files.items()} == {
        f"/etc/systemd/system/{name}": "absent",
        "/etc/tpu_ops/buckets": "absent",
    }
