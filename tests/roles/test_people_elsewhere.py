"""Entries of git and credentials for people whom users_people lists for other nodes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader
from ansible.template import Templar

ROLES = Path(__file__).resolve().parents[2] / "roles"
HEDY = {"name": "hedy", "nodes": ["store"]}
GONE = {"name": "hedy", "state": "absent"}
IN_TEAM = {"name": "hedy", "groups_of_nodes": ["team"]}
WANDB = {"person": "hedy", "kind": "wandb", "secret": "s3cret"}


def settled(role: str, node: str, accounts: list[str], variables: dict[str, Any], name: str) -> Any:
    """Return a variable of a role as the worker of a node gets it that has accounts."""
    found: dict[str, Any] = {}
    for part in ("facts", role):
        filter_loader.add_directory(str(ROLES / part / "filter_plugins"))
        for file in (ROLES / part / "defaults/main.yml", ROLES / part / "vars/main.yml"):
            found |= DataLoader().load_from_file(str(file), trusted_as_template=True) if file.exists() else {}
    worker = {"accounts": {name: {} for name in accounts}, "groups": {}, "unlisted": []}
    found |= {"ansible_facts": {"worker": worker}, "tpu_node": node, "group_names": [f"node_{node}"], **variables}
    found["__credentials_environment"] = {}
    return Templar(DataLoader(), found).template(found[name])


CASES: list[tuple[list[dict[str, Any]], list[dict[str, Any]], str, list[str], bool, bool]] = [
    # users_people, users_more_people, node, accounts besides ada's, skipped, faulty
    ([HEDY], [], "pod", [], True, False),
    ([], [HEDY], "pod", [], True, False),
    ([IN_TEAM], [], "pod", [], True, False),
    ([HEDY], [], "store", [], False, False),
    # An account that is left from earlier times, or that the guest agent made.
    ([HEDY], [], "pod", ["hedy"], True, False),
    ([HEDY, GONE | {"nodes": ["pod"]}], [], "pod", ["hedy"], True, False),
    ([HEDY, HEDY | {"nodes": ["pod"]}], [], "pod", [], False, False),
    # Who is listed nowhere, or leaves.
    ([], [], "pod", [], False, True),
    ([], [], "pod", ["hedy"], False, False),
    ([GONE], [], "pod", ["hedy"], False, True),
    ([GONE | {"nodes": ["store"]}], [], "pod", [], False, True),
    ([GONE | {"nodes": ["store"]}], [], "pod", ["hedy"], False, False),
]


@pytest.mark.parametrize(("people", "more_people", "node", "accounts", "skipped", "faulty"), CASES)
@pytest.mark.parametrize("role", ["git", "credentials"])
def test_entries_of_other_nodes_are_skipped_and_unknown_people_are_faults(
    *,
    role: str,
    people: list[dict[str, Any]],
    more_people: list[dict[str, Any]],
    node: str,
    accounts: list[str],
    skipped: bool,
    faulty: bool,
) -> None:
    ada = {"person": "ada"}
    variables = {
        "users_people": [{"name": "ada"}, *people],
        "users_more_people": more_people,
        "git_people": [{"person": "hedy", "name": "Hedy"}, ada],
        "credentials_entries": [WANDB, WANDB | ada],
    }

    def here(name: str) -> Any:
        return settled(role, node, ["ada", *accounts], variables, name)

    faults = here(f"__{role}_faults")
    assert ["hedy has no account and is not in users_people" in fault for fault in faults] == [True] * faulty
    entries = here({"git": "__git_people_here", "credentials": "__credentials_here"}[role])
    assert [entry["person"] for entry in entries] == ["hedy"] * (not skipped) + ["ada"]


def test_faults_of_skipped_entries_are_reported_and_numbers_stay() -> None:
    variables = {
        "users_people": [HEDY],
        "git_people": [{"person": "hedy", "email": "x"}, {"person": "eve"}],
        "credentials_entries": [WANDB | {"secret": ""}, WANDB | {"person": "eve"}],
    }
    for role, said in (("git", "email 'x' is not of the form"), ("credentials", "secret is missing")):
        faults = settled(role, "pod", [], variables, f"__{role}_faults")
        assert [said in faults[0], "[1]: " in faults[1], "eve has no account" in faults[1]] == [True] * 3
        assert len(faults) == 2


def test_credentials_are_removed_where_the_person_no_longer_belongs() -> None:
    variables = {"users_people": [HEDY], "credentials_entries": [WANDB, {**WANDB, "host": "h", "state": "absent"}]}
    (left,) = settled("credentials", "pod", ["hedy"], variables, "__credentials_here")
    assert left["state"] == "absent"


@pytest.mark.parametrize(
    ("role", "variable", "here"),
    [("git", "git_people", "__git_people_here"), ("credentials", "credentials_entries", "__credentials_here")],
)
def test_tasks_use_only_the_entries_for_their_worker(role: str, variable: str, here: str) -> None:
    tasks = yaml.safe_dump(yaml.safe_load((ROLES / role / "tasks/main.yml").read_text()), width=1000)
    assert here in tasks
    assert f"{variable} |" not in tasks
