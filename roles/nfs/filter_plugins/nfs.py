"""Filters that check nfs_exports and nfs_mounts, and select a host's exports and mounts; no side effects."""

from __future__ import annotations

import ipaddress
import itertools
import posixpath
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Entry = dict[str, Any]
Hosts = Mapping[str, Mapping[str, Any]]
Groups = Mapping[str, list[str]]

#: Paths that need no quoting in systemd units and in the configurations of the kernel's server and nfs-ganesha.
PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
#: Top-level directories of the system; no export or mount point may be in them (hier(7), file-hierarchy(7)).
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "sys", "tmp")
#: Directories of the system that must not be exported or mounted over, although directories in them may be (hier(7)).
PARENTS = ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/usr", "/usr/local", "/var", "/var/lib", "/var/log")
OPTION = re.compile(r"[a-z][A-Za-z0-9_.-]*(=[A-Za-z0-9_.:/+-]+)?")
#: Mount options with a number -> the minimum (nfs(5)); with a smaller number or a word, the mount would fail.
NUMBERS = {"timeo": 1, "nconnect": 1, "retrans": 0, "retry": 0, "rsize": 0, "wsize": 0, "actimeo": 0}
#: Mount options that users must not list: those that the role sets itself, and those with a meaning in /etc/fstab only.
TAKEN = {
    "auto",
    "noauto",
    "nofail",
    "user",
    "users",
    "owner",
    "group",
    "defaults",
    "bind",
    "remount",
    "ro",
    "rw",
    "addr",
}
#: Default owner, group and mode of an exported directory.
RIGHTS = {"owner": "root", "group": "root", "mode": "0755"}
#: Advice for a server that is not in the inventory: its node is deleted, or stopped.
GONE = (
    "if the server's node is stopped, start it; if it is deleted, remove the server's exports, and list its mounts with"
    " state absent"
)


def path_fault(path: str) -> str:
    """Return the fault of an export's or mount's path, or the empty string."""
    if path not in PARENTS and (not PATH.fullmatch(path) or posixpath.normpath(path) != path):
        return (
            "is not an absolute path of letters, digits, '_', '.' and '-', or contains '//', '..' or a '/' at the end"
        )
    if path in PARENTS or path.split("/")[1] in SYSTEM or path.startswith("/usr/"):
        return "is a directory of the system; choose a directory for this purpose only, for example /srv/share"
    return ""


def nested(one: str, other: str) -> bool:
    """Return whether two paths are the same or one is inside the other."""
    return (one + "/").startswith(other + "/") or (other + "/").startswith(one + "/")


def address(host: str, hosts: Hosts) -> str:
    """Return a host's internal IP address; empty if unknown."""
    return str(hosts[host].get("nfs_address") or hosts[host].get("tpu_internal_ip") or "")


def address_fault(host: str, hosts: Hosts) -> str:
    """Return the fault of a host's internal address, or the empty string."""
    found = address(host, hosts)
    if not found:
        return f"the internal address of {host} is unknown; set nfs_address for this host"
    try:
        ipaddress.ip_address(found)
    except ValueError:
        return f"nfs_address of {host} is '{found}', which is not an IP address; set it to the host's internal address"
    if found == hosts[host].get("tpu_external_ip"):
        return f"nfs_address of {host} is its external address; set it to the internal one"
    return ""


def members(names: Iterable[str], hosts: Hosts, groups: Groups) -> list[str]:
    """Given names of groups, nodes and hosts, return their hosts in this order; unknown names are ignored."""
    found: dict[str, None] = {}
    for name in names:
        node = "node_" + re.sub(r"\W", "_", name)
        if name in groups or node in groups:
            found.update(dict.fromkeys(groups[name if name in groups else node]))
        elif name in hosts:
            found[name] = None
    return list(found)


def unknown(names: Iterable[str], hosts: Hosts, groups: Groups) -> list[str]:
    """Return the names that are neither a group nor a node nor a host."""
    return [
        name for name in names if not {name, "node_" + re.sub(r"\W", "_", name)} & set(groups) and name not in hosts
    ]


def client_hosts(export: Entry, hosts: Hosts, groups: Groups) -> list[str]:
    """Return the hosts that are clients of an export; all hosts if the export lists no clients."""
    return members(export.get("clients") or ["all"], hosts, groups)


def disk_of(export: Entry, nfs: Entry) -> Entry:
    """Return the entry of disks_mounts whose disk contains this host's exported directory; empty if there is none."""
    here = nfs["disks"] if export.get("server") == nfs["host"] else []
    there = (disk for disk in here if disk.get("state") != "absent")
    return next((disk for disk in there if f"{export.get('path')}/".startswith(f"{disk.get('path')}/")), {})


