"""`tpu_ops train --git`: the real playbook and role on hosts that are this machine, and what is made of the answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pwd
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, probe, stand_in
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops import config
from tpu_ops.ansible import convergence
from tpu_ops.ansible.playbook import Outcome
from tpu_ops.cli import main, train, train_job
from tpu_ops.cli.configure import Progress
from tpu_ops.errors import HostError, UnreachableError, UsageError
from tpu_ops.fleet import view
from tpu_ops.runs import projects
from tpu_ops.runs.projects import Project
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.replies import Reply, Result

ME = pwd.getpwuid(os.geteuid()).pw_name
#: The hosts are this machine, and nothing is changed on it: what is proved here is the way to the role and back.
VARIABLES: dict[str, Any] = {
    "ansible_connection": "local",
    "ansible_become": False,
    "ansible_python_interpreter": "{{ ansible_playbook_python }}",
}
#: Nothing is made there; on the way to pytest's directories others than root may write, which the role refuses.
PLACE = "/opt/no-such-place/vision"
BROKEN = {"name": "broken", "url": "/nowhere/broken.git", "owner": ME}


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A repository with a commit that is tagged v1 and a later one; return what git says in it or in a clone."""
    for name, value in {
        "HOME": str(tmp_path),
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }.items():
        monkeypatch.setenv(name, value)

    def git(directory: str, *words: str) -> str:
        command = ["git", "-C", str(tmp_path / directory), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git(".", "init", "--quiet", "--initial-branch=main", "forge")
    for text in ("first", "second"):
        (tmp_path / "forge" / "README").write_text(text)
        git("forge", "add", "README")
        git("forge", "commit", "--quiet", "-m", text)
    git("forge", "tag", "v1", "HEAD~")
    return git


@pytest.fixture
def bring(tmp_path: Path, forge: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Project]:
    """Look what would be brought to both workers of a fleet with these projects beside `vision`."""
    member = Member(tmp_path / "member", snapshot=str(tmp_path / "published.json"))
    (tmp_path / "published.json").write_text(document([node()]).text())
    for name, value in member.environ(HOME=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    vision = {"name": "vision", "url": str(tmp_path / "forge"), "path": PLACE, "owner": ME}

    def call(word: str, *more: dict[str, Any], **changes: Any) -> Project:
        (member.path / "inventory" / "group_vars").mkdir(exist_ok=True)
        variables = VARIABLES | {"workspace_projects": [vision | changes, *more], "workspace_on_local_changes": "warn"}
        (member.path / "inventory" / "group_vars" / "all.yml").write_text(json.dumps(variables))
        fleet = view.current(config.load())
        return projects.check_out(fleet, fleet.workers, word, Progress, dry=True)

    return call


def test_a_project_is_asked_for_at_a_ref_and_the_others_are_left_alone(forge: Any, bring: Any, capsys: Any) -> None:
    assert bring("vision@v1", BROKEN) == Project("vision", PLACE, forge("forge", "rev-parse", "v1"))
    assert "pod-w[0-1]: would change: workspace : Check out the projects at these commits" in capsys.readouterr().err


def test_an_unknown_project_is_reported_with_the_known_ones(bring: Any, capsys: Any) -> None:
    with pytest.raises(HostError):
        bring("main", BROKEN)
    said = "CLI option '-e': workspace_only: 'main' names no project; write PROJECT@main; "
    assert said + "workspace_projects has vision, broken" in capsys.readouterr().err


COMMIT = "0123456789abcdef0123456789abcdef01234567"
AT = {"paths": {"vision": PLACE}, "commits": {"vision": COMMIT}}
HOSTS = ("pod-w0", "pod-w1")


def test_a_project_is_the_same_on_all_workers_or_none_is_started() -> None:
    assert projects.same({"pod-w0": AT, "pod-w1": AT}, 2).fixed == f"vision@{COMMIT}"
    assert projects.same({"pod-w0": AT | {"commits": {}}}, 1).commit == "", "as in a dry run before git is installed"
    elsewhere = {"paths": {"vision": "/srv/vision"}, "commits": {"vision": COMMIT}}
    for told in ({}, {"pod-w0": AT}, {"pod-w0": AT, "pod-w1": elsewhere}):
        with pytest.raises(UsageError, match="of 2 workers report") as caught:
            projects.same(told, 2)
    assert f"vision in {PLACE}, vision in /srv/vision" in caught.value.what


class Here:
    """Stands for workers that are this machine: what they are told is executed, as who the test runs as."""

    def __init__(self, given: Mapping[str, Result]) -> None:
        self.given = given

    async def run(self, hosts: Any, argv: Any, *, limit: float) -> dict[str, Result]:
        return {host: self.given.get(host) or await self.one(host, argv, limit) for host in hosts}

    async def one(self, host: str, argv: Any, limit: float) -> Result:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
        stdout, stderr = await asyncio.wait_for(process.communicate(), limit)
        return Result(host, process.returncode, stdout, stderr)


async def look(path: Path, commit: str, *given: Result) -> None:
    """Look at a clone before a start."""
    fanout: Any = Here({result.host: result for result in given})
    await projects.look(fanout, HOSTS, RunSpec("r1", ("true",), cwd=str(path), code_digest=commit))


async def test_before_the_start_the_clone_is_readable_and_at_the_commit(forge: Any, tmp_path: Path) -> None:
    commit, place = forge("forge", "rev-parse", "v1"), tmp_path / "forge"
    forge("forge", "checkout", "--quiet", "--detach", "v1")
    await look(place, commit)
    with pytest.raises(HostError, match=r"you cannot enter .*/none, where the run would start") as closed:
        await look(tmp_path / "none", commit)
    assert (closed.value.where, "group or mode" in closed.value.fix) == ("pod-w[0-1]", True)
    with pytest.raises(HostError, match=f"is at {commit[:12]} and no longer at {COMMIT[:12]}"):
        await look(place, COMMIT)
    with pytest.raises(HostError, match=r"git cannot tell the commit of .*: fatal: ") as unread:
        await look(tmp_path, commit)
    assert unread.value.fix == f"check that you can read {tmp_path}/.git there, or run as its owner with --user"
    with pytest.raises(UnreachableError, match="no route"):
        await look(place, commit, Result("pod-w1", None, problem="no route", reached=False))


async def test_without_sudo_the_error_names_sync_as_the_alternative() -> None:
    refused = Result("pod-w1", 1, stderr=b"sudo: a password is required")
    fanout: Any = Here({"pod-w0": Result("pod-w0", 0), "pod-w1": refused})
    with pytest.raises(HostError, match="you do not have this right there") as caught:
        await projects.must_configure(fanout, HOSTS)
    assert (caught.value.where, "`--sync DIR`" in caught.value.fix) == ("pod-w1", True)


@pytest.mark.parametrize(
    ("file", "text", "declared"),
    [
        ("group_vars/all/main.yml", "workspace_projects: []  # none yet\n# workspace_projects: [{name: a}]\n", False),
        ("group_vars/all/main.yml", "users_people: []\n", False),
        ("group_vars/all/main.yml", "workspace_projects:\n  - name: vision\n", True),
        ("host_vars/pod-w0.json", '{"workspace_projects": [{"name": "vision"}]}', True),
        ("group_vars/all/vault.yml", "$ANSIBLE_VAULT;1.1;AES256\n6162\n", True),
        ("tpu_vm.yml", "compose: {workspace_projects: mine}", True),
        ("../group_vars/all", "workspace_projects: [{name: vision}]", True),
        ("../elsewhere/group_vars/all.yml", "workspace_projects: [{name: vision}]", True),
    ],
)
def test_a_fleet_without_any_project_is_told_where_to_declare_one(
    tmp_path: Path, file: str, text: str, declared: bool
) -> None:
    """Ansible is asked about every place that may declare a project."""
    settings: Any = SimpleNamespace(path=tmp_path, file=tmp_path / "inventory" / "tpu_vm.yml")
    settings.file.parent.mkdir()
    place = settings.file.parent / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    others = f"{settings.file},{tmp_path / 'elsewhere' / 'hosts.yml'}"
    if declared:
        projects.must_be_declared(settings, others)
        return
    with pytest.raises(UsageError, match="`workspace_projects` has none") as caught:
        projects.must_be_declared(settings, others)
    assert caught.value.where == str(settings.file.parent / "group_vars" / "all" / "main.yml")
    assert "workspace_projects: [{name: vision, url: https://example.org/vision.git}]" in caught.value.fix


def test_a_linked_variables_file_may_declare_a_project(tmp_path: Path) -> None:
    """Two fleets may share variables through a link."""
    settings: Any = SimpleNamespace(path=tmp_path, file=tmp_path / "inventory" / "tpu_vm.yml")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "main.yml").write_text("workspace_projects: [{name: vision}]")
    (tmp_path / "inventory" / "group_vars").mkdir(parents=True)
    (tmp_path / "inventory" / "group_vars" / "all").symlink_to(tmp_path / "shared")
    projects.must_be_declared(settings)


class Ready:
    """Stands for two workers that are fit for a run, whose person may configure them."""

    async def call(self, requests: Any, *_: Any, **__: Any) -> dict[str, Reply]:
        return {host: Reply(host, {"probe": probe(boot_id=host)}) for host in requests}

    async def run(self, hosts: Any, *_: Any, **__: Any) -> dict[str, Result]:
        return {host: Result(host, 0) for host in hosts}


@pytest.mark.parametrize("dry", [True, False])
def test_later_attempts_run_in_the_project_at_the_same_commit(
    dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[Any] = []

    def converge(*given: Any, check: bool) -> Outcome:
        asked.append((*given[-2:], check))
        return Outcome(data={"workspace": dict.fromkeys(HOSTS, AT)})

    fleet: Any = SimpleNamespace(
        settings=stand_in(tmp_path),
        workers=pod(2),
        listed=(),
        warnings=(),
    )
    fleet.settings.path, fleet.settings.file = tmp_path, tmp_path / "tpu_vm.yml"
    fleet.settings.file.write_text("workspace_projects: [{name: vision}]")
    monkeypatch.setattr(convergence, "converge", converge)
    monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _: Ready())
    monkeypatch.setattr("tpu_ops.fleet.view.known", lambda _: fleet)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["pod", "--git", "main", "--json", *["--dry-run"] * dry])
    job = train_job.Job(fleet, pod(2), RunSpec("r1", ("true",)), None, [0], args)
    job.bring()
    kept = {"workspace_on_local_changes": "fail", "workspace_during_runs": False}
    assert asked == [("workspace", {"workspace_only": "main", **kept}, dry)]
    assert (job.spec.cwd, job.spec.code_digest) == (PLACE, COMMIT)
    assert job.recovered().kept.git == f"vision@{COMMIT}"
    said = f"{'would check out' if dry else 'checked out'} vision in {PLACE} on 2 workers: commit {COMMIT}, "
    assert said in capsys.readouterr().err
    if dry:
        assert asyncio.run(job.run()) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["cwd"], plan["code_digest"]) == (PLACE, COMMIT)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run's name each time that it was looked whether it could be started."""
    seen: list[str] = []

    async def check(job: train_job.Job, _: Any) -> None:
        seen.append(job.spec.run_id)

    monkeypatch.setattr(train_job.Job, "_check", check)
    return seen


