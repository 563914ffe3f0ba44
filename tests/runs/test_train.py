"""The files of `tpu_ops train` after a failed start, and the run names that it accepts."""

from __future__ import annotations

import argparse
import contextlib
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.runs.test_parts import pod, probe, stand_in
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops import config
from tpu_ops.cli import sync as cli_sync
from tpu_ops.cli import train, train_job
from tpu_ops.cli.main import main
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import HostError, OpsError, UsageError
from tpu_ops.fleet import view
from tpu_ops.runs import launch, records, recovery, spec, sync
from tpu_ops.ssh.host_keys import HostKeyAlarm
from tpu_ops.ssh.replies import Reply, Result

EARLIER = records.RunRecord("exp", ("other",), ("7",), ("other-w0",), ("true",), since=1.0)
SILENT = Reply("pod-w0", {}, "unreachable", "no route to host")


def job(tmp_path: Path, *words: str) -> train_job.Job:
    """Return what `tpu_ops train pod --name exp` does."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["pod", "--name", "exp", *words])
    fleet: Any = SimpleNamespace(
        workers=tuple(pod(2)),
        listed=(),
        warnings=(),
        settings=stand_in(tmp_path),
    )
    return train_job.Job(fleet, pod(2), spec.RunSpec("exp", ("true",)), None, [0], args)


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("may_be_on", [True, False])
async def test_a_possibly_active_run_is_remembered_and_a_failed_start_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, may_be_on: bool, interrupted: bool
) -> None:
    refused = launch.NotStarted([SILENT], ["pod-w0"], 60.0, may_be_on=may_be_on)
    error = launch.Interrupted(may_be_on=may_be_on) if interrupted else refused
    monkeypatch.setattr("tpu_ops.cli.train_job.launch.start", AsyncMock(side_effect=error))
    fanout: Any = None
    for before in (None, EARLIER):
        records.forget(tmp_path, "exp")
        if before:
            records.write(tmp_path, before)
        starting = job(tmp_path, "--recover")
        starting.before = before
        guard = starting.recovered()
        with pytest.raises(type(error)):
            await starting._start(fanout)
        known = records.read(tmp_path, "exp")
        assert (known.hosts if may_be_on and known else known) == (("pod-w0", "pod-w1") if may_be_on else before)
        assert guard.driver.state.begun is may_be_on, "nothing that recovers it goes, then"
        starting.left()
        assert ("may be running\n  follow: tpu_ops attach exp" in capsys.readouterr().err) is may_be_on


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        ("python train.py --lr 1", "train.py"),
        ("python tools/go.sh", "tools/go.sh"),
        ("tools/go", "tools/go"),
        ("python ../train.py", "../train.py"),
        ("python other.py", ""),
        ("python -m train", ""),
        ("cat tools/go", ""),
        ("python HERE/train.py", ""),
        (f"bash -c {'x' * 300}.py", ""),
    ],
)
def test_a_script_that_is_here_and_is_not_copied_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str, warned: str
) -> None:
    here = tmp_path / "here"
    (here / "tools").mkdir(parents=True)
    for name in ("train.py", "tools/go", "tools/go.sh", "../train.py"):
        (here / name).touch()
    monkeypatch.chdir(here)
    for user, home in (("", "your home"), ("bob", "the home of bob")):
        cli_sync.warn_of_scripts(command.replace("HERE", str(here)).split(), user, None)
        said = capsys.readouterr().err
        assert said.startswith(f"warning: {warned} is not copied: ") if warned else said == ""
        assert (home in said) == bool(warned)
        assert ("--sync ." in said) == (bool(warned) and not user and ".." not in warned)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.py", ""),
        ("other.py", ""),
        (
            "code/train.py",
            "warning: code/train.py is not in HERE/code, in whose copy the command starts: name it train.py\n",
        ),
        ("prepare.sh", "warning: prepare.sh is not in HERE/code, in whose copy the command starts\n"),
    ],
)
def test_a_script_path_that_does_not_exist_in_the_copy_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, word: str, said: str
) -> None:
    (tmp_path / "code").mkdir()
    for name in ("code/train.py", "prepare.sh", "train.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    tree: Any = SimpleNamespace(source=tmp_path / "code")
    cli_sync.warn_of_scripts(["python", word], "", tree)
    assert capsys.readouterr().err == said.replace("HERE", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["--", "python", "train.py"], True),
        (["--shell", "--", "cd x; python train.py"], True),
        (["--sync", ".", "--", "python", "train.py"], False),
        (["--git", "vision@v2", "--", "python", "train.py"], False),
    ],
)
def test_train_warns_of_scripts_where_no_code_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], warned: bool
) -> None:
    fleet: Any = SimpleNamespace(workers=tuple(pod(2)), listed=(), warnings=(), settings=stand_in(tmp_path))
    monkeypatch.setattr(config, "load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.train.contact.find", lambda *_: (fleet, pod(2)))
    monkeypatch.setattr("tpu_ops.cli.train.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.cli.train.foreground.to_its_end", lambda run, *_, **__: run.close() or 0)
    monkeypatch.setattr("tpu_ops.cli.train_job.Job.bring", lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["train", "pod", *words]) == 0
    assert ("train.py is not copied" in capsys.readouterr().err) is warned


def test_a_dry_run_names_variables_and_secrets_and_shows_no_value(tmp_path: Path, capsys: Any) -> None:
    would = job(tmp_path, "--dry-run")
    would._would()
    assert capsys.readouterr().out.splitlines()[1:] == ["on pod-w0, pod-w1; nothing was changed"]
    would.spec = spec.RunSpec("exp", ("true",), {"LR": "hush", "B": "hush"}, {"HF_TOKEN": "hush"})
    would._would()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "variables: B, LR",
        "secrets: HF_TOKEN",
        "on pod-w0, pod-w1; nothing was changed",
    ]


async def test_a_dry_run_finds_what_is_in_the_way_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    would, looked = job(tmp_path, "--dry-run"), AsyncMock(side_effect=HostError("no sync has put it there"))
    would.tree = sync.Tree(tmp_path, "code", ("a",), {b"a": "f"}, "0")
    monkeypatch.setattr("tpu_ops.cli.train_job.contact.fanout", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.train.sync.look", looked)
    monkeypatch.setattr(would, "_check", AsyncMock())
    with pytest.raises(HostError, match="no sync has put it there"):
        await would.run()
    looked.assert_awaited_once_with(None, ("pod-w0", "pod-w1"), would.tree)


async def test_a_run_is_kept_as_begun_right_before_a_worker_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = job(tmp_path, "--recover")
    guard, fanout = starting.recovered(), None
    assert (guard.kept.attempt, guard.kept.pending) == (0, True)
    seen: list[Any] = []

    async def start(*_: object) -> None:
        kept = recovery.read(tmp_path, "exp")
        seen.append((kept.attempt, kept.pending, records.read(tmp_path, "exp") is not None))

    monkeypatch.setattr("tpu_ops.cli.train_job.launch.start", start)
    await starting._start(fanout)  # type: ignore[arg-type]
    assert seen == [(1, False, True)]


async def test_of_two_starts_of_one_name_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have found the name free, and on different nodes no worker would notice."""
    monkeypatch.setattr("tpu_ops.cli.train_job.launch.start", start := AsyncMock())
    fanout: Any = None
    # What recovers a run of the name `starting` has its own place beside it.
    with recovery.alone(tmp_path, "starting"):
        await job(tmp_path)._start(fanout)
    with pytest.raises(UsageError, match="a run with this name was started here just now") as refused:
        await job(tmp_path)._start(fanout)
    assert refused.value.fix.startswith("`tpu_ops attach exp` follows the active run, ")
    assert start.await_count == 1


