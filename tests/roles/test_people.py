from __future__ import annotations

import base64
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.users.filter_plugins import accounts, people
from roles.users.filter_plugins.people import Person
from roles.users.library import people_state
from tpu_ops.ssh import client_config, openssh

ROLE = Path(__file__).resolve().parents[2] / "roles" / "users"
ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGXIlzKGDcj4bqZ6VBmPPWdMbHnzVrWFwgbEf6hYzwCM"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEQCCfQ3v5YoXE2vjq8gVMwy3zx7W33qqjdlaeWVdqaA"
THIRD = OTHER[:-1] + "B"
ABSENT = {"state": "absent"}


@pytest.mark.parametrize("arguments", [("ed25519",), ("rsa", "-b", "3072"), ("ecdsa",), ("ecdsa", "-b", "521")])
def test_keys_that_ssh_keygen_makes_are_accepted_and_no_part_of_them_is(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    command = ["ssh-keygen", "-q", "-t", *arguments, "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(command, check=True, timeout=30)
    kind, blob = (tmp_path / "key.pub").read_text().split()[:2]
    assert people.key_fault(f"{kind} {blob} ada@analytical\n") == ""
    whole = base64.b64decode(blob)
    parts = (base64.b64encode(whole[:length]).decode() for length in range(len(whole)))
    assert [part for part in parts if not people.key_fault(f"{kind} {part}")] == []
    assert "private key" in people.key_fault((tmp_path / "key").read_text().replace("\n", " "))


def made(kind: str, *fields: bytes) -> str:
    """Return a public key of these fields."""
    blob = b"".join(struct.pack(">I", len(field)) + field for field in (kind.encode(), *fields))
    return f"{kind} {base64.b64encode(blob).decode()}"


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (ED25519, ""),
        (f"{ED25519} ada@analytical", ""),
        (ED25519.replace(" ", "   "), ""),
        (made("sk-ssh-ed25519@openssh.com", bytes(32), b"ssh:"), ""),
        (made("sk-ecdsa-sha2-nistp256@openssh.com", b"nistp256", bytes(65), b"ssh:"), ""),
        ("", "not with a key type"),
        ("ada@analytical", "not with a key type"),
        ("~/.ssh/id_ed25519.pub", "is a path; give the content"),
        ("id_ed25519.pub", "is a path; give the content"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXkt\n-----END OPENSSH PRIVATE KEY-----\n", "private key"),
        ("ssh-dss AAAAB3NzaC1kc3MAAACBAA==", "not with a key type"),
        (f'command="/bin/sh -c" {ED25519}', "has options before the type, which are not supported"),
        (f"no-pty {ED25519} ada@analytical", "has options before the type, which are not supported"),
        ("ssh-ed25519", "truncated"),
        ("ssh-ed25519 AAAA!", "not base64; copy the whole line of the .pub file"),
        (ED25519[:40], "is truncated, or not of the type ssh-ed25519; copy the whole line of the .pub file"),
        (ED25519.replace("ssh-ed25519", "ssh-rsa"), "not of the type ssh-rsa"),
        (made("ssh-ed25519", bytes(31)), "truncated"),
        (
            made("ssh-rsa", b"\1\0\1", b"\x7f" * 127),
            "so sshd rejects this key; create another pair: ssh-keygen -t ed25519",
        ),
        (f"# ada's\n{ED25519}", "more than one line; list each key separately"),
        (f"{ED25519} Ada Lovelace (ssh-ed25519, made 2026)", ""),
    ],
)
def test_keys_are_judged_before_anything_changes(key: str, fault: str) -> None:
    found = people.key_fault(key)
    assert fault in found
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    "between", [",", ", ", " a@x,", " a@x\n", " a@x ", " a@x\t", " Ada L. ", " a@x;", " a@x\r\n", " a@x"]
)
@pytest.mark.parametrize(
    "second", [OTHER, made("ssh-rsa", b"\1\0\1", b"\x7f" * 256), made("sk-ssh-ed25519@openssh.com", bytes(32), b"ssh:")]
)
def test_two_keys_in_one_entry_are_refused(between: str, second: str) -> None:
    listed = [{"name": "ada", "keys": [ED25519, f"{ED25519}{between}{second} b@x"]}]
    assert people.people_faults({"users_people": listed}) == [
        "users_people[0]: ada: keys[1] contains 2 keys, of which sshd would read only the first; write 2 entries"
    ]


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ([{"name": "ada", "keys": [ED25519]}], None),
        ([{"name": "ada"}, {"name": "ada"}], "users_people[1]: ada: listed twice, first as users_people[0]"),
        ([{"name": "ada", "keys": [ED25519, "x"]}], "users_people[0]: ada: keys[1] starts with 'x'"),
        ([{"name": "root"}], "root: name must be"),
        ([{"name": "Ada"}], "Ada: name must be"),
        ([{"name": "ada\nroot ALL=(ALL) ALL"}], "name must be"),
        ([{"name": "../ada"}], "name must be"),
        ([{}], "[0]: name must be"),
        ([{"name": "ada", "comment": "Ada:0:0"}], "ada: comment must be"),
        ([{"name": "ada", "comment": "Ada\nroot"}], "ada: comment must be"),
        ([{"name": "ada", "shell": "zsh"}], "ada: shell must be an absolute path"),
        ([{"name": "ada", "shell": "/bin/sh:x"}], "ada: shell must be an absolute path"),
        ([{"name": "ada", "groups": ["sudo"]}], "ada: groups: sudo makes people root; set sudo: full instead"),
        ([{"name": "bob", "groups": ["sudo"]}, {"name": "sudo"}], "sudo makes people root; set sudo: full instead"),
        ([{"name": "ada", "groups": ["google-sudoers"]}], "google-sudoers makes people root"),
        *(
            (
                [{"name": "ada", "groups": ["video", group], "sudo": sudo}],
                fault and f"groups: members of {group} {fault}",
            )
            for group in ("docker", "lxd", "disk")
            for sudo, fault in (
                ("none", "can become root; set sudo: full as well, or remove the group"),
                ("launcher", "can become root; set sudo: full"),
                ("full", None),
            )
        ),
        ([{"name": "ada", "groups": ["sudo"], "sudo": "full"}], "sudo makes people root"),
        ([{"name": "ada", "groups": ["tpu-run"]}], "tpu-run is the group of sudo: launcher"),
        ([{"name": "ada", "groups": ["a,sudo"]}], "'a,sudo' is not a group name"),
        ([{"name": "ada", "groups": ["bob"]}, {"name": "bob"}], "[0]: ada: groups: bob is the name of a listed person"),
        ([{"name": "ada", "groups": ["bob"]}, {"name": "bob", **ABSENT}], None),
        ([{"name": "tpu-run"}], "tpu-run: name must be"),
        ([{"name": "tpu", **ABSENT}], "tpu: state absent would remove the account that this run logs in with"),
        ([{"name": "tpu", "state": "present"}], None),
    ],
)
def test_faults_name_the_person(listed: list[Person], fault: str | None) -> None:
    faults = people.people_faults({"users_people": listed}, connecting_user="tpu")
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0])


