"""Filters that check users_groups; no side effects, so that their tests are tables."""

from __future__ import annotations

import re
from typing import Any

Group = dict[str, Any]

#: Names that groupadd of Debian and Ubuntu accepts without --force-badname.
NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")

#: Group IDs for users_groups: IDs below 100 are reserved by the distribution (Debian Policy 9.2.2).
NUMBERS = range(100, 60000)

#: Names that users_groups must not contain: groups that mean root, and the launcher's group, which the role launcher
#: creates.
TAKEN = ("root", "sudo", "admin", "wheel", "google-sudoers", "tpu-run")


def people_groups(people: list[dict[str, Any]], listed: list[Group], there: list[str]) -> list[Group]:
    """Return name and gid of every group to create, for users_groups and people with state present; 0 means any gid.

    Args:
        people: The people who belong on the worker.
        listed: users_groups.
        there: Existing groups, which are left out.
    """
    numbers = {str(group["name"]): int(group["gid"]) for group in listed}
    named = {group for person in people if person["state"] == "present" for group in person["groups"]}
    return [{"name": name, "gid": numbers.get(name, 0)} for name in sorted({*named, *numbers} - set(there))]


def group_faults(
    listed: list[Group], lists: dict[str, list[dict[str, Any]]], gids: dict[str, int], accounts: dict[str, Any]
) -> list[str]:
    """Return the faults of users_groups.

    Args:
        listed: users_groups.
        lists: Variable -> the people in it.
        gids: The worker's fact: group -> gid.
        accounts: The worker's fact: account -> uid and more.
    """
    faults = []
    names: dict[str, int] = {}
    numbers: dict[str, str] = {}
    people = {str(person.get("name")) for everybody in lists.values() for person in everybody}
    uids = {
        str(person["uid"]): f"the uid of {person.get('name')} in {variable}[{position}]"
        for variable, everybody in lists.items()
        for position, person in enumerate(everybody)
        if person.get("uid")
    }
    for position, group in enumerate(listed):
        name, gid = str(group.get("name", "")), str(group.get("gid", ""))
        where = f"users_groups[{position}]: {name}"
        faults += [f"{where}: {fault}" for fault in _faults(name, gid, people)]
        if names.setdefault(name, position) != position:
            faults.append(f"{where}: listed twice, first as users_groups[{names[name]}]; remove one of them")
        elif numbers.setdefault(gid, name) != name:
            faults.append(f"{where}: gid {gid} is already the gid of {numbers[gid]}; give each group a different gid")
        elif gid in uids:
            # useradd gives a person's own group the uid of the account as its gid.
            faults.append(f"{where}: gid {gid} is {uids[gid]}, whose own group gets this number; choose another gid")
        else:
            faults += [f"{where}: {fault}" for fault in _conflicts(name, gid, gids, accounts)]
    return faults


def _faults(name: str, gid: str, people: set[str]) -> list[str]:
    faults = []
    if not NAME.fullmatch(name) or name in TAKEN:
        taken = ", ".join(TAKEN[:-1])
        faults.append(
            f"name must be a group name other than {taken} and {TAKEN[-1]}; use at most 32 lowercase letters, digits, -"
            " and _, not starting with a digit or -"
        )
    elif name in people:
        faults.append("the name is that of a listed person; choose another name")
    if not gid.isdigit() or int(gid) not in NUMBERS:
        faults.append(f"gid must be a number from {NUMBERS[0]} to {NUMBERS[-1]}, not {gid}")
    return faults


def _conflicts(name: str, gid: str, gids: dict[str, int], accounts: dict[str, Any]) -> list[str]:
    """Return the conflicts of a group with the worker's groups and accounts."""
    has = gids.get(name)
    if has is not None and str(has) != gid:
        way = f"groupmod --gid {gid} {name}, and find / -xdev -gid {has} -exec chgrp -h {name} {{}} +"
        what = f"gid: the group has gid {has} on this worker, users_groups says {gid}"
        return [f"{what}; list {has}, or change the group while nobody works in it: {way}"]
    owner = next((other for other, number in gids.items() if str(number) == gid), name)
    if owner != name:
        return [f"gid: {gid} belongs to the group {owner} on this worker; choose another gid"]
    if name in accounts:
        return ["the name is that of an account on this worker; choose another name"]
    return []


class FilterModule:
    """Filters of the role users on groups."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"group_faults": group_faults, "people_groups": people_groups}
