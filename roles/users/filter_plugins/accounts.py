"""Filters that compare the listed people with a worker's accounts; no side effects, so that their tests are tables.

Arguments called people are the result of the filter `people_here`, those called state the result of the module
`people_state`. Accounts and groups are facts of the worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Person = dict[str, Any]
State = dict[str, Any]

LAUNCHER_GROUP = "tpu-run"

HEADER = "# Written by Ansible; changes are lost.\n"

#: Beginning of a line in a person's file of keys. The line names the groups that the role gave, so that it can take
#: them back.
GROUPS_LINE = "# Groups: "


def _present(people: list[Person]) -> list[Person]:
    return [person for person in people if person["state"] == "present"]


def people_changes(people: list[Person], worker: dict[str, Any], state: State) -> list[Person]:
    """Return the accounts to create or correct, as arguments of ansible.builtin.user.

    These are the accounts of present people that differ from the list, and those of unlisted people who are still in
    the launcher's group or in another group that the list gave them.

    Args:
        people: The people who belong on the worker.
        worker: The worker's facts `accounts` and `groups`, and `skip_done`: whether to leave out people whose account
            matches the list.
        state: The result of the module `people_state`.
    """
    accounts, changes = worker["accounts"], []
    for person in _present(people):
        account = accounts.get(person["name"])
        if account is not None and worker["skip_done"] and not _differs(person, account, state):
            continue
        has = set(account["groups"]) if account else set()
        loses = has & _given(person["name"], state) - set(person["groups"])
        changes.append(
            {key: person[key] for key in ("name", "comment", "shell")}
            | ({"uid": person["uid"]} if person["uid"] else {})
            | {
                "groups": sorted(has - loses | set(person["groups"]) if loses else set(person["groups"])),
                # Groups that the role did not give are kept.
                "append": not loses,
                "expired": person["name"] in state["expired"],
                "returns": person["name"] in state["ownerless_homes"],
            }
        )
    # Absent people are not changed here: the removal of an account also removes its groups.
    listed = {person["name"] for person in people}
    for name in sorted({*worker["groups"].get(LAUNCHER_GROUP, []), *state["given_groups"]} - listed):
        loses = set(accounts[name]["groups"]) & _given(name, state) if name in accounts else set()
        if loses:
            groups = sorted(set(accounts[name]["groups"]) - loses)
            changes.append({"name": name, "groups": groups, "append": False, "expired": False, "returns": False})
    return changes


def _given(name: str, state: State) -> set[str]:
    """Return the groups that the role gave a person, and takes back if they are no longer listed."""
    return {LAUNCHER_GROUP, *state["given_groups"].get(name, [])}


def _differs(person: Person, account: dict[str, Any], state: State) -> bool:
    name, has = person["name"], set(account["groups"])
    return (
        name in {*state["homeless"], *state["expired"], *state["ownerless_homes"]}
        or account["shell"] != person["shell"]
        or account["comment"] != person["comment"]
        or not set(person["groups"]) <= has
        or bool(has & _given(name, state) - set(person["groups"]))
    )


def people_leaving(people: list[Person], worker: dict[str, Any], state: State) -> list[dict[str, str]]:
    """Return name and option `home` of people with state absent who still have an account, or a home to remove.

    Without `skip_done`, return all people who should be absent.
    """
    return [
        {"name": person["name"], "home": person["home"]}
        for person in people
        if person["state"] == "absent"
        and (
            not worker["skip_done"]
            or person["name"] in worker["accounts"]
            or (person["home"] != "keep" and person["name"] in state["ownerless_homes"])
        )
    ]


def key_files(people: list[Person], state: State, directory: str) -> list[dict[str, str]]:
    """Return the directory of keys and the role's files in it, as entries of the module managed_files.

    Files of others in this directory stay, unless they have the name of a listed person.
    """
    files = {
        person["name"]: _groups_line(person) + "".join(f"{key}\n" for key in person["keys"])
        for person in _present(people)
    }
    leaving = {person["name"] for person in people} - set(files)
    stale = sorted({*state["key_files"], *leaving.intersection(state["foreign_key_files"])} - set(files))
    return [
        {"path": directory, "state": "directory", "mode": "0755"},
        *({"path": f"{directory}/{name}", "state": "absent"} for name in stale),
        *({"path": f"{directory}/{name}", "content": HEADER + text} for name, text in sorted(files.items())),
    ]


def _groups_line(person: Person) -> str:
    groups = [group for group in person["groups"] if group != LAUNCHER_GROUP]
    return f"{GROUPS_LINE}{' '.join(groups)}\n" if groups else ""


def people_sudoers(people: list[Person]) -> str:
    """Return the text of the role's sudo rules."""
    rules = [f"{person['name']} ALL=(ALL:ALL) NOPASSWD: ALL\n" for person in _present(people) if _full(person)]
    return HEADER + "# People with sudo: full. The launcher's own rule is in another file.\n" + "".join(rules)


def _full(person: Person) -> bool:
    return bool(person["sudo"] == "full")


