#!/usr/bin/python
"""Module that exports a worker's directories by NFS and mounts other hosts' exports; supports Python 3.8."""

from __future__ import annotations

import glob
import grp
import os
import platform
import pwd
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import UNITS, Refusal, read, unit_name
from ansible.module_utils.nfs_client import Client
from ansible.module_utils.nfs_server import Server
from ansible.module_utils.nfs_state import SERVICES, check_point, ours
from ansible.module_utils.turns import take_turn
from ansible.module_utils.worker import number

DOCUMENTATION = r"""
module: nfs_host
short_description: Export directories by NFS, and mount those of other hosts with systemd units
description:
  - Checks everything first. If something cannot be done, nothing is changed, and every reason is reported.
  - Files, services, units and mounts that differ from the request are corrected. Exports that this role made earlier
    and that are no longer listed are ended. A mount that is no longer listed stays, with a warning.
options:
  kind: {description: Kind of the NFS server., type: str, choices: [kernel, ganesha], default: kernel}
  directories:
    description: Directories to export; created if missing, and given owner, group and mode.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: The directory., type: path, required: true}
      owner: {description: Name or number., type: str, required: true}
      group: {description: Name or number., type: str, required: true}
      mode: {description: Octal digits., type: str, required: true}
      disk: {description: Mount point of the data disk that holds the directory; empty if none does., type: str,
             default: ""}
      served: {description: Whether the directory has clients., type: bool, default: true}
  files:
    description: Configuration files of the server; an empty list means that this host exports nothing.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Path of the file., type: path, required: true}
      content: {description: Text of the file., type: str, required: true}
      takes: {description: How the service gets the file., type: str, choices: [reload, restart, units], required: true}
  mounts:
    description: The mounts of this host.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Mount point., type: path, required: true}
      what: {description: Source of the mount., type: str, default: ""}
      server: {description: Address of the server; empty on the server itself., type: str, default: ""}
      server_name: {description: Inventory name of the server., type: str, default: ""}
      mount: {description: Text of the mount unit., type: str, default: ""}
      automount: {description: Text of the automount unit., type: str, default: ""}
      state: {description: Mounted or absent., type: str, choices: [mounted, absent], default: mounted}
  units_only: {description: Whether to write units of NFS mounts without starting them., type: bool, default: false}
  await_servers: {description: Whether the servers of mounts must answer at the end., type: bool, default: true}
  wait: {description: Seconds to wait for exports and for answers of servers., type: int, default: 30}
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Serve nothing and mount nothing any more
  nfs_host: {}
"""

RETURN = r"""
actions:
  description: What was or would be done, in order.
  type: list
  returned: always
changed_paths:
  description: Files that were or would be written or removed, sorted.
  type: list
  returned: always
"""