def same_directory(export: Entry, nfs: Entry) -> Entry:
    """Return the entry of disks_mounts whose mount point is the exported directory itself; empty if there is none."""
    disk = disk_of(export, nfs)
    return disk if disk.get("path") == export.get("path") else {}


def rights(export: Entry, nfs: Entry) -> dict[str, str]:
    """Return owner, group and mode for an exported directory. Values in disks_mounts count if it is a mount point."""
    disk = same_directory(export, nfs)
    return {key: str(export.get(key) or disk.get(key) or usual) for key, usual in RIGHTS.items()}


def rights_faults(export: Entry, nfs: Entry) -> list[str]:
    """Return the faults if nfs_exports and disks_mounts give one directory different owners, groups or modes."""
    disk = same_directory(export, nfs)
    return [
        f"{key} is {export[key]} here and {disk[key]} in disks_mounts for the same directory; remove one of the two"
        for key in RIGHTS
        if export.get(key) and disk.get(key) and _differ(key, str(export[key]), str(disk[key]))
    ]


def _differ(key: str, one: str, other: str) -> bool:
    """Return whether two values of owner, group or mode certainly mean different things."""
    if key == "mode":
        return one.lstrip("0") != other.lstrip("0")
    # A name and a number may mean the same account; only the worker knows.
    return one != other and one.isdecimal() == other.isdecimal()


def export_faults(export: Entry, nfs: Entry, hosts: Hosts, groups: Groups) -> list[str]:
    """Return the faults of one entry of nfs_exports that do not depend on other entries."""
    faults = [f"path {fault}"] if (fault := path_fault(str(export.get("path", "")))) else []
    mode = rights(export, nfs)["mode"]
    if not re.fullmatch(r"[0-7]{3,4}", mode):
        faults.append(f"mode '{mode}' is not octal in quotes, for example \"2775\"")
    elif int(mode, 8) & 0o002:
        place = "" if export.get("mode") else " of disks_mounts"
        faults.append(f"mode {mode}{place} lets everybody write; give a group and a mode such as 2775")
    server = str(export.get("server", ""))
    if server not in hosts:
        return faults  # Only clients need a server in the inventory, and their checks report that it is missing.
    faults += [fault] if (fault := address_fault(server, hosts)) else []
    preemptible = hosts[server].get("tpu_preemptible") or hosts[server].get("tpu_spot")
    if preemptible and not nfs["allow_preemptible"]:
        faults.append(
            f"server {server} is preemptible, and its disk is lost when the server is preempted; set"
            " nfs_allow_preemptible to accept this risk"
        )
    if server == nfs["host"]:
        # Clients are checked on the server only: otherwise each of n hosts would read the variables of n hosts.
        faults += [
            f"clients: {fault}" for host in client_hosts(export, hosts, groups) if (fault := address_fault(host, hosts))
        ]
        faults += rights_faults(export, nfs)
    return faults


def find_export(mount: Entry, nfs: Entry, hosts: Hosts) -> Entry | str:
    """Return the export that an entry of nfs_mounts names, or the reason why there is none."""
    path = str(mount.get("export") or mount.get("path", ""))
    server = str(mount.get("server", ""))
    if not server:
        named = [str(export.get("server")) for export in nfs["exports"] if export.get("path") == path]
        if not named:
            return (
                f"no export of nfs_exports has the path {path}; add an export with this path, or set export to another"
                " path"
            )
        server = named[0]
    if server not in hosts:
        return f"server {server} is not in the inventory; {GONE}"
    # The server exports what its own nfs_exports lists. Variables of a play are not in hostvars, so then this host's
    # list is used.
    there = nfs["exports"] if server == nfs["host"] else hosts[server].get("nfs_exports", nfs["exports"])
    for export in there:
        if export.get("path") == path and export.get("server") == server:
            return dict(export)
    return (
        f"nfs_exports of {server} has no export with the path {path}; add this export, or set server and export to"
        " another"
    )


def option_faults(options: Iterable[str]) -> list[str]:
    """Return the faults of a list of mount options."""
    faults = []
    for option in map(str, options):
        name, _, value = option.partition("=")
        if name.startswith("x-systemd.") or name in TAKEN:
            faults.append(f"{option} is set by the role; remove this option")
        elif not OPTION.fullmatch(option):
            faults.append(f"'{option}' is not a single option; list each separately, for example soft")
        elif name in NUMBERS and not (re.fullmatch(r"[0-9]+", value) and int(value) >= NUMBERS[name]):
            faults.append(f"{option}: give {name} a whole number, {NUMBERS[name]} or more")
    return faults


