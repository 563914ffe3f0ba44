"""The role nfs: faults in its lists, its files and units, and its reading of a worker."""

from __future__ import annotations

import copy
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.facts.module_utils import mount_points
from roles.facts.module_utils.mount_points import Mounted, Refusal
from roles.nfs.filter_plugins import nfs, nfs_plan
from roles.nfs.module_utils import nfs_client, nfs_server, nfs_state

ROLE = Path(nfs_plan.__file__).parents[1]
EXPORT: dict[str, Any] = {"path": "/srv/share", "server": "pod-w0", "group": "research", "mode": "2775"}
MOUNT: dict[str, Any] = {"path": "/mnt/share", "export": "/srv/share"}
HOSTS: dict[str, dict[str, Any]] = {
    "pod-w0": {"tpu_internal_ip": "10.0.0.2", "tpu_external_ip": "34.1.1.2"},
    "pod-w1": {"tpu_internal_ip": "10.0.0.3", "tpu_external_ip": "34.1.1.3"},
    "spot-w0": {"tpu_internal_ip": "10.0.0.4", "tpu_spot": True},
    "bare": {"ansible_host": "bare.example.org"},
    "files": {"nfs_address": "10.0.0.9"},
    "six": {"nfs_address": "fd00::6"},
}
GROUPS = {"all": ["pod-w0", "pod-w1", "spot-w0"], "node_pod": ["pod-w0", "pod-w1"], "node_my_spot": ["spot-w0"]}


def variables(host: str = "pod-w1", **changes: Any) -> dict[str, Any]:
    """Return what the tasks hand to the filters."""
    return {
        "host": host,
        "kind": "kernel",
        "exports": [EXPORT],
        "mounts": [MOUNT],
        "options": ["nfsvers=4.2", "hard"],
        "mount_timeout": 30,
        "idle_timeout": 600,
        "grace_seconds": 90,
        "ganesha_core": {},
        "allow_preemptible": False,
        "units_only": False,
        "disks": [],
        **changes,
    }


