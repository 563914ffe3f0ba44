"""What upgrade.yml says when workers fail; its own play on hosts that are this machine, whose upgrade is played.

And what it and verify.yml refuse to begin with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROOT = Path(__file__).resolve().parents[2]
POD = [f"pod-w{index}" for index in range(4)]


def upgraded(folder: Path, at_once: int, failing: list[str]) -> dict[str, str]:
    """Run the second play; where the packages are upgraded, some hosts fail. Return what was said, by host."""
    (play,) = (play for play in yaml.safe_load((ROOT / "playbooks/upgrade.yml").read_text()) if "serial" in play)
    block = play["tasks"][0]["block"]
    fail = {
        "name": "Upgrade the packages",
        "ansible.builtin.assert": {"that": "inventory_hostname not in failing", "fail_msg": "no"},
        "register": "__upgrade_packages",
    }
    play["tasks"][0]["block"] = [fail, block[-1]]
    play["vars"] |= {"failing": failing, "__upgrade_rebooted": {"changed": False}}
    (folder / "play.yml").write_text(json.dumps([play | {"become": False}]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(json.dumps({"all": {"vars": local, "hosts": {host: {} for host in POD}}}))
    done = subprocess.run(
        [
            Path(sys.executable).parent / "ansible-playbook",
            *("-i", folder / "hosts.yml", "-e", f"upgrade_at_once={at_once}", folder / "play.yml"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"},
    )
    assert (done.returncode != 0) is bool(failing), done.stdout + done.stderr
    tasks: list[dict[str, Any]] = [task for each in json.loads(done.stdout)["plays"] for task in each["tasks"]]
    words = ("Report how to continue", "Report that the worker is done")
    return {
        host: result["msg"].partition(":")[0]
        if task["task"]["name"] == words[1]
        else result["msg"].partition(": no. ")[2]
        for task in tasks
        if task["task"]["name"] in words
        for host, result in task["hosts"].items()
    }


@pytest.mark.parametrize(
    ("at_once", "failing", "said"),
    [
        (2, [], {host: f"{host} is done ({2 if index < 2 else 4} of 4)" for index, host in enumerate(POD)}),
        (
            2,
            ["pod-w0", "pod-w1"],
            dict.fromkeys(POD[:2], "Done: none. Once that is fixed, continue with --limit pod-w0,pod-w1,pod-w2,pod-w3"),
        ),
        (
            2,
            ["pod-w0"],
            {"pod-w0": "Done: pod-w1. Once that is fixed, continue with --limit pod-w0,pod-w2,pod-w3"},
        ),
        (
            1,
            ["pod-w1"],
            {
                "pod-w0": "pod-w0 is done (1 of 4)",
                "pod-w1": "Done: pod-w0. Once that is fixed, continue with --limit pod-w1,pod-w2,pod-w3",
            },
        ),
    ],
)
def test_a_worker_that_fails_says_which_are_done_and_how_to_go_on(
    tmp_path: Path, at_once: int, failing: list[str], said: dict[str, str]
) -> None:
    assert upgraded(tmp_path, at_once, failing) == said


DPKG = """\
zsh.postinst: no room

dpkg: error processing package zsh (--configure):
 installed zsh package post-installation script subprocess returned error exit status 1
Errors were encountered while processing:
 zsh
"""
DPKG_SAID = (
    "zsh.postinst: no room; dpkg: error processing package zsh (--configure): installed zsh package post-installation"
    " script subprocess returned error exit status 1; Errors were encountered while processing: zsh"
)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            {"msg": "non-zero return code", "stderr": "earlier\n" * 6 + DPKG},
            f"non-zero return code; earlier; {DPKG_SAID}",
        ),
        (
            {"msg": "apt-get failed: E: no space left\n", "stderr": "E: no space left\n"},
            "apt-get failed: E: no space left",
        ),
        ({"msg": "a run has started on it"}, "a run has started on it"),
        ({"stdout": "a run has started on it"}, "a run has started on it"),
    ],
)
def test_a_worker_that_fails_says_what_its_program_said(result: dict[str, str], said: str) -> None:
    plays = DataLoader().load_from_file(str(ROOT / "playbooks/upgrade.yml"), trusted_as_template=True)
    (task,) = plays[1]["tasks"][0]["rescue"]
    variables = task["vars"] | {"inventory_hostname": "pod-w0", "__upgrade_done": [], "__upgrade_left": POD[:1]}
    variables |= {"ansible_failed_task": {"name": "Complete"}, "ansible_failed_result": result}
    text = Templar(DataLoader(), variables).template(task["ansible.builtin.fail"]["msg"])
    end = "Done: none. Once that is fixed, continue with --limit pod-w0"
    assert text == f"pod-w0 failed: Complete: {said}. {end}"


NUMBER = "is not a whole number of 1 or more"


@pytest.mark.parametrize(
    ("playbook", "hosts"),
    [
        (
            "upgrade.yml",
            [
                # All workers at once, says Ansible.
                ({"upgrade_at_once": "0"}, f"upgrade_at_once: '0' {NUMBER}"),
                ({"upgrade_at_once": [1, "many"]}, f"upgrade_at_once: 'many' {NUMBER}"),
                ({"upgrade_at_once": [1, "25%"], "upgrade_reboot_timeout": "60", "upgrade_reboot": "always"}, None),
                ({"upgrade_reboot_timeout": -1}, f"upgrade_reboot_timeout: '-1' {NUMBER}"),
                ({"upgrade_reboot": "yes"}, "upgrade_reboot: 'yes' is not one of needed, always, never"),
                (
                    {"upgrade_rebot": "never"},
                    "upgrade_rebot: upgrade.yml has upgrade_at_once, upgrade_reboot, upgrade_reboot_timeout",
                ),
                ({"upgrade_mine": 1, "facts_own_variables": ["upgrade_mine"]}, None),
                ({}, None),
            ],
        ),
        (
            "verify.yml",
            [
                ({"verify_timeout": "soon"}, f"verify_timeout: 'soon' {NUMBER}"),
                ({"verify_mebibytes": 0}, f"verify_mebibytes: '0' {NUMBER}"),
                ({"verify_rounds": "1%"}, f"verify_rounds: '1%' {NUMBER}"),
                ({"verify_timout": 9}, "verify_timout: verify.yml has verify_mebibytes, verify_rounds, verify_timeout"),
                ({"verify_rounds": "3", "verify_timeout": 30}, None),
                ({}, None),
            ],
        ),
    ],
)
def test_numbers_that_would_do_harm_are_refused_first(
    tmp_path: Path, playbook: str, hosts: list[tuple[dict[str, Any], str | None]]
) -> None:
    play = yaml.safe_load((ROOT / "playbooks" / playbook).read_text())[0]
    first = play["tasks"][0]
    assert first["name"] == "Check the variables"
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [first]}]))
    named = {f"w{index}": values for index, (values, _) in enumerate(hosts)}
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": named}}))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", tmp_path / "hosts.yml", tmp_path / "play.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_FILTER_PLUGINS": f"{ROOT}/playbooks/filter_plugins",
        },
    )
    (task,) = json.loads(done.stdout)["plays"][0]["tasks"]
    said = {host: result["msg"] if result.get("failed") else None for host, result in task["hosts"].items()}
    assert said == {f"w{index}": fault and f"w{index}: {fault}" for index, (_, fault) in enumerate(hosts)}
