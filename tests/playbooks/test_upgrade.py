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


def second_play() -> dict[str, Any]:
    """Return the play that upgrades."""
    (play,) = (play for play in yaml.safe_load((ROOT / "playbooks/upgrade.yml").read_text()) if "serial" in play)
    found: dict[str, Any] = play
    return found


def played(folder: Path, play: dict[str, Any], hosts: list[str], *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a play on hosts that are this machine; return its exit code, and its tasks with their results."""
    (folder / "play.yml").write_text(json.dumps([play | {"become": False}]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(json.dumps({"all": {"vars": local, "hosts": {host: {} for host in hosts}}}))
    facts = ROOT / "roles/facts"
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", folder / "hosts.yml", *options, folder / "play.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_LIBRARY": str(facts / "library"),
            "ANSIBLE_MODULE_UTILS": str(facts / "module_utils"),
        },
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, [task for each in json.loads(done.stdout)["plays"] for task in each["tasks"]]


def upgraded(folder: Path, at_once: int, failing: list[str]) -> dict[str, str]:
    """Run the second play; where the packages are upgraded, some hosts fail. Return what was said, by host."""
    play = second_play()
    block = play["tasks"][0]["block"]
    fail = {
        "name": "Upgrade the packages",
        "ansible.builtin.assert": {"that": "inventory_hostname not in failing", "fail_msg": "no"},
        "register": "__upgrade_packages",
    }
    play["tasks"][0]["block"] = [fail, block[-1]]
    play["vars"] |= {"failing": failing, "__upgrade_rebooted": {"changed": False}}
    code, tasks = played(folder, play, POD, "-e", f"upgrade_at_once={at_once}")
    assert (code != 0) is bool(failing), tasks
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


#: What the reboot does to the device files of each worker, which there are before, and how many the API says.
REBOOTS: dict[str, tuple[str, list[str], int]] = {
    "never-any": ("true", [], 0),
    "late": ("rm accel1; setsid sh -c 'sleep 0.5; touch accel1' >/dev/null 2>&1 &", ["accel0", "accel1"], 2),
    "other-numbers": ("mv vfio/0 vfio/7", ["vfio/0", "vfio/1", "vfio/vfio"], 1),
    "back": ("touch accel0", [], 1),
    "two-gone": ("rm accel1 accel2", ["accel0", "accel1", "accel2"], 0),
    "last": ("rm accel0", ["accel0"], 1),
}


def counted(folder: Path, hosts: list[str], *, reboots: bool) -> tuple[list[tuple[str, str]], int]:
    """Run the second play, whose reboot does what `REBOOTS` says; return who reported what, and the exit code."""
    for host in hosts:
        (folder / host / "vfio").mkdir(parents=True)
        for name in REBOOTS[host][1]:
            (folder / host / name).touch()
    play = second_play()
    # What needs a worker of its own is left out.
    block = [
        task
        for task in play["tasks"][0]["block"]
        if not {"apt_lists", "import_tasks", "apt", "stat"} & {key.rpartition(".")[2] for key in task}
        and task["name"] != "Refuse if a run has started"
    ]
    (reboot,) = (task for task in block if "ansible.builtin.reboot" in task)
    del reboot["ansible.builtin.reboot"], reboot["vars"]
    reboot["ansible.builtin.shell"] = {"cmd": "{{ reboots[inventory_hostname][0] }}", "chdir": "{{ dev }}"}
    reboot["when"] = reboots
    for task in block:
        if "until" in task:
            task["delay"] = 0.2
    dev = f"{folder}/{{{{ inventory_hostname }}}}"
    play["tasks"][0]["block"] = block
    play["vars"] |= {"reboots": REBOOTS, "dev": dev, "__upgrade_packages": {"changed": True}}
    play["vars"]["tpu_chips_per_worker"] = "{{ reboots[inventory_hostname][2] }}"
    play["vars"]["__upgrade_device_files"] = [
        path.replace("/dev", dev, 1) for path in play["vars"].get("__upgrade_device_files", [])
    ]
    code, tasks = played(folder, play, hosts, "-e", "upgrade_chips_timeout=20")
    said = [
        (host, result["msg"])
        for task in tasks
        if task["task"]["name"].startswith("Report")
        for host, result in task["hosts"].items()
        if "msg" in result
    ]
    return said, code


def test_a_worker_whose_chips_are_gone_after_the_reboot_has_failed(tmp_path: Path) -> None:
    said, code = counted(tmp_path, [*REBOOTS], reboots=True)
    well = ["never-any", "late", "other-numbers", "back"]
    assert said[:-1] == [
        (host, f"{host} is done ({index} of 6): packages upgraded, rebooted") for index, host in enumerate(well, 1)
    ]
    host, message = said[-1]
    there = [f"{tmp_path}/two-gone/accel{index}" for index in range(3)]
    assert (host, code) == ("two-gone", 2)
    assert "two-gone failed: Check that no chips are missing: 1 of 3 chips have a device file" in message
    assert f"({there[0]}; before the upgrade {', '.join(there)})" in message
    assert "boot the previous one, or delete the node and create it anew" in message
    assert message.endswith("Once that is fixed, continue with --limit two-gone,last")
    assert (tmp_path / "last/accel0").exists()


def test_a_worker_that_had_lost_its_chips_before_is_not_done(tmp_path: Path) -> None:
    """The API gives the number of chips, since a second upgrade cannot count the lost ones."""
    said, code = counted(tmp_path, ["never-any", "back"], reboots=False)
    assert said[0] == ("never-any", "never-any is done (1 of 2): packages upgraded, not rebooted")
    assert said[1][1].startswith("back failed: Check that no chips are missing: 0 of 1 chips have a device file (none;")
    assert code == 2


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


OF_UPGRADE = ("upgrade_at_once", "upgrade_chips_timeout", "upgrade_reboot", "upgrade_reboot_timeout")
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
                    f"upgrade_rebot: upgrade.yml has {', '.join(OF_UPGRADE)}",
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
