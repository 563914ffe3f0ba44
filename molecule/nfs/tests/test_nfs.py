"""Who reads and writes what over the wire, after breaks by hand were repaired."""

from __future__ import annotations

import socket
import struct
import uuid
from typing import Any

import pytest
from testinfra.host import Host

SHARE = "/srv/nfs/share"
#: The account of the lab's workers, whose group owns the export.
TPU = "uid=1000&gid=1000"


def server_variables(host: Host) -> dict[str, Any]:
    """Return the variables of the worker that exports, the first of the node."""
    mine = host.ansible.get_variables()
    return {"internal": mine["tpu_internal_ips"][0], "external": mine["tpu_external_ips"][0]}


def serves(host: Host) -> bool:
    return bool(host.ansible.get_variables()["tpu_worker_index"] == 0)


def nfs(host: Host, program: str, path: str, *, user: str = TPU, address: str = "", root: bool = True) -> Any:
    """Run one of libnfs's programs."""
    url = f"nfs://{address or server_variables(host)['internal']}{path}?version=4&{user}"
    source = "/etc/hostname " if program == "nfs-cp" else ""
    return host.run(f"{'sudo -n ' if root else ''}timeout 20 {program} {source}'{url}'")


def test_a_file_that_one_worker_wrote_over_nfs_is_read_by_all_workers(host: Host) -> None:
    done = nfs(host, "nfs-cat", f"{SHARE}/from-w1")
    assert done.stdout == "from the other worker\n", done.stderr


def test_on_the_server_the_mount_point_has_the_same_files(host: Host) -> None:
    if serves(host):
        assert host.check_output("sudo -n cat /mnt/share/from-w1") == "from the other worker"
        assert host.check_output("sudo -n stat -c %u:%G:%a /mnt/share/from-w1").startswith("1000:tpu:")
        assert "ro" in host.check_output("findmnt -no OPTIONS /mnt/nfs-data").split(",")


def test_an_account_of_the_group_writes_and_root_is_nobody(host: Host) -> None:
    if serves(host):
        assert host.check_output(f"sudo -n stat -c %U:%G:%a {SHARE}") == "root:tpu:2775"
        return
    # A new name each time: the program does not write to a file that is there.
    done = nfs(host, "nfs-cp", f"{SHARE}/{uuid.uuid4()}")
    assert done.rc == 0, done.stderr
    refused = nfs(host, "nfs-cp", f"{SHARE}/roots", user="uid=0&gid=0")
    assert refused.rc != 0
    assert "NFS4ERR_ACCESS" in refused.stderr


def test_the_server_has_its_settings_and_the_exports_their_owners(host: Host) -> None:
    if serves(host):
        settings = host.file("/etc/ganesha/ganesha.conf")
        assert "    Squash = Root_Squash;\n" in settings.content_string
        assert (settings.user, settings.group, settings.mode) == ("root", "root", 0o644)
        assert host.check_output("stat -c %U:%G:%a /srv/nfs/data") == "root:root:755"


def test_nobody_writes_what_is_exported_to_be_read(host: Host) -> None:
    if not serves(host):
        assert nfs(host, "nfs-ls", "/srv/nfs/data").rc == 0
        assert "NFS4ERR_ROFS" in nfs(host, "nfs-cp", "/srv/nfs/data/more").stderr


@pytest.mark.parametrize("why", ["external address", "a port that anybody can open"])
def test_others_are_refused(host: Host, why: str) -> None:
    if serves(host):
        return
    if why == "external address":
        done = nfs(host, "nfs-cat", f"{SHARE}/from-w1", address=server_variables(host)["external"])
    else:
        done = nfs(host, "nfs-cat", f"{SHARE}/from-w1", root=False)
    assert done.rc != 0
    assert "NFS4ERR_NOENT" in done.stderr, "the export was seen, or the server did not answer"


def test_the_server_speaks_the_version_that_mounts_ask_for(host: Host) -> None:
    """A compound request without operations, as anybody may send it (RFC 7862, 5531)."""
    head = struct.pack(">IIIIII", 7, 0, 2, 100003, 4, 1) + bytes(16) + struct.pack(">III", 0, 2, 0)
    with socket.create_connection((server_variables(host)["external"], 2049), timeout=10) as connection:
        connection.sendall(struct.pack(">I", 1 << 31 | len(head)) + head)
        answer = connection.recv(1024)
    assert struct.unpack(">I", answer[28:32]) == (0,)


def test_units_are_written_and_left_alone(host: Host) -> None:
    if serves(host):
        return
    address = server_variables(host)["internal"]
    for unit, what, options in (
        ("mnt-share", f"{address}:{SHARE}", "nfsvers=4.2,hard,timeo=600,retrans=2,nosuid,nodev"),
        (
            r"mnt-nfs\\x2ddata",
            f"{address}:/srv/nfs/data",
            "nfsvers=4.2,hard,timeo=600,retrans=2,nosuid,nodev,noatime,ro",
        ),
    ):
        host.check_output(f"systemd-analyze verify /etc/systemd/system/{unit}.automount")
        shown = host.check_output(f"systemctl show -p What,Options,ActiveState {unit}.mount").splitlines()
        assert {f"What={what}", f"Options={options}", "ActiveState=inactive"} <= set(shown)
        shown = host.check_output(f"systemctl show -p TimeoutIdleUSec,UnitFileState {unit}.automount").splitlines()
        assert {"TimeoutIdleUSec=10min", "UnitFileState=disabled"} <= set(shown)


def test_the_server_starts_at_boot_once_its_disk_is_mounted(host: Host) -> None:
    if serves(host):
        shown = host.check_output("systemctl show -p RequiresMountsFor,UnitFileState,ActiveState nfs-ganesha")
        assert "UnitFileState=enabled" in shown
        assert "ActiveState=active" in shown
        assert {"/srv/nfs/data", SHARE} <= set(shown.partition("RequiresMountsFor=")[2].split())
