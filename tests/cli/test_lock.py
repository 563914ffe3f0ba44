"""`tpu_ops lock`: real Ansible on hosts that are this machine, real uv, and packages from a directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.python.filter_plugins.environments import wanted_environments
from roles.python.filter_plugins.fleet_locks import fleet_lists, fleet_lock_faults, fleet_locked
from tests.support.environments import UV, plain_wheel
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops.ansible import locks
from tpu_ops.ansible.playbook import Outcome
from tpu_ops.cloud.node import Node
from tpu_ops.errors import OpsError
from tpu_ops.protocol.installed_packages import pinned_packages

VARIABLES = {
    "ansible_connection": "local",
    "ansible_become": False,
    "ansible_python_interpreter": "{{ ansible_playbook_python }}",
    "python_source": "uv",
    "jax_version": "0.12.0.1",
    "jax_platform": "cpu",
    "jax_packages": ["flax"],
}


class Desk:
    """A fleet of two nodes of one worker, and a package index in a directory."""

    def __init__(self, root: Path) -> None:
        self.member, self.wheels = Member(root, snapshot=str(root / "published.json")), root / "wheels"
        self.publish(node(count=1), node("solo", node_id="2", count=1))
        for name, version, *needs in (("jax", "0.12.0.1", "six"), ("six", "1"), ("flax", "1", "jax"), ("optax", "1")):
            plain_wheel(self.wheels, name, version, *needs)
        self.locks = self.member.path / "inventory" / "locks"
        self.set("all", **VARIABLES)

    def publish(self, *nodes: Node) -> None:
        """Replace the nodes of the fleet."""
        (self.member.path.parent / "published.json").write_text(document(nodes, asked_at=time.time()).text())

    def set(self, group: str, **variables: Any) -> None:
        """Write the variables of a group."""
        path = self.member.path / "inventory" / "group_vars" / f"{group}.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(variables))

    def lock(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run `tpu_ops lock`."""
        environ = self.member.environ(UV_OFFLINE="1", UV_NO_INDEX="1", UV_FIND_LINKS=str(self.wheels))
        command = [sys.executable, "-m", "tpu_ops.cli.main", "lock", *argv]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_lists_of_all_workers_are_resolved_once_and_kept_until_they_change(desk: Desk) -> None:
    tools = {"name": "tools", "requirements": ["six"]}
    desk.set("node_solo", jax_packages=["optax"], python_environments=[tools])
    done = desk.lock("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (of_tools,) = (one for one in told if one["environment"] == "tools")
    assert (of_tools["workers"], of_tools["packages"]) == (["solo-w0"], {"six": "1"})
    found = {",".join(one["workers"]): one for one in told if one["environment"] == "jax"}
    assert {workers: one["packages"] for workers, one in found.items()} == {
        "pod-w0": {"jax": "0.12.0.1", "six": "1", "flax": "1"},
        "solo-w0": {"jax": "0.12.0.1", "six": "1", "optax": "1"},
    }
    text = Path(found["solo-w0"]["file"]).read_text()
    assert "# requirements: optax" in text
    assert text.count("--hash=sha256:") == 3
    plain_wheel(desk.wheels, "six", "2")
    desk.set("all", **VARIABLES | {"jax_packages": ["flax", "optax"]})
    done = desk.lock()
    assert done.returncode == 0, done.stderr
    first, last = (Path(one["file"]) for one in found.values())
    assert done.stdout.splitlines() == [
        f"{first}: 4 packages for pod-w0",
        "  + optax 1",
        f"{last}: 3 packages for solo-w0, no change",
        f"{of_tools['file']}: 1 package for solo-w0, no change",
    ]
    assert last.read_text() == text


def test_a_stopped_node_is_named_and_keeps_its_lock(desk: Desk) -> None:
    desk.set("node_solo", jax_packages=["optax"])
    assert desk.lock().returncode == 0
    first, last = sorted(desk.locks.iterdir())
    texts = {path: path.read_text() for path in (first, last)}
    of_solo = next(path for path, text in texts.items() if "optax" in text)
    desk.publish(node(count=1), node("solo", node_id="2", count=1, state="STOPPED"))
    desk.member.write(snapshot=str(desk.member.path.parent / "published.json"), states=["READY", "STOPPED"])
    # The list of the other worker has changed, so that its lock needs a file.
    desk.set("all", **VARIABLES | {"jax_packages": ["flax", "optax"]})
    done = desk.lock()
    assert (done.returncode, of_solo.read_text()) == (0, texts[of_solo]), done.stderr
    assert "warning: solo is STOPPED: the lists there were not read, and their locks stay" in done.stderr
    assert f"{of_solo} stays" in done.stderr
    assert done.stdout.splitlines() == [f"{desk.locks}/jax-3.12-x86_64-3.txt: 4 packages for pod-w0", "  + optax 1"]
    desk.publish(node("solo", node_id="2", count=1, state="STOPPED"))
    done = desk.lock()
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert "no worker can be asked for its lists, and all locks stay: solo is STOPPED\n  at:  solo-w0" in done.stderr


def test_a_fleet_that_lists_nothing_or_has_no_workers_is_told_so(desk: Desk) -> None:
    (own := desk.member.path / "own.txt").write_text("jax==0.12.0.1\n")
    desk.set("all", **VARIABLES | {"jax_lock": str(own), "jax_packages": []})
    done = desk.lock()
    assert "no lock was written: each environment has a lock file of its own (jax_lock, or" in done.stderr, done.stderr
    assert (done.returncode, done.stdout, desk.locks.exists()) == (0, "", False)
    desk.publish()
    done = desk.lock()
    assert (done.returncode, "the fleet has no workers" in done.stderr) == (2, True), done.stderr


def test_upgrade_takes_the_newest_versions_that_the_list_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jax", "flax"):
        plain_wheel(tmp_path / "wheels", name, "1")
        plain_wheel(tmp_path / "wheels", name, "2")
    for name, value in {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path / "wheels")}.items():
        monkeypatch.setenv(name, value)
    (lock,) = locked(tmp_path / "locks", fleet_lists(wanted("flax"), "x86_64", ""))
    lock = replace(lock, before=lock.text)
    assert locks.resolved(lock, UV, upgrade=False).changes == []
    assert locks.resolved(lock, UV, upgrade=True).changes == ["~ flax 1 -> 2"]
    (other,) = locked(tmp_path / "others", fleet_lists(wanted("misspelt"), "x86_64", ""))
    with pytest.raises(OpsError, match="misspelt") as refused:
        locks.resolved(other, UV, upgrade=False)
    assert refused.value.where == "jax[tpu]==1, misspelt, Python 3.12 on x86_64"