def faults(hosts: dict[str, Any] = HOSTS, **changes: Any) -> str:
    known = variables(**changes)
    own = nfs.own_faults(known, ["root", "ada"], ["root", "research"])
    return "; ".join(nfs.nfs_faults(known, hosts, GROUPS) + own)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"host": "pod-w0"},
        {"exports": [{**EXPORT, "server": "files"}]},
        {"exports": [{**EXPORT, "clients": ["pod", "my-spot"]}]},
        {"exports": [{**EXPORT, "clients": ["node_pod", "files"], "read_only": True, "mode": "755"}]},
        {"exports": [{**EXPORT, "server": "spot-w0"}], "allow_preemptible": True},
        {"exports": [EXPORT, {**EXPORT, "path": "/srv/share2"}], "mounts": [MOUNT, {"path": "/srv/share2"}]},
        {"mounts": [{**MOUNT, "server": "pod-w0", "options": ["noatime", "soft"]}]},
        {"mounts": [{"path": "/mnt/old", "export": "/gone", "state": "absent"}]},
        {"disks": [{"path": "/mnt/data"}, {"path": "/mnt/share", "state": "absent"}]},
        {"host": "pod-w0", "exports": [{**EXPORT, "owner": "ada", "group": "4711"}]},
    ],
)
def test_lists_that_say_all_there_is_to_say(changes: dict[str, Any]) -> None:
    assert faults(**changes) == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"server": "spot-w0"},
            "server spot-w0 is preemptible, and its disk is lost when the server is preempted; set",
        ),
        ({"server": "bare"}, "the internal address of bare is unknown; set nfs_address for this host"),
        ({"mode": "0777"}, "mode 0777 lets everybody write; give a group and a mode such as 2775"),
        ({"mode": "1777"}, "mode 1777 lets everybody write"),
        ({"mode": "u=rwx"}, "mode 'u=rwx' is not octal in quotes"),
        ({"path": "srv/share"}, "path is not an absolute path"),
        ({"path": "/srv/share/"}, "path is not an absolute path"),
        ({"path": "/srv/../etc"}, "path is not an absolute path"),
        ({"path": '/srv/a"; Squash = None; #'}, "path is not an absolute path"),
        ({"path": "/etc"}, "path is a directory of the system"),
        ({"path": "/srv"}, "path is a directory of the system"),
        ({"path": "/"}, "path is a directory of the system"),
    ],
)
def test_exports_that_are_refused_before_anything_changes(change: dict[str, Any], fault: str) -> None:
    said = faults(exports=[{**EXPORT, **change}], mounts=[])
    assert said.startswith("nfs_exports[0]: ")
    assert fault in said


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"clients": ["pod-w1", "bare"]}, "clients: the internal address of bare is unknown"),
        ({"owner": "eve"}, "there is no owner eve, and users_people does not add it"),
        ({"group": "nogroup"}, "there is no group nogroup"),
    ],
)
def test_only_the_server_is_asked_for_what_only_it_can_know(change: dict[str, Any], fault: str) -> None:
    assert fault in faults(host="pod-w0", exports=[{**EXPORT, **change}])
    assert faults(host="pod-w1", exports=[{**EXPORT, **change}]) == ""


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("34.1.1.2", "is its external address"),
        ("nas.example.org", "which is not an IP address"),
        ("10.0.0.0/8", "not an IP address"),
    ],
)
def test_addresses_are_internal_ones(address: str, fault: str) -> None:
    hosts = copy.deepcopy(HOSTS)
    hosts["pod-w0"]["nfs_address"] = address
    assert fault in faults(hosts)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"exports": [EXPORT, {**EXPORT, "server": "files"}]},
            "nfs_exports: /srv/share has two servers, pod-w0 and files",
        ),
        ({"exports": [EXPORT, EXPORT]}, "nfs_exports: /srv/share is listed twice"),
        (
            {"exports": [EXPORT, {**EXPORT, "path": "/srv/share/in"}]},
            "of /srv/share and /srv/share/in, one is inside the other",
        ),
        ({"mounts": [MOUNT, MOUNT]}, "nfs_mounts: /mnt/share is listed twice"),
        (
            {"mounts": [MOUNT, {**MOUNT, "path": "/mnt/share/in"}]},
            "of the paths /mnt/share and /mnt/share/in, one is inside the other",
        ),
        ({"mounts": [{"path": "/mnt/share"}]}, "no export of nfs_exports has the path /mnt/share"),
        ({"mounts": [{**MOUNT, "server": "files"}]}, "nfs_exports of files has no export with the path /srv/share"),
        ({"mounts": [{**MOUNT, "server": "gone"}]}, "server gone is not in the inventory"),
        ({"mounts": [{**MOUNT, "path": "mnt"}]}, "path is not an absolute path"),
        ({"mounts": [{**MOUNT, "path": "/mnt/%h"}]}, "path is not an absolute path"),
        (
            {"disks": [{"path": "/mnt/share"}]},
            "disks_mounts has /mnt/share, and one of the two mounts would hide the other",
        ),
        ({"disks": [{"path": "/mnt/share/disk"}]}, "disks_mounts has /mnt/share/disk"),
        ({"host": "spot-w0", "exports": [{**EXPORT, "clients": ["pod"]}]}, "spot-w0 is not a client of the export"),
        (
            {"host": "pod-w0", "mounts": [{**MOUNT, "path": "/srv/share/in"}]},
            "of this path and the export /srv/share, one is inside the other",
        ),
        *(
            ({"mounts": [{**MOUNT, "options": [option]}]}, "is set by the role")
            for option in ("nofail", "rw", "x-systemd.automount", "addr=10.0.0.9", "bind")
        ),
        ({"mounts": [{**MOUNT, "options": ["a,b"]}]}, "'a,b' is not a single option"),
        ({"options": ["hard\nExecStart=x"]}, "nfs_mount_options: 'hard\nExecStart=x' is not a single option"),
        *(
            ({"options": [option]}, f"nfs_mount_options: {option}: give {option.partition('=')[0]} a whole number")
            for option in ("timeo=0", "timeo=-5", "timeo=60s", "timeo", "retrans=-1", "nconnect=0")
        ),
        ({"ganesha_core": {"NFS_Port": -1}}, "nfs_ganesha_core: NFS_Port: -1 is neither a number of 0 or more nor"),
        ({"ganesha_core": {"a; b": 1}}, "nfs_ganesha_core: 'a; b' is not the name of a setting"),
        ({"ganesha_core": {"Nb_Worker": "8; }"}}, "nfs_ganesha_core: Nb_Worker: '8; }' is neither a number"),
    ],
)
def test_entries_that_do_not_go_together(changes: dict[str, Any], fault: str) -> None:
    assert fault in faults(**changes)


