"""Filters that return the contents of a worker's NFS files and units; no side effects, so that tests are tables.

Exports and mounts are what the filter `nfs_here` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = dict[str, Any]

HEADER = "# Written by Ansible (role nfs); changes are lost."
#: Packages of each kind of server, and of the kernel's client (Debian and Ubuntu).
PACKAGES = {"kernel": ["nfs-kernel-server"], "ganesha": ["dbus", "nfs-ganesha", "nfs-ganesha-vfs"]}
CLIENT_PACKAGES = ["nfs-common"]
SERVICES = {"kernel": "nfs-server.service", "ganesha": "nfs-ganesha.service"}
#: The ids that root and unknown users are mapped to: nobody and nogroup of every Debian and Ubuntu.
NOBODY = 65534


def ganesha_core(grace_seconds: int, more: Entry) -> str:
    """Return the configuration of nfs-ganesha except its exports (ganesha-core-config(8), ganesha-export-config(8)).

    NFSv4 alone; a client's port must be one that only root can open, otherwise anybody with an account on a client
    could speak NFS in anybody's name.

    Args:
        grace_seconds: How long old clients may reclaim their locks after a start.
        more: Further settings of NFS_CORE_PARAM, name -> value.
    """
    further = "".join(f"    {name} = {str(value).lower()};\n" for name, value in sorted(more.items()))
    return f"""{HEADER}
NFS_CORE_PARAM {{
    Protocols = 4;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
{further}}}
NFSV4 {{
    Grace_Period = {grace_seconds};
}}
NFS_KRB5 {{
    Active_krb5 = false;
}}
EXPORT_DEFAULTS {{
    Protocols = 4;
    Transports = TCP;
    SecType = sys;
    PrivilegedPort = true;
    Squash = Root_Squash;
    Anonymous_Uid = {NOBODY};
    Anonymous_Gid = {NOBODY};
    Access_Type = None;
}}
%include "/etc/ganesha/tpu_ops.conf"
"""


def ganesha_exports(exports: list[Entry]) -> str:
    """Given exports with the addresses of their clients, return nfs-ganesha's blocks of them."""
    blocks = [HEADER + "\n"]
    for export in exports:
        access = "RO" if export.get("read_only") else "RW"
        lines = [
            f"Export_Id = {export['id']};",
            f'Path = "{export["path"]}";',
            f'Pseudo = "{export["path"]}";',
            "FSAL { Name = VFS; }",
            *(f"CLIENT {{ Clients = {client}; Access_Type = {access}; }}" for client in export["addresses"]),
        ]
        blocks.append("EXPORT {\n" + "".join(f"    {line}\n" for line in lines) + "}\n")
    return "".join(blocks)


def kernel_exports(exports: list[Entry]) -> str:
    """Given exports with the addresses of their clients, return the kernel server's table of them (exports(5))."""
    lines = [HEADER]
    for export in exports:
        access = "ro" if export.get("read_only") else "rw"
        options = f"{access},sync,no_subtree_check,root_squash,secure,sec=sys,anonuid={NOBODY},anongid={NOBODY}"
        lines.append(" \\\n    ".join([export["path"], *(f"{client}({options})" for client in export["addresses"])]))
    return "\n".join(lines) + "\n"


