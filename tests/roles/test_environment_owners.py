"""How the roles python and workspace share the packages of one environment; with the real uv, without an index."""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.facts.module_utils import environment_sets
from roles.python.filter_plugins import environments as filters
from roles.python.library import uv_environments
from roles.python.module_utils import environment_work
from roles.python.module_utils.uv_program import Uv
from roles.workspace.library import git_workspaces
from tests.roles.conftest import Run
from tests.support.environments import UV, more, plain_wheel, write_project
from tpu_ops.protocol.installed_packages import pinned_packages

Result = dict[str, Any]

#: A lock file for several versions of Python, as `uv pip compile --universal` writes it.
UNIVERSAL = "extra==1 ; python_version >= '3.8' # via t\nextra==2 ; python_version < '3.8' \\\n    --hash=sha256:00\n"


class Worker:
    """One worker with an environment `t` and clones of projects, each with a remote of its own."""

    def __init__(self, run: Run, root: Path, arguments: Result) -> None:
        self.run = run
        self.root = root
        self.arguments = more(arguments, name="t", variable="python_environments[0]", lock="")
        self.projects: list[Result] = []

    def project(self, name: str, needs: list[str], editable: str = ".", **extras: list[str]) -> None:
        """Give a project a commit with these needs; it is in the role's list from now on."""
        source = self.root / "forge" / name
        source.parent.mkdir(exist_ok=True)
        write_project(source, name, needs, **extras)
        commands = ("init -q", "add .", "-c user.name=a -c user.email=a@x commit -q --allow-empty -m a")
        for command in commands:
            subprocess.run(["git", *command.split()], cwd=source, check=True, timeout=30)
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=source, check=True, timeout=30, capture_output=True, text=True
        )
        entry = {
            "name": name,
            "url": str(source),
            "commit": head.stdout.strip(),
            "path": str(self.root / "clones" / name),
            "owner": getpass.getuser(),
            "environment": str(self.root / "venv"),
            "editable": [editable],
        }
        self.projects = [each for each in self.projects if each["name"] != name] + [entry]

    def python(self, *, moving: bool = False, check: bool = False, **wanted: Any) -> list[Result]:
        """Do what the role python does, with `--tags python` or, before the role workspace, in site.yml."""
        self.arguments = more(self.arguments, **wanted)
        entry = self.arguments["environments"][0]
        place = {"moving": [each["path"] for each in self.projects] if moving else []}
        done: list[Result] = []

        def step(name: str, environment: Result) -> Result:
            arguments = self.arguments | place | {"step": name, "environments": [environment]}
            done.append(self.run(uv_environments, arguments, check=check))
            return done[-1]

        seen = step("look", entry)
        if seen.get("failed"):
            return done
        hostvars = {"w0": {"__python_seen": seen}}
        plan = filters.environment_plan(["w0"], hostvars)["w0"]
        if plan["resolve"]:
            resolved = step("resolve", entry)
            if resolved.get("failed"):
                return done
            hostvars["w0"]["__python_resolved"] = resolved
        for filled in filters.agreed_environments([entry], plan, hostvars, check):
            step("fill", filled)
        for unrecorded in filters.unrecorded_environments([entry], seen["environments"]):
            step("record", unrecorded)
        return done

    def workspace(self, *, check: bool = False) -> Result:
        """Do what the role workspace does."""
        arguments = {
            "projects": self.projects,
            "uv": UV,
            "cache_dir": str(self.root / "cache"),
            "system": str(self.root / "gitconfig"),
        }
        return self.run(git_workspaces, arguments, check=check)

    def settle(self) -> None:
        """Do what a run of site.yml does, and find that a second one changes nothing."""
        for _ in range(2):
            done = [*self.python(moving=True), self.workspace()]
            assert [result["msg"] for result in done if result.get("failed")] == []
        assert [result["changed"] for result in done] == [False] * len(done), "the second run"

    def packages(self) -> dict[str, str]:
        """Return the versions of what the environment holds."""
        shown = subprocess.run(
            [UV, "pip", "list", "--python", str(self.root / "venv"), "--format=freeze"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        pairs = (line.split("==") for line in shown.stdout.splitlines() if "==" in line)
        return {pair[0]: pair[1] for pair in pairs}


@pytest.fixture
def worker(run: Run, tmp_path: Path, arguments: Result, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return a worker whose uv knows two versions of six, of extra, and of flax, whose first needs an old six."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name, version, *requires in (
        ("six", "1.16.0"),
        ("six", "1.17.0"),
        ("extra", "1"),
        ("extra", "2"),
        ("flax", "1", "six<1.17"),
        ("flax", "2", "six"),
    ):
        plain_wheel(tmp_path / "wheels", name, version, *requires)
    return Worker(run, tmp_path, arguments | {"uv": UV})


def test_a_project_that_the_list_forbids_is_refused_with_both_names(worker: Worker) -> None:
    worker.project("vision", ["six>=1.17"])
    for _ in range(2):
        assert not any(result.get("failed") for result in worker.python(requirements=["six==1.16.0"], moving=True))
        refused = worker.workspace()
        assert refused["failed"] is True
        for words in (
            "workspace_projects: vision: nothing was changed in ",
            "python_environments[0] (environment t) lists; change one of them",
            "six==1.16.0",
            "six>=1.17",
        ):
            assert words in refused["msg"]
        assert worker.packages() == {"six": "1.16.0"}
    assert [result["changed"] for result in worker.python()] == [False]


@pytest.mark.parametrize("moving", [False, True])
def test_a_list_that_a_project_forbids_is_refused_unless_the_project_moves(worker: Worker, moving: bool) -> None:
    worker.project("vision", ["six>=1.17"])
    worker.python(requirements=["six"])
    worker.settle()
    done = worker.python(requirements=["six==1.16.0"], moving=moving)
    said = str(done[-1].get("msg")) + str(done[0].get("warnings"))
    assert f"vision ({worker.root}/clones/vision)" in said
    assert (done[-1].get("failed", False), worker.packages()["six"]) == (
        (False, "1.16.0") if moving else (True, "1.17.0")
    )
    if moving:
        worker.project("vision", ["six>=1.16"])
        worker.settle()
    else:
        assert (
            "the requirements of python_environments[0] (environment t) conflict with those of the installed vision"
            in said
        )


def test_the_list_and_a_project_are_resolved_together(worker: Worker) -> None:
    worker.python(requirements=["flax"], constraints=["flax<2"])
    assert worker.packages() == {"flax": "1", "six": "1.16.0"}
    worker.python(requirements=["flax"], constraints=[])
    worker.project("vision", ["six>=1.17"])
    worker.settle()
    assert worker.packages() == {"flax": "2", "six": "1.17.0", "vision": "1"}
    worker.python(requirements=["flax", "extra"])
    assert worker.packages() == {"extra": "2", "flax": "2", "six": "1.17.0", "vision": "1"}


def test_a_package_leaves_the_list_with_what_nothing_else_needs(worker: Worker) -> None:
    worker.python(requirements=["flax", "extra"])
    assert worker.packages() == {"extra": "2", "flax": "2", "six": "1.17.0"}
    checked = worker.python(requirements=["extra"], check=True)
    assert checked[0]["environments"]["t"]["plan"] == ["- flax", "- six"]
    worker.python()
    assert worker.packages() == {"extra": "2"}
    assert [result["changed"] for result in worker.python()] == [False]


def test_what_a_project_needs_stays_when_the_list_drops_it_and_leaves_with_the_project(worker: Worker) -> None:
    worker.project("vision", ["flax"])
    worker.python(requirements=["flax", "extra"])
    worker.settle()
    worker.python(requirements=["extra"])
    worker.settle()
    assert worker.packages() == {"extra": "2", "flax": "2", "six": "1.17.0", "vision": "1"}
    worker.projects[0]["state"] = "absent"
    done = worker.workspace()
    assert done.get("changed") is True, done.get("msg")
    worker.python()
    assert worker.packages() == {"extra": "2"}


def test_a_package_that_nobody_listed_is_in_no_lock_and_leaves(worker: Worker) -> None:
    worker.python(requirements=["extra"])
    install = [UV, "pip", "install", "--quiet", "--python", str(worker.root / "venv"), "flax"]
    subprocess.run(install, check=True, timeout=60)
    entry = worker.arguments["environments"][0]
    arguments = worker.arguments | {"step": "resolve", "environments": [entry]}
    assert set(pinned_packages(worker.run(uv_environments, arguments)["locks"]["t"])) == {"extra"}
    worker.python()
    assert worker.packages() == {"extra": "2"}


def test_an_empty_list_leaves_all_packages(worker: Worker) -> None:
    worker.python(requirements=[])
    subprocess.run([UV, "pip", "install", "--quiet", "--python", str(worker.root / "venv"), "flax"], check=True)
    assert [result["changed"] for result in worker.python()] == [False]
    assert worker.packages() == {"flax": "2", "six": "1.17.0"}


def test_packages_that_an_owner_added_stay_and_do_not_spread(worker: Worker) -> None:
    worker.python(requirements=["flax", "extra"])
    install = [UV, "pip", "install", "--quiet", "--python", str(worker.root / "venv")]
    plain_wheel(worker.root / "wheels", "mine", "1", "theirs", "six")
    plain_wheel(worker.root / "wheels", "theirs", "1")
    subprocess.run([*install, "mine"], check=True, timeout=60)
    wanted = worker.arguments["environments"][0] | {"owner": "ada", "requirements": ["extra"], "exact": False}
    uv = Uv(UV, str(worker.root / "cache"), 60)
    for lock in ("", "extra==2\n"):
        environment = environment_work.Environment(wanted | {"lock": lock, "agreed": bool(lock)}, uv)
        assert environment.surplus() == ["flax"], "the list no longer has it, and the owner's package needs only six"


def test_conditions_on_python_and_extras_decide_what_is_needed(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    for name, *requires in (
        ("jax", "numpy>=2", "libtpu==1; extra == 'tpu'", "cuda; extra == 'cuda_12'", "old; python_version < '3.12'"),
        ("numpy", "early; python_full_version < '3.12.1'"),
        ("libtpu", "jax[CUDA-12]; extra == 'x'", "absent"),
        *(("cuda",), ("old",), ("early",), ("stray", "strays-own"), ("strays_own",)),
    ):
        info = site / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1",
            *(f"Requires-Dist: {line}" for line in requires),
        ]
        (info / "METADATA").write_text("\n".join([*lines, ""]))

    def required(*lines: str) -> set[str]:
        return environment_sets.required(str(tmp_path), list(lines), "3.12.11")

    assert required("jax") == {"jax", "numpy", "early"}, "uv resolves locks for 3.12.0"
    assert required("jax[tpu]==1 --hash=sha256:00") == {"jax", "numpy", "early", "libtpu"}
    assert required("jax[tpu]", "libtpu[x]") == {"jax", "numpy", "early", "libtpu", "cuda"}
    assert required("stray # why", "jax; python_version < '3'", "./here") == {"stray", "strays-own"}
    (site / "stray-1.dist-info" / "direct_url.json").write_text('{"url": "file:///stray.whl"}')
    assert required() == {"stray", "strays-own"}


@pytest.mark.parametrize("exact", [False, True])
def test_a_package_that_only_a_project_needs_stays_with_a_lock(worker: Worker, exact: bool) -> None:
    worker.python(requirements=[], lock=UNIVERSAL, exact=exact)
    worker.project("vision", ["flax"])
    worker.settle()
    assert worker.packages() == {"extra": "1", "flax": "2", "six": "1.17.0", "vision": "1"}
    worker.project("vision", ["flax", "extra>=2"])
    assert "the lock file of python_environments[0] (environment t) lists" in worker.workspace()["msg"]
    assert worker.packages()["extra"] == "1"


def test_two_projects_of_an_environment_are_resolved_together(worker: Worker) -> None:
    worker.python(requirements=["extra"])
    worker.project("audio", ["six<1.17"])
    worker.settle()
    worker.project("vision", ["six>=1.17"])
    for _ in range(2):
        refused = worker.workspace()["msg"]
        assert f"vision: nothing was changed in {worker.root}/venv" in refused
        assert f"what audio ({worker.root}/clones/audio) needs" in refused
        assert worker.packages()["six"] == "1.16.0"
    # Both move in one run.
    worker.project("audio", ["six"])
    worker.project("vision", ["six>=1.17"])
    worker.settle()


def test_the_extras_of_a_project_count(worker: Worker) -> None:
    worker.project("vision", [], ".[all]", train=["extra>=2"], all=["vision[train]"], old=["six<1.17"])
    worker.python(requirements=["six"])
    worker.settle()
    assert worker.packages() == {"extra": "2", "six": "1.17.0", "vision": "1"}
    assert "conflict with those of the installed" in worker.python(requirements=["extra==1"])[-1]["msg"]
    assert not worker.python(requirements=["extra==2"])[-1].get("failed")


def test_needs_that_another_project_meets_are_not_sought_in_the_index(worker: Worker) -> None:
    worker.project("audio", [])
    worker.python(requirements=["six"])
    worker.settle()
    worker.project("vision", ["audio", "extra<2"])
    worker.settle()
    found = environment_sets.editable_projects(str(worker.root / "venv"))
    assert [(each.name, each.needs) for each in found] == [("audio", []), ("vision", ["extra<2"])]
    worker.python(requirements=["flax==1"])
    assert worker.packages() == {"audio": "1", "extra": "1", "flax": "1", "six": "1.16.0", "vision": "1"}


@pytest.mark.parametrize(
    ("projects", "directory", "paths"),
    [
        ([], "/opt/workspaces", []),
        ([{"name": "a"}, {"name": "b", "path": "/code/b", "state": "absent"}], "/opt/w/", ["/opt/w/a", "/code/b"]),
        ("misspelt", "/opt/workspaces", []),
    ],
)
def test_the_clones_that_are_about_to_move_are_known(projects: Any, directory: str, paths: list[str]) -> None:
    assert filters.moving_projects(projects, directory) == paths
