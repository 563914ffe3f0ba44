"""Filters that check users_people and users_more_people; no side effects, so that their tests are tables."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
import struct
from typing import Any

Person = dict[str, Any]

#: Names that useradd of Debian and Ubuntu accepts without --badname.
NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
#: Advice for an invalid login name or group name.
LETTERS = "use at most 32 lowercase letters, digits, - and _, not starting with a digit or -"

#: Comments that a field of /etc/passwd can contain (passwd(5)).
FIELD = re.compile(r"[^:\n\x00-\x1f]*")
SHELL = re.compile(r"/[^:\s]+")

#: Key types that OpenSSH 8.2 to 10 accept for logins (ssh-keygen(1); ssh-dss was disabled in 7.0) -> the number of
#: fields after the type in the key's bytes (RFC 4253 6.6, RFC 5656 3.1, RFC 8709 4, OpenSSH's PROTOCOL.u2f).
KEY_TYPES = {
    "ssh-ed25519": 1,
    "ssh-rsa": 2,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
    "sk-ssh-ed25519@openssh.com": 2,
    "sk-ecdsa-sha2-nistp256@openssh.com": 3,
}

#: A key type and the beginning of a key. A key begins with AAAA, since its first field is shorter than 256 bytes (RFC
#: 4251 5).
TYPE_AND_KEY = re.compile(r"(?:ssh|ecdsa)-[\w.@-]+\s+AAAA[A-Za-z0-9+/]")

#: Length of an Ed25519 public key in bytes (RFC 8032 5.1.5).
ED25519_BYTES = 32

#: The minimum length of an RSA key in bits that sshd accepts (RequiredRSASize in sshd_config(5)).
RSA_BITS = 1024

#: User IDs for people's accounts, without those of system accounts and `nobody` (Debian Policy 9.2.2).
PEOPLE_UIDS = range(1000, 60000)

#: Shells that come only from a package of the same name, and the directories into which packages install shells.
SHELLS = ("elvish", "fish", "mksh", "tcsh", "xonsh", "yash", "zsh")
SHELL_DIRECTORIES = ("/bin", "/usr/bin")

#: Names of a fleet's file, as in `verify_file` of the inventory plugin.
FLEET_FILES = ("tpu_vm.yml", "tpu_vm.yaml")

#: The group whose members are allowed to start and stop runs.
LAUNCHER_GROUP = "tpu-run"

#: Groups whose members have full sudo on Debian, Ubuntu and Google's images (google-guest-agent, accounts).
ROOT_GROUPS = ("root", "sudo", "admin", "wheel", "google-sudoers")

#: Groups whose members can become root: by access to raw disks, or to the daemons of Docker and LXD, which run as root
#: (docs.docker.com, "Docker daemon attack surface"; LXD's documentation, "Security").
ROOT_ALIKE_GROUPS = ("disk", "docker", "lxd")


def key_fault(key: str) -> str:
    """Given one line of authorized_keys without options, return its fault, or the empty string."""
    if fault := _entry_fault(key):
        return fault
    kind, _, rest = key.strip().partition(" ")
    if kind.startswith(("/", "~", "./")) or kind.endswith(".pub"):
        return "is a path; give the content of the file, or read the file with lookup('ansible.builtin.file', PATH)"
    if kind not in KEY_TYPES:
        options = set(rest.split()) & KEY_TYPES.keys()
        said = f"starts with '{kind[:40]}', not with a key type such as ssh-ed25519"
        return "has options before the type, which are not supported; give only type and key" if options else said
    try:
        blob = base64.b64decode(rest.strip().split(" ")[0], validate=True)
    except (binascii.Error, ValueError):
        return "has a part after the type that is not base64; copy the whole line of the .pub file"
    return _blob_fault(kind, blob)


def _entry_fault(key: str) -> str:
    """Given one key of a person's list, return why it is not one public key in one line, or the empty string."""
    # This check comes before the check for several lines, which a private key also has.
    if "PRIVATE KEY" in key:
        return "is a private key; give the public key, and create a new key pair"
    if (count := len(TYPE_AND_KEY.findall(key))) > 1:
        return f"contains {count} keys, of which sshd would read only the first; write {count} entries"
    if "\n" in key.strip():
        return "has more than one line; list each key separately"
    return ""


