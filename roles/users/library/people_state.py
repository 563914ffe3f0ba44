#!/usr/bin/python
"""Module that reads the state of a worker's accounts for the role users in one call; runs on Python 3.8."""

from __future__ import annotations

import base64
import binascii
import contextlib
import grp
import hashlib
import os
import pwd
import re
import stat
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.homes import home_owner, ownerless, usual_home
from ansible.module_utils.sshd_keys import keys_fault, proof_fault
from ansible.module_utils.worker import output

DOCUMENTATION = r"""
module: people_state
short_description: Read homes, keys, sudo rules and sshd's configuration of a worker in one call
options:
  people:
    description: The listed people, each with C(name), C(keys), C(shell), C(sudo) and C(state).
    type: list
    elements: dict
    required: true
  connecting_user:
    description: Account that Ansible logs in with; its keys are read as well.
    type: str
    default: ""
  keys_directory:
    description: Directory of the role's files of keys.
    type: path
    required: true
  sudoers:
    description: The role's own file of sudo rules.
    type: path
    required: true
  sshd_file:
    description: The role's own file of sshd's configuration.
    type: path
    required: true
  prove:
    description: Whether to fail if sshd would not read O(keys_directory) after a reload.
    type: bool
    default: false
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Read the state
  people_state:
    people:
      - {name: ada, keys: [], shell: /bin/bash, sudo: none, state: present}
    keys_directory: /etc/ssh/authorized_keys.d
    sudoers: /etc/sudoers.d/people
    sshd_file: /etc/ssh/sshd_config.d/20-people.conf
"""

RETURN = r"""
expired:
  description: People whose account has expired, which prevents logins.
  type: list
  returned: always
homeless:
  description: People whose account has no home.
  type: list
  returned: always
missing_shells:
  description: Login shells of people present that the worker cannot execute.
  type: list
  returned: always
ownerless_homes:
  description: People whose home is closed, as homes are kept when people leave, or belongs to a uid without an account.
  type: list
  returned: always
taken_homes:
  description: By name of an account that does not exist yet, the owner of the directory at the path of its future home.
  type: dict
  returned: always
numbered_homes:
  description: By name of people present, the uid without an account that their home belongs to.
  type: dict
  returned: always
key_files:
  description: Names of the role's own files in the keys directory.
  type: list
  returned: always
foreign_key_files:
  description: Names in the keys directory that are not the role's files.
  type: list
  returned: always
given_groups:
  description: By name, further groups that the role gave, from the person's file in the keys directory.
  type: dict
  returned: always
role_keys:
  description: Keys of the connecting user in the keys directory.
  type: list
  returned: always
home_keys:
  description: Keys of the connecting user in its home.
  type: list
  returned: always
role_sudo:
  description: People who have sudo through the role's own file.
  type: list
  returned: always
other_sudo:
  description: Users and %groups that other files allow to execute everything without a password.
  type: list
  returned: always
sshd_keys_files:
  description: Where sshd would look for keys after a restart.
  type: list
  returned: always
other_keys_files:
  description: Those of them that are neither ~/.ssh/authorized_keys nor the role's.
  type: list
  returned: always
keys_fault:
  description: Why sshd would ignore the directory in O(sshd_file), and the fix; empty if sshd would use it.
  type: str
  returned: always
sshd_behind:
  description: Whether sshd last read its configuration before the role's file was written.
  type: bool
  returned: always
foreign:
  description: >-
    By login name, what the role does not change. C(agent) and C(own) are keys in the home that are not in the person's
    list, written by Google's guest agent and by others. C(root) lists rights of root beyond those in the list: users
    and %groups of sudo rules, and groups as good as root. Left out are rules that ask for a password if the account has
    none, groups that the role takes back, and groups of O(connecting_user).
  type: dict
  returned: always
"""