def test_further_settings_of_ganesha_stand_in_its_core() -> None:
    assert faults(ganesha_core={"Nb_Worker": 8, "x": True}) == faults()
    (core,) = (
        file["content"]
        for file in plan("pod-w0", kind="ganesha", ganesha_core={"x": True, "Nb_Worker": 8})["files"]
        if file["path"] == "/etc/ganesha/ganesha.conf"
    )
    assert "    Enable_UDP = false;\n    Nb_Worker = 8;\n    x = true;\n}\n" in core


def test_the_server_s_own_list_counts() -> None:
    hosts = copy.deepcopy(HOSTS)
    hosts["pod-w0"]["nfs_exports"] = []
    assert "nfs_exports of pod-w0 has no export with the path /srv/share" in faults(hosts)


def plan(host: str, hosts: dict[str, Any] = HOSTS, **changes: Any) -> dict[str, Any]:
    known = variables(host, **changes)
    return nfs_plan.nfs_plan(nfs.nfs_here(known, hosts, GROUPS), known)


DISK = {"path": "/srv/share", "owner": "ada", "mode": "0770"}


@pytest.mark.parametrize(
    ("export", "disk", "directory"),
    [
        ({}, DISK, ("ada", "root", "0770", "/srv/share")),
        ({"group": "research", "mode": "770"}, DISK, ("ada", "research", "770", "/srv/share")),
        ({}, {"path": "/srv/share"}, ("root", "root", "0755", "/srv/share")),
        ({}, DISK | {"state": "absent"}, ("root", "root", "0755", "")),
        ({}, DISK | {"path": "/srv/sha"}, ("root", "root", "0755", "")),
        ({"path": "/srv/share/below"}, DISK, ("root", "root", "0755", "/srv/share")),
        ({"owner": "root"}, {"path": "/srv/share", "owner": "0"}, ("root", "root", "0755", "/srv/share")),
    ],
)
def test_the_mount_point_of_a_disk_has_the_owner_that_both_roles_give_it(
    export: dict[str, Any], disk: dict[str, Any], directory: tuple[str, ...]
) -> None:
    given: dict[str, Any] = {
        "exports": [{"path": "/srv/share", "server": "pod-w0", **export}],
        "disks": [disk],
        "mounts": [],
    }
    assert faults(host="pod-w0", **given) == ""
    assert plan("pod-w0", **given)["directories"] == [
        {"path": given["exports"][0]["path"], "served": True}
        | dict(zip(("owner", "group", "mode", "disk"), directory, strict=True))
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"owner": "root"}, "nfs_exports[0]: /srv/share: owner is root here and ada in disks_mounts"),
        ({"mode": "2775"}, "nfs_exports[0]: /srv/share: mode is 2775 here and 0770 in disks_mounts"),
        ({"disk": {"mode": "0777"}}, "nfs_exports[0]: /srv/share: mode 0777 of disks_mounts lets everybody write"),
    ],
)
def test_two_roles_that_would_undo_each_other_are_refused(change: dict[str, Any], fault: str) -> None:
    export = {"path": "/srv/share", "server": "pod-w0"} | {key: change[key] for key in change if key != "disk"}
    given: dict[str, Any] = {"exports": [export], "disks": [DISK | change.get("disk", {})], "mounts": []}
    assert fault in faults(host="pod-w0", **given)
    assert faults(host="pod-w1", **given) == "", "only the server has that disk"


def test_a_missing_nfs_server_stops_only_its_clients() -> None:
    gone = [{**EXPORT, "server": "gone-w0"}]
    said = "server gone-w0 is not in the inventory; if the server's node is stopped, start it; if it is deleted, remove"
    assert faults(exports=gone, mounts=[]) == ""
    assert faults(exports=gone, mounts=[{**MOUNT, "state": "absent"}]) == ""
    assert faults(exports=gone).startswith(f"nfs_mounts[0]: /mnt/share: {said}")
    (warning,) = nfs.nfs_warnings(variables(exports=gone, mounts=[]), HOSTS, GROUPS)
    assert warning.startswith(f"nfs_exports[0]: /srv/share: {said}")