def _blob_fault(kind: str, blob: bytes) -> str:
    """Given a key's type and its decoded bytes, return the fault of the bytes, or the empty string."""
    fields = _fields(blob)
    whole = fields is not None and len(fields) == KEY_TYPES[kind] + 1 and all(fields) and fields[0] == kind.encode()
    if not whole or fields is None or (kind == "ssh-ed25519" and len(fields[1]) != ED25519_BYTES):
        return f"is truncated, or not of the type {kind}; copy the whole line of the .pub file"
    if kind == "ssh-rsa" and int.from_bytes(fields[2], "big").bit_length() < RSA_BITS:
        return f"has fewer than {RSA_BITS} bits, so sshd rejects this key; create another pair: ssh-keygen -t ed25519"
    return ""


def _fields(blob: bytes) -> list[bytes] | None:
    """Split a key's bytes into its fields; return None if the last field is cut off."""
    fields = []
    while blob:
        if len(blob) < 4:
            return None
        (length,) = struct.unpack(">I", blob[:4])
        if len(blob) < 4 + length:
            return None
        fields.append(blob[4 : 4 + length])
        blob = blob[4 + length :]
    return fields


def people_faults(
    lists: dict[str, list[Person]], connecting_user: str = "", place: dict[str, Any] | None = None
) -> list[str]:
    """Return every fault of the lists of people, each with entry, person and key.

    Args:
        lists: Variable -> the people that it lists: users_people and users_more_people.
        connecting_user: The account that Ansible logs in with.
        place: The worker's place, as in `people_here`; None means that all people belong on the worker.
    """
    faults = []
    here = [person for people in lists.values() for person in _belonging(people, place)]
    own_groups = {str(person.get("name")) for person in here if person.get("state", "present") == "present"}
    first: dict[str, str] = {}
    numbers: dict[str, tuple[Any, str]] = {}
    for variable, people in lists.items():
        for position, person in enumerate(people):
            entry, name = f"{variable}[{position}]", str(person.get("name", ""))
            where = f"{entry}: {name}" if name else entry
            faults += [f"{where}: {fault}" for fault in _person_faults(person)]
            if name and person.get("uid") and person.get("state", "present") == "present":
                faults += [f"{where}: {fault}" for fault in _uid_faults(name, person["uid"], entry, numbers)]
            if not _belonging([person], place):
                continue
            faults += [
                f"{where}: groups: {group} is the name of a listed person; choose another name"
                for group in map(str, person.get("groups", []))
                if group in own_groups - {*ROOT_GROUPS, LAUNCHER_GROUP}
            ]
            if name and first.setdefault(name, entry) != entry:
                faults.append(
                    f"{where}: listed twice, first as {first[name]}; remove one of them, or give each its own nodes"
                )
            if person.get("state", "present") == "absent" and name == connecting_user:
                faults.append(
                    f"{where}: state absent would remove the account that this run logs in with;"
                    " connect as another user"
                )
    return faults


def _uid_faults(name: str, uid: Any, entry: str, numbers: dict[str, tuple[Any, str]]) -> list[str]:
    """Return the faults of a person's uid, and add the uid to `numbers`: name -> uid and entry of earlier entries.

    People of all nodes are compared: NFS and disks carry user IDs from node to node.
    """
    if not str(uid).isdigit() or int(uid) not in PEOPLE_UIDS:
        return [f"uid must be a number from {PEOPLE_UIDS[0]} to {PEOPLE_UIDS[-1]}, not {uid}"]
    faults = [
        f"uid {uid} is already the uid of {other} in {place}; give each person a different uid"
        for other, (number, place) in numbers.items()
        if number == int(uid) and other != name
    ]
    number, place = numbers.setdefault(name, (int(uid), entry))
    if number != int(uid):
        faults.append(f"uid {uid} differs from {number} in {place}; a person needs the same uid everywhere")
    return faults


def _person_faults(person: Person) -> list[str]:
    """Return the faults of one person's entry."""
    faults = []
    name = str(person.get("name", ""))
    if not NAME.fullmatch(name) or name in ("root", LAUNCHER_GROUP):
        faults.append(f"name must be a login name other than root and {LAUNCHER_GROUP}; {LETTERS}")
    if not FIELD.fullmatch(str(person.get("comment", ""))):
        faults.append("comment must be one line without a colon")
    if not SHELL.fullmatch(str(person.get("shell", "/bin/bash"))):
        faults.append("shell must be an absolute path")
    for group in map(str, person.get("groups", [])):
        if group in ROOT_GROUPS:
            faults.append(f"groups: {group} makes people root; set sudo: full instead")
        elif group in ROOT_ALIKE_GROUPS and person.get("sudo", "none") != "full":
            faults.append(f"groups: members of {group} can become root; set sudo: full as well, or remove the group")
        elif group == LAUNCHER_GROUP:
            faults.append(f"groups: {group} is the group of sudo: launcher; set sudo: launcher instead")
        elif not NAME.fullmatch(group):
            faults.append(f"groups: '{group[:40]}' is not a group name; {LETTERS}")
    for index, key in enumerate(person.get("keys", [])):
        if fault := key_fault(str(key)):
            faults.append(f"keys[{index}] {fault}")
    return faults