#: The line before each key that Google's guest agent has written (google-guest-agent, non_windows_accounts.go).
AGENT_MARK = "# Added by Google"
KEY = re.compile(r"(?:^|[\s,])((?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]+)\s+([A-Za-z0-9+/]+=*)(?:\s+(.*))?$")
#: The beginning of each file that the role writes.
HEADER = "# Written by Ansible"
#: The file below a home in which sshd looks for keys, and to which the guest agent writes.
HOME_KEYS = ".ssh/authorized_keys"
#: The line in a person's file of keys that names the groups that the role gave to the person.
GROUPS = re.compile(r"^# Groups: (.+)$", re.MULTILINE)
#: A sudo rule that allows every command.
SUDO_ALL = re.compile(r"^(\S+)\s+\S+\s*=.*(?:[\s:,)])ALL\s*$")
#: The tags of a sudo rule that decide whether sudo asks for a password. The last tag of a rule counts; for a rule
#: without a tag, the Defaults lines decide (sudoers(5)).
PASSWORD_TAG = re.compile(r"\b(NO)?PASSWD\s*:")
DEFAULTS = re.compile(r"^Defaults(?::\s*(\S+))?\s+(.*)$")
#: Groups whose members can become root, as in the filter `people_faults`. Google's guest agent adds each account that
#: it creates to docker and lxd, and never removes it from them (google-guest-agent, non_windows_accounts.go).
ROOT_ALIKE_GROUPS = ("disk", "docker", "lxd")
SUDOERS = "/etc/sudoers"
SHADOW = "/etc/shadow"
#: sshd's pid file, which sshd writes each time it reads its configuration.
PID_FILE = "/run/sshd.pid"
LARGEST = 1 << 20


def read(path: str) -> str:
    """Return the text of a regular file; empty if it is not a regular file, is too large or cannot be read."""
    try:
        # O_PATH opens nothing: a person may have put a link to a device here, and opening a device can have effects,
        # such as starting a watchdog.
        place = os.open(path, os.O_PATH)
        try:
            entry = os.fstat(place)
            if not stat.S_ISREG(entry.st_mode) or entry.st_size > LARGEST:
                return ""
            with open("/proc/self/fd/%d" % place, "rb") as stream:
                return stream.read(LARGEST + 1).decode(errors="replace")
        finally:
            os.close(place)
    except OSError:
        return ""


def authorized_keys(text: str) -> list[dict[str, Any]]:
    """Given the text of an authorized_keys file, return C(key), C(comment) and C(agent) of each key.

    C(agent) is whether Google's guest agent wrote the key.
    """
    keys = []
    agent = False
    for line in text.splitlines():
        if line.strip() == AGENT_MARK:
            agent = True
            continue
        found = None if line.lstrip().startswith("#") else KEY.search(line.strip())
        if found:
            keys.append({"key": "%s %s" % found.group(1, 2), "comment": found.group(3) or "", "agent": agent})
        agent = False
    return keys


def described(key: dict[str, Any]) -> str:
    """Return fingerprint and comment of a key, with the comment as one line of printable ASCII."""
    try:
        blob = base64.b64decode(key["key"].split()[1], validate=True)
    except (binascii.Error, ValueError):
        return "a damaged key"
    fingerprint = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    comment = "".join(letter for letter in key["comment"] if letter.isprintable())[:60].strip()
    return "SHA256:%s%s" % (fingerprint, " (%s)" % comment if comment else "")


def sudo_rules(text: str) -> list[str]:
    """Given a sudoers text, return the users and %groups who may run every command."""
    found = [SUDO_ALL.match(line) for line in sudo_lines(text)]
    return sorted({rule.group(1) for rule in found if rule})


def unasked_rules(text: str) -> list[str]:
    """Given a sudoers text, return the users and %groups who may run every command without a password."""
    lines = sudo_lines(text)
    found = set()
    for rule in filter(None, map(SUDO_ALL.match, lines)):
        tags = PASSWORD_TAG.findall(rule.group(0))
        if tags[-1] if tags else not authenticates(rule.group(1), lines):
            found.add(rule.group(1))
    return sorted(found)


def authenticates(who: str, lines: list[str]) -> bool:
    """Given lines of sudoers, return whether sudo asks a user or %group for a password in rules without a tag."""
    asked = True
    for names, settings in (found.groups() for found in map(DEFAULTS.match, lines) if found):
        for setting in (part.strip() for part in settings.split(",")):
            if setting in ("authenticate", "!authenticate") and (names is None or who in names.split(",")):
                asked = setting == "authenticate"
    return asked


