"""The guides to the grant, nodes and notebooks: their commands and examples are valid, and the first commands work."""

from __future__ import annotations

import datetime as dt
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from tpu_ops.fleet import grant
from tpu_ops.runs import declared_nodes

GUIDES = {
    name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("trc", "grant", "nodes", "notebooks", "watching")
}
MAIL = """Dear Ada, you have access for the next 30 days to:
- 32 on-demand Cloud TPU v4 chips in zone us-central2-b
- 64 spot Cloud TPU v5e chips in zone europe-west4-b
"""
#: The commands of all indented blocks, up to a pipe, except for `tpu_ops init`, which makes the fleet of the others.
COMMANDS = sorted(
    {
        line.strip().partition("|")[0].strip()
        for text in GUIDES.values()
        for line in text.splitlines()
        if line.startswith("    ") and line.strip().startswith("tpu_ops ") and "tpu_ops init" not in line
    }
)


def block(text: str, heading: str) -> list[str]:
    """Return the first indented block below a heading, without its indentation."""
    below = text.partition(f"## {heading}\n")[2]
    found = re.search(r"(?:^    .*\n)+", below, re.MULTILINE)
    assert found, heading
    return [line.removeprefix("    ") for line in found[0].splitlines()]


def test_from_nothing_to_a_node_with_jax_are_five_commands_that_lead_there_word_for_word(fleet, monkeypatch) -> None:
    """The first one installs this environment, and the last one configures the node, as tests of the lab do."""
    first, *commands, last = block(GUIDES["trc"], "Five commands")
    assert (first.split()[:3], len(commands), last.split()[:2]) == (
        ["uv", "tool", "install"],
        3,
        ["tpu_ops", "configure"],
    )
    environ = os.environ | {
        "TPU_OPS_ENDPOINT": fleet.api.grpc,
        "TPU_OPS_PROJECT": fleet.project,  # answers the question of `init`
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    monkeypatch.chdir(fleet.path.parent)
    script = ["bash", "-ec", "\n".join(commands)]
    done = subprocess.run(script, env=environ, input=MAIL, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert fleet.api.node("box", fleet.location())["state"] == "READY"
    assert "log in: tpu_ops ssh box" in done.stderr or "next: tpu_ops refresh --trust-first box" in done.stderr


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_guides_are_valid(tpu_ops, tmp_path, monkeypatch, line: str) -> None:
    """Outside of a fleet, a valid command fails because there is no fleet, and an invalid one before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TPU_OPS_FLEET", raising=False)
    code, _, err = tpu_ops(*shlex.split(line, comments=True)[1:])
    assert (code, "no fleet: " in err) == (2, True), err


def test_the_example_of_a_grant_is_valid(tmp_path) -> None:
    found = re.search(r"(?:^    (?:ends:|lines:|  - ).*\n)+", GUIDES["grant"], re.MULTILINE)
    assert found
    (tmp_path / "grant.yml").write_text("\n".join(line[4:] for line in found[0].splitlines()))
    read = grant.read(tmp_path / "grant.yml")
    assert read
    assert (read.ends, len(read.lines)) == (dt.datetime(2027, 2, 1, tzinfo=dt.UTC), 5)


def test_the_example_of_declared_nodes_is_valid(fleet) -> None:
    example = block(GUIDES["nodes"], "Nodes as code")
    (fleet.path / "nodes.yml").write_text("\n".join(example))
    (fleet.path / "scripts").mkdir()
    (fleet.path / "scripts" / "boot.sh").write_text("#!/bin/sh\n")
    declared = declared_nodes.read(fleet.settings())
    assert [one.wish.name for one in declared] == ["dev", *(f"sweep-{number}" for number in range(1, 9))]