def test_all_faults_are_reported_at_once() -> None:
    lists: dict[str, list[Person]] = {
        "users_people": [{"name": "A"}, {"name": "b", "keys": ["", "x"]}],
        "users_more_people": [{"name": "b"}],
    }
    faults = people.people_faults(lists)
    assert len(faults) == 4
    assert faults[-1].startswith(
        "users_more_people[0]: b: listed twice, first as users_people[1]; remove one of them, or"
    )


POD = {"nodes": ["pod", "pod.us-west4-a"], "groups": ["node_pod", "team_vision"]}


@pytest.mark.parametrize(
    ("person", "here"),
    [
        ({}, True),
        ({"nodes": [], "groups_of_nodes": []}, True),
        ({"nodes": ["pod"]}, True),
        ({"nodes": ["other", "pod.us-west4-a"]}, True),
        ({"nodes": ["other"]}, False),
        ({"nodes": ["po"]}, False),
        ({"groups_of_nodes": ["team_vision"]}, True),
        ({"groups_of_nodes": ["team_speech"]}, False),
        ({"nodes": ["other"], "groups_of_nodes": ["team_vision"]}, True),
        ({"nodes": ["other"], "groups_of_nodes": ["team_speech"]}, False),
    ],
)
def test_people_belong_where_their_nodes_or_groups_of_nodes_are(person: Person, here: bool) -> None:
    assert [found["name"] for found in people.people_here([{"name": "ada", **person}], POD)] == ["ada"] * here


