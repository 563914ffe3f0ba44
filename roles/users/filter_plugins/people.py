"""Filters that judge the people of a fleet; no effects, so that their tests are tables."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from typing import Any

Person = dict[str, Any]

#: What useradd of Debian and Ubuntu accepts without being forced.
NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")

#: Key types that OpenSSH 8.2 to 10 accept for logging in (ssh-keygen(1); ssh-dss left in 7.0).
KEY_TYPES = (
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)

#: The group whose members may start and stop runs.
LAUNCHER_GROUP = "tpu-run"


def key_fault(key: str) -> str:
    """Given one line of authorized_keys without options, return what is wrong with it, or the empty string."""
    if "\n" in key.strip():
        return "more than one line"
    if "PRIVATE KEY" in key:
        return "this is a private key; give the public one, and replace the pair"
    kind, _, rest = key.strip().partition(" ")
    if kind not in KEY_TYPES:
        return f"starts with '{kind[:40]}', not with a key type such as ssh-ed25519"
    try:
        blob = base64.b64decode(rest.split(" ")[0], validate=True)
    except (binascii.Error, ValueError):
        return "the part after the type is not base64"
    name = kind.encode()
    head = struct.pack(">I", len(name)) + name
    if not blob.startswith(head) or len(blob) < len(head) + 32:
        return f"is cut off, or not of the type {kind}"
    return ""


def people_faults(people: list[Person], connecting_user: str = "") -> list[str]:
    """Given users_people and the account Ansible logs in with, return every fault, each with person and key."""
    faults = []
    seen: set[str] = set()
    for position, person in enumerate(people):
        name = str(person.get("name", ""))
        where = name or f"[{position}]"
        if not NAME.fullmatch(name) or name == "root":
            faults.append(f"{where}: name must be a login name of small letters, digits, - and _, and not root")
        if name in seen:
            faults.append(f"{where}: listed twice")
        seen.add(name)
        if person.get("state", "present") == "absent" and name == connecting_user:
            faults.append(
                f"{where}: state absent would remove the account that this run logs in with; connect as another user"
            )
        for index, key in enumerate(person.get("keys", [])):
            if fault := key_fault(str(key)):
                faults.append(f"{where}: keys[{index}] {fault}")
    return faults


def people_present(people: list[Person]) -> list[Person]:
    """Return those who have an account."""
    return [person for person in people if person.get("state", "present") == "present"]


def person_groups(person: Person) -> list[str]:
    """Return the groups that a person is put into."""
    launcher = [LAUNCHER_GROUP] if person.get("sudo", "none") != "none" else []
    return sorted({*person.get("groups", []), *launcher})


def people_groups(people: list[Person]) -> list[str]:
    """Return every group that someone present is put into."""
    return sorted({group for person in people_present(people) for group in person_groups(person)})


def people_changes(people: list[Person], accounts: dict[str, Any]) -> list[Person]:
    """Given users_people and what the module `accounts` found, return those present whose account differs."""

    def differs(person: Person) -> bool:
        account = accounts["users"].get(person["name"])
        return account is None or not (
            account["home_exists"]
            and account["shell"] == person.get("shell", "/bin/bash")
            and account["comment"] == person.get("comment", "")
            and set(person_groups(person)) <= set(account["groups"])
        )

    return [person for person in people_present(people) if differs(person)]


def people_leaving(people: list[Person], accounts: dict[str, Any]) -> list[str]:
    """Return the names of those who are to be absent and still have an account."""
    return [
        person["name"]
        for person in people
        if person.get("state", "present") == "absent" and person["name"] in accounts["users"]
    ]


def people_keys(people: list[Person]) -> dict[str, list[str]]:
    """Return the keys of everyone present by name."""
    return {person["name"]: [key.strip() for key in person.get("keys", [])] for person in people_present(people)}


class FilterModule:
    """Filters of the role users."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "people_changes": people_changes,
            "people_faults": people_faults,
            "people_groups": people_groups,
            "people_keys": people_keys,
            "people_leaving": people_leaving,
            "people_present": people_present,
            "person_groups": person_groups,
        }
