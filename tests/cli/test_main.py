"""Common behaviour of all commands: output streams and error messages."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import failed
from tpu_ops.ansible.playbook import Said
from tpu_ops.cli import configure, doctor, examples, options, output
from tpu_ops.cli import run as run_command
from tpu_ops.cli.commands import COMMANDS
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import state
from tpu_ops.runs import records
from tpu_ops.runs.doctor import Finding
from tpu_ops.runs.preflight import Fault
from tpu_ops.ssh import fleet_files, openssh
from tpu_ops.ssh.replies import Result


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


@pytest.mark.parametrize("argv", [["--help"], ["list", "--help"], ["lab", "up", "--help"]])
def test_a_result_that_cannot_be_written_is_one_error(argv: list[str]) -> None:
    done = command(*argv, stdout="/dev/full")
    assert (done.returncode, done.stderr.count("error: ")) == (1, 1)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


#: Warns, then acts (writes a file), then has a result, as many a command does.
ACTS = """
import pathlib, sys
from tpu_ops.cli import list as command, main, options, output
import logging
*_, path, mode = sys.argv
sys.argv[1:] = ["list"]
def run(args):
    logging.getLogger("tpu_ops.x").warning("one")
    logging.getLogger("tpu_ops.x").warning("two")
    pathlib.Path(path).touch()
    if mode == "ask":
        options.confirmed("Sure?", "this")
    output.line("result")
    return 0
command.run, command.add_arguments = run, lambda parser: None
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("redirection", "mode", "ended", "err"),
    [
        ("2>&$broken", "", (0, "result\n"), ""),
        ("2>&-", "", (0, "result\n"), ""),
        ("2>&$broken >&2", "", (0, ""), ""),
        (">&-", "", (1, ""), "standard output"),
        ("<&-", "ask", (2, ""), "add --yes"),
    ],
)
def test_streams_that_are_closed_or_have_no_reader(
    tmp_path: Path, redirection: str, mode: str, ended: tuple[int, str], err: str
) -> None:
    """A lost message ends nothing, a lost result ends the command; without a reader, nothing is asked."""
    reader, broken = os.pipe()
    os.close(reader)
    line = f'exec "$0" -c "$1" -- "$2" "$3" {redirection.replace("$broken", str(broken))}'
    words = ["bash", "-c", line, sys.executable, ACTS, str(tmp_path / "done"), mode]
    done = subprocess.run(words, capture_output=True, text=True, pass_fds=[broken], check=False)
    os.close(broken)
    assert (done.returncode, done.stdout, (tmp_path / "done").exists()) == (*ended, True), done.stderr
    assert err in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_cell_of_a_table_gives_no_orders_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.table([{"label": "\x1b[31mred\nnext größe", "n": 1}], ("label", "n"))
    assert capsys.readouterr().out.splitlines() == ["LABEL                   N", r"\x1b[31mred next größe  1"]


