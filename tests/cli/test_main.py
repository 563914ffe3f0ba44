"""What every command has in common: where it writes, how it names mistakes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_ops.cli import run as run_command
from tpu_ops.cli import train
from tpu_ops.errors import OpsError
from tpu_ops.fleet import state
from tpu_ops.runs import records


def command(*argv: str, stdout: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own, its result to a file if that is given."""
    script = [sys.executable, "-m", "tpu_ops.cli.main", *argv]
    with Path(stdout or os.devnull).open("w") as file:
        return subprocess.run(
            script,
            env=os.environ | env,
            text=True,
            stdout=file if stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )


def test_a_result_that_cannot_be_written_is_one_error() -> None:
    done = command("--help", stdout="/dev/full")
    assert (done.returncode, done.stderr.count("error: ")) == (1, 1)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_any_text_is_written_in_any_encoding() -> None:
    done = command("g\u00e4be\udcff", PYTHONIOENCODING="ascii")
    assert (done.returncode, "unknown command" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "pod", "hostname"), "tpu_ops run pod -- hostname"),
        (("train", "pod", "--detach", "python", "-V"), "tpu_ops train pod --detach -- python -V"),
        (("train", "pod"), "tpu_ops train pod -- python train.py"),
    ],
)
def test_a_command_without_its_dashes_is_shown_with_them(tpu_ops, argv: tuple[str, ...], words: str) -> None:
    code, _, err = tpu_ops(*argv)
    assert (code, words in err) == (2, True), err


def test_an_option_that_there_is_not_is_no_command(tpu_ops, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tpu_ops("run", "pod", "--no-such-option")
    assert (ended.value.code, "unrecognized" in capfd.readouterr().err) == (2, True)


def test_help_begins_with_a_capital_and_leaves_the_others(tpu_ops, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tpu_ops("create", "--help")
    assert "Create a TPU node and" in capfd.readouterr().out


def test_a_state_that_cannot_be_written_or_read_is_an_error_in_words(tmp_path: Path) -> None:
    record = records.new("r1", "pod", "1", ("pod-w0",), ("true",))
    (tmp_path / "runs").touch()
    (tmp_path / "a directory" / "x").mkdir(parents=True)
    for fails, path in (
        (lambda: records.write(tmp_path, record), tmp_path / "runs"),
        (lambda: state.replace(tmp_path / "a directory", "text", 0o600), tmp_path / "a directory"),
        (lambda: state.replace(tmp_path / "nowhere" / "x", "text", 0o600), tmp_path / "nowhere" / "x"),
        (lambda: state.Files(tmp_path).text(tmp_path / "a directory"), tmp_path / "a directory"),
    ):
        with pytest.raises(OpsError) as caught:
            fails()
        assert (caught.value.where, bool(caught.value.fix)) == (str(path), True)
    assert [path.name for path in tmp_path.iterdir() if stat.S_ISREG(path.stat().st_mode)] == ["runs"], "nothing left"


def test_equal_faults_are_shown_once_with_all_their_workers() -> None:
    rows = [
        {"worker": f"pod-w{index}", "problem": "absent", "fix": f"ansible-playbook site.yml --limit pod-w{index}"}
        for index in (0, 1, 10)
    ]
    other = {"worker": "pod-w2", "problem": "busy", "fix": "wait"}
    assert train.folded_faults([*rows, other]) == [
        {
            "worker": "pod-w[0-1,10]",
            "problem": "absent",
            "fix": "ansible-playbook site.yml --limit pod-w0,pod-w1,pod-w10",
        },
        other,
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"timeout: failed to run command 'nope': No such file or directory\n", b"command not found: nope\n"),
        ("timeout: failed to run command \u2018/x\u2019: Permission denied".encode(), b"permission denied: /x"),
        (b"else\n", b"else\n"),
    ],
)
def test_a_command_that_is_not_there_is_named_plainly(said: bytes, shown: bytes) -> None:
    assert run_command.said_by(said) == shown
