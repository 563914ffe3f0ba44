#!/usr/bin/python
"""Module that reads all facts about a host that roles need, in one call; supports Python 3.8."""

from __future__ import annotations

import contextlib
import glob
import grp
import hashlib
import os
import platform
import pwd
import re
import stat
import sys
import time
from typing import Any, Callable

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.file_entries import block_in
from ansible.module_utils.mount_points import parse_mounts, read
from ansible.module_utils.openpgp import fingerprints
from ansible.module_utils.turns import busy
from ansible.module_utils.unit_settings import PROPERTIES, behind, blocks
from ansible.module_utils.worker import output

DOCUMENTATION = r"""
module: worker_facts
short_description: Read the state of a host on which roles base decisions, in one call
description:
  - Sets C(distribution), C(distribution_version), C(distribution_major_version), C(distribution_release),
    C(architecture) and C(python) as M(ansible.builtin.setup) does, and C(worker).
  - The state is that at the start of the play. A role may skip what this shows to be done, and nothing else.
options:
  programs:
    description: Programs whose versions are read, as absolute paths.
    type: list
    elements: path
    default: []
  files:
    description: Files, directories and links to read, as shell patterns; C(**) means everything below a directory.
    type: list
    elements: path
    default: []
  signing_keys:
    description: Files of OpenPGP keys whose fingerprints are read, as shell patterns.
    type: list
    elements: path
    default: []
  paths:
    description: Absolute paths to report as existing or not; links are followed.
    type: list
    elements: path
    default: []
  mentions:
    description: Words to look for in files, with the files as shell patterns.
    type: dict
    default: {}
  units:
    description:
      - Units to read, as systemctl patterns. systemd searches all of its directories for the state of a unit, so that
        all units of a host take it half a second.
    type: list
    elements: str
    default: ["*"]
  settings:
    description: Units with their settings files, to report whether these were applied.
    type: dict
    default: {}
  skip_done:
    description:
      - Whether roles may skip what is done. If not, C(packages), C(programs), C(files), C(mentions) and C(hugepages)
        are empty, and C(skip_done) tells this to roles that decide by the rest.
    type: bool
    default: true
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Read the worker's state
  worker_facts:
    programs: [/opt/uv/bin/uv]

- name: Install what is missing
  ansible.builtin.apt:
    name: [tmux]
  when: "'tmux' not in ansible_facts['worker']['packages']"
"""

RETURN = r"""
ansible_facts:
  description:
    - C(worker) has C(packages), name -> version of what is installed; C(apt_lists) with C(filled), C(stamp), the file
      that the role base touches when it has fetched the lists of all sources, and C(age), the seconds since;
      C(dpkg_interrupted), whether dpkg is working or was interrupted, in which case apt installs nothing before C(dpkg
      --configure -a); C(accounts), name -> C(uid), C(gid), C(home), C(shell), C(comment), C(groups); C(groups), name ->
      members; C(gids), name -> number of each group; C(unlisted), which of C(accounts) and C(groups) a directory
      service may have more of; C(units), name -> C(active), C(enabled), where C(active) is skipped for an enabled unit
      whose conditions systemd found unmet; C(behind), which of O(settings) were written after systemd read the unit, or
      after the service was started; C(hugepages), the kernel's choice of transparent hugepages; C(mounts), a list of
      C(source), C(target), C(fstype), C(options); C(filesystems), those that the kernel knows by now; C(programs), path
      -> first line of what C(--version) says, without those that do not run; C(paths), path -> missing, executable for
      a file that can be executed, or there; C(signing_keys), path -> fingerprints of the primary keys in it;
      C(mentions), word -> files that have it.
    - C(files) in it is path -> C(state), which is C(file), C(directory), C(link) or C(other); C(owner), C(group),
      C(mode); of a link C(target); of a file C(digest), its SHA-256 in hexadecimal digits, and C(block), that of what
      stands between the marks of M(managed_files), empty if nothing is marked. A path without wildcards where nothing
      exists has an empty entry; what cannot be read is left out.
  type: dict
  returned: always
"""

#: The directory of apt's package lists.
LISTS = "/var/lib/apt/lists"
#: A stamp file that the module apt_lists touches after each complete refresh of apt's lists. Other times prove less:
#: the time of the lists' directory shows that some lists were fetched, the time of `partial` only an attempt, and the
#: update-success-stamp of Ubuntu's apt that at least one source did not fail.
STAMP = "/var/lib/apt/periodic/tpu_ops-lists-stamp"
#: The directory in which dpkg journals changes before it writes them to its list of packages.
UPDATES = "/var/lib/dpkg/updates"


def distribution(os_release: str, debian_version: str) -> dict[str, str]:
    """Given the texts of /etc/os-release and /etc/debian_version, return Ansible's facts on the distribution."""
    pairs = (line.partition("=") for line in os_release.splitlines() if "=" in line and not line.startswith("#"))
    values = {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}
    name = {"debian": "Debian", "ubuntu": "Ubuntu"}.get(values.get("ID", ""), values.get("NAME", ""))
    version = values.get("VERSION_ID", "")
    # Debian's point releases (12.5) are only in /etc/debian_version, which contains no number before a release.
    if name == "Debian" and re.match(r"^\d+\.\d+$", debian_version.strip()):
        version = debian_version.strip()
    return {
        "distribution": name,
        "distribution_version": version,
        "distribution_major_version": version.partition(".")[0],
        "distribution_release": values.get("VERSION_CODENAME", ""),
    }