async def test_a_run_that_cannot_be_kept_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_ops.cli.train_job.launch.start", start := AsyncMock())
    starting = job(tmp_path, "--recover")
    guard, fanout = starting.recovered(), None
    records.write(tmp_path, EARLIER)
    starting.before = EARLIER
    (tmp_path / "runs/exp").touch()
    with pytest.raises(OpsError, match="cannot write"):
        await starting._start(fanout)  # type: ignore[arg-type]
    assert (start.await_count, guard.driver.state.begun, starting.may_be_on) == (0, False, False)
    assert records.read(tmp_path, "exp") == EARLIER


async def test_an_alarm_in_the_midst_of_a_start_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tpu_ops.cli.train_job.launch.start", AsyncMock(side_effect=HostKeyAlarm("the host key CHANGED"))
    )
    starting = job(tmp_path, "--recover")
    guard, fanout = starting.recovered(), None
    with pytest.raises(HostKeyAlarm):
        await starting._start(fanout)  # type: ignore[arg-type]
    assert guard.driver.state.begun
    assert records.read(tmp_path, "exp")


async def test_a_local_failure_during_a_start_keeps_the_run_and_its_hints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    error = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr("tpu_ops.cli.train_job.launch.start", AsyncMock(side_effect=error))
    starting = job(tmp_path, "--recover")
    guard, fanout = starting.recovered(), None
    with pytest.raises(BlockingIOError):
        await starting._start(fanout)  # type: ignore[arg-type]
    assert guard.driver.state.begun
    assert records.read(tmp_path, "exp")
    assert "may be running\n  follow: tpu_ops attach exp" in capsys.readouterr().err


