"""Commands in messages name the fleet of the call."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import probe
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops.cli import output
from tpu_ops.cli.main import main
from tpu_ops.errors import OpsError
from tpu_ops.runs import launch
from tpu_ops.ssh.replies import Reply

OPTION = "--fleet /f.tpu_vm.yml"


@pytest.fixture
def named() -> Iterator[list[str]]:
    """Have the writer name a fleet; each time that the option is looked up adds to the list."""
    lookups: list[str] = []

    def option() -> str:
        lookups.append(OPTION)
        return OPTION

    output.begin()
    output.name_fleet(option)
    yield lookups
    output.end()


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("wait, or `tpu_ops stop r2`", f"wait, or `tpu_ops stop {OPTION} r2`"),
        ("`tpu_ops runs` or `tpu_ops ssh-config`", f"`tpu_ops runs {OPTION}` or `tpu_ops ssh-config {OPTION}`"),
        ("tpu_ops run pod-w0 -- true", f"tpu_ops run {OPTION} pod-w0 -- true"),
        ("`tpu_ops run pod -- ls --fleet x`", f"`tpu_ops run {OPTION} pod -- ls --fleet x`"),
        ("`TPU_OPS_ZONES=b tpu_ops status r1`", f"`TPU_OPS_ZONES=b tpu_ops status {OPTION} r1`"),
        ("`env -u TPU_OPS_ZONES tpu_ops status r1`", f"`env -u TPU_OPS_ZONES tpu_ops status {OPTION} r1`"),
        ("no file ./a`b: `tpu_ops list`", f"no file ./a`b: `tpu_ops list {OPTION}`"),
        ("`tpu_ops refresh --fleet b --from api`", "`tpu_ops refresh --fleet b --from api`"),
        ("`tpu_ops refresh --from api --fleet b`", "`tpu_ops refresh --from api --fleet b`"),
        ("`tpu_ops lab up`, `tpu_ops --help`, `tpu_ops`", "`tpu_ops lab up`, `tpu_ops --help`, `tpu_ops`"),
        ("tpu_ops listens; tpu_ops list", "tpu_ops listens; tpu_ops list"),
        ('the file does not say "format": "tpu_ops snapshot"', 'the file does not say "format": "tpu_ops snapshot"'),
    ],
)
def test_the_writer_names_the_fleet_in_commands(named: list[str], text: str, printed: str, capsys: Any) -> None:
    assert output.on_fleet(output.on_fleet(text)) == printed
    output.info(text)
    output.error(OpsError("what", where="where", fix=text))
    output.error_as_json(OpsError("what", where="where", fix=text))
    out, err = capsys.readouterr()
    assert err == f"{printed}\nerror: what\n  at:  where\n  fix: {printed}\n"
    assert json.loads(out)["error"] == {"problem": "what", "where": "where", "fix": printed, "code": 1}
    assert len(named) <= 1


def test_a_command_that_is_a_whole_fix_names_the_fleet_within_a_message(named: list[str], capsys: Any) -> None:
    output.warning(str(OpsError("it is away", where="pod-w0", fix="tpu_ops refresh")))
    assert capsys.readouterr().err == f"warning: pod-w0: it is away (`tpu_ops refresh {OPTION}`)\n"


def test_messages_that_are_logged_name_the_fleet(named: list[str], capsys: Any) -> None:
    output.listen()
    logging.getLogger("tpu_ops.x").warning("`tpu_ops list` shows it")
    assert capsys.readouterr().err == f"warning: `tpu_ops list {OPTION}` shows it\n"


@pytest.mark.parametrize("write", [output.as_it_is, output.line, lambda text: output.raw(f"{text}\n".encode())])
def test_text_of_other_programs_is_printed_unchanged(
    named: list[str], write: Callable[[str], None], capsys: Any
) -> None:
    write("`tpu_ops list`")
    assert (capsys.readouterr().out, named) == ("`tpu_ops list`\n", [])


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
    assert (out, err.count("run r2 of ada has held")) == ("", 1), "an error is printed once"
    assert f"  fix: wait for the run (`tpu_ops attach {fleet} r2` follows it), or `tpu_ops stop {fleet} r2`" in err
    workers.probes = {"lockfiles": ["/tmp/libtpu_lockfile"], "preloads": [], "program": "1"}
    assert main(["doctor", "--fleet", "other.tpu_vm.yml"]) == 1
    assert f"fix: tpu_ops unlock {fleet} pod-w0,pod-w1\n" in capsys.readouterr().out
    assert main(["runs", "--fleet", "other.tpu_vm.yml"]) == 0
    assert f"`tpu_ops train {fleet}` starts a run" in capsys.readouterr().err
    assert main(["logs", "--fleet", "other.tpu_vm.yml", "nothing"]) == 2
    assert f"`tpu_ops runs {fleet}` the runs" in capsys.readouterr().err


def test_attach_and_recovery_tell_of_the_fleet_that_they_were_called_with(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fleet = f"--fleet {tmp_path / 'other.tpu_vm.yml'}"

    async def followed(*_: Any, begun: Callable[..., None], **__: Any) -> None:
        begun(workers, SimpleNamespace(run_id="r1", hosts=("pod-w0", "pod-w1")))
        raise BrokenPipeError

    monkeypatch.setattr("tpu_ops.runs.attempts.followed", followed)
    monkeypatch.setattr("tpu_ops.cli.output.give_up", lambda: None)
    assert main(["attach", "--fleet", "other.tpu_vm.yml", "r1"]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"  follow: tpu_ops attach {fleet} r1",
        f"  stop:   tpu_ops stop {fleet} r1",
    ]
    assert main(["attach", "--fleet", "other.tpu_vm.yml", "r1", "--recover"]) == 2
    assert f"only runs that `tpu_ops train {fleet} --recover` started" in capsys.readouterr().err