def test_a_client_that_is_not_there_keeps_nobody_from_being_configured() -> None:
    """A preempted node is such a client. While all clients are gone, nothing is exported, to nobody."""
    exports = [{**EXPORT, "clients": ["pod", "gone"]}, {**EXPORT, "path": "/srv/other", "clients": ["gone-w0"]}]
    for host in ("pod-w0", "pod-w1"):
        known = variables(host, exports=exports)
        assert nfs.nfs_faults(known, HOSTS, GROUPS) == []
        gone, other, nobody = nfs.nfs_warnings(known, HOSTS, GROUPS)
        assert gone.startswith("nfs_exports[0]: /srv/share: clients: no group, node or host is called gone; use names")
        assert other.startswith("nfs_exports[1]: /srv/other: clients: no group, node or host is called gone-w0; use")
        assert nobody.startswith(
            "nfs_exports[1]: /srv/other: clients: the listed clients have no hosts, so the directory "
        )
    assert nfs.nfs_warnings(variables(), HOSTS, GROUPS) == []
    planned = plan("pod-w0", exports=exports)
    served = {directory["path"]: directory["served"] for directory in planned["directories"]}
    assert served == {"/srv/share": True, "/srv/other": False}, "both are there for the server itself"
    assert "/srv/other" not in str(planned["files"])
    assert plan("pod-w0", exports=exports[1:], mounts=[])["files"] == []


def test_servers_that_a_play_leaves_out_are_known() -> None:
    here = {host: nfs.nfs_here(variables(host), HOSTS, GROUPS) for host in HOSTS}
    server = here["pod-w1"]["mounts"][0]["server_name"]
    assert nfs.nfs_left_out(here["pod-w1"], ["pod-w1"]) == [server]
    assert nfs.nfs_left_out(here["pod-w1"], [server, "pod-w1"]) == []
    assert nfs.nfs_left_out(here[server], [server]) == []


def test_exports_do_not_depend_on_the_order_of_the_inventory() -> None:
    """A worker that runs site.yml on itself has its hosts in another order than the controller."""
    other = {name: hosts[::-1] for name, hosts in GROUPS.items()}
    assert nfs.nfs_here(variables("pod-w0"), HOSTS, other) == nfs.nfs_here(variables("pod-w0"), HOSTS, GROUPS)


def test_a_client_s_units_name_the_server_s_present_address() -> None:
    (mount,) = plan("pod-w1")["mounts"]
    assert "What=10.0.0.2:/srv/share\nWhere=/mnt/share\nType=nfs\nOptions=nfsvers=4.2,hard\n" in mount["mount"]
    assert "[Automount]\nWhere=/mnt/share\nTimeoutIdleSec=600\n" in mount["automount"]
    moved = copy.deepcopy(HOSTS)
    moved["pod-w0"]["tpu_internal_ip"] = "10.0.0.77"
    (mount,) = plan("pod-w1", moved)["mounts"]
    assert mount["what"] == "10.0.0.77:/srv/share"
    assert "What=10.0.0.77:/srv/share\n" in mount["mount"]
    (mount,) = plan("pod-w1", exports=[{**EXPORT, "server": "six", "read_only": True}])["mounts"]
    assert mount["what"] == "[fd00::6]:/srv/share"
    assert "Options=nfsvers=4.2,hard,ro\n" in mount["mount"]


def test_the_server_mounts_its_own_directory_without_nfs() -> None:
    planned = plan("pod-w0")
    (mount,) = planned["mounts"]
    assert "What=/srv/share\nWhere=/mnt/share\nType=none\nOptions=bind\n" in mount["mount"]
    assert mount["automount"] == ""
    assert planned["packages"] == ["nfs-kernel-server"]
    assert plan("pod-w0", mounts=[{"path": "/srv/share"}])["mounts"] == []


@pytest.mark.parametrize(
    ("units_only", "packages"),
    [(False, ["nfs-common"]), (True, [])],
)
def test_units_that_are_not_started_take_no_packages(units_only: bool, packages: list[str]) -> None:
    assert plan("pod-w1", units_only=units_only)["packages"] == packages


def files(**changes: Any) -> dict[str, str]:
    return {entry["path"]: entry["content"] for entry in plan("pod-w0", **changes)["files"]}