def test_a_name_may_be_listed_for_two_nodes_and_not_twice_for_one() -> None:
    listed: list[Person] = [{"name": "ada", "nodes": ["pod"], "sudo": "full"}, {"name": "ada", "nodes": ["other"]}]
    assert people.people_faults({"users_people": listed}, place=POD) == []
    listed.append({"name": "ada", "groups_of_nodes": ["team_vision"]})
    assert people.people_faults({"users_people": listed}, place=POD) == [
        "users_people[2]: ada: listed twice, first as users_people[0]; remove one of them, or give each its own nodes"
    ]


def test_you_may_be_removed_where_this_run_does_not_go() -> None:
    listed: list[Person] = [{"name": "tpu", "nodes": ["other"], **ABSENT}]
    assert people.people_faults({"users_people": listed}, "tpu", POD) == []
    assert len(people.people_faults({"users_people": listed}, "tpu", POD | {"nodes": ["other"]})) == 1


def test_nodes_that_the_inventory_does_not_have_are_told() -> None:
    listed: list[Person] = [
        {"name": "ada", "nodes": ["pod", "twin", "twin.us-west4-a"], "groups_of_nodes": ["team_vision"]},
        {"name": "bob", "nodes": ["pdo", "pod-w0", "other"], "groups_of_nodes": ["team_visions"]},
    ]
    groups = {"all": ["pod-w0"], "node_pod": ["pod-w0"], "node_twin_us_west4_a": [], "team_vision": []}
    assert people.people_nowhere({"users_people": listed[:1], "users_more_people": listed[1:]}, groups) == [
        (
            "users_more_people[0]: bob: nodes: the inventory has no pdo (did you mean pod?),"
            " pod-w0 (a worker; name its node), other"
        ),
        "users_more_people[0]: bob: groups_of_nodes: the inventory has no team_visions (did you mean team_vision?)",
    ]


FISH = {"shell": "/usr/bin/fish"}
PWSH = {"shell": "/opt/pwsh"}


@pytest.mark.parametrize(
    ("person", "stands", "coming", "faulty", "told"),
    [
        (FISH, "missing", ["zsh"], True, False),
        ({"shell": "/bin/fish"}, "missing", [], True, False),
        (FISH, "executable", [], False, False),
        (FISH, "missing", ["fish"], False, False),
        ({**FISH, **ABSENT}, "missing", [], False, False),
        ({**FISH, "nodes": ["other"]}, "missing", [], False, False),
        (PWSH, "missing", [], True, False),
        (PWSH, "there", [], True, False),
        # Only the package that comes will tell.
        (PWSH, "missing", ["powershell"], False, True),
        ({"shell": "/usr/local/bin/fish"}, "missing", ["powershell"], False, True),
        (PWSH, "missing", ["pwsh"], False, False),
        # What was not asked of the worker, and what is nobody's to name.
        (PWSH, None, [], False, False),
        ({}, None, [], False, False),
    ],
)
def test_missing_shells_are_faults_unless_a_package_may_bring_them(
    person: Person, stands: str | None, coming: list[str], faulty: bool, told: bool
) -> None:
    lists, shell = {"users_people": [{"name": "ada", **person}]}, person.get("shell", "")
    paths = {shell: stands} if stands else {}
    fault = (
        f"users_people[0]: ada: shell {shell} does not exist, and no package that this playbook installs brings it; add"
        " its package to shell_packages and run site.yml, or choose another shell"
    )
    warning = (
        f"users_people[0]: ada: shell {shell} does not exist yet; unless one of powershell installs the shell, the"
    )
    assert people.shell_faults(lists, POD, paths, coming) == [fault] * faulty
    assert people.shell_warnings(lists, POD, paths, coming) == [f"{warning} worker will be refused"] * told


@pytest.mark.parametrize(
    ("names", "file", "faulty"),
    [
        (["ada"], "/fleet/inventory/tpu_vm.yml", False),
        (["ada"], "/fleet/inventory/gpu.tpu_vm.yaml", False),
        (["ada"], "/fleet/hosts.yml", True),
        (["ada"], "", True),
        # No node's worker.
        (["ada"], None, False),
        ([], "/fleet/hosts.yml", False),
    ],
)
def test_keys_are_taken_out_of_the_metadata_with_a_fleet_s_file_only(
    names: list[str], file: str | None, faulty: bool
) -> None:
    said = (
        "users_remove_metadata_keys: the API needs the settings of the fleet's tpu_vm.yml, but this worker is"
        f" from {file or 'no file'}; pass the fleet's inventory/tpu_vm.yml with -i"
    )
    assert people.removal_faults(names, "", file) == [said] * faulty