def _belonging(people: list[Person], place: dict[str, Any] | None) -> list[Person]:
    """Return the people who belong on a worker: their entry names its node or a group with it, or neither."""
    if place is None:
        return people
    nodes, groups = set(place["nodes"]), set(place["groups"])

    def here(person: Person) -> bool:
        named, in_groups = person.get("nodes", []), person.get("groups_of_nodes", [])
        return not (named or in_groups) or bool(nodes & set(named)) or bool(groups & set(in_groups))

    return [person for person in people if here(person)]


def people_here(people: list[Person], place: dict[str, Any]) -> list[Person]:
    """Return the people who belong on a worker, each with a value for every key.

    Args:
        people: The entries of users_people and users_more_people.
        place: `nodes`, all names of the worker's node, and `groups`, the inventory's groups that contain the worker.
    """
    return [
        {
            "name": person["name"],
            "comment": person.get("comment", ""),
            "keys": [" ".join(key.split()) for key in person.get("keys", [])],
            "shell": person.get("shell", "/bin/bash"),
            "uid": int(person.get("uid") or 0),
            "sudo": person.get("sudo", "none"),
            "groups": sorted(
                {*person.get("groups", []), *([LAUNCHER_GROUP] if person.get("sudo", "none") != "none" else [])}
            ),
            "state": person.get("state", "present"),
            "home": person.get("home", "keep"),
        }
        for person in _belonging(people, place)
    ]


def people_nowhere(lists: dict[str, list[Person]], groups: dict[str, list[str]]) -> list[str]:
    """Return a warning for each person whose nodes or groups_of_nodes are not in the inventory.

    A missing name is no fault, since its node may be deleted or not yet created; but the name may be misspelt.

    Args:
        lists: Variable -> the people that it lists.
        groups: The inventory's groups, with their hosts.
    """
    # Names of the inventory's groups for nodes, node_NAME; if several nodes have the same name, node_NAME_ZONE.
    nodes = {name.removeprefix("node_") for name in groups if name.startswith("node_")}

    def known(node: str) -> bool:
        group = re.sub(r"[^A-Za-z0-9_]", "_", node)
        return any(name == group or name.startswith(f"{group}_") for name in nodes)

    def hint(name: str, words: list[str]) -> str:
        if name in groups.get("all", []):
            return f"{name} (a worker; name its node)"
        near = difflib.get_close_matches(name, words, 1)
        return f"{name} (did you mean {near[0]}?)" if near else name

    lines = []
    for variable, people in lists.items():
        for position, person in enumerate(people):
            missing = {
                "nodes": [
                    hint(name, [node.replace("_", "-") for node in nodes])
                    for name in person.get("nodes", [])
                    if not known(name)
                ],
                "groups_of_nodes": [
                    hint(name, list(groups)) for name in person.get("groups_of_nodes", []) if name not in groups
                ],
            }
            lines += [
                f"{variable}[{position}]: {person['name']}: {key}: the inventory has no {', '.join(names)}"
                for key, names in missing.items()
                if names
            ]
    return lines


def shell_faults(
    lists: dict[str, list[Person]], place: dict[str, Any], paths: dict[str, str], coming: list[str]
) -> list[str]:
    """Return a fault for each login shell that is missing on a worker and that no package of this run can install.

    Args:
        lists: Variable -> the people that it lists.
        place: The worker's place, as in `people_here`.
        paths: The worker's fact `paths`: path -> executable, there or missing.
        coming: Packages that will be installed before the accounts are created, `facts_coming_packages`.
    """
    return [
        f"{where}: shell {shell} does not exist, and no package that this playbook installs brings it; add its package"
        " to shell_packages and run site.yml, or choose another shell"
        for where, shell in _lacking(lists, place, paths)
        if _no_package_brings(shell, coming)
    ]