def test_the_kernel_exports_to_each_client_and_squashes_root() -> None:
    written = files(exports=[{**EXPORT, "clients": ["my-spot"]}, {**EXPORT, "path": "/srv/data", "read_only": True}])
    safe = "sync,no_subtree_check,root_squash,secure,sec=sys,anonuid=65534,anongid=65534"
    assert written["/etc/exports.d/tpu_ops.exports"].splitlines()[1:] == [
        "/srv/share \\",
        f"    10.0.0.4(rw,{safe})",
        "/srv/data \\",
        *(f"    10.0.0.{last}(ro,{safe}){' ' + chr(92) if last < 4 else ''}" for last in (2, 3, 4)),
    ]
    assert "vers3=n\nvers4=y\ngrace-time=90\n" in written["/etc/nfs.conf.d/tpu_ops.conf"]
    assert (
        "RequiresMountsFor=/srv/share /srv/data\n" in written["/etc/systemd/system/nfs-server.service.d/tpu_ops.conf"]
    )


@pytest.mark.parametrize(
    ("clients", "options", "threads"),
    [(1, [], 8), (160, ["hard"], 8), (161, [], 9), (512, [], 26), (512, ["hard", "nconnect=4"], 103)],
)
def test_the_kernel_has_threads_for_all_connections(clients: int, options: list[str], threads: int) -> None:
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(clients)]
    exports = [{**EXPORT, "addresses": addresses}, {**EXPORT, "path": "/srv/b", "addresses": addresses[:1]}]
    server = {"kind": "kernel", "grace_seconds": 90, "options": options}
    (written,) = [file["content"] for file in nfs_plan.server_files(exports, server) if "nfs.conf" in file["path"]]
    assert ("threads=" in written, f"\nthreads={threads}\n" in written) == (threads > 8, threads > 8)
    assert nfs_plan.kernel_threads(exports, options) == threads


def test_numbers_of_exports_stay_when_the_list_changes() -> None:
    both = files(kind="ganesha", exports=[{**EXPORT, "path": "/srv/a"}, EXPORT])["/etc/ganesha/tpu_ops.conf"]
    one = files(kind="ganesha")["/etc/ganesha/tpu_ops.conf"]
    (block,) = one.split("EXPORT {")[1:]
    assert block in both
    assert 0 < nfs.export_id("/srv/a") < 65536
    assert nfs.export_id("/srv/a") != nfs.export_id("/srv/share")


def test_a_worker_without_exports_and_mounts_gets_no_server() -> None:
    planned = plan("spot-w0", mounts=[])
    assert planned == {"directories": [], "files": [], "mounts": [], "packages": []}


def test_traces_are_what_was_enabled_or_written_by_hand() -> None:
    units = {
        "nfs-server.service": {"enabled": "enabled", "active": "active"},
        "nfs-ganesha.service": {"enabled": "disabled", "active": "inactive"},
        "proc-sys-fs-binfmt_misc.automount": {"enabled": "static", "active": "active"},
        "mnt-share.automount": {"enabled": "disabled", "active": "inactive"},
    }
    assert nfs_plan.nfs_traces({"units": units}) == ["mnt-share.automount", "nfs-server.service"]


def test_servers_are_asked_what_they_serve() -> None:
    answer = '{"type":"...","data":[[1,2],[[4711,"/srv/share",[],[1,2]],[0,"/",[],[1,2]]]]}'
    assert nfs_state.parse_ganesha(answer) == ["/srv/share"]
    assert nfs_state.parse_ganesha("Call failed: the name was not provided by any .service files") == []
    assert nfs_state.parse_exportfs("/srv/share  10.0.0.2(sync,wdelay)\n/srv/share  10.0.0.3(sync)\n") == ["/srv/share"]


def test_the_log_of_ganesha_says_why_it_exports_nothing() -> None:
    head = "21/11/2026 23:53:35 : epoch 6b022eff : w0 : ganesha.nfsd-2071[main] "
    says = ["main :MAIN :FATAL :Failed to PR_SET_IO_FLUSHER", "vfs_create_export :FSAL :CRIT :no such file system"]
    text = "".join(f"{head}{line}\n" for line in ["main :MAIN :EVENT :starting", *says])
    assert nfs_state.parse_log(text) == says


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nfs_state, "UNITS", str(tmp_path))
    monkeypatch.setattr(mount_points, "FSTAB", str(tmp_path / "fstab"))
    return tmp_path


def mounted(target: str, fstype: str, source: str) -> Mounted:
    return Mounted("8:1", target, "rw", fstype, source, "rw")