def test_keys_that_may_let_this_run_in_are_not_taken_out_of_the_metadata() -> None:
    assert people.removal_faults(["ada", "tpu", "a:b"], "tpu") == [
        (
            "users_remove_metadata_keys[1]: tpu: this run logs in with this account, perhaps with a key from the"
            " metadata; connect as another user"
        ),
        (
            "users_remove_metadata_keys[2]: a:b: is not a login name; use at most 32 lowercase letters, digits, -"
            " and _, not starting with a digit or -"
        ),
    ]


def here(**person: Any) -> Person:
    """Return one person as the filters of accounts take it."""
    return people.people_here([{"name": "ada", **person}], POD)[0]


def account(*groups: str, **fields: Any) -> dict[str, Any]:
    return {"uid": 1001, "shell": "/bin/bash", "comment": "", "groups": list(groups), **fields}


def facts(
    found: dict[str, Any] | None = None, groups: dict[str, list[str]] | None = None, *, skip_done: bool = True
) -> dict[str, Any]:
    """Return the worker's facts as the filters of accounts take them."""
    return {"accounts": found or {}, "groups": groups or {}, "skip_done": skip_done}


def state(**found: Any) -> dict[str, Any]:
    """Return what the module finds on a worker where there is nothing to say."""
    lists = ("expired", "homeless", "ownerless_homes", "role_keys", "home_keys", "role_sudo", "other_sudo")
    files = ("key_files", "foreign_key_files")
    return {key: [] for key in lists + files} | {"given_groups": {}, "taken_homes": {}, "keys_fault": ""} | found


@pytest.mark.parametrize(
    ("person", "found", "in_state", "differs"),
    [
        ({"sudo": "launcher"}, account("tpu-run", "video"), {}, False),
        ({"groups": ["video"], "sudo": "full"}, account("tpu-run", "video"), {}, False),
        ({}, account("video"), {}, False),
        ({}, account("tpu-run", "video"), {}, True),
        ({"groups": ["docker"]}, account("video"), {}, True),
        ({"shell": "/usr/bin/zsh"}, account(), {}, True),
        ({"comment": "Ada"}, account(), {}, True),
        ({}, account(), {"homeless": ["ada"]}, True),
        ({}, account(), {"expired": ["ada"]}, True),
        ({}, account(), {"ownerless_homes": ["ada"]}, True),
        ({}, None, {}, True),
        (ABSENT, None, {}, False),
        (ABSENT, account(), {}, False),
    ],
)
def test_only_accounts_that_differ_are_touched(
    person: Person, found: dict[str, Any] | None, in_state: dict[str, list[str]], differs: bool
) -> None:
    held = {"ada": found} if found else {}
    changes = accounts.people_changes([here(**person)], facts(held), state(**in_state))
    assert [change["name"] for change in changes] == ["ada"] * differs
    # Nobody present is skipped then.
    every = accounts.people_changes([here(**person)], facts(held, skip_done=False), state(**in_state))
    assert [change["name"] for change in every] == ["ada"] * (person != ABSENT)
    assert changes in ([], every)


def test_only_the_launchers_group_is_taken_from_people_who_lost_it() -> None:
    worker = facts(
        {"ada": account("tpu-run", "video"), "old": account("tpu-run", "audio"), "new": account()},
        {"tpu-run": ["ada", "gone", "old"]},
    )
    changes = accounts.people_changes([here(), here(name="new", sudo="launcher")], worker, state())
    assert [(change["name"], change["groups"], change["append"]) for change in changes] == [
        ("ada", ["video"], False),
        ("new", ["tpu-run"], True),
        ("old", ["audio"], False),
    ]


@pytest.mark.parametrize(
    ("listed", "has", "given", "after"),
    [
        # Taken off the list; never the list's; still the list's; taken off by somebody else before.
        ([here()], ["docker", "video"], ["docker"], ["video"]),
        ([here()], ["docker", "video"], [], None),
        ([here(groups=["docker"])], ["docker"], ["docker"], None),
        ([here()], ["video"], ["docker"], None),
        ([here(groups=["video"])], ["docker", "audio"], ["docker"], ["audio", "video"]),
        ([here(sudo="launcher")], ["tpu-run", "docker"], ["docker"], ["tpu-run"]),
        # No longer listed at all.
        ([], ["docker", "video"], ["docker"], ["video"]),
        ([], ["video"], ["docker"], None),
        ([here(**ABSENT)], ["docker"], ["docker"], None),
    ],
)
def test_groups_that_the_list_gave_are_taken_back_and_others_stay(
    listed: list[Person], has: list[str], given: list[str], after: list[str] | None
) -> None:
    worker = facts({"ada": account(*has)}, {name: ["ada"] for name in has})
    changes = accounts.people_changes(listed, worker, state(given_groups={"ada": given} if given else {}))
    assert [(change["groups"], change["append"]) for change in changes] == ([] if after is None else [(after, False)])