def test_foreign_text_is_one_line_without_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[2Jname\r\nerror: forged\u202e"
    output.info(text)
    output.warning(text)
    output.error(OpsError(text, where=text, fix=text))
    shown = r"\x1b[2Jname error: forged\u202e"
    beginnings = ("", "warning: ", "error: ", "  at:  ", "  fix: ")
    assert capsys.readouterr().err.splitlines() == [beginning + shown for beginning in beginnings]
    # Ansible shows the same errors by itself.
    assert str(OpsError(text, where=text, fix=text)) == f"{shown}: {shown} ({shown})"
    output.line(text)
    assert capsys.readouterr().out == f"{shown}\n"


def test_the_output_of_a_program_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[1m of a program\nas it is"
    output.as_it_is(text)
    output.raw(f"{text}\n".encode(), aside=True)
    assert capsys.readouterr() == (f"{text}\n", f"{text}\n")


BYTES = b"\0\r\n\xff\x80 no line end"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bytes_of_a_program_are_text_on_a_terminal_only(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    output.raw(BYTES)
    output.raw(BYTES, aside=True)
    shown = BYTES.decode(errors="replace").encode() + b"\n" if terminal else BYTES
    assert capsysbinary.readouterr() == (shown, shown)


def test_pieces_of_a_line_are_one_line_unless_other_output_comes_between(capsys: pytest.CaptureFixture[str]) -> None:
    output.begin()
    for text, ended in ((b".", False), (b".", False), (b"", True)):
        output.piece("[0] ", text, ended=ended)
    assert capsys.readouterr().out == "[0] ..\n"
    for lead, text, ended in (
        ("[0] ", b"a", False),
        ("[1] ", b"b", False),
        ("[0] ", b"c", False),
        ("[1] ", b"", True),
        ("[0] ", b"d", True),
        ("[0] ", b"e", False),
    ):
        output.piece(lead, text, ended=ended)
    output.raw(b"[1] whole\n")
    output.piece("[0] ", b"", ended=True)
    assert capsys.readouterr().out == "[0] a\n[1] b\n[0] cd\n[0] e\n[1] whole\n"


@pytest.mark.parametrize(("terminal", "shown"), [(False, "[0] ab\n"), (True, "[0] a\n[0] b\n")])
def test_a_message_interrupts_an_unfinished_line_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str
) -> None:
    output.begin()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.piece("[0] ", b"a", ended=False)
    output.info("a message")
    output.piece("[0] ", b"b", ended=True)
    assert capsys.readouterr() == (shown, "a message\n")


def test_a_worker_s_word_gives_no_orders_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Any user of a worker chooses the command line of a process, and so the text in messages."""
    forged = "pid 7 of eve: \x1b]0;owned\a\x1b[2Jx\nPASS  all is well"
    shown = r"pid 7 of eve: \x1b]0;owned\x07\x1b[2Jx PASS  all is well"
    doctor.show(Finding("chips", (Fault("pod-w0", forged, forged),), ("pod-w0",)))
    run_command._show(["pod-w0"], 1, Result("pod-w0", None, problem=forged))
    configure.Progress()(Said(f"one\n{forged}"))
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == [f"        pod-w0: {shown}", f"          fix: {shown}", f"--- pod-w0: {shown}"]
    assert err.splitlines() == ["one", *shown.replace(" PASS", "\nPASS").splitlines()]


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["nothing"], "tpu_ops nothing"),
        (["run", "pod"], "after `--`"),
        # -h is the command's, though its -- was forgotten.
        (["run", "pod", "df", "-h", "/"], "df /"),
        (["train", "pod", "--"], "after `--`"),
    ],
)
def test_an_error_of_the_command_line_says_where_it_is(tpu_ops, argv, where):
    failed(tpu_ops(*argv), 2, f"  at:  {where}\n", "  fix: ")


def test_a_confirmation_without_a_terminal_fails_and_suggests_yes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError) as caught:
        options.confirmed("delete it?", "deleting")
    assert (caught.value.where, caught.value.fix) == ("standard input, which is not a terminal", "add --yes")


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
        (("run", "pod-w[0-4/2]", "hostname"), "tpu_ops run 'pod-w[0-4/2]' -- hostname"),
    ],
)
def test_a_command_without_its_dashes_is_shown_with_them(tpu_ops, argv: tuple[str, ...], words: str) -> None:
    code, _, err = tpu_ops(*argv)
    assert (code, words in err) == (2, True), err


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (("train", "python", "t.py"), "tpu_ops train TARGET -- python t.py"),
        (("train", "--detach", "python3.12", "-u", "t.py"), "tpu_ops train TARGET --detach -- python3.12 -u t.py"),
        (("train", "t.py", "--lr", "1"), "tpu_ops train TARGET -- python t.py --lr 1"),
        (("train", "./t.sh"), "tpu_ops train TARGET -- ./t.sh"),
        (("train", "torchrun", "a b"), "tpu_ops train TARGET -- torchrun 'a b'"),
        (("run", "bash", "-c", "ls"), "tpu_ops run TARGET -- bash -c ls"),
    ],
)
def test_a_command_without_a_target_is_shown_with_one(tpu_ops, argv: tuple[str, ...], fix: str) -> None:
    failed(tpu_ops(*argv), 2, "the target is missing", f"  fix: {fix}\n")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("trian", "did you mean train or grant? `tpu_ops --help` lists the commands"),
        ("ru", "did you mean run or runs? `tpu_ops --help` lists the commands"),
        ("nothing", "`tpu_ops --help` lists the commands"),
    ],
)
def test_a_command_that_is_misspelt_is_named(tpu_ops, word: str, fix: str) -> None:
    failed(tpu_ops(word), 2, "unknown command", f"  fix: {fix}\n")


@pytest.mark.parametrize(
    ("argv", "word", "fix"),
    [
        (
            ("train", "pod", "--detahc", "--", "true"),
            "--detahc",
            "did you mean --detach? `tpu_ops train --help` shows the options",
        ),
        (("list", "--satte=READY"), "--satte=READY", "did you mean --state? `tpu_ops list --help` shows"),
        (("list", "--nothing-like-it"), "--nothing-like-it", "`tpu_ops list --help` shows"),
        (("sync", "a", "b", "c"), "c", "give several nodes or workers as one word, as in a,b"),
    ],
)
def test_an_argument_that_is_unknown_is_named_with_advice(tpu_ops, argv: tuple[str, ...], word: str, fix: str) -> None:
    said = f"error: unrecognized arguments: {word}\n  at:  tpu_ops {argv[0]}\n  fix: {fix}"
    failed(tpu_ops(*argv), 2, said)


@pytest.mark.parametrize(
    "argv",
    [
        ("profile", "exp", "--fleet=HERE", "results"),
        ("profile", "exp", "results", "--fleet=HERE"),
        ("tunnel", "pod", "8888", "--fleet=HERE", "9000"),
    ],
)
def test_an_argument_that_can_be_left_out_may_follow_options(tmp_path: Path, tpu_ops, argv: tuple[str, ...]) -> None:
    failed(tpu_ops(*(word.replace("HERE", str(tmp_path)) for word in argv)), 2, "inventory/tpu_vm.yml")


def test_an_option_may_be_shortened(tmp_path: Path, tpu_ops) -> None:
    failed(tpu_ops("list", "--fleet", str(tmp_path), "--stat=READY"), 2, "inventory/tpu_vm.yml")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ("create", "pod", "--type", "v4-8", "--timeout", "x"),
            ("'x' is not a number: give a number of seconds", "--timeout", "tpu_ops create"),
        ),
        (("create",), ("the following arguments are required: NAME, --type", "tpu_ops create", "tpu_ops create")),
        (("unlock", "pod", "--grace", "x"), ("'x' is not a number", "--grace", "tpu_ops unlock")),
        (("list", "--cost", "--idle", "1h"), ("not allowed with argument --cost", "--idle", "tpu_ops list")),
        (("disk", "attach", "a", "b", "--mode", "x"), ("invalid choice: 'x'", "--mode", "tpu_ops disk attach")),
        (("lab", "nothing"), ("invalid choice: 'nothing'", "COMMAND", "tpu_ops lab")),
        (("run", "pod", "--no-such-option"), ("unrecognized arguments", "tpu_ops run", "tpu_ops run")),
    ],
)
def test_an_error_of_usage_has_the_form_of_all_errors(
    tpu_ops, argv: tuple[str, ...], error: tuple[str, str, str]
) -> None:
    what, where, command = error
    result = tpu_ops(*argv)
    failed(result, 2, f"  at:  {where}\n  fix: `{command} --help` shows the options\n")
    assert result[2].startswith(f"error: {what}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home that ssh looks into, which would be this person's own."""
    monkeypatch.setattr(openssh, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (("ssh-config", "--install", "--file", ""), "--file"),
        (("ssh-config", "--install", "--file="), "--file"),
        (("inventory", ""), "target, argument 1"),
        (("list", "--cached", "--fleet", ""), "--fleet"),
        (("delete", "pod", "--yes", "--zone", ""), "--zone"),
        (("status", ""), "run, argument 1"),
        (("train", "pod", "--sync", "", "--", "true"), "--sync"),
        (("ssh", "", "--", "true"), "target, argument 1"),
        (("lab", "preempt", ""), "node, argument 2"),
        (("sync", "pod", ""), "DIR, argument 2"),
        (("run", "", "--", "true"), "target, argument 1"),
    ],
)
def test_an_empty_argument_is_no_default(fleet, tpu_ops, home: Path, argv: tuple[str, ...], where: str) -> None:
    failed(tpu_ops(*argv), 2, "an argument is empty", f"at:  {where}\n")
    assert not (home / ".ssh" / "config").exists()


@pytest.mark.parametrize(
    "argv", [("run", "pod", "--", "echo", ""), ("ssh", "pod", "echo", ""), ("list", "--label=spare=")]
)
def test_empty_arguments_of_a_command_and_empty_labels_are_accepted(
    tmp_path: Path, tpu_ops, argv: tuple[str, ...]
) -> None:
    failed(tpu_ops(argv[0], "--fleet", str(tmp_path), *argv[1:]), 2, "inventory/tpu_vm.yml")


def test_help_begins_with_a_capital_and_leaves_the_others(tpu_ops, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tpu_ops("create", "--help")
    assert "Create TPU nodes and" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (
            "create",
            ("--type", "--zone", "--spot", "if there is no capacity", "--until-capacity", "--metadata", "--json"),
        ),
        ("list", ("--cached", "--idle", "--name", "output and fleet", "--fleet")),
        ("apply", ("--yes", "--dry-run", "what else it may do", "--prune", "--watch", "--json", "--fleet")),
        (
            "configure",
            ("--check", "--tags", "where and how it runs", "--on-workers", "output and fleet", "--json", "--fleet"),
        ),
        ("delete", ("--yes", "--dry-run", "if names are shared", "--zone", "--no-wait", "--fleet")),
        (
            "train",
            ("--sync", "--env", "--detach", "--rank", "code, environment", "--git", "recovery", "--recover", "--json"),
        ),
    ],
)
def test_help_shows_the_options_in_groups_the_most_used_first(name: str, order: tuple[str, ...]) -> None:
    lines = [line.strip() for line in command(name, "--help").stdout.splitlines()]
    found = [next(at for at, line in enumerate(lines) if line.startswith(words)) for words in order]
    assert found == sorted(found)


