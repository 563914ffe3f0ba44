"""Filters that check the variables of the role git and return the texts of git's and ssh's files; no side effects."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from typing import Any

Entry = dict[str, Any]

#: A key of git's configuration (git-config(1), "Syntax"): section, optional subsection, name.
KEY = re.compile(r"(?P<section>[A-Za-z][A-Za-z0-9.-]*?)(\.(?P<sub>[^\n\0]+))?\.(?P<name>[A-Za-z][A-Za-z0-9-]*)")

#: A host as written in URLs and on ssh's command line, optionally with a port.
HOST = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?")

#: Types of host keys that OpenSSH 8.2 to 10 accept (ssh-keyscan(1)).
KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")

#: Value of git_pull -> settings of git (git-config(1), pull.ff and pull.rebase).
PULL: dict[str, dict[str, str]] = {
    "ff-only": {"pull.ff": "only", "pull.rebase": "false"},
    "merge": {"pull.ff": "true", "pull.rebase": "false"},
    # pull.ff is set too: git refuses to rebase if it is "only", which the system configuration may contain.
    "rebase": {"pull.ff": "true", "pull.rebase": "true"},
    "unset": {},
}

BEGIN = re.compile(r"-----BEGIN ((?:[A-Z]+ )?PRIVATE KEY)-----\n")
DAMAGED = "is damaged; give the whole content of its file, unchanged"
LOCKED = "has a passphrase, which nobody can type on a worker; remove it with ssh-keygen -p"


def is_host(text: str) -> bool:
    """Return whether a text is a host, optionally with a port: an invalid host in ssh's configuration breaks ssh."""
    match = HOST.fullmatch(text)
    return match is not None and 0 < int(match["port"] or 22) < 65536


def host_key_fault(key: str) -> str:
    """Given a host key in the form `TYPE BASE64`, return its fault, or the empty string."""
    kind, _, blob = key.strip().partition(" ")
    if kind not in KEY_TYPES:
        return f"starts with '{kind[:40]}', not with a type such as ssh-ed25519"
    try:
        data = base64.b64decode(blob.strip(), validate=True)
    except (binascii.Error, ValueError):
        return "has something other than base64 after the type; give only type and key"
    head = struct.pack(">I", len(kind)) + kind.encode()
    whole = data.startswith(head) and len(data) >= len(head) + 32
    return "" if whole else f"is truncated, or not of the type {kind}; copy the whole line that the forge publishes"


def private_key_fault(key: str) -> str:
    """Given a deploy key's text, return its fault, which contains no part of the key; empty if there is none.

    OpenSSH's own format is described in PROTOCOL.key in its sources: a fixed beginning, then the cipher's name.
    """
    text = key.replace("\r\n", "\n").strip() + "\n"
    begin = BEGIN.match(text)
    if not begin or not text.endswith(f"-----END {begin[1]}-----\n"):
        return "is not a private key from -----BEGIN to -----END; give the whole content of its file"
    body = text[begin.end() :].rpartition("-----END")[0]
    magic = b"openssh-key-v1\0"
    if begin[1] == "OPENSSH PRIVATE KEY":
        try:
            data = base64.b64decode("".join(body.split()), validate=True)
        except (binascii.Error, ValueError):
            return DAMAGED
        if not data.startswith(magic + struct.pack(">I", 4)):
            return LOCKED if data.startswith(magic) else DAMAGED
    elif "ENCRYPTED" in begin[1] or "ENCRYPTED" in body:
        return LOCKED
    return ""


def setting_faults(settings: dict[str, Any]) -> list[str]:
    """Return what is wrong with git settings given as key -> value."""
    faults = []
    for key, value in settings.items():
        if not KEY.fullmatch(str(key)):
            faults.append(f"'{key}' is not a setting such as init.defaultBranch")
        if not isinstance(value, (str, int, bool)) or "\0" in str(value):
            faults.append(f"{key}: the value is not a string, number or boolean")
    return faults


