"""What tests of `--recover` in a lab share: a fleet that is quickly configured, and commands that are followed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.desk import Desk, lab_up
from tests.support.fleet import ROOT
from tests.support.runs import PATIENCE


@contextlib.contextmanager
def launcher_lab(purpose: str, folder: Path) -> Iterator[Desk]:
    """Start a lab without nodes for as long as the block lasts; yield a shell whose site.yml has the launcher alone.

    Args:
        purpose: What its name begins with.
        folder: A directory for all that is made.
    """
    fleet = launcher_fleet(folder / "fleet")
    with lab_up(purpose, folder / "state", TPU_OPS_FLEET=str(fleet)) as shell:
        yield shell


def launcher_fleet(folder: Path) -> Path:
    """Make a fleet whose site.yml has the launcher alone: what a run needs, and quickly there on a new worker."""
    (folder / "inventory" / "group_vars").mkdir(parents=True)
    (folder / "inventory" / "tpu_vm.yml").write_text("plugin: tpu_vm\n")
    (folder / "inventory" / "group_vars" / "all.yml").write_text('launcher_venv: ""\n')
    (folder / "playbooks").mkdir()
    for name in ("library", "action_plugins", "filter_plugins"):
        (folder / "playbooks" / name).symlink_to(ROOT / "playbooks" / name)
    (folder / "site.yml").write_text("- import_playbook: playbooks/launcher.yml\n")
    play = {"hosts": "all", "become": True, "gather_facts": False, "roles": ["launcher"]}
    (folder / "playbooks" / "launcher.yml").write_text(json.dumps([play]))
    return folder


@contextlib.contextmanager
def begun(desk: Desk, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, which is killed at the end of the block, and when it takes too long."""
    pipe = subprocess.PIPE
    # As at a terminal, even where these tests themselves run in the background of a shell, which ignores Ctrl-C.
    command = ["env", "--default-signal=INT", *argv]
    process = subprocess.Popen(
        command, cwd=ROOT, env=desk.environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    patience = threading.Timer(PATIENCE, process.kill)
    patience.start()
    try:
        yield process
    finally:
        patience.cancel()
        process.kill()
        process.wait()


def lines_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what a command says up to the line that holds a text."""
    assert process.stderr is not None
    found = ""
    for line in process.stderr:
        found += line
        if text in line:
            return found
    raise AssertionError(f"{text!r} was never said: {found}")
