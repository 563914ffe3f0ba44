"""Keys taken out of nodes' metadata through a real API process."""

from __future__ import annotations

from typing import Any

import pytest

from roles.users.library import node_metadata_keys
from tests.roles.conftest import Run
from tests.support.fleet import FleetDir

MINE, HERS, STRANGERS = (f"ssh-ed25519 {letter * 8}" for letter in "ABC")


def keys(fleet: FleetDir, name: str) -> Any:
    """Return the metadata of a node."""
    return fleet.api.node(name, fleet.location())["metadata"]


def test_exactly_the_lines_of_people_asked_for_go(run: Run, fleet: FleetDir) -> None:
    stays = [f"tpu:{MINE} tpu", f"ada:{HERS} at home", "", "adam:ssh-rsa x", "no key"]
    goes = [f"ada:{STRANGERS} x", f" ada:ssh-rsa {STRANGERS}", "bob:ssh-rsa y"]
    lines = [stays[0], goes[0], *stays[1:4], goes[1], goes[2], stays[4]]
    fleet.create("pod", metadata={"ssh-keys": "\n".join(lines), "secret": "s3cret"})
    node = f"{fleet.location()}/nodes/pod"
    asked = {"fleet_file": str(fleet.file), "node": node, "people": {"ada": [HERS], "bob": [], "eve": []}}
    checked = run(node_metadata_keys, asked, check=True)
    assert (checked["changed"], checked["removed"]) == (True, goes)
    assert keys(fleet, "pod")["ssh-keys"].splitlines() == lines
    done = run(node_metadata_keys, asked)
    assert (done["changed"], done["removed"]) == (True, goes)
    assert "s3cret" not in str(done)
    assert keys(fleet, "pod") == {"ssh-keys": "\n".join(stays), "secret": "s3cret"}
    assert run(node_metadata_keys, asked)["changed"] is False


@pytest.mark.parametrize(
    ("file", "fault"), [("", "nodes/gone"), ("missing/tpu_vm.yml", "cannot read the fleet's file")]
)
def test_what_cannot_be_asked_is_said(run: Run, fleet: FleetDir, file: str, fault: str) -> None:
    node = f"{fleet.location()}/nodes/gone"
    asked = {"fleet_file": str(fleet.path / file if file else fleet.file), "node": node, "people": {"ada": []}}
    done = run(node_metadata_keys, asked)
    assert done["failed"]
    assert done["msg"].startswith("users_remove_metadata_keys: ")
    assert fault in done["msg"]