def shell_warnings(
    lists: dict[str, list[Person]], place: dict[str, Any], paths: dict[str, str], coming: list[str]
) -> list[str]:
    """Return a warning for each missing login shell that packages of this run may install; see `shell_faults`."""
    return [
        f"{where}: shell {shell} does not exist yet; unless one of {', '.join(coming)} installs the shell, the worker"
        " will be refused"
        for where, shell in _lacking(lists, place, paths)
        if not _no_package_brings(shell, coming) and shell.rpartition("/")[2] not in coming
    ]


def _lacking(lists: dict[str, list[Person]], place: dict[str, Any], paths: dict[str, str]) -> list[tuple[str, str]]:
    """Return entry and login shell of people with state present whose shell is not executable on the worker."""
    return [
        (f"{variable}[{position}]: {person.get('name')}", person["shell"])
        for variable, people in lists.items()
        for position, person in enumerate(people)
        if person.get("state", "present") == "present"
        and _belonging([person], place)
        and paths.get(person.get("shell", ""), "executable") != "executable"
    ]


def _no_package_brings(shell: str, coming: list[str]) -> bool:
    directory, _, name = shell.rpartition("/")
    return not coming or (name in SHELLS and directory in SHELL_DIRECTORIES and name not in coming)


def account_faults(lists: dict[str, list[Person]], place: dict[str, Any], worker: dict[str, Any]) -> list[str]:
    """Return a fault for each person who conflicts with the accounts or groups of a worker.

    Args:
        lists: Variable -> the people that it lists.
        place: The worker's place, as in `people_here`.
        worker: The worker's facts `accounts` and `groups`.
    """
    return [
        f"{variable}[{position}]: {person.get('name')}: {fault}"
        for variable, people in lists.items()
        for position, person in enumerate(people)
        if _belonging([person], place)
        for fault in _account_faults(person, worker["accounts"], worker["groups"])
    ]


def _account_faults(person: Person, accounts: dict[str, Any], groups: dict[str, Any]) -> list[str]:
    name, uid = str(person.get("name", "")), str(person.get("uid", ""))
    number = accounts[name]["uid"] if name in accounts else None
    if number is not None and number not in PEOPLE_UIDS:
        return [f"is a system account (uid {number}); choose another name"]
    if person.get("state", "present") == "absent":
        return []
    faults = []
    if number is None and name in groups:
        # useradd could not create the account's own group, and would use the group that all accounts without their own
        # share.
        faults.append(
            "a group of this name exists, but no account of this name; choose another name, or remove the group:"
            f" groupdel {name}"
        )
    if not uid.isdigit() or not int(uid):
        return faults
    owner = next((other for other, account in accounts.items() if account["uid"] == int(uid)), name)
    if number not in (None, int(uid)):
        faults.append(
            f"uid: the account has uid {number} on this worker, the list says {uid}; list {number}, or change the"
            f" account while {name} has no processes: usermod --uid {uid} {name}, and chown the person's files outside"
            " the home"
        )
    elif owner != name:
        faults.append(
            f"uid: {uid} belongs to {owner} on this worker; choose another uid, or remove {owner} in a separate run"
            " before"
        )
    return faults


def removal_faults(names: list[str], connecting_user: str = "", fleet_file: str | None = None) -> list[str]:
    """Return the faults of users_remove_metadata_keys.

    Args:
        names: The login names in users_remove_metadata_keys.
        connecting_user: The account that Ansible logs in with.
        fleet_file: The inventory file of a node's worker, with the settings for the API. None for a host that is not
            part of a node and so has no metadata.
    """
    faults = []
    if names and fleet_file is not None and not fleet_file.endswith(FLEET_FILES):
        faults.append(
            f"users_remove_metadata_keys: the API needs the settings of the fleet's tpu_vm.yml, but this worker"
            f" is from {fleet_file or 'no file'}; pass the fleet's inventory/tpu_vm.yml with -i"
        )
    for position, name in enumerate(names):
        where = f"users_remove_metadata_keys[{position}]: {name}"
        if not NAME.fullmatch(str(name)):
            faults.append(f"{where}: is not a login name; {LETTERS}")
        elif name == connecting_user:
            faults.append(
                f"{where}: this run logs in with this account, perhaps with a key from the metadata; connect as another"
                " user"
            )
    return faults


class FilterModule:
    """Filters of the role users that check the list."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "account_faults": account_faults,
            "people_faults": people_faults,
            "people_here": people_here,
            "people_nowhere": people_nowhere,
            "removal_faults": removal_faults,
            "shell_faults": shell_faults,
            "shell_warnings": shell_warnings,
        }