def test_recover_checks_at_the_start_that_new_nodes_can_be_configured(
    checked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(convergence, "rehearse", lambda *given: asked.append(given[-1]))
    fleet: Any = SimpleNamespace(settings=stand_in(Path()))
    args = argparse.Namespace(outside_grant=True)
    job = train_job.Job(fleet, pod(2), RunSpec("r1", ("true",)), None, [0], args)
    for given, calls, said in (
        ({}, 1, "checking whether site.yml could configure a recreated node"),
        ({"pod-w1": Result("pod-w1", 1)}, 0, "warning: pod-w1: you do not have the full passwordless sudo there"),
    ):
        asked.clear()
        checked.clear()
        results = {host: given.get(host, Result(host, 0)) for host in HOSTS}
        monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _, results=results: Here(results))
        job.look_ahead()
        err = capsys.readouterr().err
        assert (len(asked), said in err, checked) == (calls, True, ["r1"])


def test_recover_without_force_stops_if_site_yml_would_refuse(
    checked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("site.yml would fail there")

    fleet: Any = SimpleNamespace(settings=stand_in(Path()), workers=pod(2), listed=(), warnings=())
    monkeypatch.setattr("tpu_ops.cli.train.config.load", lambda _: None)
    monkeypatch.setattr("tpu_ops.fleet.contact.find", lambda *_: (fleet, fleet.workers))
    monkeypatch.setattr("tpu_ops.fleet.contact.serving", lambda *_: fleet)
    monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _: Ready())
    monkeypatch.setattr(convergence, "rehearse", refuse)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["pod", "--recover", "--outside-grant"])
    args.command = ["true"]
    with pytest.raises(HostError, match=r"site\.yml would fail there"):
        train.run(args)
    job = train_job.Job(
        fleet, pod(2), RunSpec("r1", ("true",)), None, [0], parser.parse_args(["pod", "--force", "--outside-grant"])
    )
    job.look_ahead()
    assert "warning: site.yml would fail there; recovery will end if" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--git", "main", "--sync", "."], "at:  --git and --sync"),
        (["--git", "vision@"], "a project or a ref is missing"),
        (["--git", "@v1"], "a project or a ref is missing"),
    ],
)
def test_contradictory_options_are_refused_before_any_contact(words: list[str], said: str, capsys: Any) -> None:
    assert main.main(["train", "pod", *words, "--", "true"]) == 2
    assert said in capsys.readouterr().err
