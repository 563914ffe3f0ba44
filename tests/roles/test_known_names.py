"""Accounts and groups that a worker has or gets, as all roles know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader
from ansible.template import Templar, trust_as_template

from roles.credentials.filter_plugins import credentials
from roles.disks.filter_plugins import disks
from roles.facts.filter_plugins import known_names
from roles.git.filter_plugins import git
from roles.nfs.filter_plugins import nfs
from roles.python.filter_plugins import environments
from roles.users.filter_plugins import people
from roles.workspace.filter_plugins import workspace

FACTS = Path(__file__).resolve().parents[2] / "roles/facts"
BOX: dict[str, Any] = {"nodes": ["box"], "groups": ["all", "pod"]}


@pytest.mark.parametrize(
    ("listed", "known"),
    [
        ([{"name": "ada", "state": "absent", "nodes": ["box"]}], ["root"]),
        ([{"name": "ada", "state": "absent", "nodes": ["other"]}], ["ada", "root"]),
        ([{"name": "grace", "nodes": ["other"]}], ["ada", "root"]),
        ([{"name": "grace", "groups_of_nodes": ["pod"], "groups": ["deploy"]}], ["ada", "grace", "root"]),
        (
            [{"name": "ada", "state": "absent", "nodes": ["other"]}, {"name": "ada", "nodes": ["box"]}],
            ["ada", "root"],
        ),
    ],
)
def test_people_are_known_where_they_belong(listed: list[dict[str, Any]], known: list[str]) -> None:
    worker: dict[str, Any] = {"accounts": {"root": {}, "ada": {}}, "groups": {}, "unlisted": []}
    assert known_names.known_accounts(worker, listed, BOX) == known
    coming = {person["name"] for person in people.people_here(listed, BOX) if person["state"] == "present"}
    leaving = {person["name"] for person in people.people_here(listed, BOX)} - coming
    assert set(known) == {"root", "ada"} - leaving | coming
    groups = known_names.known_groups(worker, listed, BOX)
    assert set(groups) - {"deploy"} == set(known)
    assert ("deploy" in groups) == ("grace" in known)


def test_a_name_that_a_directory_service_may_have_is_left_to_the_worker() -> None:
    worker: dict[str, Any] = {"accounts": {"root": {}}, "groups": {}, "unlisted": ["accounts", "groups"]}
    accounts, groups = known_names.known_accounts(worker, [], BOX), known_names.known_groups(worker, [], BOX)
    known = {"accounts": accounts, "groups": groups}
    eve: dict[str, Any] = {"name": "eve", "person": "eve", "owner": "eve", "group": "eve", "url": "https://a.test/b"}
    export = {"path": "/srv/share", "server": "box", "clients": ["box"], "owner": "eve", "group": "eve"}
    mount = {"device": "/dev/sdb", "path": "/mnt/a", "owner": "eve", "group": "eve"}

    def faults(known: dict[str, list[str]]) -> list[str]:
        nfs_host = {"host": "box", "exports": [export], "ganesha_core": {}, "disks": []}
        return [
            fault
            for found in (
                git.people_faults([eve], known["accounts"]),
                git.deploy_key_faults([{"host": "a.test", "group": "eve"}], {"a.test": ["k"]}, known["groups"]),
                credentials.credentials_faults([eve | {"kind": "wandb", "secret": "x"}], {}, known["accounts"]),
                disks.disks_faults([mount], known["accounts"], known["groups"]),
                nfs.own_faults(nfs_host, known["accounts"], known["groups"]),
                environments.environment_faults([eve], {"3.12": {}}, "3.12", known["accounts"]),
                workspace.workspace_faults([eve], "/opt", known),
            )
            for fault in found
            if "no account" in fault or "there is no" in fault
        ]

    assert faults(known) == []
    assert len(faults({"accounts": ["root"], "groups": []})) == 10


def test_people_to_be_are_known_and_people_who_leave_are_not() -> None:
    worker = {"accounts": {"root": {}, "bob": {}}, "groups": {"video": []}, "unlisted": []}
    listed = [{"name": "ada", "groups": ["deploy"]}, {"name": "bob", "state": "absent", "groups": ["old"]}]
    assert known_names.known_accounts(worker, listed, BOX) == ["ada", "root"]
    assert known_names.known_groups(worker, listed, BOX) == ["ada", "deploy", "root", "video"]
    numbered = known_names.known_groups(worker, listed, BOX, [{"name": "shared", "gid": 5000}], ["tpu-run"])
    assert numbered == ["ada", "deploy", "root", "shared", "tpu-run", "video"]


@pytest.mark.parametrize(
    ("listed", "coming"),
    [
        ("zsh", []),
        ("fish", ["fish"]),
        ("zsh:amd64", []),
        ("fish:amd64", ["fish"]),
        ("zsh=5.9-4+b6", []),
        ("zsh=5.8-1", ["zsh"]),
        ("zsh=5.9*", []),
        ("zsh=5.8*", ["zsh"]),
        ("zsh:amd64=5.9-4+b6", []),
        ("fish=3.6", ["fish"]),
        # An epoch's colon begins no architecture.
        ("git=1:2.39.5-0+deb12u2", []),
        ("git=1:2.47.3-0", ["git"]),
    ],
)
def test_packages_come_that_are_listed_and_not_there(listed: str, coming: list[str]) -> None:
    installed = {"zsh": "5.9-4+b6", "git": "1:2.39.5-0+deb12u2"}
    assert known_names.packages_to_come([listed], installed) == coming


@pytest.mark.parametrize(
    ("people", "paths"),
    [
        ([{"name": "ada", "shell": "/bin/zsh"}, {"name": "bob"}], ["/bin/zsh", "/lib/x.so"]),
        ([{"name": "ada", "shell": "zsh"}, {"name": "bob", "shell": 7}], ["/lib/x.so"]),
        # Whose faults the check of the variables tells, after the worker was read.
        ("{{ nowhere + [] }}", ["/lib/x.so"]),
        ("{{ 1 // 0 }}", ["/lib/x.so"]),
        (7, ["/lib/x.so"]),
        ([{"name": "ada", "shell": "{{ nowhere }}"}], ["/lib/x.so"]),
        # Only what is asked for is templated.
        ([{"name": "ada", "keys": ["{{ nowhere }}"], "shell": "/bin/zsh"}], ["/bin/zsh", "/lib/x.so"]),
    ],
)
def test_paths_in_variables_are_requested_and_invalid_values_have_none(people: Any, paths: list[str]) -> None:
    def trusted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: trusted(each) for key, each in value.items()}
        if isinstance(value, list):
            return [trusted(each) for each in value]
        return trust_as_template(value) if isinstance(value, str) else value

    filter_loader.add_directory(str(FACTS / "filter_plugins"))
    (task,) = DataLoader().load_from_file(str(FACTS / "tasks/main.yml"), trusted_as_template=True)
    variables = DataLoader().load_from_file(str(FACTS / "vars/main.yml"), trusted_as_template=True)
    variables |= {"users_people": trusted(people), "tcmalloc_library": "/lib/x.so"}
    assert Templar(DataLoader(), variables).template(task["worker_facts"]["paths"]) == paths


@pytest.mark.parametrize("library", [None, "{{ nowhere }}", "{{ 1 // 0 }}", 7])
def test_a_library_that_is_missing_or_faulty_names_no_path(library: Any) -> None:
    filter_loader.add_directory(str(FACTS / "filter_plugins"))
    (task,) = DataLoader().load_from_file(str(FACTS / "tasks/main.yml"), trusted_as_template=True)
    variables = DataLoader().load_from_file(str(FACTS / "vars/main.yml"), trusted_as_template=True)
    variables |= {"users_people": [{"name": "ada", "shell": "/bin/zsh"}]}
    if library is not None:
        variables["tcmalloc_library"] = trust_as_template(library) if isinstance(library, str) else library
    assert Templar(DataLoader(), variables).template(task["worker_facts"]["paths"]) == ["/bin/zsh"]


@pytest.mark.parametrize(
    ("files", "words"),
    [(None, set()), ([], set()), (["/etc/environment"], {"libtcmalloc"})],
    ids=["no role", "none", "one"],
)
def test_words_are_sought_only_in_files_that_a_role_of_the_play_names(files: list[str] | None, words: set[str]) -> None:
    (task,) = DataLoader().load_from_file(str(FACTS / "tasks/main.yml"), trusted_as_template=True)
    variables = DataLoader().load_from_file(str(FACTS / "vars/main.yml"), trusted_as_template=True)
    variables |= {} if files is None else {"tcmalloc_files": files}
    found = Templar(DataLoader(), variables).template(task["worker_facts"]["mentions"])
    assert set(found) == words | {"/etc/chrony/sources.d"}


@pytest.mark.parametrize(
    ("roles", "coming"),
    [(["facts", "base", "shell", "users"], ["curl", "zsh"]), (["facts", "shell"], ["zsh"]), (["facts", "users"], [])],
)
def test_packages_come_with_the_roles_that_a_playbook_has(roles: list[str], coming: list[str]) -> None:
    filter_loader.add_directory(str(FACTS / "filter_plugins"))
    variables = DataLoader().load_from_file(str(FACTS / "vars/main.yml"), trusted_as_template=True)
    variables |= {"ansible_facts": {"worker": {"packages": {"tmux": "3.5"}}}, "ansible_play_role_names": roles}
    variables |= {"base_packages": ["curl"], "shell_packages": ["tmux", "zsh"]}
    assert Templar(DataLoader(), variables).template(variables["facts_coming_packages"]) == coming