def refusal(path: Path, mounts: list[Mounted], what: str = "10.0.0.2:/srv/share") -> str:
    try:
        nfs_state.check_point(str(path), mounts, what)
    except Refusal as exc:
        return str(exc)
    return ""


def test_mount_points_that_would_hide_something_are_refused(units: Path) -> None:
    point = units / "point"
    assert refusal(point, []) == ""
    point.mkdir()
    assert refusal(point, []) == ""
    (point / "thesis.tex").touch()
    assert "is not empty (thesis.tex)" in refusal(point, [])
    (units / "link").symlink_to(point)
    assert f"through a symbolic link to {point}; give that path" in refusal(units / "link", [])
    assert "not a directory" in refusal(point / "thesis.tex", [])


def test_mount_points_that_somebody_else_cares_for_are_refused(units: Path) -> None:
    point, text = units / "point", str(units / "point")
    unit = units / mount_points.unit_name(text, "mount")
    assert "(ext4 from /dev/sdb); unmount it, or give another path" in refusal(
        point, [mounted(text, "ext4", "/dev/sdb")]
    )
    for fstype in ("nfs4", "autofs"):
        assert refusal(point, [mounted(text, fstype, "10.0.0.1:/old")]) == ""
    unit.write_text(nfs_state.HEADER + "\n")
    assert refusal(point, [mounted(text, "ext4", "/dev/sdb")]) == ""
    unit.write_text("[Mount]\n")
    assert "does not belong to this role" in refusal(point, [])
    unit.unlink()
    (units / "fstab").write_text(f"10.0.0.1:/x {text} nfs defaults 0 0\n")
    assert "/etc/fstab has a line for it" in refusal(point, [])


def test_a_directory_that_is_bound_to_its_place_already_is_left_there(units: Path) -> None:
    point = units / "point"
    point.mkdir()
    mounts = [mounted(str(point), "ext4", "/dev/sda1")]
    assert refusal(point, mounts, what=str(point)) == ""
    assert refusal(point, mounts, what=str(units)) != ""


class Server(nfs_server.Server):
    """A worker that exports something."""

    def __init__(self, *, check: bool = False) -> None:
        super().__init__(SimpleNamespace(check_mode=check, params={}))

    def fail(self, text: str) -> None:
        raise AssertionError(text)


def exported(path: Path, mode: str = "2775") -> dict[str, Any]:
    return {"path": str(path), "owner": str(os.geteuid()), "group": str(os.getegid()), "mode": mode}


def test_a_directory_is_made_and_changed_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "share"
    for check, actions in ((True, 1), (False, 2), (False, 0)):
        server = Server(check=check)
        server.directory(exported(path))
        assert len(server.actions) == actions
        assert path.is_dir() is not check
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o755, 0o2775]