def people_faults(people: list[Entry], accounts: list[str]) -> list[str]:
    """Return the faults of git_people, given the accounts that the worker has once site.yml has run."""
    faults = []
    names = [entry.get("person") for entry in people]
    for position, entry in enumerate(people):
        where = f"git_people[{position}]: {names[position]}"
        if not {names[position], "*"} & set(accounts):
            faults.append(
                f"{where} has no account and is not in users_people for this node; set person, or list"
                f" {names[position]} for this node"
            )
        if names[position] in names[:position]:
            faults.append(f"{where} is listed twice; remove one of them")
        if (email := entry.get("email")) and not re.fullmatch(r"[^\s<>@]+@[^\s<>@]+", email):
            faults.append(f"{where}: email '{email}' is not of the form name@host")
        if re.search(r"[<>\n]", entry.get("name") or ""):
            faults.append(f"{where}: name must not contain <, > or a newline")
        faults += [f"{where}: settings: {fault}" for fault in setting_faults(entry.get("settings") or {})]
    return faults


def forge_faults(host_keys: dict[str, list[str]]) -> list[str]:
    """Return the faults of the pinned host keys, given as host -> list of keys."""
    faults = []
    for host, keys in host_keys.items():
        if not is_host(str(host)):
            faults.append(f"git_host_keys: '{host}' is not a host name, or a host name, a colon and a port")
        if not keys or isinstance(keys, str):
            faults.append(
                f"git_host_keys: {host} has no list of keys, so nobody could clone from it; list each as TYPE BASE64"
            )
            continue
        found = [(index, host_key_fault(str(key))) for index, key in enumerate(keys)]
        faults += [f"git_host_keys: {host}[{index}] {fault}" for index, fault in found if fault]
    return faults


def deploy_name(entry: Entry) -> str:
    """Return the host name that git URLs must contain to use a deploy key: its alias or its forge."""
    return str(entry.get("alias") or str(entry.get("host")).partition(":")[0])


def deploy_key_faults(deploy_keys: list[Entry], host_keys: dict[str, list[str]], groups: list[str]) -> list[str]:
    """Return the faults of git_deploy_keys; the messages contain no part of a key."""
    faults = []
    names = [deploy_name(entry) for entry in deploy_keys]
    for position, entry in enumerate(deploy_keys):
        name, host, group = names[position], entry.get("host"), entry.get("group")
        where = f"git_deploy_keys[{position}]: {name}"
        if host not in host_keys:
            faults.append(f"{where}: {host} has no pinned key; add it to git_more_host_keys")
        if not is_host(name) or ":" in name:
            key = "alias" if entry.get("alias") else "host"
            faults.append(f"{where}: {key} is not a host name; give one such as work.forge.test")
        if entry.get("alias") and name in {known.partition(":")[0] for known in host_keys}:
            faults.append(f"{where}: the alias is the name of a forge; choose another alias")
        if name in names[:position]:
            faults.append(f"{where} already has a key; give each additional key its own alias")
        if fault := private_key_fault(str(entry.get("key", ""))):
            faults.append(f"{where}: key {fault}")
        if group and not {group, "*"} & set(groups):
            faults.append(
                f"{where}: there is no group {group}, and users_people does not add it on this node; set group, or"
                f" list {group} for this node"
            )
    return faults


def git_faults(
    people: list[Entry],
    settings: dict[str, Any],
    host_keys: dict[str, list[str]],
    deploy_keys: list[Entry],
    known: dict[str, list[str]],
) -> list[str]:
    """Return every fault of the role's variables, each with variable and key."""
    return [
        *(f"git_settings: {fault}" for fault in setting_faults(settings)),
        *people_faults(people, known["accounts"]),
        *forge_faults(host_keys),
        *deploy_key_faults(deploy_keys, host_keys, known["groups"]),
    ]


def git_config_text(settings: dict[str, Any]) -> str:
    """Given settings as key -> value, return the text of a git configuration file with these settings."""
    lines = ["# Written by Ansible; changes are lost."]
    for key, value in sorted(settings.items()):
        match = KEY.fullmatch(key)
        if not match:
            raise ValueError(f"{key} is not a setting")
        sub = f' "{_escaped(match["sub"])}"' if match["sub"] else ""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        lines += [f"[{match['section']}{sub}]", f'\t{match["name"]} = "{_escaped(text)}"']
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return the text escaped for a double-quoted value of a git configuration file."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