def mount_faults(mount: Entry, nfs: Entry, hosts: Hosts, groups: Groups) -> list[str]:
    """Return the faults of one entry of nfs_mounts that do not depend on other entries."""
    path = str(mount.get("path", ""))
    faults = [f"path {fault}"] if (fault := path_fault(path)) else []
    if mount.get("state", "mounted") == "absent":
        return faults
    faults += [
        f"disks_mounts has {disk['path']}, and one of the two mounts would hide the other; choose a path next to that"
        " one"
        for disk in nfs["disks"]
        if disk.get("state") != "absent" and nested(path, str(disk.get("path")))
    ]
    faults += [f"options: {fault}" for fault in option_faults(mount.get("options", []))]
    export = find_export(mount, nfs, hosts)
    if isinstance(export, str):
        return [*faults, export]
    server = str(export["server"])
    if server == nfs["host"]:
        if path != export["path"] and nested(path, str(export["path"])):
            faults.append(
                f"on its server {server}, of this path and the export {export['path']}, one is inside the other; choose"
                " a path next to the exported one, or the same path"
            )
        return faults
    faults += [fault] if (fault := address_fault(server, hosts)) else []
    if nfs["host"] not in client_hosts(export, hosts, groups):
        faults.append(
            f"{nfs['host']} is not a client of the export {export['path']} of {server}; add the host to the clients, or"
            " remove this mount from the host's nfs_mounts"
        )
    return faults


def nfs_faults(nfs: Entry, hosts: Hosts, groups: Groups) -> list[str]:
    """Return every fault of a host's NFS variables, each with its entry.

    Args:
        nfs: The host's variables, as in `tasks/validate.yml`.
        hosts: The inventory's hosts -> their variables.
        groups: The inventory's groups -> their hosts.
    """
    faults = []
    exports, mounts = nfs["exports"], nfs["mounts"]
    for position, export in enumerate(exports):
        where = f"nfs_exports[{position}]: {export.get('path', 'no path')}"
        faults += [f"{where}: {fault}" for fault in export_faults(export, nfs, hosts, groups)]
    for one, other in itertools.combinations(exports, 2):
        a, b = str(one.get("path")), str(other.get("path"))
        if a == b and one.get("server") != other.get("server"):
            servers = f"{one.get('server')} and {other.get('server')}"
            faults.append(f"nfs_exports: {a} has two servers, {servers}; remove one of them, or give it another path")
        elif a == b:
            faults.append(f"nfs_exports: {a} is listed twice; remove one of them")
        elif one.get("server") == other.get("server") and nested(a, b):
            faults.append(
                f"nfs_exports: of {a} and {b}, one is inside the other, so clients of one could read the other; export"
                " directories next to each other"
            )
        elif export_id(a) == export_id(b):
            faults.append(f"nfs_exports: {a} and {b} get the same export number; give one of them another path")
    for position, mount in enumerate(mounts):
        where = f"nfs_mounts[{position}]: {mount.get('path', 'no path')}"
        faults += [f"{where}: {fault}" for fault in mount_faults(mount, nfs, hosts, groups)]
    for one, other in itertools.combinations(mounts, 2):
        a, b = str(one.get("path")), str(other.get("path"))
        if a == b:
            faults.append(f"nfs_mounts: {a} is listed twice; remove one of them")
        elif nested(a, b):
            faults.append(
                f"nfs_mounts: of the paths {a} and {b}, one is inside the other; choose two paths next to each other"
            )
    faults += [f"nfs_mount_options: {fault}" for fault in option_faults(nfs["options"])]
    return faults