def test_why_a_directory_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, before = os.mkdir, len(list(Path("/proc/self/fd").iterdir()))

    def full(name: str, *more: Any, **at: Any) -> None:
        if name == "share":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(name, *more, **at)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(AssertionError, match="No space left on device; if the directory is on a"):
        Server().directory(exported(tmp_path / "new" / "share" / "below"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_link_in_place_of_a_directory_gives_no_access_to_its_target(tmp_path: Path) -> None:
    shared, system = tmp_path / "shared", tmp_path / "system"
    for path, mode in ((shared, 0o777), (system, 0o755)):
        path.mkdir()
        path.chmod(mode)
    (shared / "link").symlink_to(system)
    for path in (shared / "link", shared / "link" / "below"):
        with pytest.raises(AssertionError, match=f"nfs_exports: {path}: .*/link is a symbolic link in a place where"):
            Server().directory(exported(path))
    assert (stat.S_IMODE(system.stat().st_mode), list(system.iterdir())) == (0o755, [])


class Client(nfs_client.Client):
    """A worker on which something is mounted by NFS; its commands are only written down, and succeed."""

    def __init__(self, **parameters: Any) -> None:
        self.said: list[str] = []
        self.ran: list[tuple[str, ...]] = []
        parameters = {"wait": 0, "units_only": False, **parameters}
        super().__init__(SimpleNamespace(check_mode=False, params=parameters, warn=self.said.append))

    def mounts(self) -> list[Mounted]:
        gone = any(command[0] == "umount" for command in self.ran)
        return [] if gone else [mounted("/mnt/share", "nfs4", "127.0.0.1:/srv/share")]

    def run(self, *command: str, check: bool = True) -> tuple[int, str]:
        self.ran.append(command)
        return 0, ""

    def unit(self, name: str) -> dict[str, str]:
        return {"ActiveState": "inactive", "UnitFileState": "disabled", "NeedDaemonReload": "no"}

    def fail(self, text: str) -> None:
        raise AssertionError(text)


LAZILY = ("umount", "--force", "--lazy", "--no-canonicalize", "/mnt/share")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that answers until it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(nfs_client, "PORT", listening.getsockname()[1])
        yield listening


@pytest.mark.parametrize("answers", [True, False])
def test_no_unmounting_waits_for_a_server_that_is_away(
    server: socket.socket, units: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(nfs_client, "UNITS", str(units))
    (units / "mnt-share.mount").write_text(nfs_state.HEADER + "\n")
    if not answers:
        server.close()
    client = Client()
    client.absent("/mnt/share")
    assert client.ran[0] == (("umount", "/mnt/share") if answers else LAZILY)
    assert not (units / "mnt-share.mount").exists()
    entry = {"path": "/mnt/share", "what": "127.0.0.1:/srv/share", "server": "127.0.0.1"}
    client = Client()
    client.change_remote(entry, client.mounts(), rewritten=True)
    assert (("umount", "/mnt/share") in client.ran, len(client.said)) == (answers, not answers)
    client = Client()
    client.change_remote({**entry, "what": "10.0.0.9:/srv/share"}, client.mounts(), rewritten=True)
    assert client.ran == [LAZILY]


def test_servers_that_do_not_answer_are_named_together(server: socket.socket) -> None:
    entries = [
        {"path": path, "server": address, "server_name": name}
        for path, address, name in [
            ("/mnt/a", "127.0.0.1", "pod-w0"),
            ("/mnt/b", "127.0.0.1", "pod-w0"),
            ("/mnt/c", "127.0.0.2", "store-w0"),
            ("/mnt/d", "", "pod-w1"),
        ]
    ]
    Client().check_servers(entries[:2])
    with pytest.raises(AssertionError) as failure:
        Client().check_servers(entries)
    assert str(failure.value).startswith("nfs_mounts: /mnt/c: the server store-w0 does not answer at 127.0.0.2:")
    server.close()
    with pytest.raises(AssertionError, match=r"/mnt/a, /mnt/b: the server pod-w0 .*; /mnt/c: .*state absent"):
        Client().check_servers(entries)


@pytest.mark.parametrize(
    ("plan", "tasks"),
    [
        ({"files": ["exports"], "mounts": []}, ["Export directories"]),
        ({"files": ["exports"], "mounts": [{"server": ""}, {"state": "absent"}]}, ["Export directories"]),
        ({"files": [], "mounts": [{"server": "10.0.0.9"}]}, ["Mount directories of servers"]),
        # What the role left of a server is removed there as well.
        ({"files": [], "mounts": []}, ["Mount directories of servers"]),
        (
            {"files": ["exports"], "mounts": [{"server": ""}, {"server": "10.0.0.9"}]},
            ["Export directories", "Mount directories of servers"],
        ),
    ],
)
def test_servers_export_before_anybody_waits_for_them(plan: dict[str, Any], tasks: list[str]) -> None:
    tasks_of_role = DataLoader().load_from_file(str(ROLE / "tasks/main.yml"), trusted_as_template=True)
    (block,) = [task for task in tasks_of_role if "block" in task]
    templar = Templar(DataLoader(), {"__nfs_plan": plan})
    work = [task for task in block["block"] if "nfs_host" in task and not task.get("check_mode")]
    done = [task for task in work if templar.evaluate_conditional(task["when"])]
    assert [task["name"] for task in done] == tasks
    assert [task["nfs_host"].get("await_servers", True) for task in work] == [False, True]


def test_what_depends_on_other_hosts_has_no_exports_and_mounts_if_there_are_faults() -> None:
    known = variables("pod-w0")
    good = nfs.nfs_fleet(known, HOSTS, GROUPS)
    assert good == {"faults": [], "warnings": [], "here": nfs.nfs_here(known, HOSTS, GROUPS)}
    bad = nfs.nfs_fleet(variables("pod-w0", exports=[{"server": "pod-w0"}]), HOSTS, GROUPS)
    assert bad["here"] == {"exports": [], "mounts": []}
    assert bad["faults"] != []