def test_the_groups_that_the_list_gave_are_read_where_they_were_written(tmp_path: Path) -> None:
    listed = [here(sudo="launcher", groups=["video", "docker"]), here(name="bob", sudo="full", keys=[ED25519])]
    for entry in accounts.key_files(listed, state(), str(tmp_path))[1:]:
        Path(entry["path"]).write_text(entry["content"])
    assert people_state.given_groups(str(tmp_path), ["ada", "bob"]) == {"ada": ["docker", "video"]}


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ([{"name": "ada", "uid": 5001}, {"name": "bob", "uid": 5002}], ""),
        ([{"name": "ada", "uid": 999}], "[0]: ada: uid must be a number from 1000 to 59999, not 999"),
        ([{"name": "ada", "uid": 65534}], "not 65534"),
        ([{"name": "ada", "uid": -1}], "not -1"),
        (
            [{"name": "ada", "uid": 5001}, {"name": "bob", "uid": 5001}],
            "[1]: bob: uid 5001 is already the uid of ada in users_people[0]",
        ),
        # Disks move between nodes.
        (
            [{"name": "ada", "uid": 5001}, {"name": "bob", "uid": 5001, "nodes": ["other"]}],
            "[1]: bob: uid 5001 is already the uid of ada",
        ),
        (
            [{"name": "ada", "uid": 5001, "nodes": ["pod"]}, {"name": "ada", "uid": 5002, "nodes": ["other"]}],
            "[1]: ada: uid 5002 differs from 5001 in users_people[0]",
        ),
        ([{"name": "ada", "uid": 5001, **ABSENT}, {"name": "bob", "uid": 5001}], ""),
    ],
)
def test_numbers_of_people_are_their_own_in_the_whole_fleet(listed: list[Person], fault: str) -> None:
    faults = people.people_faults({"users_people": listed}, place=POD)
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


@pytest.mark.parametrize(
    ("person", "uids", "fault"),
    [
        ({"uid": 5001}, {}, ""),
        ({"uid": 5001}, {"ada": 5001}, ""),
        ({}, {"ada": 1003}, ""),
        (
            {"uid": 5001},
            {"ada": 1003},
            "ada: uid: the account has uid 1003 on this worker, the list says 5001; list 1003",
        ),
        ({"uid": 5001}, {"bob": 5001}, "ada: uid: 5001 belongs to bob on this worker; choose another"),
        ({"uid": 5001, **ABSENT}, {"ada": 1003}, ""),
    ],
)
def test_a_worker_where_a_number_is_taken_or_another_is_refused(
    person: Person, uids: dict[str, int], fault: str
) -> None:
    worker = facts({name: account(uid=uid) for name, uid in uids.items()})
    faults = people.account_faults({"users_people": [{"name": "ada", **person}]}, POD, worker)
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


def test_an_account_is_made_with_its_number() -> None:
    changes = accounts.people_changes([here(uid="5001"), here(name="bob")], facts(), state())
    assert [change.get("uid") for change in changes] == [5001, None]


@pytest.mark.parametrize(
    ("home", "found", "ownerless", "leaves"),
    [
        ("keep", account(), [], True),
        ("archive", account(), [], True),
        ("keep", None, ["ada"], False),
        ("archive", None, ["ada"], True),
        ("remove", None, ["ada"], True),
        ("remove", None, [], False),
    ],
)
def test_people_leave_once_and_a_kept_home_may_go_later(
    home: str, found: dict[str, Any] | None, ownerless: list[str], leaves: bool
) -> None:
    listed = [here(home=home, **ABSENT), here(name="bob")]
    wanted = [{"name": "ada", "home": home}] if leaves else []
    held = {"ada": found} if found else {}
    assert accounts.people_leaving(listed, facts(held), state(ownerless_homes=ownerless)) == wanted
    every = accounts.people_leaving(listed, facts(held, skip_done=False), state(ownerless_homes=ownerless))
    assert every == [{"name": "ada", "home": home}]


