"""Accounts and groups that a worker has or gets, as all roles know them."""

from __future__ import annotations

from typing import Any

import pytest

from roles.credentials.filter_plugins import credentials
from roles.disks.filter_plugins import disks
from roles.facts.filter_plugins import known_names
from roles.git.filter_plugins import git
from roles.nfs.filter_plugins import nfs
from roles.python.filter_plugins import environments
from roles.users.filter_plugins import people
from roles.workspace.filter_plugins import workspace

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
    assert set(groups) - {"tpu-run", "deploy"} == set(known)
    assert ("deploy" in groups) == ("grace" in known)


def test_a_name_that_a_directory_service_may_have_is_left_to_the_worker() -> None:
    worker: dict[str, Any] = {"accounts": {"root": {}}, "groups": {}, "unlisted": ["accounts", "groups"]}
    accounts, groups = known_names.known_accounts(worker, [], BOX), known_names.known_groups(worker, [], BOX)
    known = {"accounts": accounts, "groups": groups}
    eve: dict[str, Any] = {"name": "eve", "person": "eve", "owner": "eve", "group": "eve", "url": "https://a.test/b"}
    export = {"path": "/srv/share", "server": "box", "clients": ["box"], "owner": "eve", "group": "eve"}
    mount = {"device": "/dev/sdb", "path": "/mnt/a", "owner": "eve", "group": "eve"}

    def faults(known: dict[str, list[str]]) -> list[str]:
        nfs_host = {"host": "box", "allow_preemptible": False, **known}
        return [
            fault
            for found in (
                git.people_faults([eve], known["accounts"]),
                git.deploy_key_faults([{"host": "a.test", "group": "eve"}], {"a.test": ["k"]}, known["groups"]),
                credentials.credentials_faults([eve | {"kind": "wandb", "secret": "x"}], {}, known["accounts"]),
                disks.disks_faults([mount], known["accounts"], known["groups"]),
                nfs.export_faults(export, nfs_host, {"box": {"tpu_internal_ip": "10.0.0.2"}}, {}),
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
    assert known_names.known_groups(worker, listed, BOX) == ["ada", "deploy", "root", "tpu-run", "video"]
