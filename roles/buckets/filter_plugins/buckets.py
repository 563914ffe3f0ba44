"""Filters that check buckets_mounts and write its units; no side effects, so that their tests are tables."""

from __future__ import annotations

import itertools
import re
from typing import Any

Mount = dict[str, Any]

#: Mount points that need no quoting in units. In the names of units, only their '-' is escaped.
PATH = re.compile(r"/(mnt|media|srv|data)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
#: Names of buckets (https://cloud.google.com/storage/docs/buckets#naming).
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
#: An option of the command line; systemd would replace '%' and '$' in a unit.
OPTION = re.compile(r"[a-z][a-z0-9-]*(=[A-Za-z0-9_.:/,+-]+)?")
#: Options that the role sets itself, and options with which its units would not work.
TAKEN = {
    *("allow-other", "default-permissions", "uid", "gid", "umask", "dir-perms", "file-perms", "dir-mode", "file-mode"),
    *("read-only", "daemon", "foreground", "o", "option", "allow-non-empty", "nonempty"),
}
#: Defaults of an entry's keys.
RIGHTS = {"owner": "root", "group": "root", "mode": "0755"}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: Seconds for which names and sizes of objects are cached, so that workers see what others write.
TTL = 60


def unit_name(path: str) -> str:
    """Return the name of a mount's unit, with the path as `systemd-escape --path` writes it."""
    escaped = path.strip("/").replace("-", r"\x2d").replace("/", "-")
    return f"tpu_ops-bucket-{escaped}.service"


def mount_faults(mount: Mount) -> list[str]:
    """Return the faults of one entry of buckets_mounts that do not depend on other entries."""
    path, bucket = str(mount.get("path", "")), str(mount.get("bucket", ""))
    faults = []
    if not PATH.fullmatch(path) or ".." in path:
        faults.append(
            "path is not a directory in /mnt, /media, /srv or /data, of letters, digits, '_', '.' and '-'; choose one,"
            " for example /mnt/data"
        )
    if not BUCKET.fullmatch(bucket):
        faults.append(f"bucket '{bucket}' is not the name of a bucket; give it without gs:// and without a path")
    mode = str(mount.get("mode") or RIGHTS["mode"])
    if not re.fullmatch(r"0?[0-7]{3}", mode):
        faults.append(f"mode '{mode}' is not octal in quotes, for example \"0775\"")
    for option in map(str, mount.get("options") or []):
        if not OPTION.fullmatch(option):
            faults.append(f"options: '{option}' is not a single option without dashes; give dir-cache-time=1h, say")
        elif option.partition("=")[0] in TAKEN:
            faults.append(f"options: {option} is set by the role; remove this option")
    return faults


def buckets_faults(mounts: list[Mount], accounts: list[str], groups: list[str], others: list[str]) -> list[str]:
    """Return every fault of buckets_mounts, each with its entry.

    Args:
        mounts: buckets_mounts.
        accounts: The accounts that the worker has once site.yml has run; `*` stands for unknown accounts.
        groups: The groups that the worker has then, likewise.
        others: Mount points of other roles.
    """
    if not isinstance(mounts, list) or not all(isinstance(mount, dict) for mount in mounts):
        return ["buckets_mounts: must be a list of mappings, each with bucket and path"]
    faults = []
    for position, mount in enumerate(mounts):
        where = f"buckets_mounts[{position}]: {mount.get('path', 'no path')}"
        faults += [f"{where}: {fault}" for fault in mount_faults(mount)]
        for key, known in (("owner", accounts), ("group", groups)):
            name = str(mount.get(key) or RIGHTS[key])
            if not NAME.fullmatch(name) or (not name.isdecimal() and not {name, "*"} & set(known)):
                faults.append(f"{where}: there is no {key} {name} on this node; set {key}, or add it")
        faults += [
            f"{where}: {other} is a mount of another role, and one would hide the other; choose a path next to it"
            for other in others
            if _nested(str(mount.get("path")), other)
        ]
    for one, other in itertools.combinations([str(mount.get("path")) for mount in mounts], 2):
        if one == other:
            faults.append(f"buckets_mounts: {one} is listed twice; remove one of them")
        elif _nested(one, other):
            faults.append(
                f"buckets_mounts: of {one} and {other}, one is inside the other; choose two paths next to each other"
            )
    return faults


def _nested(one: str, other: str) -> bool:
    return (one + "/").startswith(other + "/") or (other + "/").startswith(one + "/")


def buckets_units(mounts: list[Mount]) -> list[str]:
    """Return the names of the units of buckets_mounts."""
    return [unit_name(mount["path"]) for mount in mounts]


def unit_text(mount: Mount, tool: str) -> str:
    """Return the text of a mount's unit.

    A shell looks up owner and group when the unit starts, since the role users may create them in the same play.
    The launcher orders runs after these units (tpu_ops/host/mounts.py). `Before=tpu-run.service` here would keep that
    unit loaded, and systemd refuses to start a transient unit that is loaded.
    """
    path = mount["path"]
    mode = int(str(mount.get("mode") or RIGHTS["mode"]), 8)
    rights = [_number("uid", str(mount.get("owner") or RIGHTS["owner"]))]
    rights += [_number("gid", str(mount.get("group") or RIGHTS["group"]))]
    more = [f"--{option}" for option in mount.get("options") or []]
    command = _rclone(mount, mode) if tool == "rclone" else _gcsfuse(mount, mode)
    words = [*command[:-2], *rights, *more, *command[-2:]]
    # gcsfuse does not notify systemd, but its first process ends once the bucket is mounted.
    kind = ["Type=notify", "NotifyAccess=main"] if tool == "rclone" else ["Type=forking"]
    return "\n".join([
        "# Written by Ansible (role buckets); changes are lost.",
        "[Unit]",
        f"Description=Bucket {mount['bucket']} at {path}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *kind,
        "CacheDirectory=tpu_ops-buckets",
        "CacheDirectoryMode=0700",
        *(f"Environment=RCLONE_GCS_{name}=true" for name in RCLONE if tool == "rclone"),
        f"ExecStartPre=-/usr/bin/fusermount3 -u -z {path}",
        f"ExecStartPre=/usr/bin/mkdir -p {path}",
        f"ExecStart=/bin/sh -c 'exec {' '.join(words)}'",
        f"ExecStopPost=-/usr/bin/fusermount3 -u -z {path}",
        # The exit code of rclone when systemd ends it.
        "SuccessExitStatus=143",
        "Restart=always",
        "RestartSec=5",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ])  # fmt: skip


#: Settings of rclone, as variables: unlike options, older versions ignore those that they do not know.
RCLONE = ("ENV_AUTH", "NO_CHECK_BUCKET", "BUCKET_POLICY_ONLY")


def _number(option: str, name: str) -> str:
    """Return the option with the number of a user or group; a name is looked up on the worker."""
    if name.isdecimal():
        return f"--{option}={name}"
    database = "passwd" if option == "uid" else "group"
    # systemd reads "$$" as "$".
    return f'--{option}="$$(getent {database} {name} | cut -d: -f3)"'


def _rclone(mount: Mount, mode: int) -> list[str]:
    # Without a pause before the upload, a closed file is in the bucket even if the worker is preempted soon.
    own = ["--read-only"] if mount.get("read_only") else ["--vfs-cache-mode=writes", "--vfs-write-back=0s"]
    return [
        *("/usr/bin/rclone", "mount", "--config=/dev/null", "--cache-dir=/var/cache/tpu_ops-buckets"),
        *("--allow-other", "--default-permissions", "--umask=0", f"--dir-cache-time={TTL}s", *own),
        *(f"--dir-perms=0{mode:o}", f"--file-perms=0{mode & 0o666:o}", f":gcs:{mount['bucket']}", mount["path"]),
    ]


def _gcsfuse(mount: Mount, mode: int) -> list[str]:
    own = ["-o ro"] if mount.get("read_only") else []
    return [
        *("/usr/bin/gcsfuse", "--disable-autoconfig", "--implicit-dirs", "-o allow_other", *own),
        *(f"--metadata-cache-ttl-secs={TTL}", f"--dir-mode={mode:o}", f"--file-mode={mode & 0o666:o}"),
        *(mount["bucket"], mount["path"]),
    ]


def buckets_files(mounts: list[Mount], tool: str, gone: list[str]) -> list[dict[str, str]]:
    """Return the entries of `managed_files`: units to write and to remove, and the list that the launcher reads."""
    place, paths = "/etc/systemd/system/", "".join(f"{mount['path']}\n" for mount in mounts)
    return [
        *({"path": place + unit_name(mount["path"]), "content": unit_text(mount, tool)} for mount in mounts),
        *({"path": place + name, "state": "absent"} for name in gone),
        # The launcher starts runs after these mounts, and only if all are there (tpu_ops/host/mounts.py).
        {"path": "/etc/tpu_ops/buckets", **({"content": paths} if paths else {"state": "absent"})},
    ]


class FilterModule:
    """Filters of the role buckets."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"buckets_faults": buckets_faults, "buckets_files": buckets_files, "buckets_units": buckets_units}
