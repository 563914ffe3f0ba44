from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roles.facts.filter_plugins import values
from roles.facts.filter_plugins.values import remote_faults
from roles.facts.module_utils import turns
from roles.facts.module_utils.as_person import PersonFault
from roles.workspace.filter_plugins import workspace
from roles.workspace.filter_plugins.workspace import (
    dotfiles_faults,
    dotfiles_projects,
    workspace_chosen,
    workspace_environment_faults,
    workspace_environment_warnings,
    workspace_everywhere,
    workspace_faults,
    workspace_on_disks,
    workspace_only_faults,
    workspace_questions,
    workspace_wanted,
)
from roles.workspace.library import git_commits, git_workspaces
from roles.workspace.module_utils import programs
from roles.workspace.module_utils.clones import Clone
from roles.workspace.module_utils.editables import Environment, installed
from tests.roles.conftest import Run
from tpu_ops.host import fitness

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROJECT = {"name": "vision", "url": "https://forge.test/vision.git"}
KNOWN = {"accounts": ["root", "ada"], "groups": ["research"]}
ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.parametrize(
    ("projects", "fault"),
    [
        ([PROJECT], None),
        ([PROJECT | {"url": "git@forge.test:team/vision.git", "owner": "ada", "group": "research"}], None),
        (
            [PROJECT | {"url": "ssh://git@forge.test:2222/v.git", "ref": "feature/x", "owner": "ada", "mode": "775"}],
            None,
        ),
        ([PROJECT | {"url": "/srv/vision.git", "ref": COMMIT, "editable": [".", "lib/a[train,test]"]}], None),
        ([PROJECT, PROJECT | {"name": "two"}], None),
        ([PROJECT | {"name": "a/b"}], "name must consist of letters"),
        ([PROJECT | {"url": "ext::sh -c id"}], "url is not of the form"),
        ([PROJECT | {"url": "https://ada:s3cret@forge.test/v"}], "url contains a password or token"),
        ([PROJECT | {"url": "https://s3cret@forge.test/v"}], "url contains a password or token"),
        ([PROJECT | {"ref": "-x"}], "ref '-x' is not the name"),
        ([PROJECT | {"ref": "a..b"}], "ref 'a..b' is not the name"),
        ([PROJECT | {"path": "vision"}], "path 'vision' must be absolute"),
        ([PROJECT | {"path": "/vision"}], "with two or more parts"),
        ([PROJECT | {"path": "/opt/../etc/x"}], "without .."),
        ([PROJECT | {"mode": "99"}], "mode '99' is not an octal string"),
        ([PROJECT | {"mode": 493}], "mode 493 is not an octal string"),
        ([PROJECT | {"mode": "0055"}], "that gives the owner access"),
        (
            [PROJECT | {"mode": "0775", "group": "research"}],
            "mode '0775' lets others write to a clone that belongs to root",
        ),
        ([PROJECT | {"mode": "0757"}], "mode '0757' lets others write to a clone that belongs to root"),
        ([PROJECT | {"editable": ["../x"]}], "editable '../x' is not a path below the clone"),
        ([PROJECT | {"owner": "eve"}], "owner eve has no account"),
        ([PROJECT | {"owner": "eve", "state": "absent"}], None),
        ([PROJECT | {"group": "nobody2"}], "there is no group nobody2"),
        (
            [PROJECT | {"path": "/a/b"}, {**PROJECT, "name": "two", "path": "/a/b"}],
            "path /a/b is the path of vision, is inside",
        ),
        (
            [PROJECT | {"path": "/a/b/c"}, {**PROJECT, "name": "two", "path": "/a/b"}],
            "path /a/b is the path of vision, is",
        ),
        ([PROJECT | {"path": "/a/b"}, PROJECT | {"path": "/a/c"}], "vision: the name is listed twice"),
    ],
)
def test_faults_name_project_and_key_and_no_password(projects: list[Any], fault: str | None) -> None:
    faults = workspace_faults(projects, "/opt/workspaces", KNOWN)
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0]), faults
    assert "s3cret" not in str(faults)


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        ("https://mirror/", True),
        ("git://forge.test/v", True),
        ("file:///srv/v", True),
        ("git@forge.test:/srv/v", True),
        ("git@[::1]:v", True),
        # Hosts of an ssh config.
        ("git:v", True),
        ("my_forge:v", True),
        ("https:/forge.test/v", False),
        ("HTTPS://forge.test/v", False),
        ("https:///v", False),
        ("forge.test/v", False),
        ("ext::sh -c id", False),
        ("--upload-pack=id", False),
    ],
)
def test_projects_and_other_roles_agree_about_what_git_clones(url: str, taken: bool) -> None:
    faults = workspace_faults([PROJECT | {"url": url}], "/opt", KNOWN)
    assert [bool(faults), bool(remote_faults({"url": url}))] == [not taken] * 2


@pytest.mark.parametrize("url", ["http://forge.test/v", "ftp://forge.test/v", "/srv/my v"])
def test_projects_come_from_fewer_places(url: str) -> None:
    assert "url is not of the form" in str(workspace_faults([PROJECT | {"url": url}], "/opt", KNOWN))
    assert remote_faults({"url": url}) == []


@pytest.mark.parametrize(
    ("only", "names", "fault"),
    [
        ("", ["vision", "two"], None),
        ("vision@v1", ["vision", "two"], None),
        ("vision@v@1", ["vision", "two"], None),
        ("v1", ["vision"], None),
        (COMMIT, ["vision"], None),
        ("v1", ["vision", "two"], "workspace_only: 'v1' names no project; write PROJECT@v1; workspace_projects has"),
        ("v1", [], "write PROJECT@v1; workspace_projects has no project"),
        ("one@v1", ["vision", "two"], "workspace_only: no project is called 'one'; workspace_projects has vision, two"),
        ("gone@v1", ["vision"], "no project is called 'gone'"),
        ("vision@", ["vision"], "workspace_only: ref '' is not the name of"),
        ("vision@a..b", ["vision"], "workspace_only: ref 'a..b' is not the name of"),
    ],
)
def test_workspace_only_chooses_a_single_project_at_another_ref(only: str, names: list[str], fault: str | None) -> None:
    gone = PROJECT | {"name": "gone", "state": "absent"}
    projects = [*(PROJECT | {"name": name, "ref": "main"} for name in names), gone]
    faults = workspace_only_faults(projects, only)
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0]), faults
    if fault is None:
        ref = only.removeprefix("vision@")
        chosen = workspace_chosen(projects, only)
        assert chosen == ([PROJECT | {"name": "vision", "ref": ref}] if only else projects)


