"""Ansible reads its configuration when it is imported: the project's own."""

import os
from pathlib import Path

import pytest

os.environ["ANSIBLE_CONFIG"] = str(Path(__file__).resolve().parents[2] / "ansible.cfg")


@pytest.fixture
def said(capsys):
    """Returns what Ansible said, without the line ends that it puts in."""
    from ansible.utils.display import Display

    # Ansible says the same only once in a process.
    Display()._warns.clear()
    return lambda: " ".join(capsys.readouterr().err.split())


@pytest.fixture
def mixed(fleet):
    """Two projects and two zones, a name used twice, a stopped node."""
    fleet.create("pod", "v4-32", labels={"team": "vision"})
    fleet.create("twin", "v4-8")
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    fleet.create("theirs", "v4-8", project=fleet.second)
    fleet.write(projects=[fleet.project, fleet.second])
    return fleet