def sudo_lines(text: str) -> list[str]:
    """Return the lines of a sudoers text without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if not line.lstrip().startswith("#")]


def other_sudoers(own: str) -> str:
    """Return the text of all of sudo's files except the role's own."""
    folder = os.path.dirname(own)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if "." not in name and not name.endswith("~")]
    return "\n".join(read(path) for path in [SUDOERS] + paths if path != own)


def with_password(text: str) -> list[str]:
    """Given the text of /etc/shadow, return the accounts with a usable password (shadow(5))."""
    fields = [line.split(":") for line in text.splitlines()]
    return [entry[0] for entry in fields if len(entry) > 1 and not entry[1].startswith(("!", "*"))]


def expired_accounts(text: str, today: int) -> list[str]:
    """Given the text of /etc/shadow and today as days since 1970-01-01, return the expired accounts."""
    fields = [line.split(":") for line in text.splitlines()]
    return [entry[0] for entry in fields if len(entry) > 7 and entry[7].isdigit() and int(entry[7]) <= today]


def read_accounts(names: list[str]) -> dict[str, pwd.struct_passwd]:
    """Return the accounts of these names; names without an account are left out."""
    accounts = {}
    for name in names:
        try:
            accounts[name] = pwd.getpwnam(name)
        except KeyError:
            continue
    return accounts


def given_groups(directory: str, names: list[str]) -> dict[str, list[str]]:
    """Read the groups that the role gave to people from its files of keys: person -> groups."""
    found = {name: GROUPS.search(read(os.path.join(directory, name))) for name in names}
    return {name: match[1].split() for name, match in found.items() if match}


def sshd_keys_files() -> list[str]:
    """Return the files in which sshd would look for keys after a restart, apart from Match rules for single users."""
    told = output("/usr/sbin/sshd", "-T", "-C", "user=nobody,host=localhost,addr=127.0.0.1")
    found = [line.split()[1:] for line in told.splitlines() if line.startswith("authorizedkeysfile ")]
    return found[0] if found else []


def other_keys_files(listed: list[str], own_text: str, directory: str) -> list[str]:
    """Return the files of keys in sshd's configuration that are not the role's, so that the role keeps them there.

    Args:
        listed: All files in which sshd looks for keys.
        own_text: The text of the role's file for sshd. Its last word is the path of the role's files of keys, which may
            still be in an earlier directory.
        directory: The role's directory of keys.
    """
    words = own_text.split() if own_text.startswith(HEADER) else []
    own = {"none", HOME_KEYS, directory + "/%u", *words[-1:]}
    return [path for path in listed if path not in own]


def taken_homes(names: list[str]) -> dict[str, str]:
    """Given people without an account, return person -> owner of the future home, if this exists and is not root's."""
    found = {}
    for name in names:
        owner = home_owner(usual_home(name))
        if owner:
            with contextlib.suppress(KeyError):
                found[name] = pwd.getpwuid(owner).pw_name
    return found


def sshd_behind(path: str) -> bool:
    """Return whether a file of sshd's configuration has changed since sshd last read its configuration."""
    try:
        written, loaded = os.stat(path).st_mtime, os.stat(PID_FILE).st_mtime
    except OSError:
        return False
    # A modification time in the future means that the clock was set back; then the two times cannot be compared.
    return loaded < written <= time.time()


def foreign(
    person: dict[str, Any],
    groups: list[str],
    home_keys: list[dict[str, Any]],
    rules: list[str],
    alike: list[str],
) -> dict[str, Any]:
    """Return the keys and rights that an account has although the list does not give them to the person.

    Args:
        person: An entry of the module's option `people`.
        groups: The groups of the account.
        home_keys: The keys in the account's home.
        rules: Users and %groups who may run every command with sudo.
        alike: The account's groups whose members can become root and that the role does not take back.
    """
    absent = person["state"] == "absent"
    hers = set() if absent else {" ".join(key.split()[:2]) for key in person["keys"]}
    others = [key for key in home_keys if key["key"] not in hers]
    granted = {person["name"]} | {"%" + group for group in groups}
    found = {
        "agent": sorted({described(key) for key in others if key["agent"]}),
        # Other keys of an absent person give no access without an account; only the guest agent's keys could recreate
        # the account.
        "own": [] if absent else sorted({described(key) for key in others if not key["agent"]}),
        "root": [] if absent or person["sudo"] == "full" else sorted(granted & set(rules) | set(alike)),
    }
    return dict(found, state=person["state"]) if any(found.values()) else {}