def test_environments_that_no_role_makes_are_told() -> None:
    editable: dict[str, Any] = PROJECT | {"editable": ["."]}
    projects: list[dict[str, Any]] = [
        editable | {"name": "a", "environment": "/opt/venvs/jx"},
        editable | {"name": "b", "environment": "/opt/venvs/tools"},
        editable | {"name": "c", "environment": "/srv/paper"},
        editable | {"name": "d"},
        PROJECT | {"name": "e", "environment": "/opt/venvs/jx"},
        editable | {"name": "f", "environment": "/opt/venvs/jx", "state": "absent"},
        editable | {"name": "g", "environment": "paper"},
    ]
    environments: list[dict[str, Any]] = [{"name": "tools"}, {"name": "paper", "path": "/srv/paper"}]
    said = "environment /opt/venvs/jx is not created by any role: it is neither jax_venv nor in python_environments"
    found = workspace_environment_warnings(projects, "/opt/venvs/jax", "/opt/venvs/jax", environments)
    assert found == [f"workspace_projects[0]: a: {said}"]


def test_a_path_is_the_same_for_the_role_as_for_those_that_facts_checks() -> None:
    assert workspace.PATH == values.PATH


def test_only_a_project_that_is_to_be_installed_needs_an_environment() -> None:
    editable: dict[str, Any] = {**PROJECT, "editable": ["."]}
    projects: list[dict[str, Any]] = [PROJECT]
    projects += [editable | {"environment": "/opt/a"}, editable | {"state": "absent"}, editable]
    assert workspace_environment_faults(projects, "/opt/venvs/jax", []) == []
    assert workspace_environment_faults(projects, "", []) == [
        "workspace_projects[3]: vision: environment is missing, and workspace_environment is empty; set one of them"
    ]


def test_an_environment_is_one_of_python_environments_by_its_name_or_a_path() -> None:
    environments: list[dict[str, Any]] = [{"name": "tools"}, {"name": "paper", "path": "/srv/paper"}]
    words = ["tools", "", "paper", "/opt/x"]
    projects = [PROJECT | {"name": word or "none", "environment": word} for word in words]
    assert workspace_environment_faults(projects, "paper", environments) == []
    wanted = workspace_wanted(projects, "/w", "paper", {}, environments)
    assert [project["environment"] for project in wanted] == ["/opt/venvs/tools", "/srv/paper", "/srv/paper", "/opt/x"]
    said = "is not one of python_environments and not an absolute path; name one, or"
    said += " give a path that starts with /, without spaces or .."
    assert workspace_environment_faults(projects, "venv", [{"name": "paper"}]) == [
        f"workspace_environment: 'venv' {said}",
        f"workspace_projects[0]: tools: environment 'tools' {said}",
    ]
    at = "workspace_environment: 't' is at 'rel/x' according to python_environments, which is not an absolute path;"
    assert workspace_environment_faults([], "t", [{"name": "t", "path": "rel/x"}]) == [
        f"{at} give a path that starts with /, without spaces or .."
    ]
    # What the role python refuses: where it has no part nobody does.
    for odd in ({"name": "t"}, "t", 7, None, [None], [["t"]]):
        assert workspace_environment_faults([], "t", odd) == [f"workspace_environment: 't' {said}"]
        assert workspace_environment_warnings([], "/opt/venvs/jax", "/opt/venvs/jax", odd) == []
        assert workspace_wanted([], "/w", "t", {}, odd) == []
    for word in ("/opt/../x", "/opt/x y", "tool"):
        assert workspace_environment_faults([], word, environments) == [f"workspace_environment: '{word}' {said}"]


def test_each_remote_and_ref_is_asked_for_once_and_whole_commits_are_not() -> None:
    projects = [
        PROJECT,
        PROJECT | {"name": "two", "ref": "HEAD", "owner": "ada"},
        PROJECT | {"name": "three", "ref": "v1"},
        PROJECT | {"name": "four", "ref": COMMIT},
        PROJECT | {"name": "five", "ref": "gone", "state": "absent"},
    ]
    url = PROJECT["url"]
    asked = [{"url": url, "ref": "HEAD", "owner": "root"}, {"url": url, "ref": "v1", "owner": "root"}]
    assert workspace_questions({"w0": projects, "w1": projects}, "") == [{"worker": "w0", "questions": asked}]
    wanted = workspace_wanted(projects, "/w", "/e", {f"{url} HEAD": "a", f"{url} v1": "b"}, [])
    assert [project["commit"] for project in wanted] == ["a", "a", "b", COMMIT, ""]
    assert wanted[0] == PROJECT | {"path": "/w/vision", "commit": "a", "environment": "/e", "owner": "root"}


@pytest.mark.parametrize(
    ("disks", "disk"),
    [
        ([{"path": "/mnt/a"}, {"path": "/w"}], "/w"),
        ([{"path": "/w/vision"}], "/w/vision"),
        ([{"path": "/w", "state": "absent"}, {"path": "/w/vis"}], ""),
        ([None, "/w"], ""),
        ("/w", ""),
    ],
)
def test_the_disk_that_a_project_is_on_is_known(disks: Any, disk: str) -> None:
    assert workspace_on_disks(workspace_wanted([PROJECT], "/w", "/e", {}, []), disks)[0]["disk"] == disk


def test_a_forge_is_asked_by_the_first_worker_that_has_the_project() -> None:
    other = {"name": "other", "url": "git@forge.test:other.git", "owner": "ada"}
    hostvars: dict[str, dict[str, Any]] = {
        "w0": {},
        "w1": {"workspace_projects": [PROJECT, other]},
        "w2": {"workspace_projects": [other | {"ref": "v1"}]},
        "w3": {},
    }
    everywhere = workspace_everywhere(["w0", "w1", "w2", "w3"], hostvars, {"w0": [PROJECT]})
    assert everywhere == {"w0": [PROJECT], "w1": [PROJECT, other], "w2": [other | {"ref": "v1"}]}
    assert workspace_questions(everywhere, "") == [
        {"worker": "w0", "questions": [{"url": PROJECT["url"], "ref": "HEAD", "owner": "root"}]},
        {"worker": "w1", "questions": [{"url": other["url"], "ref": "HEAD", "owner": "ada"}]},
        {"worker": "w2", "questions": [{"url": other["url"], "ref": "v1", "owner": "ada"}]},
    ]
    assert workspace_questions({"w0": [], "w1": [PROJECT]}, "vision@v2") == [
        {"worker": "w1", "questions": [{"url": PROJECT["url"], "ref": "v2", "owner": "root"}]}
    ]


