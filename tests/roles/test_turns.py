"""Two playbooks that change one worker take turns, and the holder of the lock is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roles.facts.library import managed_files, worker_facts
from roles.facts.module_utils import turns
from roles.python.library import uv_environments
from roles.tcmalloc.library import preload_entries
from tests.roles.conftest import Run
from tests.support.environments import state
from tpu_ops.host import fitness

#: Holds the turns whose files are named until its input ends; asked through sudo, in a session from elsewhere.
HOLDER = """
import sys
import roles.facts.module_utils.turns as turns
turns.DIRECTORY = sys.argv[1]
for what in sys.argv[2:]:
    turns.take_turn(None, what)
print(flush=True)
sys.stdin.read()
"""

Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(run: Run) -> Iterator[Hold]:
    """Have another process hold turns until it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*whats: str) -> subprocess.Popen[str]:
        session = os.environ | {"SSH_CONNECTION": "10.1.2.3 40000 10.4.5.6 22", "SUDO_USER": "ada"}
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, turns.DIRECTORY, *whats],
            cwd=Path(__file__).parents[2],
            env=session,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def files(tmp_path: Path) -> dict[str, Any]:
    return {
        "files": [
            {"path": str(tmp_path / "a.conf"), "content": "a\n", "owner": str(os.getuid()), "group": str(os.getgid())}
        ]
    }


def test_the_user_who_holds_a_turn_for_too_long_is_named(
    run: Run, tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hold("configuration files")
    monkeypatch.setattr(turns, "PATIENCE", 0.1)
    monkeypatch.setattr(turns, "_POLL", 0.01)
    said = run(managed_files, files(tmp_path))["msg"]
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", said) == (
        f"configuration files: ada from 10.1.2.3 since TIME UTC (pid {other.pid}) is at work on them on this worker,"
        " and did not end within 0 s; run this playbook again once that has ended (if its playbook was killed, what is"
        " left of it here ends by itself)"
    )
    assert not (tmp_path / "a.conf").exists()


def test_a_killed_holder_keeps_nobody_out(run: Run, tmp_path: Path, hold: Hold) -> None:
    other = hold("configuration files")
    other.kill()
    other.wait()
    done = run(managed_files, files(tmp_path))
    assert (done["changed"], "warnings" in done) == (True, False)


@pytest.mark.parametrize("told", [0.0, 600.0])
def test_a_turn_that_was_waited_for_long_is_told(
    run: Run, tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch, told: float
) -> None:
    other = hold("configuration files")

    def end(_: float) -> None:
        other.kill()
        other.wait()

    monkeypatch.setattr("time.sleep", end)
    monkeypatch.setattr(turns, "TOLD", told)
    done = run(managed_files, files(tmp_path))
    assert done["changed"] is True
    said = "configuration files: waited 0 s for ada from 10.1.2.3 since "
    assert [said in str(warning) for warning in done.get("warnings", [])] == ([] if told else [True])


def test_an_environment_that_another_playbook_just_filled_is_skipped(
    run: Run, tmp_path: Path, arguments: dict[str, Any], hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hold("Python environments")

    def end(_: float) -> None:
        # What the other one does before it ends.
        monkeypatch.undo()
        monkeypatch.setattr(turns, "DIRECTORY", str(tmp_path / "others"))
        assert run(uv_environments, arguments)["changed"] is True
        other.kill()
        other.wait()

    monkeypatch.setattr("time.sleep", end)
    done = run(uv_environments, arguments)
    assert (done["changed"], state(done)["packages"]) == (False, {"jax": "1"})


def test_a_file_that_two_roles_change_is_changed_in_one_turn(
    run: Run, tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "environment", hold("configuration files")
    path.write_text("LD_PRELOAD=/usr/lib/libtcmalloc.so.4\n")

    def end(_: float) -> None:
        # What the role base does before it ends.
        path.write_text(f"{path.read_text()}SSL_CERT_FILE=/a.crt\n")
        other.kill()
        other.wait()

    monkeypatch.setattr("time.sleep", end)
    assert run(preload_entries, {"files": [str(path)], "library": "libtcmalloc"})["changed"] is True
    assert path.read_text() == "SSL_CERT_FILE=/a.crt\n"


def test_active_playbooks_are_named_when_another_one_begins(run: Run, hold: Hold) -> None:
    assert "warnings" not in run(worker_facts, {"units": ["none.service"]})
    hold("Python environments", "data disks")
    said = [str(warning) for warning in run(worker_facts, {"units": ["none.service"]})["warnings"]]
    assert re.findall(r"on this worker: (.*?) by ada from 10\.1\.2\.3 since", " ".join(said)) == [
        "Python environments",
        "data disks",
    ]


def test_the_holder_of_an_unreadable_or_missing_turn_is_somebody_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "turn").write_text('{"who": 1')
    assert turns.holder(str(tmp_path / "turn")) == "somebody else"
    assert turns.holder(str(tmp_path / "none")) == "somebody else"


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ('{"who": "ada", "pid": 1, "since": 0, "changing": ["/opt/venvs/jax"]}', True),
        # Of the one before, which has ended: whoever has just taken the turn has not written yet.
        ('{"who": "ada", "pid": 4194305, "since": 0, "changing": ["/opt/venvs/jax"]}', False),
        ('{"who": "ada", "pid": 7, "since": 0}', False),
        ('{"changing": ["/opt/venvs/jax"]}', False),
        ('["changing"]', False),
        ('{"who": 1', False),
        ("", False),
    ],
)
def test_a_launcher_takes_only_a_whole_mark_of_whoever_holds_a_turn(
    hold: Hold, run: Run, text: str, is_told: bool
) -> None:
    hold("Python environments")
    (Path(turns.DIRECTORY) / "Python-environments").write_text(text)
    assert [change["changing"] for change in fitness.changes(turns.DIRECTORY)] == [["/opt/venvs/jax"]] * is_told