def packages(listing: str) -> dict[str, str]:
    """Given dpkg-query's lines of status, name and version, return name -> version of the installed packages."""
    rows = (line.split("\t") for line in listing.splitlines())
    return {row[1]: row[2] for row in rows if row[0] == "installed"}


def units(files: str, loaded: str) -> dict[str, dict[str, str]]:
    """Given systemctl's lists of unit files and loaded units, return unit -> whether it is `enabled` and `active`."""
    active = {row[0]: row[2] for row in (line.split(None, 4) for line in loaded.splitlines()) if len(row) > 3}
    rows = [line.split() for line in files.splitlines()]
    found = {row[0]: {"enabled": row[1], "active": active.get(row[0], "inactive")} for row in rows if len(row) > 1}
    # An instance of a template unit, such as name@x.service, has no unit file of its own.
    for name, state in active.items():
        if "@" in name:
            found.setdefault(name, {"enabled": "", "active": state})
    return found


def refused(shown: str) -> list[str]:
    """Given Id and ConditionResult of units from systemctl show, return the units whose start conditions failed."""
    return [
        block["Id"]
        for block in blocks(shown)
        if block.get("ConditionResult") == "no" and block.get("ConditionTimestamp")
    ]


def unit_states(kinds: str, patterns: list[str]) -> dict[str, dict[str, str]]:
    """Return the state of each matching unit; an enabled unit whose start conditions failed is `skipped`."""
    found = units(
        output("systemctl", "list-unit-files", "--no-legend", "--no-pager", kinds, "--", *patterns),
        output("systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", kinds, "--", *patterns),
    )
    idle = [name for name, unit in found.items() if unit == {"enabled": "enabled", "active": "inactive"}]
    idle = [name for name in idle if "@." not in name]
    if idle:
        properties = "--property=Id,ConditionResult,ConditionTimestamp"
        for name in refused(output("systemctl", "show", "--no-pager", properties, "--", *idle)):
            if name in found:
                found[name]["active"] = "skipped"
    return found


def hugepages(line: str) -> str:
    """Given the text of the kernel's file, such as `always [madvise] never`, return the value in brackets."""
    match = re.search(r"\[(\w+)\]", line)
    return match[1] if match else ""


def mounts(mountinfo: str) -> list[dict[str, str]]:
    """Given the text of /proc/self/mountinfo, return every mount, with the mount's options before the file system's."""
    found = []
    for mounted in parse_mounts(mountinfo):
        own = mounted.options.split(",")
        options = own + [option for option in mounted.super_options.split(",") if option not in (*own, "ro", "rw")]
        names = {"source": mounted.source, "target": mounted.target, "fstype": mounted.fstype}
        found.append(dict(names, options=",".join(options)))
    return found


def people() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the accounts and the groups of this host."""
    groups = {group.gr_name: sorted(group.gr_mem) for group in grp.getgrall()}
    accounts = {
        entry.pw_name: {
            "uid": entry.pw_uid,
            "gid": entry.pw_gid,
            "home": entry.pw_dir,
            "shell": entry.pw_shell,
            "comment": entry.pw_gecos,
            "groups": sorted(name for name, members in groups.items() if entry.pw_name in members),
        }
        for entry in pwd.getpwall()
    }
    return accounts, groups


def unlisted(nsswitch: str) -> list[str]:
    """Given the text of /etc/nsswitch.conf, return which of `accounts` and `groups` also come from a directory service.

    A directory service answers for single names, but may not list them.
    """
    found = []
    for name, database in (("accounts", "passwd"), ("groups", "group")):
        lines = re.findall(r"^[ \t]*%s:([^#\n]*)" % database, nsswitch, re.MULTILINE)
        sources = re.sub(r"\[[^]]*\]", " ", " ".join(lines)).split()
        if set(sources) - {"files", "compat", "systemd"}:
            found.append(name)
    return found


def apt_lists(directory: str, stamp: str) -> dict[str, Any]:
    """Return the age in seconds of apt's last complete refresh, and whether there are package lists at all."""
    try:
        age = max(0, int(time.time() - os.stat(stamp).st_mtime))
    except OSError:
        age = sys.maxsize
    return {
        "age": age,
        "stamp": stamp,
        "filled": bool(glob.glob(os.path.join(glob.escape(directory), "*_Packages*"))),
    }


def dpkg_interrupted(directory: str) -> bool:
    """Return whether dpkg was interrupted, by apt's criterion: the directory has files whose names are numbers."""
    try:
        return any(name.isdigit() for name in os.listdir(directory))
    except OSError:
        return False


def contents(patterns: list[str]) -> dict[str, bytes]:
    """Given shell patterns of paths, return path -> content of each matching file."""
    found = {}
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        if os.path.isfile(path):
            with open(path, "rb") as stream:
                found[path] = stream.read()
    return found