class NfsHost(Server, Client):  # type: ignore[misc] # Ansible alone knows module_utils
    """The checks and changes of the module nfs_host on this worker."""

    def check(self) -> list[str]:
        """Return the reasons why the listed exports and mounts cannot be made on this worker."""
        parameters, refusals = self.module.params, []
        coming = [mount for mount in parameters["mounts"] if mount["state"] == "mounted"]
        if (
            not parameters["units_only"]
            and any(mount["server"] for mount in coming)
            and not self.kernel_has("nfs", "nfsv4")
        ):
            refusals.append(
                "nfs_mounts: the kernel %s has no NFS client, its module is nfsv4; boot a kernel with this module, or"
                " set nfs_client_units_only to write the units without starting them" % platform.release()
            )
        if parameters["kind"] == "kernel" and parameters["files"] and not self.kernel_has("nfsd", "nfsd"):
            refusals.append(
                "nfs_exports: the kernel %s has no NFS server, its module is nfsd; boot a kernel with this module, or"
                " set nfs_server_kind: ganesha" % platform.release()
            )
        mounts = self.mounts()
        for export in parameters["directories"]:
            path, disk = export["path"], export["disk"]
            # Without the disk, clients would write to the boot disk, below the mount point. Check mode is exempt, since
            # it mounts no disk.
            if disk and not self.module.check_mode and all(mount.target != disk for mount in mounts):
                refusals.append(
                    "nfs_exports: %s: the directory's disk is not mounted at %s; run again with --tags disks,nfs, which"
                    " mounts the disk or says why not" % (path, disk)
                )
            if os.path.realpath(path) != path or (os.path.lexists(path) and not os.path.isdir(path)):
                refusals.append(
                    "nfs_exports: %s is not a directory, or is behind a symbolic link; give the path of the"
                    " directory itself" % path
                )
            for key, find in (("owner", pwd.getpwnam), ("group", grp.getgrnam)):
                # In check mode, an account or group may be missing because the role users has not created it.
                if number(export[key], find) < 0 and not self.module.check_mode:
                    refusals.append(
                        "nfs_exports: %s: this worker has no %s %s; set %s, or create the account or group"
                        % (path, key, export[key], key)
                    )
        for mount in coming:
            try:
                check_point(mount["path"], mounts, mount["what"])
            except Refusal as exc:
                refusals.append("nfs_mounts: %s: %s" % (mount["path"], exc))
        return refusals

    def kernel_has(self, filesystem: str, name: str) -> bool:
        """Return whether the kernel supports a file system, or can load the module `name` for it."""
        if any(line.split()[-1] == filesystem for line in read("/proc/filesystems").splitlines() if line.strip()):
            return True
        modprobe = self.module.get_bin_path("modprobe", opt_dirs=["/sbin", "/usr/sbin"])
        return bool(modprobe) and self.run(modprobe, "--dry-run", "--quiet", name, check=False)[0] == 0


def main() -> None:
    """Run the module."""
    text: dict[str, Any] = {"type": "str", "required": True}
    path: dict[str, Any] = {"type": "path", "required": True}
    optional: dict[str, Any] = {"type": "str", "default": ""}
    more: dict[str, Any] = {"disk": optional, "served": {"type": "bool", "default": True}}

    def entries(options: dict[str, Any]) -> dict[str, Any]:
        return {"type": "list", "elements": "dict", "default": [], "options": options}

    module = AnsibleModule(
        argument_spec={
            "kind": {"type": "str", "choices": sorted(SERVICES), "default": "kernel"},
            "directories": entries({"path": path, "owner": text, "group": text, "mode": text, **more}),
            "files": entries(
                {"path": path, "content": text, "takes": {**text, "choices": ["reload", "restart", "units"]}}
            ),
            "mounts": entries(
                {
                    "path": path,
                    **dict.fromkeys(("what", "server", "server_name", "mount", "automount"), optional),
                    "state": {"type": "str", "choices": ["mounted", "absent"], "default": "mounted"},
                }
            ),
            "units_only": {"type": "bool", "default": False},
            "await_servers": {"type": "bool", "default": True},
            "wait": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    take_turn(module, "NFS")
    work, mounts = NfsHost(module), module.params["mounts"]
    refusals = work.check()
    if refusals:
        module.fail_json(msg="nothing was changed here; " + "; ".join(refusals), actions=[])
    work.serve()
    coming = [mount for mount in mounts if mount["state"] == "mounted"]
    for mount in mounts:
        if mount["state"] == "absent":
            work.absent(mount["path"])
    for mount in coming:
        work.mounted(mount)
    if module.params["await_servers"] and not module.check_mode:
        work.check_servers(coming)
    listed = {unit_name(mount["path"], "mount") for mount in mounts}
    for unit in sorted(glob.glob(UNITS + "/*.mount")):
        if os.path.basename(unit) not in listed and ours(unit):
            module.warn("%s is no longer in nfs_mounts but stays; list it with state absent to unmount it" % unit)
    work.end(changed_paths=sorted(work.paths))


if __name__ == "__main__":
    main()