def people_refusals(
    people: list[Person], worker: dict[str, Any], state: State, connecting_user: str = "", own_keys: Iterable[str] = ()
) -> list[str]:
    """Return the reasons not to change this worker, each with the person and the key of the entry.

    Args:
        people: The people who belong on the worker.
        worker: The worker's facts `accounts`.
        state: The result of the module `people_state`.
        connecting_user: The account that Ansible logs in with.
        own_keys: The known public keys with which Ansible may log in; at least one of them must stay.
    """
    accounts = worker["accounts"]
    faults = [
        f"{name}: the home of the new account would be /home/{name}, which belongs to {owner}; move that directory"
        " away, or choose another name"
        for name, owner in state["taken_homes"].items()
    ]
    faults += [state["keys_fault"]] if state["keys_fault"] else []
    me = next((person for person in _present(people) if person["name"] == connecting_user), None)
    way = "this run logs in with this account; connect as another user, or keep what would be removed"
    before = {*state["role_keys"], *state["home_keys"]}
    after = {*state["home_keys"], *(" ".join(line.split()[:2]) for line in me["keys"])} if me else {*state["home_keys"]}
    # ssh does not tell which of these keys this run used.
    mine = before.intersection(" ".join(key.split()[:2]) for key in own_keys)
    if before and (not after or (mine and not mine & after)):
        faults.append(f"{connecting_user}: keys: the key of this account would be removed; {way}")
    others = {connecting_user, *(f"%{group}" for group in accounts.get(connecting_user, {}).get("groups", []))}
    keeps = (me is not None and _full(me)) or others & set(state["other_sudo"])
    if connecting_user in state["role_sudo"] and not keeps:
        faults.append(f"{connecting_user}: sudo: this account would no longer be able to become root; {way}")
    return faults


def nobody_refusals(everybody: list[Person], state: State) -> list[str]:
    """Return why an empty list of people is rejected, if the role has given people access to this worker.

    Nobody means to remove everybody by an empty list: probably the variables of another fleet or a new directory are in
    use.

    Args:
        everybody: The entries of users_people and users_more_people for all nodes.
        state: The result of the module `people_state`.
    """
    names = sorted({*state["key_files"], *state["role_sudo"]})
    if everybody or not names:
        return []
    lost = f"users_people lists nobody, and {', '.join(names)} would lose access"
    way = "the variables of this worker's fleet (the inventory's group_vars; TPU_OPS_FLEET)"
    return [f"{lost}; check that this run uses {way}, or list the people who leave with state: absent"]


def metadata_people(people: list[Person], names: list[str]) -> dict[str, list[str]]:
    """For each of these login names, return the person's keys in the list: these stay in the node's metadata."""
    return {
        name: [
            " ".join(key.split()[:2]) for person in _present(people) if person["name"] == name for key in person["keys"]
        ]
        for name in names
    }


def people_report(workers: Mapping[str, Mapping[str, Any]], directory: str) -> list[str]:
    """Return a line for each key, right and file of people that the role does not change, with the way to change it.

    Args:
        workers: The workers' variables by the workers' names.
        directory: The role's directory of keys.
    """
    hosts: dict[str, list[str]] = {}
    agents: set[str] = set()
    taken = _taken(workers)
    for host, variables in workers.items():
        state = variables.get("__users_state", {})
        lines = [
            f"{directory}/{name} does not belong to this role and stays; list the person in users_people, or remove the"
            " file"
            for name in state.get("foreign_key_files", [])
        ]
        lines += [
            f"{name}: the home belonged to uid {number}, which no account has; the role gives it to {name} with"
            " everything in it"
            for name, number in state.get("numbered_homes", {}).items()
        ]
        for name, found in state.get("foreign", {}).items():
            agent = [] if (variables.get("tpu_node_label"), name) in taken else found["agent"]
            lines += _foreign_lines(name, found | {"agent": agent})
            agents.update([name] if agent else [])
        for line in lines:
            hosts.setdefault(line, []).append(host)
    asked = json.dumps({"users_remove_metadata_keys": sorted(agents)})
    way = (
        "the guest agent gets its keys from ssh-keys in the metadata. To remove these people's keys from the nodes'"
        f" metadata: ansible-playbook playbooks/users.yml -e '{asked}'. Keys that are left after that are in the"
        " project's metadata: gcloud compute project-info describe, and add-metadata"
        " --metadata-from-file=ssh-keys=keys.txt"
    )
    return [f"{line} ({', '.join(found)})" for line, found in hosts.items()] + ([way] if agents else [])


def _taken(workers: Mapping[str, Mapping[str, Any]]) -> set[tuple[Any, str]]:
    """Return (node, person) for all people whose keys this run has removed from the node's metadata."""
    return {
        (variables.get("tpu_node_label"), line.strip().partition(":")[0])
        for variables in workers.values()
        for line in variables.get("__users_metadata", {}).get("removed", [])
    }


def _foreign_lines(name: str, found: dict[str, Any]) -> list[str]:
    gone = found["state"] == "absent"
    agent = "ssh-keys in the metadata name this account and would recreate it" if gone else "Google's guest agent adds"
    lines = [f"{name}: {agent}: {key}" for key in found["agent"]]
    lines += [
        f"{name}: ~/.ssh/authorized_keys contains {key}, which is not in the list of keys" for key in found["own"]
    ]
    return lines + [_root_line(name, way) for way in found["root"]]


def _root_line(name: str, way: str) -> str:
    """Return the line about an account that can become root by a sudo rule for it or a %group, or by a group."""
    if way.startswith("%") or way == name:
        return f"{name}: sudo is full, whatever users_people says, because of another sudo rule for {way}"
    return (
        f"{name}: members of the group {way} can become root, whatever users_people says; remove {name} from the group:"
        f" gpasswd --delete {name} {way}, or set sudo: full"
    )


def shells_without(shells: list[str], packages: list[str]) -> list[str]:
    """Return the login shells whose name is not that of one of these packages."""
    return [shell for shell in shells if shell.rpartition("/")[2] not in packages]


class FilterModule:
    """Filters of the role users that compare the list with a worker."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "key_files": key_files,
            "metadata_people": metadata_people,
            "people_changes": people_changes,
            "people_leaving": people_leaving,
            "nobody_refusals": nobody_refusals,
            "people_refusals": people_refusals,
            "people_report": people_report,
            "people_sudoers": people_sudoers,
            "shells_without": shells_without,
        }
