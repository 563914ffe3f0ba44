"""What site.yml says about faulty variables, before it changes anything: it is run here on this machine, check only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGXIlzKGDcj4bqZ6VBmPPWdMbHnzVrWFwgbEf6hYzwCM"


@pytest.mark.parametrize(
    "faults",
    [
        [
            (
                {"users_people": [{"name": "ada", "sudo": "all"}], "python_source": "pyenv"},
                [
                    "value of sudo must be one of: none, launcher, full",
                    "value of python_source must be one of: deadsnakes, distribution, uv",
                ],
            ),
            (
                {"users_people": [{"name": "ada", "key": ED25519}, {}], "shell_scrollback": "many"},
                [
                    "unknown key users_people.key. Supported parameters",
                    "missing required arguments: name found in users_people",
                    "argument 'shell_scrollback' is of type str and we were unable to convert to int",
                ],
            ),
        ],
        [
            ({"users_people": [{"name": "ada", "keys": ["no"]}]}, ["ada: keys[0] starts with 'no'"]),
            (
                {"users_people": [{"name": "tpu", "state": "absent"}], "ansible_user": "tpu"},
                ["tpu: state absent would remove the account"],
            ),
        ],
        [({"python_source": "distribution", "python_minimum": "3.99"}, ["python_minimum 3.99 of"])],
        [({"python_source": "uv", "python_version": "3.10"}, ["JAX 0.10.2 needs Python 3.11 or later"])],
        [
            (
                {
                    "nfs_exports": [{"path": "/srv/share", "server": "good-w0", "mode": "0777"}],
                    "nfs_mounts": [{"path": "/mnt/share", "export": "/srv/share"}],
                    "disks_mounts": [{"label": "data", "path": "/mnt/share"}],
                },
                [
                    "nfs_exports[0]: /srv/share: mode 0777 lets everybody write",
                    "server good-w0 is preemptible",
                    "nfs_mounts[0]: /mnt/share: disks_mounts has /mnt/share",
                ],
            )
        ],
    ],
)
def test_a_worker_s_fault_ends_the_run_before_any_worker_is_changed(
    tmp_path: Path, faults: list[tuple[dict[str, Any], list[str]]]
) -> None:
    right = SYSTEM | {"python_source": "uv", "python_version": "3.12", "tpu_internal_ip": "10.0.0.2", "tpu_spot": True}
    hosts = {"good-w0": right} | {f"bad-w{index}": right | faulty for index, (faulty, _) in enumerate(faults)}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, "--check", "site.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"},
    )
    assert done.returncode != 0, done.stderr
    tasks = json.loads(done.stdout)["plays"][0]["tasks"]
    # The first task past the checks would be the first change.
    assert not any(task["task"]["name"].startswith("base :") for task in tasks)
    failures = {host: json.dumps(result) for host, result in tasks[-1]["hosts"].items() if result.get("failed")}
    assert set(failures) == set(hosts) - {"good-w0"}, tasks[-1]
    for index, (_, said) in enumerate(faults):
        assert [text for text in said if text not in failures[f"bad-w{index}"]] == []