LISTED = [
    here(sudo="launcher", groups=["video"], keys=[f" {ED25519}\n"]),
    here(name="bob", sudo="full"),
    here(name="eve", sudo="full", keys=[ED25519], groups=["docker"], **ABSENT),
]


def test_groups_keys_and_sudo_are_those_of_people_present() -> None:
    files = accounts.key_files(LISTED, state(key_files=["ada", "eve", ".x"]), "/keys")
    assert [(entry["path"], entry.get("state", "file")) for entry in files] == [
        ("/keys", "directory"),
        ("/keys/.x", "absent"),
        ("/keys/eve", "absent"),
        ("/keys/ada", "file"),
        ("/keys/bob", "file"),
    ]
    assert files[3]["content"].splitlines()[1:] == ["# Groups: video", ED25519]
    rules = [line for line in accounts.people_sudoers(LISTED).splitlines() if not line.startswith("#")]
    assert rules == ["bob ALL=(ALL:ALL) NOPASSWD: ALL"]


ROOT = {"role_sudo": ["tpu"]}
BY_GROUP = {"role_sudo": ["tpu"], "other_sudo": ["%google-sudoers"]}


@pytest.mark.parametrize(
    ("person", "found", "own_keys", "fault"),
    [
        # Nothing of the connecting account is the role's.
        (None, {}, ED25519, ""),
        (None, {"home_keys": [ED25519]}, ED25519, ""),
        ({"keys": [OTHER]}, {"home_keys": [ED25519]}, ED25519, ""),
        # Its key.
        (None, {"role_keys": [ED25519]}, ED25519, "tpu: keys:"),
        (None, {"role_keys": [ED25519]}, "", "tpu: keys:"),
        ({"keys": [OTHER]}, {"role_keys": [ED25519]}, f"{ED25519} x", "tpu: keys:"),
        ({"keys": [OTHER]}, {"role_keys": [ED25519]}, "", ""),
        ({"keys": [OTHER]}, {"role_keys": [ED25519], "home_keys": [ED25519]}, ED25519, ""),
        ({"keys": [f"{ED25519} new comment"]}, {"role_keys": [ED25519]}, ED25519, ""),
        ({"keys": []}, {"role_keys": [ED25519]}, OTHER, "tpu: keys:"),
        # One key of a file and one of the agent.
        ({"keys": [OTHER]}, {"role_keys": [ED25519, OTHER]}, f"{ED25519} x\n{OTHER} y", ""),
        ({"keys": [THIRD]}, {"role_keys": [ED25519, OTHER]}, f"{ED25519} x\n{OTHER} y", "tpu: keys:"),
        ({"keys": [THIRD]}, {"role_keys": [OTHER]}, f"{ED25519} x\n{OTHER} y", "tpu: keys:"),
        # Its sudo.
        (None, ROOT, "", "tpu: sudo:"),
        ({"sudo": "launcher"}, ROOT, "", "tpu: sudo:"),
        ({"sudo": "full"}, ROOT, "", ""),
        ({"sudo": "none"}, BY_GROUP, "", ""),
        ({"sudo": "none"}, ROOT | {"other_sudo": ["tpu"]}, "", ""),
        ({"sudo": "none"}, ROOT | {"other_sudo": ["%other"]}, "", "tpu: sudo:"),
    ],
)
def test_changes_that_lock_out_the_connecting_user_are_refused(
    person: Person | None, found: dict[str, Any], own_keys: str, fault: str
) -> None:
    listed = [here(name="tpu", **person)] if person is not None else []
    held = facts({"tpu": account("google-sudoers")})
    faults = accounts.people_refusals(listed, held, state(**found), "tpu", own_keys.splitlines())
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


@pytest.mark.parametrize(
    ("everybody", "found", "named"),
    [
        ([], {"key_files": ["bea"], "role_sudo": ["ada"]}, "ada, bea would lose access"),
        ([], {}, ""),
        # Nobody here, but the list is this fleet's.
        ([{"name": "ada", "nodes": ["other"]}], {"key_files": ["bea"]}, ""),
        ([{"name": "bea", **ABSENT}], {"key_files": ["bea"]}, ""),
    ],
)
def test_a_list_without_anybody_takes_nobody_s_access(
    everybody: list[Person], found: dict[str, Any], named: str
) -> None:
    faults = accounts.nobody_refusals(everybody, state(**found))
    assert [named in fault for fault in faults] == [True] * bool(named)


