"""`tpu_ops who --watch` repeats its table in one place on a terminal, even if workers are silent."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_control import Answers
from tests.runs.test_parts import stand_in
from tpu_ops.cli import main, runs, who
from tpu_ops.errors import ExitCode
from tpu_ops.runs import control, holders, overview
from tpu_ops.runs.outcomes import outcome_of
from tpu_ops.ssh.replies import Reply

RUN = {"run_id": "r1", "person": "ada", "since": 5.0}
BUSY = Reply("", {"holders": [], "holder": RUN, "argv": ["sh", "-c", "sleep 1"], "chips": ["/dev/accel0"]})
IDLE = Reply("", {"holders": [], "holder": None, "chips": ["/dev/accel0"]})
SILENT = Reply("", {}, "unreachable", "no route to\nhost")


class Fleet(Answers):
    """Workers that are asked three times, whereupon the person presses Ctrl-C."""

    rounds = 0

    async def call(self, requests: Any, action: str, **more: Any) -> dict[str, Reply]:
        self.rounds += 1
        if self.rounds > 3:
            raise KeyboardInterrupt
        assert more["limit"] <= who.PATIENCE, "one that hangs does not stop the clock for long"
        return await super().call(requests, action)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_comes_again_and_again_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, terminal: bool
) -> None:
    fleet: Any = Fleet(w0=BUSY, w1=IDLE, w2=SILENT)
    chosen = [SimpleNamespace(host=f"w{index}") for index in range(3)]
    monkeypatch.setattr("tpu_ops.cli.who.config.load", lambda _: stand_in(Path()))
    monkeypatch.setattr("tpu_ops.cli.who.contact.find", lambda *_: (None, chosen))
    monkeypatch.setattr("tpu_ops.cli.who.contact.serving", lambda *_: None)
    monkeypatch.setattr("tpu_ops.cli.who.contact.fanout", lambda _: fleet)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main.main(["who", "pod", "--watch", "0.01"]) == ExitCode.INTERRUPTED
    shown = capsys.readouterr().out
    assert shown.count("\x1b[H\x1b[2J") == (3 if terminal else 0)
    text = shown.replace("\x1b[H\x1b[2J", "")
    once = (
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, every 0\.01 s; Ctrl-C quits\n"
        r"WORKER .*\nw0 +ada +r1 .* sh -c 'sleep 1'\nfree: w1\nsilent: w2: no route to host\n"
    )
    assert re.fullmatch(f"(?:{once}){{3}}", text)


def test_json_names_workers_that_could_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = tmp_path / "f.tpu_vm.yml"
    file.touch()
    fleet: Any = Answers(w0=IDLE, w1=SILENT._replace(fix="`tpu_ops list` shows it"))
    chosen = [SimpleNamespace(host=f"w{index}") for index in range(2)]
    settings = stand_in(Path())
    monkeypatch.setattr("tpu_ops.cli.who.config.load", lambda _: settings)
    monkeypatch.setattr("tpu_ops.cli.who.contact.find", lambda *_: (SimpleNamespace(settings=settings), chosen))
    monkeypatch.setattr("tpu_ops.cli.who.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.cli.who.contact.away", lambda *_: {})
    monkeypatch.setattr("tpu_ops.cli.who.contact.with_hint", lambda _, replies: tuple(replies))
    monkeypatch.setattr("tpu_ops.cli.who.contact.fanout", lambda _: fleet)
    assert main.main(["who", "--fleet", str(file), "pod", "--json"]) == ExitCode.UNREACHABLE
    told = json.loads(capsys.readouterr().out)
    fault = {"worker": "w1", "problem": SILENT.problem, "fix": f"`tpu_ops list --fleet {file}` shows it"}
    assert (told["chips"], told["faults"]) == ({"w0": 1}, [fault])


def test_watch_with_json_is_a_usage_error(capsys: Any) -> None:
    assert main.main(["who", "--watch", "--json"]) == ExitCode.USAGE
    assert "leave out one of the two" in capsys.readouterr().err


def lent(asker: str) -> tuple[Reply, Reply]:
    """Return what two workers answer of a run of ada's: on one it holds a chip, on the other none yet."""
    holder = {"run_id": "r1", "person": "ada", "uid": 1001, "asker": asker, "since": 5.0}
    process = {"user": "ada", "run": "r1", "pid": 7, "since": 6.0, "command": "python", "devices": ["/dev/accel0"]}
    busy = {"holders": [process, process | {"run": "", "pid": 8}], "holder": holder}
    return Reply("w0", busy), Reply("w1", {"holders": [], "holder": holder})


@pytest.mark.parametrize(("asker", "shown"), [("bob", "ada (started by bob)"), ("ada", "ada"), ("", "ada")])
def test_the_user_who_started_a_run_as_another_user_is_named(asker: str, shown: str, capsys: Any) -> None:
    found = [holder for reply in lent(asker) for holder in holders.held_on(reply.host, reply.value)]
    assert [(row["worker"], row["run"], row["person"]) for row in who.rows(found)] == [
        ("w[0-1]", "r1", shown),
        ("w0", "none", "ada"),
    ]
    asked = {
        "state": "running",
        "since": 5.0,
        "attempt": 1,
        "code_digest": "",
        "person": {"uid": 1001, "name": "ada"},
        "asker": asker,
    }
    row = (control.RunRef("r1", ("w0",)), (outcome_of(0, "w0", asked),), 5.0)
    assert runs.show(overview.Overview((row,), control.Found([])), stand_in(Path()), as_json=False) == 0
    assert re.search(rf"r1 +{re.escape(shown)} +w0 +running", capsys.readouterr().out)


def test_two_people_s_runs_of_one_name_are_two_rows() -> None:
    people = {"a-w0": "ada", "a-w1": "ada", "b-w0": "bob"}
    found = [
        holder
        for host, name in people.items()
        for holder in holders.held_on(host, {"holder": RUN | {"person": name, "asker": name}, "argv": ["true"]})
    ]
    assert [(row["worker"], row["person"], row["run"]) for row in who.rows(found)] == [
        ("a-w[0-1]", "ada", "r1"),
        ("b-w0", "bob", "r1"),
    ]