def mentioned(word: str, patterns: list[str]) -> list[str]:
    """Given shell patterns of paths, return the matching files that contain a word or cannot be read."""
    found = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        if os.path.isfile(path) and (word in read(path) or not os.access(path, os.R_OK)):
            found.append(path)
    return found


def standing(path: str) -> str:
    """Return `missing`, `executable` (a file that can be executed) or `there` (anything else); links are followed."""
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return "executable"
    return "there" if os.path.exists(path) else "missing"


def digest(data: bytes) -> str:
    """Return the SHA-256 of data in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def name_of(number: int, entry_of: Callable[[int], Any]) -> str:
    """Return the name of a uid or gid; without a name, the number itself."""
    try:
        return str(entry_of(number)[0])
    except KeyError:
        return str(number)


def entry(path: str) -> dict[str, str]:
    """Return type, attributes and digest of what exists at a path; empty if nothing exists.

    Raises:
        OSError: The path cannot be read.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if stat.S_ISLNK(found.st_mode):
        return {"state": "link", "target": os.readlink(path)}
    owner, group = name_of(found.st_uid, pwd.getpwuid), name_of(found.st_gid, grp.getgrgid)
    kept = {"owner": owner, "group": group, "mode": "%04o" % stat.S_IMODE(found.st_mode)}
    if not stat.S_ISREG(found.st_mode):
        return dict(kept, state="directory" if stat.S_ISDIR(found.st_mode) else "other")
    with open(path, "rb") as stream:
        data = stream.read()
    kept.update(state="file", digest=digest(data))
    block = block_in(data.decode("utf-8", "surrogateescape"))
    if block is not None:
        kept["block"] = digest(block.encode("utf-8", "surrogateescape")) if block else ""
    return kept


def entries(patterns: list[str]) -> dict[str, dict[str, str]]:
    """Given paths and shell patterns, return path -> result of `entry`; paths that cannot be read are left out."""
    found = {}
    for pattern in patterns:
        for path in glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else [pattern]:
            with contextlib.suppress(OSError):
                found[os.path.normpath(path)] = entry(path)
    return found


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "programs": {"type": "list", "elements": "path", "default": []},
            "files": {"type": "list", "elements": "path", "default": []},
            "signing_keys": {"type": "list", "elements": "path", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "mentions": {"type": "dict", "default": {}},
            "units": {"type": "list", "elements": "str", "default": ["*"]},
            "settings": {"type": "dict", "default": {}},
            "skip_done": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    settings = module.params["settings"]
    versions = {path: output(path, "--version").partition("\n")[0].strip() for path in module.params["programs"]}
    keys = {path: fingerprints(data) for path, data in contents(module.params["signing_keys"]).items()}
    accounts, groups = people()
    # `sys.version_info` is in a variable, since mypy would otherwise evaluate comparisons with it for one Python only.
    version = sys.version_info
    facts: dict[str, Any] = distribution(read("/etc/os-release"), read("/etc/debian_version"))
    facts["architecture"] = platform.machine()
    facts["python"] = {
        "executable": sys.executable,
        "type": sys.implementation.name,
        "version": {name: getattr(version, name) for name in ("major", "minor", "micro", "releaselevel", "serial")},
        "version_info": list(version),
        "has_sslcontext": True,
    }
    facts["worker"] = {
        "packages": packages(output("dpkg-query", "-W", "-f", "${db:Status-Status}\t${Package}\t${Version}\n")),
        "apt_lists": apt_lists(LISTS, STAMP),
        "dpkg_interrupted": dpkg_interrupted(UPDATES),
        "accounts": accounts,
        "groups": groups,
        "gids": {group.gr_name: group.gr_gid for group in grp.getgrall()},
        "unlisted": unlisted(read("/etc/nsswitch.conf")),
        "units": unit_states("--type=service,socket,timer,mount,automount,path", module.params["units"]),
        "behind": behind(
            settings, output("systemctl", "show", "--no-pager", PROPERTIES, "--", *settings) if settings else ""
        ),
        "hugepages": hugepages(read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "mounts": mounts(read("/proc/self/mountinfo")),
        "filesystems": sorted(line.split()[-1] for line in read("/proc/filesystems").splitlines() if line.strip()),
        "programs": {path: line for path, line in versions.items() if line},
        "paths": {path: standing(path) for path in module.params["paths"]},
        "files": entries(module.params["files"]),
        "signing_keys": keys,
        "mentions": {word: mentioned(word, patterns) for word, patterns in module.params["mentions"].items()},
    }
    facts["worker"]["skip_done"] = module.params["skip_done"]
    if not module.params["skip_done"]:
        facts["worker"].update(packages={}, programs={}, files={}, signing_keys={}, mentions={}, hugepages="")
    for line in busy():
        module.warn(
            "another playbook is at work on this worker: %s; where both change the same thing, this one waits for the"
            " other" % line
        )
    module.exit_json(changed=False, ansible_facts=facts)


if __name__ == "__main__":
    main()