@pytest.mark.parametrize(
    ("named", "public_half", "more"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_own_keys_are_those_of_the_key_file_or_of_the_agent(
    tmp_path: Path, named: bool, public_half: bool, more: bool
) -> None:
    keys = [tmp_path / name for name in ("file", "agent", "more", "ever more")]
    for key in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=30)
    own = [keys[not named], *(keys[2:] if more else [])]
    wanted = {" ".join(Path(f"{key}.pub").read_text().split()[:2]) for key in own}
    # As the inventory writes them.
    offered = client_config.arguments(("IdentityFile", openssh.quoted(path)) for path in (*keys[2:], tmp_path / "none"))
    if not public_half:
        keys[0].with_suffix(".pub").unlink()
    # The agent ends with the command.
    command = [
        "ssh-agent",
        "sh",
        "-ec",
        'ssh-add -q "$0"; "$@"',
        str(keys[1]),
        f"{sys.prefix}/bin/ansible",
        "localhost",
    ]
    (tmp_path / "hosts.yml").write_text("all: { hosts: { localhost: { ansible_connection: local } } }\n")
    command += ["--inventory", str(tmp_path / "hosts.yml"), "--extra-vars", "@roles/users/vars/main.yml"]
    command += ["--extra-vars", f"ansible_ssh_private_key_file={keys[0]}"] if named else []
    command += ["--extra-vars", json.dumps({"ansible_ssh_common_args": offered})] if more else []
    command += ["-m", "debug", "-a", "var=__users_own_keys"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = re.findall(r"ssh-ed25519 [A-Za-z0-9+/=]+", done.stdout)
    assert set(found) == wanted


@pytest.mark.parametrize(
    ("person", "held", "refused"),
    [({}, {}, True), ({}, {"ada": account()}, False), (ABSENT, {}, False), ({"name": "bob"}, {}, False)],
)
def test_an_account_is_not_made_where_a_group_has_its_name(person: Person, held: dict[str, Any], refused: bool) -> None:
    faults = people.account_faults({"users_people": [{"name": "ada", **person}]}, POD, facts(held, {"ada": []}))
    assert len(faults) == refused
    assert all("ada: a group of this name exists" in fault for fault in faults)


@pytest.mark.parametrize(("uid", "refused"), [(33, True), (999, True), (1000, False), (1001, False), (65534, True)])
def test_accounts_of_the_system_are_not_taken_over(uid: int, refused: bool) -> None:
    for listed in ({"name": "ada"}, {"name": "ada", **ABSENT}):
        bea: Person = {"name": "bea", "nodes": ["other"]}
        lists: dict[str, list[Person]] = {"users_people": [], "users_more_people": [bea, listed]}
        faults = people.account_faults(lists, POD, facts({"ada": account(uid=uid), "bea": account(uid=1)}))
        said = f"users_more_people[1]: ada: is a system account (uid {uid}); choose another name"
        assert faults == [said] * refused


def test_a_home_of_somebody_else_and_a_line_before_the_role_s_are_refused() -> None:
    found = state(taken_homes={"ada": "zed"}, keys_fault="/etc/ssh/sshd_config:1: AuthorizedKeysFile none: way out")
    assert accounts.people_refusals([here()], facts(), found) == [
        (
            "ada: the home of the new account would be /home/ada, which belongs to zed; move that directory away, or"
            " choose another name"
        ),
        "/etc/ssh/sshd_config:1: AuthorizedKeysFile none: way out",
    ]


def test_sshds_files_are_checked_before_a_reload_and_before_removals() -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())
    names = [task["name"] for task in tasks]
    order = [
        "Write keys, sudo rules and where sshd finds the keys",
        "Prove that sshd will find the keys",
        "Reload sshd",
        "Remove people who leave",
    ]
    assert [name for name in names if name in order] == order
    assert tasks[names.index(order[1])]["people_state"]["prove"] is True


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_a_link_in_a_returned_home_gives_no_ownership_of_its_target(tmp_path: Path) -> None:
    tasks = {task["name"]: task for task in yaml.safe_load((ROLE / "tasks" / "main.yml").read_text())}
    home, system, programs = tmp_path / "home", tmp_path / "system", tmp_path / "bin"
    for directory in (home / "a" / "b", system, programs):
        directory.mkdir(parents=True)
    for path in (home / "a" / "b" / "passwd", home / "a" / "own", system / "passwd"):
        path.touch()
    # Between the look at what is there and the change.
    (programs / "chown").write_text(
        '#!/bin/sh\nmv "$HOME/a/b" "$HOME/a/c" && ln -s "$SYSTEM" "$HOME/a/b"\nexec /bin/chown "$@"\n'
    )
    (programs / "chown").chmod(0o755)
    words = tasks["Return the contents of the homes of people who come back"]["ansible.builtin.command"]["argv"]
    item = {"{{ item.home }}": str(home), "{{ item.uid }}:{{ item.group }}": "54321:54321"}
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "SYSTEM": str(system)}
    subprocess.run([item.get(word, word) for word in words], env=environment, check=False, timeout=30)
    assert (system / "passwd").stat().st_uid == 0
    given = {path.relative_to(home).as_posix(): path.lstat().st_uid for path in home.rglob("*")}
    assert given == dict.fromkeys(("a", "a/b", "a/c", "a/c/passwd", "a/own"), 54321)
    assert home.stat().st_uid == 0
    # Ansible goes down by paths.
    assert "recurse" not in tasks["Return homes to people who come back"]["ansible.builtin.file"]