PROGRAMS = {"3.12": {"program": "3.12"}}


def wanted(*requirements: str, lock: str = "") -> list[dict[str, Any]]:
    """Return the environment with JAX as the role wants it."""
    listed = {"name": "jax", "requirements": ["jax[tpu]==1", *requirements], "lock": lock and "own.txt"}
    return wanted_environments([listed], PROGRAMS, "3.12", [lock] if lock else [])


def locked(directory: Path, lists: list[dict[str, Any]]) -> list[locks.Lock]:
    """Return the locks that the command would write for a worker w0, with the list instead of uv's output."""
    told = locks.lists_of(Outcome(data={"lists": {"w0": {"jax": lists}}}))
    found = []
    for lock in locks.planned(directory, told):
        pins = [line.partition("==")[0].partition("[")[0] + "==1" for line in lock.wanted.requirements]
        found.append(replace(lock, text=lock.wanted.header + "\n".join(pins) + "\n"))
    locks.write(found)
    return found


def test_the_role_installs_the_lock_of_its_very_list(tmp_path: Path) -> None:
    locked(tmp_path, fleet_lists(wanted("flax"), "x86_64", ""))
    (path,) = tmp_path.iterdir()
    assert path.name == "jax-3.12-x86_64.txt"
    texts = [path.read_text()]
    (entry,) = fleet_locked(wanted("flax"), "x86_64", texts)
    assert (pinned_packages(entry["lock"]), entry["exact"], entry["agreed"]) == ({"jax": "1", "flax": "1"}, True, False)
    (owned,) = fleet_locked([wanted("flax")[0] | {"owner": "ada"}], "x86_64", texts)
    assert (owned["lock"], owned["exact"], owned["agreed"]) == (entry["lock"], False, True)
    for others in (wanted("optax"), wanted("flax", "optax")):
        assert fleet_locked(others, "x86_64", texts) == others
    assert fleet_locked(wanted("flax"), "aarch64", texts) == wanted("flax")
    own = wanted("flax", lock="jax==1\n")
    assert fleet_locked(own, "x86_64", texts) == own
    assert fleet_lists(own, "x86_64", "") == []


@pytest.mark.parametrize(
    ("now", "machine", "said"),
    [
        (["flax"], "x86_64", ""),
        (["flax", "optax"], "x86_64", "(now also optax); run `tpu_ops lock`, and try again"),
        ([], "x86_64", "(no longer flax)"),
        (["optax"], "x86_64", "(now also optax, no longer flax)"),
        (["optax"], "aarch64", ""),
    ],
)
def test_a_list_that_differs_from_its_lock_is_refused_in_plain_words(
    tmp_path: Path, now: list[str], machine: str, said: str
) -> None:
    locked(tmp_path, fleet_lists(wanted("flax"), "x86_64", ""))
    texts = [path.read_text() for path in tmp_path.iterdir()]
    faults = fleet_lock_faults(wanted(*now), machine, texts, "jax_packages")
    if said:
        assert faults[0].startswith(
            "jax_packages: the fleet's lock of jax for Python 3.12 on x86_64 is for another list"
        )
        assert said in faults[0]
    else:
        assert faults == []


def test_a_changed_list_keeps_its_file_and_a_file_of_the_user_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "jax-3.12-x86_64.txt").write_text("mine==1\n")
    lists = fleet_lists(wanted("flax"), "x86_64", "") + fleet_lists(wanted("optax"), "x86_64", "")
    assert [lock.path.name for lock in locked(tmp_path, lists)] == ["jax-3.12-x86_64-2.txt", "jax-3.12-x86_64-3.txt"]
    (changed, kept) = locked(tmp_path, fleet_lists(wanted("chex"), "x86_64", "") + lists[1:])
    assert (changed.path.name, changed.changes) == ("jax-3.12-x86_64-2.txt", ["+ chex 1", "- flax"])
    assert (kept.path.name, kept.changes) == ("jax-3.12-x86_64-3.txt", [])
    assert (tmp_path / "jax-3.12-x86_64.txt").read_text() == "mine==1\n"