def test_dotfiles_are_projects_of_their_owner_after_those_of_the_fleet() -> None:
    ada: dict[str, Any] = {"name": "ada", "dotfiles": {"repository": "https://forge.test/ada/dotfiles"}}
    bob = {"name": "bob", "dotfiles": {"repository": "bob@forge.test:dot", "ref": "v1"}}
    dotfiles = dotfiles_projects([ada, {"name": "carol"}, bob], {"ada": {"home": "/mnt/ada"}})
    assert [(one["path"], one["owner"], one["ref"], one["optional"]) for one in dotfiles] == [
        ("/mnt/ada/.dotfiles", "ada", "HEAD", True),
        ("/home/bob/.dotfiles", "bob", "v1", True),
    ]
    hostvars: dict[str, dict[str, Any]] = {
        "w0": {"__workspace_dotfiles": dotfiles[:1]},
        "w1": {"workspace_projects": [PROJECT], "__workspace_dotfiles": dotfiles},
    }
    everywhere = workspace_everywhere(["w0", "w1"], hostvars, {"w0": []})
    assert everywhere == {"w0": dotfiles[:1], "w1": [PROJECT, *dotfiles]}
    asked = {plan["worker"]: plan["questions"] for plan in workspace_questions(everywhere, "")}
    assert asked["w0"] == [{"url": ada["dotfiles"]["repository"], "ref": "HEAD", "owner": "ada", "optional": True}]
    assert [(one["owner"], one.get("optional", False)) for one in asked["w1"]] == [("bob", True), ("root", False)]
    assert workspace_chosen([PROJECT, *dotfiles], "v2") == [PROJECT | {"ref": "v2"}], "train --git leaves them alone"


@pytest.mark.parametrize(
    ("dotfiles", "fault"),
    [
        ({"repository": "https://forge.test/a", "ref": "main"}, ""),
        ({"repository": "https://token@forge.test/a"}, "users_people: ada: dotfiles: repository contains a password"),
        ({"repository": "ext::sh -c id"}, "users_people: ada: dotfiles: repository is not of the form"),
        ({"repository": "/srv/dot", "ref": "a b"}, "users_people: ada: dotfiles: ref 'a b' is not the name"),
        ({"repository": "/srv/dot", "branch": "a"}, "users_people: ada: dotfiles: unknown key branch; the keys are"),
        ("https://forge.test/a", ""),
    ],
)
def test_faults_of_dotfiles_name_the_person(dotfiles: Any, fault: str) -> None:
    found = dotfiles_faults([{"name": "ada", "dotfiles": dotfiles}, {"name": "bob"}])
    assert [text[: len(fault)] for text in found] == ([fault] if fault else [])


LISTING = "a\tHEAD\nb\trefs/heads/main\nb\trefs/heads/both\nc\trefs/tags/both\nd\trefs/tags/v1\ne\trefs/tags/v1^{}\n"


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("HEAD", "a"),
        ("main", "b"),
        ("v1", "e"),
        ("refs/tags/both", "c"),
        ("refs/heads/both", "b"),
        ("both", "the remote has both a branch and a tag both"),
        ("none", "the remote has no branch or tag none; if this is a commit, give all of its 40 digits"),
    ],
)
def test_a_ref_is_one_branch_or_the_commit_of_one_tag(ref: str, found: str) -> None:
    if len(found) == 1:
        assert git_commits.chosen(LISTING, ref) == found
        return
    with pytest.raises(PersonFault, match=found):
        git_commits.chosen(LISTING, ref)


Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Return a function that runs git in a directory below the test's own, with no configuration of anybody."""
    (tmp_path / "home").mkdir()
    me = pwd.getpwuid(os.geteuid())
    account = pwd.struct_passwd((*me[:5], str(tmp_path / "home"), me[6]))
    for name in ("getpwnam", "getpwuid"):
        monkeypatch.setattr(pwd, name, lambda _: account)
    # The way to pytest's directories is not root's alone.
    monkeypatch.setattr(git_workspaces, "guarded_way", lambda _: True)
    (tmp_path / "home" / ".gitconfig").write_text("[user]\n\tname = A\n\temail = a@b\n[init]\n\tdefaultBranch = main\n")
    environment = os.environ | {"HOME": str(tmp_path / "home"), "GIT_CONFIG_NOSYSTEM": "1"}

    def call(directory: str, *arguments: str) -> str:
        command = ["git", "-C", str(tmp_path / directory), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, env=environment
        ).stdout.strip()

    (tmp_path / "source").mkdir()
    call("source", "init", "-q")
    for name, text in (("a.txt", "one\n"), (".gitignore", "*.log\n__pycache__/\n")):
        (tmp_path / "source" / name).write_text(text)
    call("source", "add", ".")
    call("source", "commit", "-q", "-m", "first")
    return call