def own_faults(nfs: Entry, accounts: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return every fault that depends on this host's own facts: unknown owners of exports, and settings of ganesha.

    Args:
        nfs: The host's variables, as for `nfs_faults`.
        accounts: The accounts that will exist on this host; `*` stands for accounts that are not known.
        groups: The groups that will exist on this host, likewise.
    """
    faults = [
        f"nfs_exports[{position}]: {export.get('path', 'no path')}: there is no {key} {name}, and users_people does not"
        f" add it on this node; set {key}, or list {name} for this node"
        for position, export in enumerate(nfs["exports"])
        if export.get("server") == nfs["host"]
        for key, known in (("owner", accounts), ("group", groups))
        if not (name := rights(export, nfs)[key]).isdecimal() and not {name, "*"} & set(known)
    ]
    faults += [
        f"nfs_ganesha_core: {name}: {value!r} is neither a number of 0 or more nor true or false"
        if isinstance(name, str) and re.fullmatch(r"[A-Za-z_]+", name)
        else f"nfs_ganesha_core: {name!r} is not the name of a setting; use only letters and _, as in Nb_Worker"
        for name, value in nfs["ganesha_core"].items()
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_]+", name) and isinstance(value, int) and value >= 0)
    ]
    return faults


def nfs_warnings(nfs: Entry, hosts: Hosts, groups: Groups) -> list[str]:
    """Return a warning for each server and client in nfs_exports that is not in the inventory.

    A missing name is no fault, since its node may be deleted or not yet created; but the name may be misspelt.
    """
    lines = []
    for position, export in enumerate(nfs["exports"]):
        entry = f"nfs_exports[{position}]: {export.get('path')}: "
        if export.get("server") not in hosts:
            lines.append(f"{entry}server {export.get('server')} is not in the inventory; {GONE}")
        where = f"{entry}clients: "
        if missing := unknown(export.get("clients") or ["all"], hosts, groups):
            names = ", ".join(missing)
            lines.append(
                f"{where}no group, node or host is called {names}; use names that `ansible-inventory --graph` shows,"
                " unless the node will be created again"
            )
        if not client_hosts(export, hosts, groups):
            lines.append(
                f"{where}the listed clients have no hosts, so the directory is not exported; name a group with hosts,"
                " or omit clients for all hosts"
            )
    return lines


def export_id(path: str) -> int:
    """Return the number of an export. It depends on the path only, since it is part of all file handles of clients."""
    return zlib.crc32(path.encode()) % 65535 + 1


def nfs_here(nfs: Entry, hosts: Hosts, groups: Groups) -> Entry:
    """Given variables without faults, return this host's exports and mounts, with the addresses of the other hosts.

    A mount with state mounted has the export's path, the server's name and address, and whether it is read-only. The
    address is empty if this host is the server, which mounts its directory without NFS.
    """
    exports = [
        {
            **export,
            **rights(export, nfs),
            "disk": str(disk_of(export, nfs).get("path") or ""),
            "id": export_id(export["path"]),
            # In an order that does not depend on how many inventories there are, so that the file stays the same.
            "addresses": [address(host, hosts) for host in sorted(client_hosts(export, hosts, groups))],
        }
        for export in nfs["exports"]
        if export["server"] == nfs["host"]
    ]
    mounts: list[Entry] = []
    for mount in nfs["mounts"]:
        export = find_export(mount, nfs, hosts)
        if mount.get("state", "mounted") == "absent":
            mounts.append({"path": mount["path"], "state": "absent"})
        elif isinstance(export, dict) and (export["server"], export["path"]) != (nfs["host"], mount["path"]):
            server = export["server"]
            mounts.append(
                {
                    "path": mount["path"],
                    "export": export["path"],
                    "server": "" if server == nfs["host"] else address(server, hosts),
                    "server_name": server,
                    "read_only": bool(export.get("read_only")),
                    "options": mount.get("options", []),
                }
            )
    return {"exports": exports, "mounts": mounts}


class _Read(dict[str, Mapping[str, Any]]):
    """Reads the variables of each host once: Ansible combines them anew at each access."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts

    def __contains__(self, name: object) -> bool:
        return name in self._hosts

    def __missing__(self, name: str) -> Mapping[str, Any]:
        self[name] = self._hosts[name]
        return self[name]


def nfs_fleet(nfs: Entry, hosts: Hosts, groups: Groups) -> Entry:
    """Return the results of `nfs_faults`, `nfs_warnings` and `nfs_here`: `faults`, `warnings` and `here`.

    If there are faults, `here` has neither exports nor mounts.
    """
    read = _Read(hosts)
    faults = nfs_faults(nfs, read, groups)
    here = {"exports": [], "mounts": []} if faults else nfs_here(nfs, read, groups)
    return {"faults": faults, "warnings": nfs_warnings(nfs, read, groups), "here": here}


def nfs_left_out(here: Entry, hosts: Sequence[str]) -> list[str]:
    """Given the result of `nfs_here` and the hosts of a play, return the mounts' servers that are not in the play.

    Such a server still admits the client addresses of the last run that configured it.
    """
    servers = {mount["server_name"] for mount in here["mounts"] if mount.get("server")}
    return sorted(servers.difference(hosts))


class FilterModule:
    """Filters of the role nfs for nfs_exports and nfs_mounts."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "nfs_fleet": nfs_fleet,
            "nfs_left_out": nfs_left_out,
            "own_faults": own_faults,
        }