def git_pull_settings(how: str) -> dict[str, str]:
    """Return the settings for a choice of git_pull."""
    return PULL[how]


def git_person_settings(entry: Entry) -> dict[str, Any]:
    """Given an entry of git_people, return its settings."""
    named = {"user.name": entry.get("name"), "user.email": entry.get("email")}
    pull = PULL[entry.get("pull", "unset")]
    return {key: value for key, value in named.items() if value} | pull | (entry.get("settings") or {})


def git_people_files(people: list[Entry], directory: str) -> list[Entry]:
    """Return the files with people's settings as entries of the module managed_files."""
    return [
        {"path": f"{directory}/people/{entry['person']}", "content": git_config_text(git_person_settings(entry))}
        for entry in people
    ]


def git_known_hosts(host_keys: dict[str, list[str]]) -> str:
    """Return the text of the known_hosts file; a host with a port has OpenSSH's form [host]:port (sshd(8))."""
    lines = ["# Written by Ansible; changes are lost."]
    lines += [f"{_known_name(host)} {key.strip()}" for host, keys in sorted(host_keys.items()) for key in keys]
    return "\n".join(lines) + "\n"


def _known_name(host: str) -> str:
    """Return the form in which known_hosts names a host: HOST, or [HOST]:PORT if the port is not 22."""
    name, _, port = host.partition(":")
    return name if port in ("", "22") else f"[{name}]:{port}"


def git_ssh_config(host_keys: dict[str, list[str]], deploy_keys: list[Entry], directory: str) -> str:
    """Return ssh's configuration for the forges: pinned keys only, and a deploy key for users who can read it.

    ssh rejects a private key whose owner shares it with a group (ssh(1)), so root has a separate copy. A `Match` line
    limits each deploy key to users who can read it; for other users, ssh would try it instead of their own key.
    """
    hosts = sorted({host.partition(":")[0] for host in host_keys})
    aliases = [str(entry["alias"]) for entry in deploy_keys if entry.get("alias")]
    lines = ["# Written by Ansible; changes are lost."]
    for entry in deploy_keys:
        if entry.get("alias"):
            name, _, port = str(entry["host"]).partition(":")
            lines += [
                f"Host {entry['alias']}",
                f"    HostName {name}",
                f"    HostKeyAlias {_known_name(entry['host'])}",
            ]
            lines += [f"    Port {port}"] if port else []
    for entry in deploy_keys:
        name = deploy_name(entry)
        path = f"{directory}/keys/{name}"
        lines += [f"Match originalhost {name} localuser root", f"    IdentityFile {path}"]
        if entry.get("group"):
            lines += [f'Match originalhost {name} !localuser root exec "test -r {path}.group"']
            lines += [f"    IdentityFile {path}.group"]
    if hosts:
        lines += [
            f"Host {' '.join(hosts + aliases)}",
            f"    GlobalKnownHostsFile {directory}/known_hosts",
            # ssh accepts only the pinned host keys, and none from a user's known_hosts.
            "    UserKnownHostsFile /dev/null",
            "    StrictHostKeyChecking yes",
            "    UpdateHostKeys no",
            "    CheckHostIP no",
        ]
    return "\n".join(lines) + "\n"


def git_key_files(deploy_keys: list[Entry], directory: str) -> list[Entry]:
    """Return the files with the deploy keys as entries of the module managed_files."""
    files = []
    for entry in deploy_keys:
        path = f"{directory}/keys/{deploy_name(entry)}"
        content = str(entry["key"]).replace("\r\n", "\n").strip() + "\n"
        files.append({"path": path, "content": content, "mode": "0600"})
        if entry.get("group"):
            files.append({"path": f"{path}.group", "content": content, "mode": "0640", "group": entry["group"]})
    return files


class FilterModule:
    """Filters of the role git."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "git_config_text": git_config_text,
            "git_faults": git_faults,
            "git_key_files": git_key_files,
            "git_known_hosts": git_known_hosts,
            "git_people_files": git_people_files,
            "git_pull_settings": git_pull_settings,
            "git_ssh_config": git_ssh_config,
        }