def test_key_files_of_others_stay_unless_the_person_is_listed() -> None:
    found = state(key_files=["gone", "ada"], foreign_key_files=["other", "bob"])
    files = accounts.key_files([here(keys=[ED25519]), here(name="bob", **ABSENT)], found, "/keys")
    absent = [entry["path"] for entry in files if entry.get("state") == "absent"]
    assert absent == ["/keys/bob", "/keys/gone"]
    assert all(entry["content"].startswith(people_state.HEADER) for entry in files if "content" in entry)


def test_the_metadata_keep_the_keys_of_the_list() -> None:
    listed = [here(keys=[f"{ED25519} ada@analytical"]), here(name="bob", keys=[OTHER], **ABSENT)]
    assert accounts.metadata_people(listed, ["ada", "bob", "eve"]) == {"ada": [ED25519], "bob": [], "eve": []}


def test_a_login_shell_is_missing_unless_its_package_is_on_the_way() -> None:
    assert accounts.shells_without(["/bin/fish", "/usr/bin/zsh"], ["tmux", "zsh"]) == ["/bin/fish"]


def test_the_report_names_workers_once_and_the_way_to_the_metadata() -> None:
    node: dict[str, Any] = {"tpu_node_label": "pod"}
    root = ["%google-sudoers", "ada", "docker"]
    found = {"agent": ["SHA256:a (x)"], "own": ["SHA256:b"], "root": root, "state": "present"}
    gone = {"agent": ["SHA256:c"], "own": [], "root": [], "state": "absent"}
    workers: dict[str, dict[str, Any]] = {
        "pod-w0": node | {"__users_state": {"foreign": {"ada": found}}},
        "pod-w1": node | {"__users_state": {"foreign": {"ada": found, "bob": gone}, "foreign_key_files": ["eve"]}},
        "plain": {"__users_state": {"foreign": {}, "numbered_homes": {"bob": 4242}}},
        "skipped": {},
    }
    agent, own, by_group, by_rule, docker, eve, absent, home, way = accounts.people_report(workers, "/keys")
    assert agent == "ada: Google's guest agent adds: SHA256:a (x) (pod-w0, pod-w1)"
    assert "contains SHA256:b, which is not in the list of keys (pod-w0, pod-w1)" in own
    assert "rule for %google-sudoers (pod-w0, pod-w1)" in by_group
    assert "rule for ada (pod-w0, pod-w1)" in by_rule
    assert docker == (
        "ada: members of the group docker can become root, whatever users_people says; remove ada from the group:"
        " gpasswd --delete ada docker, or set sudo: full (pod-w0, pod-w1)"
    )
    assert eve.startswith("/keys/eve does not belong to this role and stays;")
    assert absent == ("bob: ssh-keys in the metadata name this account and would recreate it: SHA256:c (pod-w1)")
    assert (
        home == "bob: the home belonged to uid 4242, which no account has; the role gives it to bob with everything"
        " in it (plain)"
    )
    assert """playbooks/users.yml -e '{"users_remove_metadata_keys": ["ada", "bob"]}'""" in way
    # Those that this run took out are not told.
    workers["pod-w0"]["__users_metadata"] = {"changed": True, "removed": [f"ada:{ED25519}", f"bob:{OTHER}"]}
    workers["pod-w1"]["__users_metadata"] = {"skipped": True}
    assert accounts.people_report(workers, "/keys") == [own, by_group, by_rule, docker, eve, home]
