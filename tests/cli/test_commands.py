"""Commands that are told to be copied are on the fleet that was named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import probe
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops.cli import commands
from tpu_ops.cli.main import main
from tpu_ops.runs import launch
from tpu_ops.ssh.replies import Reply

HELD = "wait for it, or `tpu_ops stop r2`"


def named(name: str) -> str:
    return f"tpu_ops {name} --fleet /f.tpu_vm.yml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HELD, "wait for it, or `tpu_ops stop --fleet /f.tpu_vm.yml r2`"),
        ("tpu_ops run pod-w0 -- true", "tpu_ops run --fleet /f.tpu_vm.yml pod-w0 -- true"),
        ("`tpu_ops runs` or tpu_ops ssh-config", f"`{named('runs')}` or {named('ssh-config')}"),
        (f"{named('refresh')} --from api", f"{named('refresh')} --from api"),
        ('it does not say "format": "tpu_ops snapshot"', 'it does not say "format": "tpu_ops snapshot"'),
        (
            "tpu_ops lab up; update tpu_ops here, tpu_ops listens",
            "tpu_ops lab up; update tpu_ops here, tpu_ops listens",
        ),
    ],
)
def test_the_commands_of_a_text_name_the_fleet_once(text: str, said: str) -> None:
    assert commands.on_fleet(text, named) == said


class Workers:
    """Stands for two workers that are fit for a run, and what they answer else."""

    def __init__(self) -> None:
        self.probes: dict[str, Any] = {}
        self.others: Callable[[str], Reply] = lambda host: Reply(host, {"record": None, "records": [], "holder": None})

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        if action == "probe":
            return {host: Reply(host, {"probe": probe(boot_id=host, **self.probes)}) for host in requests}
        return {host: self.others(host) for host in requests}


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """The workers of a fleet whose file is `other.tpu_vm.yml`, where no directory has one."""
    member = Member(tmp_path, snapshot=str(tmp_path / "published.json"))
    member.file.rename(tmp_path / "other.tpu_vm.yml")
    (tmp_path / "published.json").write_text(document([node()]).text())
    for name in [name for name in os.environ if name.startswith("TPU_OPS_")]:
        monkeypatch.delenv(name)
    for name, value in member.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TPU_OPS_FLEET")
    monkeypatch.chdir(tmp_path)
    found = Workers()
    monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _: found)
    return found


def test_hints_of_train_name_the_fleet_of_the_call(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    async def start(*_: object) -> None:
        """Let it begin."""

    monkeypatch.setattr(launch, "start", start)
    call = ["train", "--fleet", "other.tpu_vm.yml", "pod", "--name", "r1"]
    assert main([*call, "--detach", "--", "true"]) == 0
    fleet = f"--fleet {tmp_path / 'other.tpu_vm.yml'}"
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"  follow: tpu_ops attach {fleet} r1",
        f"  stop:   tpu_ops stop {fleet} r1",
    ]


def test_suggested_commands_name_the_fleet_of_the_call(workers: Workers, tmp_path: Path, capsys: Any) -> None:
    fleet = f"--fleet {tmp_path / 'other.tpu_vm.yml'}"
    holder = {"run_id": "r2", "person": "ada", "uid": os.getuid(), "asker": "ada", "since": 1.0, "supervisor": {}}
    workers.probes = {"holder": holder}
    assert main(["train", "--fleet", "other.tpu_vm.yml", "pod", "--", "true"]) == 1
    out, err = capsys.readouterr()
    assert f"wait for it (`tpu_ops attach {fleet} r2` follows it), or `tpu_ops stop {fleet} r2`" in out
    assert f"  fix: wait for it (`tpu_ops attach {fleet} r2` follows it), or `tpu_ops stop {fleet} r2`" in err
    workers.probes = {"lockfiles": ["/tmp/libtpu_lockfile"], "preloads": [], "program": "1"}
    assert main(["doctor", "--fleet", "other.tpu_vm.yml"]) == 1
    assert f"fix: tpu_ops unlock {fleet} pod-w0,pod-w1\n" in capsys.readouterr().out
    assert main(["runs", "--fleet", "other.tpu_vm.yml"]) == 0
    assert f"`tpu_ops train {fleet}` starts one" in capsys.readouterr().err
    assert main(["logs", "--fleet", "other.tpu_vm.yml", "nothing"]) == 2
    assert f"`tpu_ops runs {fleet}` runs" in capsys.readouterr().err


def test_attach_and_recovery_tell_of_the_fleet_that_they_were_called_with(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fleet = f"--fleet {tmp_path / 'other.tpu_vm.yml'}"

    async def followed(*_: Any, begun: Callable[..., None], **__: Any) -> None:
        begun(workers, SimpleNamespace(run_id="r1", hosts=("pod-w0", "pod-w1")))
        raise BrokenPipeError

    monkeypatch.setattr("tpu_ops.cli.following.followed", followed)
    monkeypatch.setattr("tpu_ops.cli.output.give_up", lambda: None)
    assert main(["attach", "--fleet", "other.tpu_vm.yml", "r1"]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"  follow: tpu_ops attach {fleet} r1",
        f"  stop:   tpu_ops stop {fleet} r1",
    ]
    assert main(["attach", "--fleet", "other.tpu_vm.yml", "r1", "--recover"]) == 2
    assert f"only runs that `tpu_ops train {fleet} --recover` started" in capsys.readouterr().err