async def test_the_name_of_a_run_that_is_recovered_here_is_taken(tmp_path: Path) -> None:
    starting = job(tmp_path)
    kept = recovery.Recovery("exp", 1, Plan(()), recovery.options_of(starting.spec, {}), pending=True)
    recovery.write(tmp_path, kept)
    fanout: Any = None
    follows, others = (
        "`tpu_ops attach exp` follows the active run",
        "`tpu_ops stop exp` ends it; or choose another --name",
    )
    for process, first in (("", "`tpu_ops attach exp --recover` resumes the active run"), ("at work", follows)):
        at_work = recovery.lock(tmp_path, "exp") if process else contextlib.nullcontext()
        with at_work, pytest.raises(UsageError, match="the run has not ended") as wrong:
            await starting._check(fanout)
        assert wrong.value.fix == f"{first}, {others}"


async def test_the_name_of_a_run_that_is_on_elsewhere_is_taken(tmp_path: Path) -> None:
    starting = job(tmp_path)
    other = pod(1, "other", "7")
    starting.fleet.workers = (*starting.workers, *other)  # type: ignore[misc]
    records.write(tmp_path, EARLIER)
    answer = {"other-w0": Reply("other-w0", {"record": {"state": "running"}})}
    fanout: Any = SimpleNamespace(call=AsyncMock(return_value=answer))
    with pytest.raises(UsageError, match="a run exp that was started here is active") as wrong:
        await starting._check(fanout)
    assert wrong.value.where == "other-w0"
    assert (
        wrong.value.fix
        == "`tpu_ops attach exp` follows the active run, `tpu_ops stop exp` ends it; or choose another --name"
    )


class Ready:
    """Stands for two workers, the second one's clock off."""

    async def call(self, requests: Any, *_: Any, **__: Any) -> dict[str, Reply]:
        clocks = {"pod-w0": 1000.0, "pod-w1": 0.0}
        return {host: Reply(host, {"probe": probe(boot_id=host, clock=clocks[host])}) for host in requests}

    async def run(self, hosts: Any, *_: Any, **__: Any) -> dict[str, Result]:
        return {host: Result(host, 0) for host in hosts}


def test_each_warning_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    member = Member(tmp_path, snapshot=str(tmp_path / "published.json"), proxy_jump="pod-w7")
    (tmp_path / "published.json").write_text(document([node()]).text())
    for name, value in member.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tpu_ops.cli.train_job.contact.fanout", lambda _: Ready())
    monkeypatch.setattr("tpu_ops.ansible.convergence.rehearse", lambda *_: None)
    assert main(["train", "pod", "--recover", "--force", "--dry-run", "--", "true"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [
        words for line in said for words in ("proxy_jump pod-w7", "the worker's clock is -1000 s off") if words in line
    ] == [
        "proxy_jump pod-w7",
        "the worker's clock is -1000 s off",
    ]
    assert len(said) == 2
    known = view.current(config.load())
    assert capsys.readouterr().err.count("warning: proxy_jump pod-w7") == 1, "it is another look"
    view.current(config.load(), known.warnings)
    assert capsys.readouterr().err == ""
