"""Environments whose Python is missing, has another version, or does not answer."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.python.library import uv_environments
from tests.roles.conftest import Run
from tests.support.environments import by_hand, state

#: The Python that the environments of these tests get.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
ROLE = Path(uv_environments.__file__).parents[1]


def test_an_environment_whose_python_is_gone_gets_it_back_and_loses_nothing(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", PYTHON)
    there = {path.relative_to(tmp_path) for path in (tmp_path / "venv").rglob("*")}
    assert state(run(uv_environments, arguments, check=True))["plan"] == [f"~ Python {PYTHON}"]
    filled = state(run(uv_environments, arguments))
    assert (filled["plan"], filled["packages"]) == ([f"~ Python {PYTHON}", "+ jax==1"], {"jax": "1"})
    assert there <= {path.relative_to(tmp_path) for path in (tmp_path / "venv").rglob("*")}
    assert run(uv_environments, arguments)["changed"] is False


def test_an_old_pythons_files_are_removed_once_the_new_one_is_complete(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.8")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\necho 3.8\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    assert state(run(uv_environments, arguments, check=True))["plan"] == [f"~ Python {PYTHON} (was 3.8)", "+ jax==1"]
    arguments["environments"][0]["proof"] = "raise SystemExit('not yet')"
    assert "does not work: not yet" in run(uv_environments, arguments)["msg"]
    (kept,) = (tmp_path / "venv").glob(".old-*")
    assert sorted(path.name for path in kept.iterdir()) == ["bin", "lib", "pyvenv.cfg"]
    assert (kept / "lib/python3.8/site-packages/theirs.pth").exists()
    arguments["environments"][0]["proof"] = ""
    # As a run that died after its proof leaves it.
    assert state(run(uv_environments, arguments, check=True))["plan"] == [f"- {kept}"]
    made = run(uv_environments, arguments)
    assert (made["changed"], state(made)["packages"]) == (True, {"jax": "1"})
    assert not kept.exists()
    assert (tmp_path / "venv" / "notebooks" / "n.txt").read_text() == "years of work"
    assert run(uv_environments, arguments)["changed"] is False


def test_a_directory_that_is_in_the_way_says_the_way_out(run: Run, tmp_path: Path, arguments: dict[str, Any]) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis").write_text("years of work")
    message = run(uv_environments, arguments)["msg"]
    assert f"{tmp_path}/venv is in the way: it is not empty and not a virtual environment; move it elsewhere" in message
    assert (tmp_path / "venv" / "thesis").read_text() == "years of work"


def test_an_interrupted_change_of_python_is_gone_on_with(run: Run, tmp_path: Path, arguments: dict[str, Any]) -> None:
    by_hand(tmp_path / "venv", "3.8")
    uv = Path(arguments["uv"])
    program = uv.read_text()
    uv.write_text("#!/bin/sh\nexit 1\n")
    assert "ended with 1" in run(uv_environments, arguments)["msg"]
    assert not (tmp_path / "venv" / "pyvenv.cfg").exists()
    uv.write_text(program)
    assert state(run(uv_environments, arguments))["packages"] == {"jax": "1"}


def test_a_python_that_does_not_answer_is_a_fault_and_no_reason_to_make_another(
    run: Run, tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(tmp_path / "venv", "3.8")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    monkeypatch.setattr("ansible.module_utils.environment_work.START", 0.2)
    said = run(uv_environments, arguments)["msg"]
    assert said.startswith(f"environment jax: {tmp_path}/venv/bin/python did not report its version within 0.2 s")
    assert not list((tmp_path / "venv").glob(".old-*"))


def test_a_download_that_fails_comes_with_ways_out(run: Run, arguments: dict[str, Any], tmp_path: Path) -> None:
    Path(arguments["uv"]).write_text("#!/bin/sh\necho 'dns error' >&2\nexit 2\n")
    asked = arguments | {"step": "pythons", "pythons": ["3.13"], "python_dir": str(tmp_path / "none")}
    said = run(uv_environments, asked | {"environments": []})["msg"]
    for word in ("Python 3.13", "dns error", "python_more_versions", "python_uv_downloads_json_url", "python_source"):
        assert word in said


@pytest.mark.parametrize(
    ("found", "disks", "state"),
    [
        ("uv 1.2.3 (x86_64)", {}, None),
        ("uv 1.2.3", {"__disks_done": {"changed": False}}, None),
        ("uv 1.2.3", {"__disks_done": {"changed": False, "skipped": True}}, None),
        # A disk that was unmounted, or mounted over it, may have taken what was there when the worker was read.
        ("uv 1.2.3", {"__disks_done": {"changed": True}}, "present"),
        ("uv 1.2.30", {}, "forcereinstall"),
        ("", {"__disks_done": {"changed": True}}, "forcereinstall"),
    ],
)
def test_uv_is_looked_for_again_after_a_disk_was_mounted_or_unmounted(
    found: str, disks: dict[str, Any], state: str | None
) -> None:
    def load(name: str) -> Any:
        return DataLoader().load_from_file(str(ROLE / name), trusted_as_template=True)

    programs = {"/opt/uv/bin/uv": found} if found else {}
    variables = {"python_uv": "/opt/uv/bin/uv", "python_uv_version": "1.2.3", "ansible_check_mode": False, **disks}
    variables |= {"ansible_facts": {"worker": {"programs": programs, "skip_done": True}}}
    variables["__python_uv_known"] = load("vars/main.yml")["__python_uv_known"]
    (task,) = (task for task in load("tasks/main.yml") if task["name"] == "Install uv")
    templar = Templar(DataLoader(), variables)
    assert all(templar.evaluate_conditional(condition) for condition in task["when"]) is (state is not None)
    if state:
        assert templar.template(task["ansible.builtin.pip"]["state"]) == state


ARCHIVE = "/etc/apt/sources.list.d/tpu_ops-deadsnakes.list"
PPA = "https://ppa.launchpadcontent.net/deadsnakes/ppa/ubuntu"


def variable_of_role(name: str, **variables: Any) -> Any:
    """Return a variable of the role as it is with others."""
    kept = DataLoader().load_from_file(str(ROLE / "vars/main.yml"), trusted_as_template=True)
    return Templar(DataLoader(), kept | variables).template(kept[name])


@pytest.mark.parametrize(
    ("found", "wanted", "stale"),
    [
        ({}, ["3.12"], False),
        ({}, [], False),
        (None, ["3.12"], False),
        ("http://mirror/a", ["3.12"], False),
        ("http://mirror/typo", ["3.12"], True),
        ("http://mirror/a", [], True),
        ({"state": "link", "target": "/x"}, ["3.12"], True),
    ],
)
def test_an_archive_that_is_not_asked_for_is_told_from_one_that_is(
    found: str | dict[str, str] | None, wanted: list[str], stale: bool
) -> None:
    if isinstance(found, str):
        line = f"deb [signed-by=/etc/apt/keyrings/tpu_ops-deadsnakes.asc] {found} jammy main\n"
        found = {"state": "file", "digest": sha256(line.encode()).hexdigest()}
    facts = {"distribution_release": "jammy", "worker": {"files": {} if found is None else {ARCHIVE: found}}}
    variables = {"ansible_facts": facts, "__python_deadsnakes": wanted, "python_deadsnakes_url": "http://mirror/a"}
    assert variable_of_role("python_archive_stale", **variables) is stale
    assert variable_of_role("python_archive", **variables) == ARCHIVE


@pytest.mark.parametrize(
    ("system", "url", "source", "said"),
    [
        (("Ubuntu", "22.04", "jammy"), PPA, "deadsnakes", None),
        (("Ubuntu", "20.04", "focal"), "https://mirror.example/deadsnakes", "deadsnakes", None),
        (("Debian", "12.5", "bookworm"), "https://mirror.example/deadsnakes", "deadsnakes", None),
        (
            ("Ubuntu", "20.04", "focal"),
            PPA,
            "deadsnakes",
            "python_source: deadsnakes no longer has packages for Ubuntu 20.04; set python_source: uv, or",
        ),
        (
            ("Ubuntu", "20.04", "focal"),
            PPA,
            "uv",
            "python_more_versions: deadsnakes no longer has packages for Ubuntu 20.04; set source: uv, or",
        ),
        (
            ("Debian", "12.5", "bookworm"),
            PPA,
            "deadsnakes",
            "python_source: deadsnakes has packages for Ubuntu and not",
        ),
    ],
)
def test_the_public_archive_is_refused_where_it_has_no_packages(
    system: tuple[str, str, str], url: str, source: str, said: str | None
) -> None:
    facts = dict(zip(("distribution", "distribution_version", "distribution_release"), system, strict=True))
    variables = {"ansible_facts": facts, "python_deadsnakes_url": url, "python_source": source}
    installed: dict[str, Any] = {"__python_install": []}
    variables["__python_install"] = ["python3.12-venv"]
    faults = variable_of_role("__python_archive_faults", __python_deadsnakes=["3.12"], **variables)
    assert [fault.startswith(said or "nothing") for fault in faults] == [True] * (said is not None)
    assert variable_of_role("__python_archive_faults", __python_deadsnakes=[], **variables) == []
    # What was installed while the archive had it stays in use.
    faults = variable_of_role("__python_archive_faults", __python_deadsnakes=["3.12"], **variables | installed)
    assert bool(faults) == (system[0] == "Debian" and said is not None)


def task_of_role(file: str, name: str) -> dict[str, Any]:
    """Return a task of the role."""
    tasks = DataLoader().load_from_file(str(ROLE / "tasks" / file), trusted_as_template=True)
    (task,) = (task for task in tasks if task["name"] == name)
    return dict(task)


@pytest.mark.parametrize(
    ("missing", "wanted", "written", "check", "done"),
    [
        (["python3.12"], ["3.12"], False, False, ["Refresh the package lists", "Install Python"]),
        (["python3.12"], ["3.12"], True, False, ["Refresh the package lists", "Install Python"]),
        ([], ["3.12"], False, False, []),
        ([], ["3.12"], True, False, ["Refresh the package lists"]),
        ([], [], True, False, []),
        # Here the module does nothing in check mode.
        (["python3.12"], ["3.12"], True, True, ["Refresh the package lists"]),
        (["python3-venv"], [], False, True, ["Install Python"]),
    ],
)
def test_an_archive_is_read_in_the_run_that_writes_it(
    missing: list[str], wanted: list[str], written: bool, check: bool, done: list[str]
) -> None:
    variables = {"__python_install": missing, "__python_deadsnakes": wanted, "ansible_check_mode": check}
    variables |= {"__python_configured": {"changed_paths": [ARCHIVE] if written else []}, "python_archive": ARCHIVE}
    templar = Templar(DataLoader(), variables)
    tasks = [task_of_role("install.yml", name) for name in ("Refresh the package lists", "Install Python")]
    runs = [task["name"] for task in tasks if all(map(templar.evaluate_conditional, task["when"]))]
    assert runs == done
    # A worker that has its Pythons does without an archive that does not answer.
    assert templar.template(tasks[0]["apt_lists"]["packages"]) == missing
    assert "update_cache" not in tasks[1]["ansible.builtin.apt"]


@pytest.mark.parametrize(
    ("result", "again"),
    [
        ({"changed": True}, False),
        ({"msg": "python_deadsnakes_key_url: https://k.example returned no key: timed out; set it to"}, True),
        ({"msg": "python_deadsnakes_key_url: https://k.example returned no key and not the key F2"}, False),
        ({"msg": "python_deadsnakes_key_url: https://k.example returned the key F3 and not the key F2"}, False),
    ],
)
def test_a_silent_key_server_is_retried_and_a_wrong_key_is_not(result: dict[str, Any], again: bool) -> None:
    task = task_of_role("main.yml", "Fetch the deadsnakes archive's key")
    templar = Templar(DataLoader(), {task["register"]: result})
    assert templar.evaluate_conditional(task["until"]) is not again
    assert task["retries"] > 1
