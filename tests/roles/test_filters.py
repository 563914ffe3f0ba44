from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.jax.filter_plugins.jax import jax_python_fault
from roles.python.filter_plugins.signing_keys import primary_fingerprints
from roles.users.filter_plugins import people

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGXIlzKGDcj4bqZ6VBmPPWdMbHnzVrWFwgbEf6hYzwCM"


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_keys_that_ssh_keygen_makes_are_accepted(tmp_path: Path, kind: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", tmp_path / "key"], check=True, timeout=30)
    public = (tmp_path / "key.pub").read_text()
    assert people.key_fault(public) == ""
    assert "private key" in people.key_fault((tmp_path / "key").read_text().replace("\n", " "))


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (ED25519, ""),
        (f"{ED25519} ada@analytical", ""),
        ("", "not with a key type"),
        ("ada@analytical", "not with a key type"),
        ("ssh-dss AAAAB3NzaC1kc3MAAACBAA==", "not with a key type"),
        (f'command="/bin/sh" {ED25519}', "not with a key type"),
        ("ssh-ed25519", "cut off"),
        ("ssh-ed25519 AAAA!", "not base64"),
        (ED25519[:40], "cut off"),
        (ED25519.replace("ssh-ed25519", "ssh-rsa"), "not of the type ssh-rsa"),
        (f"{ED25519}\n{ED25519}", "more than one line"),
    ],
)
def test_keys_are_judged_before_anything_changes(key: str, fault: str) -> None:
    found = people.key_fault(key)
    assert fault in found
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ([{"name": "ada", "keys": [ED25519]}], None),
        ([{"name": "ada"}, {"name": "ada"}], "ada: listed twice"),
        ([{"name": "ada", "keys": [ED25519, "x"]}], "ada: keys[1] starts with 'x'"),
        ([{"name": "root"}], "root: name must be"),
        ([{"name": "Ada"}], "Ada: name must be"),
        ([{"name": "ada\nroot ALL=(ALL) ALL"}], "name must be"),
        ([{"name": "../ada"}], "name must be"),
        ([{}], "[0]: name must be"),
        ([{"name": "tpu", "state": "absent"}], "tpu: state absent would remove the account that this run logs in with"),
        ([{"name": "tpu", "state": "present"}], None),
    ],
)
def test_faults_name_the_person(listed: list[people.Person], fault: str | None) -> None:
    faults = people.people_faults(listed, connecting_user="tpu")
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0])


def test_all_faults_are_reported_at_once() -> None:
    assert len(people.people_faults([{"name": "A"}, {"name": "b", "keys": ["", "x"]}, {"name": "b"}])) == 4


ACCOUNT = {"shell": "/bin/bash", "comment": "", "groups": ["tpu-run", "video"], "home_exists": True}


@pytest.mark.parametrize(
    ("person", "account", "differs"),
    [
        ({"name": "ada", "sudo": "launcher"}, ACCOUNT, False),
        ({"name": "ada"}, ACCOUNT, False),
        ({"name": "ada", "groups": ["video"], "sudo": "full"}, ACCOUNT, False),
        ({"name": "ada", "groups": ["docker"]}, ACCOUNT, True),
        ({"name": "ada", "shell": "/usr/bin/zsh"}, ACCOUNT, True),
        ({"name": "ada", "comment": "Ada"}, ACCOUNT, True),
        ({"name": "ada"}, ACCOUNT | {"home_exists": False}, True),
        ({"name": "ada"}, None, True),
        ({"name": "ada", "state": "absent"}, None, False),
        ({"name": "ada", "state": "absent"}, ACCOUNT, False),
    ],
)
def test_only_accounts_that_differ_are_touched(
    person: people.Person, account: dict[str, Any] | None, differs: bool
) -> None:
    found = {"users": {"ada": account} if account else {}}
    assert people.people_changes([person], found) == ([person] if differs else [])
    leaves = person.get("state") == "absent" and account is not None
    assert people.people_leaving([person], found) == (["ada"] if leaves else [])


def test_groups_and_keys_are_those_of_people_present() -> None:
    listed: list[people.Person] = [
        {"name": "ada", "sudo": "launcher", "groups": ["video"], "keys": [f" {ED25519}\n"]},
        {"name": "bob", "sudo": "none"},
        {"name": "eve", "sudo": "full", "state": "absent", "keys": [ED25519], "groups": ["docker"]},
    ]
    assert people.people_groups(listed) == ["tpu-run", "video"]
    assert people.people_keys(listed) == {"ada": [ED25519], "bob": []}


@pytest.mark.parametrize(
    ("jax", "python", "needs"),
    [
        ("0.10.2", "3.11", None),
        ("0.10.2", "3.12", None),
        ("0.10.2", "3.13", None),
        ("0.10.2", "3.10", "needs Python 3.11 or later"),
        ("0.12.0.1", "3.11", "needs Python 3.12 or later"),
        ("0.12.0.1", "3.12", None),
        ("0.6.2", "3.10", None),
        ("0.6.3", "3.10", "needs Python 3.11 or later"),
        ("0.4.31", "3.8", "needs Python 3.10 or later"),
        ("0.4.13", "3.8", None),
        ("0.4.1", "3.7", "use Python 3.8 or later"),
        ("newest", "3.12", "is not a version"),
    ],
)
def test_a_python_too_old_for_the_jax_is_refused_with_the_one_that_can(
    jax: str, python: str, needs: str | None
) -> None:
    fault = jax_python_fault(jax, python)
    assert fault == "" if needs is None else needs in fault


def test_the_way_out_names_the_newest_jax_for_the_python_that_is_there() -> None:
    assert "jax_version to 0.6.2 or older" in jax_python_fault("0.10.2", "3.10")


PRIMARY, SUBKEY, OTHER = "A" * 40, "B" * 40, "C" * 40


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        (
            f"pub:-:4096:1:BA6932366A755776:1::::::::::0:\nfpr:::::::::{PRIMARY}:\nuid:-::::1:::x::::::::::0:\n",
            [PRIMARY],
        ),
        (f"pub:-:\nfpr:::::::::{PRIMARY}:\nsub:-:\nfpr:::::::::{SUBKEY}:\n", [PRIMARY]),
        (f"pub:-:\nfpr:::::::::{PRIMARY}:\npub:-:\nfpr:::::::::{OTHER}:\n", [PRIMARY, OTHER]),
        ("", []),
        ("gpg: no valid OpenPGP data found.\n", []),
    ],
)
def test_fingerprints_of_all_primary_keys_count_and_of_no_subkey(listing: str, found: list[str]) -> None:
    assert primary_fingerprints(listing) == found