def parsers(name: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of a command, and those of its subcommands, by their words."""
    module = importlib.import_module(f"tpu_ops.cli.{COMMANDS[name][0]}")
    parser = argparse.ArgumentParser(name, exit_on_error=False)
    module.add_arguments(parser)
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"{name} {word}": below for word, below in action.choices.items()}
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_two_examples_that_the_command_accepts(name: str) -> None:
    found = parsers(name)
    for words in found:
        shown = [example for example, _ in examples.EXAMPLES[words]]
        assert len(shown) >= 2, words
        for example in shown:
            after = re.search(rf"\btpu_ops ({words}\b[^)>]*)", example)
            assert after or words == name, example
            front = shlex.split(after[1] if after else example.removeprefix("tpu_ops "))
            given = front[1 : front.index("--")] if "--" in front else front[1:]
            found[name].parse_args(given)


def test_a_help_ends_with_its_examples() -> None:
    shown = command("lab", "up", "--help").stdout
    assert shown.endswith(f"\n\n{examples.of('lab up')}\n")


def test_a_state_that_cannot_be_written_or_read_is_an_error_in_words(tmp_path: Path) -> None:
    record = records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",))
    (tmp_path / "runs").touch()
    (tmp_path / "a directory" / "x").mkdir(parents=True)
    for fails, path in (
        (lambda: records.write(tmp_path, record), tmp_path / "runs"),
        (lambda: fleet_files.replace(tmp_path / "a directory", "text", 0o600), tmp_path / "a directory"),
        (lambda: fleet_files.replace(tmp_path / "nowhere" / "x", "text", 0o600), tmp_path / "nowhere" / "x"),
        (lambda: state.Files(tmp_path).text(tmp_path / "a directory"), tmp_path / "a directory"),
    ):
        with pytest.raises(OpsError) as caught:
            fails()
        assert (caught.value.where, bool(caught.value.fix)) == (str(path), True)
    assert [path.name for path in tmp_path.iterdir() if stat.S_ISREG(path.stat().st_mode)] == ["runs"], "nothing left"


#: Prints JSON unless it fails first.
FAILS = """
import json, sys
from tpu_ops.cli import main, options, output, runs
from tpu_ops.errors import UnreachableError
*words, ends = sys.argv[1:]
sys.argv[1:] = words
def run(args):
    if "has a result" in ends:
        output.as_json([])
    if "system" in ends:
        raise OSError(28, "No space left on device", "/x")
    raise UnreachableError("no answer", where="pod-w0", fix="wait")
runs.run = run
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("words", "ends", "code", "result"),
    [
        (["runs", "--json"], "", 4, {"problem": "no answer", "where": "pod-w0", "fix": "wait", "code": 4}),
        (["runs", "--json"], "system", 1, {"problem": "No space left on device", "where": "/x", "code": 1}),
        (["runs", "--json"], "has a result", 4, []),
        (["runs"], "", 4, None),
        (["runs", "--json", "--bogus"], "", 2, {"problem": "unrecognized arguments: --bogus", "where": "tpu_ops runs"}),
        (["rnus", "--json"], "", 2, {"problem": "unknown command", "where": "tpu_ops rnus"}),
        (["train", "pod", "--", "--json"], "", 2, None),
    ],
)
def test_json_output_of_a_failure_is_one_document(
    tmp_path: Path, words: list[str], ends: str, code: int, result: Any
) -> None:
    script = [sys.executable, "-c", FAILS, *words, ends]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, "error: " in done.stderr) == (code, True), done.stderr
    found: Any = json.loads(done.stdout) if done.stdout else None
    if isinstance(result, dict):
        assert found.keys() == {"error"}
        assert result.items() <= found["error"].items()
    else:
        assert found == result