@pytest.fixture
def bring(run: Run, git: Git, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that brings the clone of the source to a commit, by default to that of its branch."""

    def call(commit: str = "", *, check: bool = False, **changes: Any) -> dict[str, Any]:
        project = {
            "name": "vision",
            "url": str(tmp_path / "source"),
            "commit": commit.strip() if commit else git("source", "rev-parse", "main"),
            "path": str(tmp_path / "work" / "vision"),
            "owner": ME,
            "environment": str(tmp_path / "venv"),
        }
        arguments = {
            "projects": [
                project
                | {
                    key: value
                    for key, value in changes.items()
                    if key in project or key in ("state", "editable", "disk", "scripts", "optional")
                }
            ],
            "uv": "/nonexistent/uv",
            "cache_dir": str(tmp_path / "cache"),
            "system": str(tmp_path / "gitconfig"),
            "on_local_changes": changes.get("on_local_changes", "fail"),
            "during_runs": changes.get("during_runs", True),
            "timeout": changes.get("timeout", 600),
        }
        return run(git_workspaces, arguments, check=check)

    return call


Bring = Callable[..., dict[str, Any]]


def commit(git: Git, tmp_path: Path, text: str, directory: str = "source") -> str:
    """Commit a change of the one file; return the commit."""
    (tmp_path / directory / "a.txt").write_text(text)
    git(directory, "commit", "-q", "-a", "-m", text.strip())
    return git(directory, "rev-parse", "HEAD")


def test_a_clone_is_made_moved_and_left_alone(git: Git, bring: Bring, tmp_path: Path) -> None:
    assert bring(check=True)["changed"] is True
    assert not (tmp_path / "work").exists()
    first = bring()
    assert (first["changed"], first["commits"]) == (True, {"vision": git("work/vision", "rev-parse", "HEAD")})
    assert bring()["changed"] is False
    second = commit(git, tmp_path, "two\n")
    assert bring(check=True)["actions"] == [f"vision: move from {first['commits']['vision'][:12]} to {second}"]
    assert (tmp_path / "work/vision/a.txt").read_text() == "one\n"
    assert bring()["commits"] == {"vision": second}
    assert (tmp_path / "work/vision/a.txt").read_text() == "two\n"
    assert bring()["changed"] is False


def test_a_script_runs_once_at_each_commit_and_again_after_a_failure(git: Git, bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "source/setup").mkdir()
    script = tmp_path / "source/install"
    script.write_text('#!/bin/sh\necho "$HOME $PWD" >>~/ran\n[ ! -e ~/broken ] || { echo no foo; exit 1; }\n')
    script.chmod(0o755)
    git("source", "add", ".")
    git("source", "commit", "-q", "-m", "script")
    work, ran = tmp_path / "work/vision", tmp_path / "home/ran"
    dotfiles: dict[str, Any] = {"scripts": ["missing", "setup", "install"], "optional": True}
    assert not bring(check=True, **dotfiles).get("failed")
    assert not ran.exists()
    assert f"vision: run {work}/install" in bring(**dotfiles)["actions"]
    assert ran.read_text() == f"{tmp_path}/home {work}\n"
    assert bring(**dotfiles)["changed"] is False
    (tmp_path / "home/broken").touch()
    newer = commit(git, tmp_path, "two\n")
    for _ in range(2):
        failed = bring(newer, **dotfiles)
        assert not failed.get("failed")
        assert f"vision: {work}/install exited with 1; its last output: no foo" in str(failed["warnings"])
    (tmp_path / "home/broken").unlink()
    assert bring(newer, check=True, **dotfiles)["actions"] == [f"vision: run {work}/install"]
    assert bring(newer, **dotfiles)["changed"] is True
    assert len(ran.read_text().splitlines()) == 4
    (work / "a.txt").write_text("own\n")
    kept = bring(commit(git, tmp_path, "three\n"), **dotfiles)
    assert "changed files: a.txt" in str(kept["warnings"])
    assert (kept["changed"], (work / "a.txt").read_text(), len(ran.read_text().splitlines())) == (False, "own\n", 4)


def test_no_background_process_is_awaited_and_a_hanging_script_is_ended(git: Git, bring: Bring, tmp_path: Path) -> None:
    script, pid = tmp_path / "source/install", tmp_path / "home/pid"
    script.write_text("#!/bin/sh\nsleep 300 & echo $! >~/pid\n")
    script.chmod(0o755)
    git("source", "add", ".")
    git("source", "commit", "-q", "-m", "script")
    done = bring(scripts=["install"], optional=True, timeout=20)
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it was left running
    assert (done["changed"], done.get("warnings", [])) == (True, [])
    script.write_text("#!/bin/sh\necho Which shell?\nsleep 300 & echo $! >~/pid\nwait\n")
    git("source", "commit", "-q", "-a", "-m", "hangs")
    said = str(bring(scripts=["install"], optional=True, timeout=1)["warnings"])
    assert "install did not end within 1 s (workspace_timeout) and was ended; its last output: Which shell?" in said


def test_nothing_is_cloned_below_a_mount_point_whose_disk_is_not_mounted(bring: Bring, tmp_path: Path) -> None:
    said = f"vision: the project's disk is not mounted at {tmp_path}/work; run site.yml with --tags disks, which mounts"
    assert said in bring(disk=str(tmp_path / "work"))["msg"]
    assert not (tmp_path / "work").exists()
    assert "msg" not in bring(disk=str(tmp_path / "work"), check=True), "it mounts none"
    assert bring(disk="/")["changed"] is True


def test_runs_and_moves_of_a_clone_exclude_each_other_unless_allowed(
    git: Git, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, seen = [""], list[list[str]]()

    def look() -> str:
        seen.extend(change["changing"] for change in fitness.changes(turns.DIRECTORY))
        return active[0]

    monkeypatch.setattr(git_workspaces, "active_run", look)
    first = bring(during_runs=False)["commits"]
    assert bring(during_runs=False)["changed"] is False
    assert seen == [], "nothing was moved"
    second = commit(git, tmp_path, "two\n")
    active[0] = "spring-7"
    refused = bring(during_runs=False)
    place = tmp_path / "work/vision"
    said = f"vision: {place} is not moved, since the run spring-7 is active on this worker and may use it; wait for it,"
    assert said in refused["msg"]
    # Before it looks for a run: whoever starts one at that moment sees this, or is seen.
    assert (seen, git("work/vision", "rev-parse", "HEAD")) == ([[str(place)]], first["vision"])
    assert bring()["commits"] == {"vision": second}


def test_an_environment_is_changed_like_a_clone_is_moved(
    bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, seen = tmp_path / "venv", list[list[str]]()
    place.mkdir()
    (place / "pyvenv.cfg").touch()

    def look() -> str:
        seen.extend(change["changing"] for change in fitness.changes(turns.DIRECTORY))
        return "spring-7"

    def install(self: Environment, projects: list[str], constraints: list[str], *, dry: bool) -> list[str]:
        (place / ("asked" if dry else "installed")).touch()
        return ["+ jax"]

    monkeypatch.setattr(git_workspaces, "active_run", look)
    monkeypatch.setattr("roles.workspace.library.git_workspaces.Environment.install", install)
    refused = bring(during_runs=False, editable=["."])
    assert f"vision: {place} is not changed, since the run spring-7 is active on this worker" in refused["msg"]
    assert (seen, (place / "installed").exists()) == ([[str(place)]], False)
    clone = tmp_path / "work" / "vision"
    assert f"install into {place}: + {clone}" in str(bring(editable=["."])["actions"])
    assert (place / "installed").exists()


def test_a_clone_is_removed_under_a_run_only_where_it_may_be_moved_under_one(
    bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[list[str]]()

    def look() -> str:
        seen.extend(change["changing"] for change in fitness.changes(turns.DIRECTORY))
        return "spring-7"

    monkeypatch.setattr(git_workspaces, "active_run", look)
    monkeypatch.setattr("roles.workspace.library.git_workspaces.Environment.remove", lambda *_: None)
    place, venv = tmp_path / "work/vision", tmp_path / "venv"
    bring()
    refused = bring(during_runs=False, state="absent")
    assert f"vision: {place} is not removed, since the run spring-7 is active on this worker" in refused["msg"]
    assert (seen, refused["actions"], place.exists()) == ([[str(place)]], [], True)
    assert f"vision: remove {place}" in bring(state="absent")["actions"]
    assert not place.exists()
    seen.clear()
    # An interrupted run has left what is installed from it.
    monkeypatch.setattr("roles.workspace.library.git_workspaces.Environment.below", lambda *_: ["vision"])
    refused = bring(during_runs=False, state="absent")
    assert f"vision: {venv} is not changed, since the run spring-7 is active on this worker" in refused["msg"]
    assert (seen, refused["actions"]) == ([[str(venv)]], [])
    assert f"vision: uninstall vision from {venv}" in bring(state="absent")["actions"]


def test_the_system_gitconfig_is_changed_under_the_lock_of_the_role_git(
    bring: Bring, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look(*_: Any, **__: Any) -> list[str]:
        seen.append(any(line.startswith("settings of git by ") for line in turns.busy()))
        return []

    bring()
    monkeypatch.setattr(git_workspaces, "keep_safe", look)
    bring(state="absent")
    assert seen == [True]


def test_workers_get_the_same_commit_although_the_branch_moves(
    git: Git, bring: Bring, run: Run, tmp_path: Path
) -> None:
    url = str(tmp_path / "source")
    asked = run(git_commits, {"questions": [{"url": url, "ref": "main", "owner": ME}]})
    before = asked["commits"][f"{url} main"]
    assert asked["shown"] == [f"{url} main is commit {before}"]
    commit(git, tmp_path, "meanwhile\n")
    assert bring(before)["commits"] == {"vision": before}
    assert (tmp_path / "work/vision/a.txt").read_text() == "one\n"


def test_a_rewritten_branch_is_followed_since_nobody_s_work_was_in_it(git: Git, bring: Bring, tmp_path: Path) -> None:
    commit(git, tmp_path, "two\n")
    bring()
    git("source", "commit", "-q", "--amend", "-m", "rewritten")
    git("source", "reflog", "expire", "--expire=now", "--all")
    assert bring()["commits"] == {"vision": git("source", "rev-parse", "HEAD")}


@pytest.fixture
def killed(git: Git, bring: Bring, tmp_path: Path) -> str:
    """Kill a checkout: files of the new commit are in the clone, one in part, and the lock; return the commit."""
    source, clone = tmp_path / "source", tmp_path / "work/vision"
    for name in ("gone.txt", "whole.txt", "part.txt"):
        (source / name).write_text("old\n")
    git("source", "add", ".")
    commit(git, tmp_path, "one\n")
    bring()
    git("source", "rm", "-q", "gone.txt")
    for name, text in (("whole.txt", "new\n"), ("part.txt", "new and long\n"), ("added", "x"), ("b.log", "y")):
        (source / name).write_text(text)
    (source / "link").symlink_to("added")
    git("source", "add", "-f", ".")
    wanted = commit(git, tmp_path, "two\n")
    git("work/vision", "fetch", "-q")
    git("work/vision", "update-ref", "refs/tpu_ops/moving", wanted)
    (clone / "gone.txt").unlink()
    (clone / "whole.txt").write_text("new\n")
    (clone / "part.txt").write_text("new and")
    (clone / "added").write_text("x")
    (clone / "b.log").write_text("")
    (clone / "link").symlink_to("added")
    (clone / ".git/index.lock").touch()
    return wanted


@pytest.mark.parametrize("moved", [False, True], ids=["to the same commit", "to a later one"])
def test_a_checkout_that_was_cut_short_is_finished(
    git: Git, bring: Bring, tmp_path: Path, killed: str, moved: bool
) -> None:
    latest = commit(git, tmp_path, "three\n") if moved else killed
    finished = f"vision: finish the interrupted checkout of {killed}"
    further = [f"vision: move from {killed[:12]} to {latest}"] if moved else []
    before = git("work/vision", "status", "--porcelain")
    checked = bring(check=True)
    assert (checked["actions"], checked.get("warnings", [])) == ([finished, *further], [])
    assert git("work/vision", "status", "--porcelain") == before
    done = bring()
    assert (done["actions"], done["commits"]) == ([finished, *further], {"vision": latest})
    assert git("work/vision", "status", "--porcelain", "--ignored") == ""
    assert git("work/vision", "rev-parse", "HEAD") == latest
    assert (tmp_path / "work/vision/part.txt").read_text() == "new and long\n"
    assert not git("work/vision", "for-each-ref", "refs/tpu_ops/moving")
    assert bring()["changed"] is False


def replaced_by_link(clone: Path) -> None:
    (clone / "link").unlink()
    (clone / "link").symlink_to("/")


def replaced_by_directory(clone: Path) -> None:
    (clone / "added").unlink()
    (clone / "added").mkdir()
    (clone / "added/x").touch()


WORK: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "a changed file of the new commit": (lambda clone: (clone / "whole.txt").write_text("mine\n"), [], "whole.txt"),
    "a changed file of the old commit": (lambda clone: (clone / "a.txt").write_text("mine\n"), [], "a.txt"),
    "a file that goes": (lambda clone: (clone / "gone.txt").write_text("mine\n"), [], "gone.txt"),
    "a changed file that git is told not to see": (
        lambda clone: (clone / "whole.txt").write_text("mine\n"),
        ["update-index", "--assume-unchanged", "whole.txt"],
        "whole.txt",
    ),
    "a permission": (lambda clone: (clone / ".gitignore").chmod(0o755), [], ".gitignore"),
    "a file in the way": (lambda clone: (clone / "added").write_text("mine\n"), [], "added"),
    "another link": (replaced_by_link, [], "link"),
    "a directory in the way": (
        replaced_by_directory,
        [],
        "added",
    ),
    "something staged": (lambda clone: (clone / "own").touch(), ["add", "own"], "own"),
    "a commit": (lambda clone: None, ["commit", "-q", "-a", "-m", "mine"], "mine"),
}


@pytest.mark.parametrize("what", WORK)
def test_work_in_a_tree_whose_checkout_was_cut_short_stays(
    git: Git, bring: Bring, tmp_path: Path, killed: str, what: str
) -> None:
    clone, (change, command, name) = tmp_path / "work/vision", WORK[what]
    change(clone)
    if command:
        (clone / ".git/index.lock").unlink(missing_ok=True)
        git("work/vision", *command)

    def state() -> list[str]:
        return [git("work/vision", *words) for words in (["status", "--porcelain"], ["rev-parse", "HEAD"], ["diff"])]

    before = state()
    texts = {path: path.read_bytes() for path in clone.glob("*") if path.is_file() and not path.is_symlink()}
    for check in (True, False):
        done = bring(check=check)
        assert done["failed"] is True
        assert killed not in str(done["actions"])
        assert f"has changes made during the interrupted checkout of {killed[:12]}: " in done["msg"]
        assert name in done["msg"].partition(f"checkout of {killed[:12]}: ")[2]
        assert state() == before
        assert {path: path.read_bytes() for path in texts} == texts


def test_the_lock_of_a_git_that_is_at_work_stays(git: Git, bring: Bring, tmp_path: Path, killed: str) -> None:
    clone = tmp_path / "work/vision"
    with subprocess.Popen(
        ["git", "-C", str(clone), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin
        assert other.stdout
        other.stdin.write(b"HEAD\n")
        other.stdin.flush()
        # It is in the clone once it answers.
        assert b" commit " in other.stdout.readline()
        assert "index.lock" in bring()["msg"]
        assert (clone / ".git/index.lock").exists()
        other.communicate(timeout=60)
    assert bring()["commits"] == {"vision": killed}


def test_a_checkout_that_takes_too_long_is_finished_by_the_next_run(
    git: Git, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git is killed during the checkout, since its filter does not end."""
    bring()
    (tmp_path / "source/.gitattributes").write_text("z.txt filter=slow\n")
    (tmp_path / "source/z.txt").write_text("z\n")
    git("source", "add", ".")
    wanted = commit(git, tmp_path, "two\n")
    git("work/vision", "config", "filter.slow.smudge", "sleep 300")
    with monkeypatch.context() as patched:
        patched.setattr(git_workspaces.Workspace, "clone", lambda self, path: Clone(path, ME, 2))
        assert "did not end within 2 s" in bring()["msg"]
    assert (tmp_path / "work/vision/.git/index.lock").exists()
    git("work/vision", "config", "filter.slow.smudge", "cat")
    done = bring()
    assert done["commits"] == {"vision": wanted}, done
    assert git("work/vision", "status", "--porcelain") == ""


def test_a_commit_that_is_on_no_branch_is_left_again(git: Git, bring: Bring, tmp_path: Path) -> None:
    git("source", "config", "uploadpack.allowAnySHA1InWant", "true")
    git("source", "checkout", "-q", "--detach")
    commit(git, tmp_path, "a proposal\n")
    git("source", "update-ref", "refs/pull/1/head", "HEAD")
    git("source", "checkout", "-q", "main")
    bring(git("source", "rev-parse", "refs/pull/1/head"))
    assert (tmp_path / "work/vision/a.txt").read_text() == "a proposal\n"
    assert bring()["commits"] == {"vision": git("source", "rev-parse", "main")}
    assert bring(state="absent")["changed"] is True


def test_a_clone_without_its_remote_is_refused_with_the_way_out(git: Git, bring: Bring) -> None:
    bring()
    git("work/vision", "remote", "remove", "origin")
    assert "has no remote origin; git -C" in bring()["msg"]


LOCAL: dict[str, tuple[Callable[[Path], object], list[list[str]], str]] = {
    "a changed file": (lambda clone: (clone / "a.txt").write_text("mine\n"), [], "changed files: a.txt"),
    "a removed file": (lambda clone: (clone / "a.txt").unlink(), [], "changed files: a.txt"),
    "an added file": (lambda clone: (clone / "b").write_text(""), [["add", "b"]], "changed files: b"),
    "a commit": (
        lambda clone: (clone / "a.txt").write_text("mine\n"),
        [["commit", "-q", "-a", "-m", "mine"]],
        "commits that the remote does not have: ",
    ),
    "a commit on a branch": (
        lambda clone: (clone / "a.txt").write_text("mine\n"),
        [["checkout", "-q", "-b", "mine"], ["commit", "-q", "-a", "-m", "mine"]],
        "commits that the remote does not have: ",
    ),
}


@pytest.mark.parametrize("what", LOCAL)
def test_local_work_is_named_and_survives(git: Git, bring: Bring, tmp_path: Path, what: str) -> None:
    bring()
    clone, (change, commands, said) = tmp_path / "work/vision", LOCAL[what]
    change(clone)
    for command in commands:
        git("work/vision", *command)
    commit(git, tmp_path, "two\n")

    def state() -> list[str]:
        return [git("work/vision", *words) for words in (["status", "--porcelain"], ["rev-parse", "HEAD"], ["diff"])]

    before = state()
    for check in (True, False):
        done = bring(check=check)
        assert done["failed"] is True
        assert f"{clone} has {said}" in done["msg"]
        assert "Commit and push" in done["msg"]
        assert state() == before
    warned = bring(on_local_changes="warn")
    assert (warned["changed"], "failed" in warned) == (False, False)
    assert said in str(warned["warnings"])
    gone = bring(state="absent")
    assert said in gone["msg"]
    assert state() == before


def test_files_that_git_does_not_know_stay_and_are_reported(git: Git, bring: Bring, tmp_path: Path) -> None:
    bring()
    (tmp_path / "work/vision/notes").write_text("mine")
    commit(git, tmp_path, "two\n")
    done = bring()
    assert "untracked files; they stay: notes" in str(done["warnings"])
    assert (tmp_path / "work/vision/a.txt").read_text() == "two\n"
    assert (tmp_path / "work/vision/notes").read_text() == "mine"
    (tmp_path / "source/notes").write_text("theirs")
    git("source", "add", "notes")
    commit(git, tmp_path, "three\n")
    assert "would be overwritten by checkout" in bring()["msg"]
    assert (tmp_path / "work/vision/notes").read_text() == "mine"


def test_the_record_of_an_editable_installation_is_nobody_s_work(git: Git, bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "source/src").mkdir()
    (tmp_path / "source/src/code.py").write_text("")
    git("source", "add", "src")
    commit(git, tmp_path, "two\n")
    bring()
    (tmp_path / "work/vision/src/vision.egg-info").mkdir()
    (tmp_path / "work/vision/src/vision.egg-info/PKG-INFO").write_text("Name: vision\n")
    assert bring().get("warnings", []) == []
    assert bring(state="absent")["changed"] is True


def test_a_clone_that_fails_changes_nothing(git: Git, bring: Bring, tmp_path: Path) -> None:
    failed = bring("0" * 40)
    assert (failed["failed"], failed["changed"], failed["actions"]) == (True, False, [])
    assert not (tmp_path / "work/vision").exists()


#: What git says of an sshd that takes no more connections just now.
TURNED_AWAY = "kex_exchange_identification: Connection closed by remote host"


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """Return a function that has git fail at remotes, with some words and so many times; its calls go to a file."""
    real, calls = shutil.which("git"), tmp_path / "calls"
    script = tmp_path / "bin" / "git"

    def fail(words: str, times: int) -> Path:
        script.parent.mkdir(exist_ok=True)
        calls.unlink(missing_ok=True)
        script.write_text(
            f"""#!/bin/sh
case "$*" in
clone*|*" fetch "*|ls-remote*)
    echo "$*" >>{calls}
    if [ "$(wc -l <{calls})" -le {times} ]; then echo "{words}" >&2; exit 128; fi ;;
esac
exec {real} "$@"
"""
        )
        script.chmod(0o755)
        path = f"{script.parent}:{os.environ['PATH']}"
        monkeypatch.setattr(programs, "ENVIRONMENT", programs.ENVIRONMENT | {"PATH": path})
        monkeypatch.setattr(programs, "PAUSE", 0.01)
        return calls

    return fail


@pytest.mark.parametrize("words", [TURNED_AWAY, "error: The requested URL returned error: 429"])
def test_a_forge_that_turns_some_of_many_workers_away_is_asked_again(
    bring: Bring, forge: Callable[[str, int], Path], tmp_path: Path, words: str
) -> None:
    calls = forge(words, 2)
    assert not bring().get("failed")
    assert len(calls.read_text().splitlines()) == 3
    assert (tmp_path / "work/vision/a.txt").exists()
    assert git_commits.ask(str(tmp_path / "source"), "main", 60).endswith("refs/heads/main\n")


def test_a_forge_that_turns_everybody_away_or_refuses_is_not_asked_for_ever(
    bring: Bring, forge: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PATIENCE", 2.0)
    calls = forge(TURNED_AWAY, 10**6)
    assert TURNED_AWAY in bring()["msg"]
    assert len(calls.read_text().splitlines()) > 2
    forge("Permission denied (publickey).", 10**6)
    assert "Permission denied" in bring()["msg"]
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("left", "said"),
    [("train.log", "files that git ignores: train.log"), ("notes", "untracked files: notes")],
)
def test_a_clone_with_the_last_copy_of_a_file_is_not_removed(
    bring: Bring, tmp_path: Path, left: str, said: str
) -> None:
    bring()
    clone = tmp_path / "work/vision"
    (clone / left).write_text("")
    assert said in bring(state="absent")["msg"]
    (clone / left).unlink()
    (clone / "__pycache__").mkdir()
    (clone / "__pycache__" / "a.pyc").write_text("")
    assert bring(state="absent", check=True)["changed"] is True
    assert clone.exists()
    assert bring(state="absent")["actions"] == [
        f"vision: remove {clone}",
        *([f"forget {clone} in {tmp_path}/gitconfig"] if ME == "root" else []),
    ]
    assert not clone.exists()
    assert bring(state="absent")["changed"] is False


def test_a_removal_that_was_cut_short_is_finished(
    bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the midst of the first removal, with git's own directory half gone."""
    bring()
    clone, gone = tmp_path / "work/vision", tmp_path / "work/vision.tpu_ops-gone"
    remove = shutil.rmtree

    def dies(path: str) -> None:
        remove(Path(path) / ".git" / "refs")
        (Path(path) / "a.txt").unlink()
        raise OSError(path, "the run was killed")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        assert "the run was killed" in bring(state="absent")["msg"]
    assert bring(state="absent", check=True)["actions"][0] == f"vision: remove {gone}"
    assert bring(state="absent")["actions"][0] == f"vision: remove {gone}"
    assert not clone.exists()
    assert not gone.exists()
    assert bring(state="absent")["changed"] is False


def test_a_clone_that_comes_back_takes_what_was_left_of_its_removal(bring: Bring, tmp_path: Path) -> None:
    leftover = tmp_path / "work" / "vision.tpu_ops-gone"
    (leftover / ".git").mkdir(parents=True)
    bring()
    assert not leftover.exists()


def work(git: Git, tmp_path: Path, *commands: str) -> None:
    """Commit something in the clone, and run git there."""
    commit(git, tmp_path, "mine\n", "work/vision")
    for command in commands:
        git("work/vision", *command.split())


@pytest.mark.parametrize("where", [["tag experiment"], ["branch mine"], []], ids=["a tag", "a branch", "nothing"])
def test_a_clone_with_an_unpublished_commit_is_not_removed(
    git: Git, bring: Bring, tmp_path: Path, where: list[str]
) -> None:
    bring()
    work(git, tmp_path, *where, "checkout -q --detach origin/main")
    assert "commits that the remote does not have: " in bring(state="absent")["msg"]
    assert (tmp_path / "work/vision/a.txt").exists()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("", ""),
        ("echo mine >a.txt", "changed files: lib, lib/a.txt"),
        ("touch notes", "untracked files: lib/notes"),
        ("echo mine >a.txt; git stash -q", "stashes: stash@{0} WIP on (no branch): "),
        ("git commit -q --allow-empty -m mine; git checkout -q origin/main", " mine in lib"),
    ],
    ids=["nothing", "a change", "a new file", "a stash", "a commit"],
)
def test_a_clone_with_work_in_a_submodule_is_not_removed(
    git: Git, bring: Bring, tmp_path: Path, what: str, said: str
) -> None:
    (tmp_path / "lib").mkdir()
    git("lib", "init", "-q")
    (tmp_path / "lib" / "a.txt").write_text("one\n")
    git("lib", "add", ".")
    git("lib", "commit", "-q", "-m", "first")
    local = ("-c", "protocol.file.allow=always")
    git("source", *local, "submodule", "--quiet", "add", str(tmp_path / "lib"), "lib")
    # git itself then tells of no work there.
    git("source", "config", "--file", ".gitmodules", "submodule.lib.ignore", "all")
    git("source", "commit", "-q", "-a", "-m", "with lib")
    bring()
    git("work/vision", *local, "submodule", "--quiet", "update", "--init")
    place = tmp_path / "work/vision/lib"
    environment = os.environ | {"HOME": str(tmp_path / "home"), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-ec", what], cwd=place, check=True, timeout=60, env=environment)
    result = bring(state="absent")
    assert said in result.get("msg", "")
    assert place.exists() is bool(said)


def test_a_clone_is_removed_with_all_that_its_remote_has_or_had(git: Git, bring: Bring, tmp_path: Path) -> None:
    bring()
    git("source", "checkout", "-q", "--detach")
    commit(git, tmp_path, "released\n")
    git("source", "tag", "v1")
    bring(git("source", "rev-parse", "v1"))
    git("source", "checkout", "-q", "main")
    commit(git, tmp_path, "two\n")
    bring()
    git("source", "commit", "-q", "--amend", "-m", "rewritten")
    bring()
    assert bring(state="absent")["changed"] is True
    assert not (tmp_path / "work/vision").exists()


@pytest.mark.parametrize("told", ["--skip-worktree", "--assume-unchanged"])
def test_a_clone_is_not_removed_with_changes_that_git_was_told_not_to_see(
    git: Git, bring: Bring, tmp_path: Path, told: str
) -> None:
    bring()
    git("work/vision", "update-index", told, "a.txt")
    (tmp_path / "work/vision/a.txt").write_text("mine\n")
    assert "files whose changes git was told to ignore: a.txt" in bring(state="absent")["msg"]


def test_ignored_files_are_not_overwritten(git: Git, bring: Bring, tmp_path: Path) -> None:
    bring()
    (tmp_path / "work/vision/run.log").write_text("mine")
    (tmp_path / "source/run.log").write_text("theirs")
    git("source", "add", "-f", "run.log")
    commit(git, tmp_path, "two\n")
    said = "files that git ignores and the checkout would overwrite: run.log"
    # Check mode learns of it once the commit has been fetched.
    assert [said in bring(check=check)["msg"] for check in (False, True)] == [True, True]
    assert (tmp_path / "work/vision/run.log").read_text() == "mine"
    (tmp_path / "work/vision/run.log").unlink()
    assert bring()["changed"] is True


def test_git_of_one_person_s_is_not_run_for_another(git: Git, bring: Bring, tmp_path: Path) -> None:
    bring()
    clone = tmp_path / "work/vision"
    (clone / ".git").rename(tmp_path / "elsewhere")
    (clone / ".git").symlink_to(tmp_path / "elsewhere")
    assert f"{clone}/.git is a symbolic link" in bring()["msg"]
    (clone / ".git").unlink()
    (tmp_path / "elsewhere").rename(clone / ".git")
    if ME == "root":
        os.chown(clone / ".git", 65534, -1)
        assert f"{clone}/.git belongs to uid 65534" in bring()["msg"]
        os.chown(clone / ".git", 0, -1)
        clone.chmod(0o775)
        assert f"others than root can write in {clone}" in bring()["msg"]


@pytest.fixture
def bare(git: Git, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker without git, which the test's own helper has all the same."""
    assert git("source", "status", "--short") == ""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("roles.facts.module_utils.as_person.PATH", str(tmp_path / "bin"))


def asked(run: Run, url: str, ref: str, *, check: bool) -> dict[str, Any]:
    return run(git_commits, {"questions": [{"url": url, "ref": ref, "owner": ME}], "timeout": 30}, check=check)


def test_check_mode_warns_of_a_forge_that_cannot_be_asked_yet(run: Run, git: Git, tmp_path: Path) -> None:
    gone = f"{tmp_path}/gone"
    checked = asked(run, gone, "main", check=True)
    assert (checked.get("failed", False), checked["commits"]) == (False, {})
    assert f"{gone}, asked by {ME}: git ls-remote" in str(checked["warnings"])
    assert gone in asked(run, gone, "main", check=False)["msg"]
    # What it answers counts.
    url = f"{tmp_path}/source"
    assert asked(run, url, "main", check=True)["commits"] == {f"{url} main": git("source", "rev-parse", "main")}
    assert "the remote has no branch or tag mian" in asked(run, url, "mian", check=True)["msg"]


@pytest.mark.usefixtures("bare")
def test_check_mode_warns_where_there_is_no_git_yet_and_names_what_it_knows(
    run: Run, git: Git, bring: Bring, tmp_path: Path
) -> None:
    assert "git does not run" in str(asked(run, "/none", "main", check=True)["warnings"])
    assert "git does not run" in asked(run, "/none", "main", check=False)["msg"]
    unknown = "0" * 40
    done = bring(unknown, check=True)
    assert done["actions"][0] == f"vision: clone {tmp_path / 'work/vision'} at {unknown}"
    git("", "clone", "-q", "source", "work/vision")
    done = bring(unknown, check=True)
    assert (done.get("failed", False), done["actions"]) == (False, [])
    assert f"vision: git is not installed yet, so {tmp_path / 'work/vision'} was not checked" in str(done["warnings"])
    done = bring(unknown, state="absent", check=True)
    assert done["actions"] == [f"vision: remove {tmp_path / 'work/vision'}"]
    assert "not installed yet" in str(done["warnings"])
    assert "git does not run" in bring(unknown)["msg"]


def test_check_mode_warns_where_a_commit_or_uv_is_not_there_yet(run: Run, bring: Bring, tmp_path: Path) -> None:
    first = bring()["commits"]
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    done = bring(" ", check=True, editable=["."])
    assert (done.get("failed", False), done["actions"], done["commits"]) == (False, [], first)
    assert f"it is not known yet whether {tmp_path / 'work/vision'} moves" in str(done["warnings"])
    assert f"uv is not installed yet, so it is not known what changes in {tmp_path}/venv" in str(done["warnings"])


def test_an_interrupted_clone_is_made_anew_and_what_is_no_clone_is_left(bring: Bring, tmp_path: Path) -> None:
    leftover = tmp_path / "work" / "vision.tpu_ops-new"
    (leftover / ".git").mkdir(parents=True)
    bring()
    assert not leftover.exists()
    other = tmp_path / "work" / "other"
    other.mkdir()
    (other / "thesis").write_text("mine")
    assert "is not empty and not a clone" in bring(path=str(other))["msg"]
    assert (other / "thesis").read_text() == "mine"


def record(venv: Path, name: str, version: str, directory: str = "") -> Path:
    """Write the record of an installed package."""
    found = venv / "lib/python3.11/site-packages" / f"{name}-{version}.dist-info"
    found.mkdir(parents=True)
    if directory:
        origin = {"url": f"file://{directory}", "dir_info": {"editable": True}}
        (found / "direct_url.json").write_text(json.dumps(origin))
    return found


def test_uv_is_told_to_leave_pinned_packages_at_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv, uv = tmp_path / "venv", tmp_path / "uv"
    record(venv, "jax", "0.10.2")
    record(venv, "numpy", "2.0")
    record(venv, "my_vision", "1.0", f"{tmp_path}/a%20b")
    uv.write_text(
        '#!/bin/sh\nrm -f said\nfor word; do case "$before" in --constraints) cat "$word" >> said;; esac; before=$word;'
        " echo \"$word\" >> words; done\nprintf ' - my-vision==1.0\\n + my-vision @ file\\n + new==1\\n' >&2\n"
    )
    uv.chmod(0o755)
    (tmp_path / "pins.txt").write_text("torch<3\n")
    monkeypatch.chdir(tmp_path)
    environment = Environment(str(venv), str(uv), ["JAX", "torch"], 60)
    assert environment.missing([f"{tmp_path}/a b"], [f"{tmp_path}/pins.txt"]) == ["+ new==1"]
    assert (tmp_path / "said").read_text() == "torch<3\njax==0.10.2\n"
    assert "--dry-run" in (tmp_path / "words").read_text().split()
    assert [package.directory for package in installed(str(venv))] == ["", f"{tmp_path}/a b", ""]


def test_a_project_that_says_something_new_of_itself_is_installed_again(tmp_path: Path) -> None:
    venv, project = tmp_path / "venv", tmp_path / "p"
    project.mkdir()
    environment = Environment(str(venv), "/nonexistent/uv", [], 60)
    assert environment.missing([f"{project}[x]"], []) == [f"+ {project}"]
    origin = record(venv, "p", "1.0", str(project)) / "direct_url.json"
    (project / "pyproject.toml").write_text("")
    os.utime(origin, (1, 1))
    assert environment.missing([str(project)], []) == [f"+ {project}"]
    assert environment.below(str(tmp_path)) == ["p"]
    assert environment.below(f"{tmp_path}/pp") == []