def root_alike(name: str, groups: list[str], given: list[str], connecting_user: str) -> list[str]:
    """Return an account's groups whose members can become root, except those that the role gave and takes back.

    The result is empty for the account that Ansible logs in with, since this account has full sudo in any case.
    """
    return [] if name == connecting_user else sorted(set(groups) & set(ROOT_ALIKE_GROUPS) - set(given))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "people": {"type": "list", "elements": "dict", "required": True},
            "connecting_user": {"type": "str", "default": ""},
            "keys_directory": {"type": "path", "required": True, "no_log": False},
            "sudoers": {"type": "path", "required": True},
            "sshd_file": {"type": "path", "required": True},
            "prove": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    people, directory, user = (module.params[key] for key in ("people", "keys_directory", "connecting_user"))
    names = sorted({person["name"] for person in people} | ({user} if user else set()))
    accounts = read_accounts(names)
    shadow = read(SHADOW)
    expired = expired_accounts(shadow, int(time.time() // 86400))
    entries = grp.getgrall()
    groups = {name: [group.gr_name for group in entries if name in group.gr_mem] for name in accounts}
    homes = {name: account.pw_dir for name, account in accounts.items()}
    in_homes = {name: authorized_keys(read(os.path.join(home, HOME_KEYS))) for name, home in homes.items()}
    sudoers = other_sudoers(module.params["sudoers"])
    every, unasked, passwords = sudo_rules(sudoers), unasked_rules(sudoers), with_password(shadow)
    present = [person for person in people if person["state"] == "present"]
    found_files = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    key_files = [name for name in found_files if read(os.path.join(directory, name)).startswith(HEADER)]
    given = given_groups(directory, key_files)
    left = {
        name: foreign(
            person,
            groups[name],
            in_homes[name],
            every if name in passwords else unasked,
            root_alike(name, groups[name], given.get(name, []), user),
        )
        for person, name in ((each, each["name"]) for each in people)
        if name in accounts
    }
    listed = sshd_keys_files()
    own, wanted = module.params["sshd_file"], directory + "/%u"
    fault = proof_fault(own, wanted, listed) if module.params["prove"] else ""
    if fault:
        module.fail_json(msg=fault)
    ownerless_homes = [name for name in names if ownerless(name, homes.get(name, usual_home(name)))]
    owners = {
        person["name"]: home_owner(homes.get(person["name"], usual_home(person["name"])))
        for person in present
        if person["name"] in ownerless_homes
    }
    module.exit_json(
        changed=False,
        expired=[name for name in names if name in expired],
        homeless=[name for name, home in homes.items() if not os.path.isdir(home)],
        missing_shells=sorted({p["shell"] for p in present if not os.access(p["shell"], os.X_OK)}),
        ownerless_homes=ownerless_homes,
        taken_homes=taken_homes([person["name"] for person in present if person["name"] not in accounts]),
        numbered_homes={name: owner for name, owner in owners.items() if owner},
        key_files=key_files,
        foreign_key_files=[name for name in found_files if name not in key_files],
        given_groups=given,
        role_keys=[key["key"] for key in authorized_keys(read(os.path.join(directory, user)))] if user else [],
        home_keys=[key["key"] for key in in_homes.get(user, [])],
        role_sudo=sudo_rules(read(module.params["sudoers"])),
        other_sudo=unasked,
        sshd_keys_files=listed,
        other_keys_files=other_keys_files(listed, read(own), directory),
        keys_fault="" if wanted in listed else keys_fault(own, wanted),
        sshd_behind=sshd_behind(own),
        foreign={name: found for name, found in left.items() if found},
    )


if __name__ == "__main__":
    main()