def kernel_threads(exports: list[Entry], options: list[str]) -> int:
    """Return how many threads the kernel's server needs for its clients; 8 is its own default.

    Up to Linux 6.13 it closes the oldest of more than 20 connections for each thread, plus three threads
    (svc_check_conn_limits in net/sunrpc/svc_xprt.c).

    Args:
        exports: With the addresses of their clients.
        options: Mount options of clients; with nconnect (nfs(5)) each has several connections.
    """
    clients = {client for export in exports for client in export["addresses"]}
    named = (str(option).partition("=") for option in options)
    each = max([1, *(int(value) for name, _, value in named if name == "nconnect" and value.isdecimal())])
    return max(8, -(-len(clients) * each // 20))


def drop_in(service: str) -> str:
    """Return the role's part of a service's unit."""
    return f"/etc/systemd/system/{service}.d/tpu_ops.conf"


def server_files(exports: list[Entry], nfs: Entry) -> list[Entry]:
    """Return the files of a server, and what applies them: a restart or reload of the service, or of systemd."""
    paths = " ".join(export["path"] for export in exports)
    kind, grace_seconds = nfs["kind"], nfs["grace_seconds"]
    if kind == "ganesha":
        core = ganesha_core(grace_seconds, nfs["ganesha_core"])
        files = [
            {"path": "/etc/ganesha/tpu_ops.conf", "content": ganesha_exports(exports), "takes": "reload"},
            {"path": "/etc/ganesha/ganesha.conf", "content": core, "takes": "restart"},
        ]
    else:
        core = f"{HEADER}\n[nfsd]\nvers3=n\nvers4=y\ngrace-time={grace_seconds}\n"  # nfs.conf(5)
        if (threads := kernel_threads(exports, nfs["options"])) > 8:
            core += f"threads={threads}\n"
        files = [
            {"path": "/etc/exports.d/tpu_ops.exports", "content": kernel_exports(exports), "takes": "reload"},
            {"path": "/etc/nfs.conf.d/tpu_ops.conf", "content": core, "takes": "restart"},
        ]
    # Nothing is served, and nothing written, in a mount point whose disk is missing.
    unit = f"{HEADER}\n[Unit]\nRequiresMountsFor={paths}\n"
    return [*files, {"path": drop_in(SERVICES[kind]), "content": unit, "takes": "units"}]


def mount_units(mount: Entry, nfs: Entry) -> Entry:
    """Given a mount as `nfs_here` returns it and the host's variables, return it with the texts of its units."""
    path, server, read_only = mount["path"], mount["server"], ["ro"] if mount["read_only"] else []
    if not server:
        what, kind, options = mount["export"], "none", ["bind", *read_only]
    else:
        host = f"[{server}]" if ":" in server else server
        what, kind = f"{host}:{mount['export']}", "nfs"
        options = [*nfs["options"], *mount["options"], *read_only]
    lines = [HEADER, "[Unit]", f"Description=NFS export {what}" if server else f"Description=Export {what}"]
    lines += ["", "[Mount]", f"What={what}", f"Where={path}", f"Type={kind}", f"Options={','.join(options)}"]
    lines += [f"TimeoutSec={nfs['mount_timeout']}"]
    # The automount pulls in the mount; without one the boot wants the mount, but never requires it.
    lines += [] if server else ["", "[Install]", "WantedBy=local-fs.target"]
    automount = [HEADER, "[Unit]", f"Description=NFS export {what}, mounted when it is used", ""]
    automount += ["[Automount]", f"Where={path}", f"TimeoutIdleSec={nfs['idle_timeout']}", ""]
    automount += ["[Install]", "WantedBy=remote-fs.target"]
    return {
        "path": path,
        "what": what,
        "server": server,
        "server_name": mount["server_name"],
        "mount": "\n".join(lines) + "\n",
        "automount": "\n".join(automount) + "\n" if server else "",
    }


def nfs_plan(here: Entry, nfs: Entry) -> Entry:
    """Given what `nfs_here` returns and the host's variables, return what the module `nfs_host` makes of the host."""
    exports = here["exports"]
    # exports(5): a line without clients exports to everybody.
    served = [export for export in exports if export["addresses"]]
    mounts = [mount if mount.get("state") == "absent" else mount_units(mount, nfs) for mount in here["mounts"]]
    directories = [
        {**{key: export[key] for key in ("path", "owner", "group", "mode", "disk")}, "served": export in served}
        for export in exports
    ]
    remote = any(mount.get("server") for mount in mounts)
    packages = PACKAGES[nfs["kind"]] if served else []
    return {
        "directories": directories,
        "files": server_files(served, nfs) if served else [],
        "mounts": mounts,
        "packages": [*packages, *(CLIENT_PACKAGES if remote and not nfs["units_only"] else [])],
    }


def nfs_traces(worker: Mapping[str, Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Given the worker's state, return the units that the role, or somebody else, has left of NFS."""
    units = worker["units"]
    servers = [name for name in SERVICES.values() if units.get(name, {}).get("enabled") == "enabled"]
    # What systemd ships itself is static.
    mounts = [
        name
        for name, unit in units.items()
        if name.endswith(".automount") and unit["enabled"] in ("enabled", "disabled")
    ]
    return sorted([*servers, *mounts])


class FilterModule:
    """Filters of what a worker has of NFS."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"nfs_plan": nfs_plan, "nfs_traces": nfs_traces}
