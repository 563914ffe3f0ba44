"""Ansible reads its configuration when it is imported: the project's own."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tpu_ops.cloud import nodes

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


@pytest.fixture
def instance_names(monkeypatch):
    """Workers publish their names as instances, as on the real service."""
    published = nodes.published

    def named(*args, **options):
        return [replace(entry, instance_name=f"t1v-n-{i}") for i, entry in enumerate(published(*args, **options))]

    monkeypatch.setattr(nodes, "published", named)
