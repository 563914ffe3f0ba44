"""Filters that return the contents of a worker's NFS files and units; no side effects, so that tests are tables.

Arguments called exports and mounts are in the form that the filter `nfs_here` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = dict[str, Any]

HEADER = "# Written by Ansible (role nfs); changes are lost."
#: Kind of server -> its packages; and the packages of the kernel's client (Debian and Ubuntu).
PACKAGES = {"kernel": ["nfs-kernel-server"], "ganesha": ["dbus", "nfs-ganesha", "nfs-ganesha-vfs"]}
CLIENT_PACKAGES = ["nfs-common"]
SERVICES = {"kernel": "nfs-server.service", "ganesha": "nfs-ganesha.service"}
#: The uid and gid to which root and unknown users are mapped: nobody and nogroup in every Debian and Ubuntu.
NOBODY = 65534


def ganesha_core(grace_seconds: int, more: Entry) -> str:
    """Return the configuration of nfs-ganesha except its exports (ganesha-core-config(8), ganesha-export-config(8)).

    Only NFSv4 is enabled. A client's port must be privileged: otherwise anybody with an account on a client could send
    NFS requests in another person's name.

    Args:
        grace_seconds: Seconds after a start in which earlier clients can reclaim their locks.
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
    """Given exports with their clients' addresses, return the text of nfs-ganesha's file of exports."""
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
    """Given exports with their clients' addresses, return the text for the kernel's server (exports(5))."""
    lines = [HEADER]
    for export in exports:
        access = "ro" if export.get("read_only") else "rw"
        options = f"{access},sync,no_subtree_check,root_squash,secure,sec=sys,anonuid={NOBODY},anongid={NOBODY}"
        lines.append(" \\\n    ".join([export["path"], *(f"{client}({options})" for client in export["addresses"])]))
    return "\n".join(lines) + "\n"


def kernel_threads(exports: list[Entry], options: list[str]) -> int:
    """Return the number of threads that the kernel's server needs for its clients; at least its default, 8.

    With n threads, the server closes the oldest connections above 20 (n + 3), up to Linux 6.13 (svc_check_conn_limits
    in net/sunrpc/svc_xprt.c).

    Args:
        exports: The exports with their clients' addresses.
        options: The clients' mount options; with nconnect (nfs(5)) each client has several connections.
    """
    clients = {client for export in exports for client in export["addresses"]}
    named = (str(option).partition("=") for option in options)
    each = max([1, *(int(value) for name, _, value in named if name == "nconnect" and value.isdecimal())])
    return max(8, -(-len(clients) * each // 20))


def drop_in(service: str) -> str:
    """Return the path of the role's drop-in for a service's unit."""
    return f"/etc/systemd/system/{service}.d/tpu_ops.conf"


def server_files(exports: list[Entry], nfs: Entry) -> list[Entry]:
    """Return a server's files, each with what applies it: reload or restart of the service, or systemd's reload."""
    paths = " ".join(export["path"] for export in exports)
    kind, grace_seconds = nfs["kind"], nfs["grace_seconds"]
    if kind == "ganesha":
        core = ganesha_core(grace_seconds, nfs["ganesha_core"])
        files = [
            {"path": "/etc/ganesha/tpu_ops.conf", "content": ganesha_exports(exports), "takes": "reload"},
            {"path": "/etc/ganesha/ganesha.conf", "content": core, "takes": "restart"},
        ]
    else:
        core = f"{HEADER}\n[nfsd]\nvers3=n\nvers4=y\ngrace-time={grace_seconds}\n"  # The syntax is that of nfs.conf(5).
        if (threads := kernel_threads(exports, nfs["options"])) > 8:
            core += f"threads={threads}\n"
        files = [
            {"path": "/etc/exports.d/tpu_ops.exports", "content": kernel_exports(exports), "takes": "reload"},
            {"path": "/etc/nfs.conf.d/tpu_ops.conf", "content": core, "takes": "restart"},
        ]
    # Without the disk of an exported directory, the service does not start: clients would see and fill the mount point.
    unit = f"{HEADER}\n[Unit]\nRequiresMountsFor={paths}\n"
    return [*files, {"path": drop_in(SERVICES[kind]), "content": unit, "takes": "units"}]


def mount_units(mount: Entry, nfs: Entry) -> Entry:
    """Given a mount in the form of `nfs_here` and the host's variables, return it with the texts of its units."""
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
    # A remote mount is started by its automount unit. A local mount is wanted at boot, but the boot does not fail
    # without it.
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
    """Given the result of `nfs_here` and the host's variables, return the packages, and the arguments of `nfs_host`."""
    exports = here["exports"]
    # Exports without clients are left out, since such a line exports to everybody (exports(5)).
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
    """Given the worker's facts, return its enabled NFS servers and its automount units, whoever created them."""
    units = worker["units"]
    servers = [name for name in SERVICES.values() if units.get(name, {}).get("enabled") == "enabled"]
    # Automount units that are part of systemd are `static`, and are not counted.
    mounts = [
        name
        for name, unit in units.items()
        if name.endswith(".automount") and unit["enabled"] in ("enabled", "disabled")
    ]
    return sorted([*servers, *mounts])


class FilterModule:
    """Filters of the role nfs for files, units and packages of a worker."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"nfs_plan": nfs_plan, "nfs_traces": nfs_traces}
