"""Environments: the common set of workers, refused entries, and the one that is active at login."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from roles.python.filter_plugins import environments as filters


def seen(packages: dict[str, str] | None, plan: bool = False, **more: Any) -> dict[str, Any]:
    """Return what a worker says of its environment; no packages are no environment."""
    entry = {
        "fresh": packages is None,
        "plan": ["+ x"] if plan else [],
        "packages": packages or {},
        "editable": [],
        "local": [],
        "digest": str(sorted((packages or {}).items())) if packages else "",
        "key": "k",
        "locked": False,
        "projects": "",
    }
    return {"__python_seen": {"environments": {"jax": entry | more}}}


ONE, TWO = {"jax": "1", "numpy": "1"}, {"jax": "1", "numpy": "2"}


@pytest.mark.parametrize(
    ("workers", "leader", "filled"),
    [
        ([seen(ONE), seen(ONE)], None, []),
        ([seen(None), seen(None)], 0, [0, 1]),
        # A new worker gets what the others have.
        ([seen(None), seen(ONE)], 1, [0, 1]),
        # The most common set wins.
        ([seen(TWO), seen(ONE), seen(ONE)], 1, [0, 1, 2]),
        # One that lacks something is not asked while others do not.
        ([seen(ONE, plan=True), seen(TWO)], 1, [0, 1]),
        ([seen(None), seen(ONE, plan=True)], 1, [0, 1]),
        # People's own projects are no difference.
        ([seen(ONE), seen(ONE | {"mine": "1"}, editable=["mine"])], None, []),
        ([seen(ONE), seen(ONE | {"mine": "1"}, local=["mine"])], None, []),
        # A package that only this worker's project needs stays here.
        ([seen(ONE), seen(ONE | {"x": "1"}, projects="a")], None, []),
        ([seen(ONE, projects="a"), seen(TWO, projects="a"), seen(TWO)], 0, [0, 1]),
        # A new worker has no projects yet, and gets what most others have.
        ([seen(None), seen(TWO), seen(ONE, projects="a"), seen(ONE, projects="a")], 2, [0, 2, 3]),
        # Other wishes, other sets.
        ([seen(ONE), seen(TWO, key="other")], None, []),
        ([seen(ONE, locked=True), seen(TWO, locked=True)], None, []),
        ([seen(ONE, locked=True), seen(TWO, locked=True, plan=True)], None, [1]),
        ([{}, {"__python_seen": {"skipped": True}}], None, []),
    ],
)
def test_workers_agree_on_one_set(workers: list[dict[str, Any]], leader: int | None, filled: list[int]) -> None:
    hostvars = {f"w{index}": worker for index, worker in enumerate(workers)}
    plan = filters.environment_plan(list(hostvars), hostvars)
    assert [host for host in plan if plan[host]["resolve"]] == ([] if leader is None else [f"w{leader}"])
    assert [host for host in plan if plan[host]["fill"]] == [f"w{index}" for index in filled]
    assert {plan[f"w{index}"]["from"].get("jax") for index in filled} <= {None if leader is None else f"w{leader}"}


def test_no_worker_installs_anything_when_the_set_could_not_be_resolved() -> None:
    hostvars = {"w0": seen(None), "w1": seen(None)}
    plan = filters.environment_plan(["w0", "w1"], hostvars)
    wanted = [{"name": "jax", "lock": "", "requirements": ["jax"]}]
    with pytest.raises(AnsibleFilterError, match="w0 did not resolve the environment jax"):
        filters.agreed_environments(wanted, plan["w1"], hostvars, check=False)
    assert filters.agreed_environments(wanted, plan["w1"], hostvars, check=True) == [wanted[0] | {"agreed": True}]
    hostvars["w0"]["__python_resolved"] = {"locks": {"jax": "jax==1"}}
    agreed = filters.agreed_environments(wanted, plan["w1"], hostvars, check=False)[0]
    assert (agreed["lock"], agreed["agreed"]) == ("jax==1", True)
    locked = filters.agreed_environments([wanted[0] | {"lock": "jax==2"}], plan["w1"], hostvars, check=False)[0]
    assert (locked["lock"], locked["agreed"]) == ("jax==2", False)


def test_the_report_names_the_workers_that_differ() -> None:
    same = {"w0": seen(ONE), "w1": seen(ONE)}
    assert [line.split(" on ")[1] for line in filters.environment_report(["w0", "w1"], same)] == [
        "2 workers: jax 1, numpy 1, 2 packages"
    ]
    differing = {"w0": seen(ONE), "w1": seen(TWO), "w2": seen(None)}
    lines = filters.environment_report(["w0", "w1", "w2"], differing)
    assert [line.split(" on ")[1].partition(":")[0] for line in lines] == ["w2", "w0", "w1"]


PROGRAMS = filters.python_programs("distribution", "3.12", [{"version": "3.13", "source": "uv"}], "3.11")


def test_each_python_is_named_as_uv_finds_it() -> None:
    found = filters.python_programs("deadsnakes", "3.12", [{"version": "3.13"}], "3.10")
    assert {version: program["program"] for version, program in found.items()} == {
        "3.12": "/usr/bin/python3.12",
        "3.13": "3.13",
        "3.10": "/usr/bin/python3",
    }
    assert list(PROGRAMS) == ["3.11", "3.13"]


@pytest.mark.parametrize(
    ("environments", "said"),
    [
        ([{"name": "a"}, {"name": "a", "path": "/opt/b"}], "python_environments: two entries have the name a"),
        (
            [{"name": "a", "path": "/opt/b"}, {"name": "b", "path": "/opt/b"}],
            "python_environments: two entries have the path /opt/b",
        ),
        ([{"name": "a b"}], "python_environments[0].name: a b: the name contains characters other than"),
        ([{"name": "a", "path": "venvs/a"}], "python_environments[0].path: a: venvs/a is not an absolute path"),
        ([{"name": "a", "path": "/usr"}], "two or more parts"),
        ([{"name": "a", "path": "/opt/../etc"}], "/opt/../etc is not"),
        (
            [{"name": "a", "python": "3.9"}],
            "python_environments[0].python: a: 3.9 is not one of this worker's Pythons (3.11, 3.13)",
        ),
        (
            [{"name": "a", "requirements": ["jax=0.10"]}],
            "python_environments[0].requirements: a: requirement 'jax=0.10'",
        ),
        ([{"name": "a", "constraints": ["x=1"]}], "python_environments[0].constraints: a: requirement 'x=1'"),
        (
            [{"name": "a", "owner": "eve"}],
            "python_environments[0].owner: a: eve has no account and is not in users_people for this node; set owner",
        ),
        ([{"name": "a", "requirements": ["jax==0.10", "-e ./x", "x @ https://host/x.whl"], "python": "3.13"}], ""),
        (
            [
                {
                    "name": "a",
                    "owner": "ada",
                    "constraints": ["x<2", "y==1 # why", "rich==13.9.4 --hash=sha256:00 --hash=sha256:11"],
                }
            ],
            "",
        ),
    ],
)
def test_environments_that_cannot_be_are_refused(environments: list[dict[str, Any]], said: str) -> None:
    faults = filters.environment_faults(environments, PROGRAMS, "3.11", ["ada", "root"])
    assert said in "; ".join(faults) if said else faults == []


@pytest.mark.parametrize(
    ("more", "source", "version", "own", "said"),
    [
        ([{"version": "3.13"}], "deadsnakes", "3.12", [], ""),
        ([{"version": "3.99"}], "deadsnakes", "3.12", [], "python_more_versions[0].version: uv has no Python 3.99"),
        ([{"version": "3.13"}, {"version": "3.7"}], "uv", "3.12", [], "[1].version: uv has no Python 3.7, only 3.8 to"),
        ([], "uv", "3.99", [], "python_version: uv has no Python 3.99"),
        ([], "deadsnakes", "3.99", [], "python_version: deadsnakes has no Python 3.99"),
        ([], "distribution", "3.99", [], ""),
        ([{"version": "3.99"}], "uv", "3.99", ["uv"], ""),
        ([{"version": "3.99"}], "deadsnakes", "3.99", ["uv", "deadsnakes"], ""),
        ([], "uv", "3.x", [], "python_version: '3.x' is not a version such as 3.12"),
        ([{"version": "3.13"}, {"version": "3.13"}], "uv", "3.12", [], "python_more_versions: 3.13 is listed twice"),
    ],
)
def test_versions_that_no_source_can_have_are_refused(
    more: list[dict[str, Any]], source: str, version: str, own: list[str], said: str
) -> None:
    faults = filters.python_faults(more, source, version, "0.13.8", own)
    assert said in "; ".join(faults) if said else faults == []


def test_a_newer_uv_may_have_newer_pythons() -> None:
    assert filters.python_faults([{"version": "3.17"}], "distribution", "", "0.14.0", []) == []
    assert filters.python_faults([{"version": "3.7"}], "distribution", "", "0.14.0", []) != []


def test_a_version_of_uv_that_is_none_is_refused() -> None:
    assert filters.python_faults([], "deadsnakes", "3.12", "newest", []) == [
        "python_uv_version: 'newest' is not a version such as 0.13.9"
    ]


def test_an_environment_in_the_place_of_jax_s_is_refused() -> None:
    environments = [{"name": "a"}, {"name": "jax"}, {"name": "b", "path": "/opt/venvs/jax"}]
    assert [fault.partition(" is also")[0] for fault in filters.shared_path_faults(environments, "/opt/venvs/jax")] == [
        "python_environments[1].path: jax: /opt/venvs/jax",
        "python_environments[2].path: b: /opt/venvs/jax",
    ]


def test_a_missing_lock_file_is_named_with_its_environment() -> None:
    environments = [{"name": "a", "lock": "a.lock"}, {"name": "b"}, {"name": "c", "lock": "/c.lock"}]
    missing = ["/inventory/a.lock", "/c.lock"]
    assert filters.missing_lock_faults(environments, "/inventory", missing) == [
        "python_environments[0].lock: a: /inventory/a.lock is missing on this machine; create it, or name another",
        "python_environments[2].lock: c: /c.lock is missing on this machine; create it, or name another",
    ]


def test_each_wanted_environment_names_the_variable_that_it_is_from() -> None:
    environments = [{"name": "a"}, {"name": "jax", "variable": "jax_venv"}]
    wanted = filters.wanted_environments(environments, PROGRAMS, "3.11", [])
    assert [entry["variable"] for entry in wanted] == ["python_environments[0]", "jax_venv"]


def test_versions_that_a_recovery_keeps_are_constraints_of_lists_without_a_lock() -> None:
    environments: list[dict[str, Any]] = [
        {"name": "a", "constraints": ["x<2"]},
        {"name": "b"},
        {"name": "c", "lock": "l"},
    ]
    wanted = filters.wanted_environments(environments, PROGRAMS, "3.11", ["x==1"])
    kept = {"/opt/venvs/a": {"x": "1", "y": "2"}, "/opt/venvs/c": {"x": "1"}}
    constraints = [entry["constraints"] for entry in filters.kept_versions(wanted, kept)]
    assert constraints == [["x<2", "x==1", "y==2"], [], []]


def test_faults_of_the_role_jax_name_its_own_variables() -> None:
    environment = {"name": "jax", "path": "jax", "requirements": ["a=1"], "lock": "l"}
    names = {"path": "jax_venv", "requirements": "jax_packages", "lock": "jax_lock"}
    faults = filters.environment_faults([environment], PROGRAMS, "3.11", ["root"], names)
    faults += filters.environment_lock_faults([environment], [""], names)
    assert [fault.partition(":")[0] for fault in faults] == ["jax_packages", "jax_venv", "jax_lock"]


@pytest.mark.parametrize(
    ("lock", "requirements", "said"),
    [
        ("jax==0.10.2\nnumpy==2\n", ["jax[tpu]==0.10.2"], ""),
        ("jax==0.10.1\n", ["jax[tpu]==0.10.2"], "the lock file has jax 0.10.1, not jax==0.10.2"),
        ("numpy==2\n", ["jax==0.10.2"], "the lock file lacks jax"),
        ("", ["jax==0.10.2"], "the lock file pins no package"),
        ("Torch_XLA==2.9.0\n", ["torch-xla>=2.9", "x @ https://host/x.whl", "y; python_version<'3'"], ""),
    ],
)
def test_a_lock_without_what_is_asked_for_is_refused(lock: str, requirements: list[str], said: str) -> None:
    faults = filters.environment_lock_faults([{"name": "a", "lock": "x", "requirements": requirements}], [lock])
    assert said in "; ".join(faults) if said else faults == []


@pytest.mark.parametrize(
    ("everybody", "people", "person", "active"),
    [
        ("", {}, "ada", ""),
        ("a", {}, "ada", "/opt/venvs/a"),
        ("a", {}, "root", ""),
        ("/opt/venvs/b", {"ada": "a", "bob": ""}, "ada", "/opt/venvs/a"),
        ("/opt/venvs/b", {"ada": "a", "bob": ""}, "bob", ""),
        ("/opt/venvs/b", {"ada": "a", "bob": ""}, "carol", "/opt/venvs/b"),
        ("", {"ada": "a"}, "bob", ""),
        ("", {"root": "a"}, "root", "/opt/venvs/a"),
    ],
)
def test_the_active_environment_is_the_users_or_the_common_one(
    everybody: str, people: dict[str, str], person: str, active: str
) -> None:
    cases = filters.active_cases(everybody, people, [{"name": "a"}])
    shell = f"id() {{ echo {person}; }}\n{cases}\necho ${{__venv-}}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout.strip() == active


def test_without_an_active_environment_the_role_removes_only_its_own_commands() -> None:
    made, gone = (filters.command_files(script, "/d") for script in (f"{filters.COMMAND}true\n", ""))
    assert {entry["path"] for entry in made} == {entry["path"] for entry in gone}
    contents = {entry["path"]: entry["content"] for entry in made if "content" in entry}
    assert all(content.startswith(filters.COMMAND) for content in contents.values())
    begins = {entry["path"] for entry in gone if entry.get("begins") == filters.COMMAND}
    assert begins == set(contents)
    assert {entry["state"] for entry in gone} == {"absent"}


@pytest.mark.parametrize(
    ("everybody", "people", "said"),
    [
        ("c", {}, "python_active_environment: 'c' is neither"),
        ("", {"ada": "c"}, "python_active_environments.ada: 'c' is neither"),
        ("/opt/$(id)", {}, "'/opt/$(id)' is neither"),
        ("", {"ada) rm": "a"}, "'ada) rm' is not an account name"),
        ("a", {"ada": ""}, ""),
    ],
)
def test_an_active_environment_that_is_none_is_refused(everybody: str, people: dict[str, str], said: str) -> None:
    faults = filters.login_faults(everybody, people, [{"name": "a"}])
    assert said in "; ".join(faults) if said else faults == []
