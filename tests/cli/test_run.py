"""`tpu_ops run`: how a command is started, ended and spoken of, by the shell that a worker has."""

from __future__ import annotations

import base64
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tpu_ops.cli import run
from tpu_ops.protocol import wire
from tpu_ops.ssh import envelope
from tpu_ops.ssh.replies import Output, Result, result_of

LINE = "; for a shell line: --shell -- 'LINE'"
WHOLE = "; `tpu_ops configure` puts it on PATH, or give its full path: /opt/venvs/jax/bin/python"


def enveloped(argv: Sequence[str], limit: float = 60.0, **environ: str) -> Result:
    """Run a command here as on a worker."""
    marker = wire.new_marker()
    command = ["/bin/sh", "-c", envelope.enveloped(marker, argv, limit).replace("timeout", "/usr/bin/timeout", 1)]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, check=False)
    streams = [Output(marker), Output()]
    for stream, said in zip(streams, (done.stdout, done.stderr), strict=True):
        stream.add(said)
    return result_of("pod-w0", marker, done.returncode, *streams)


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("nope", "command not found: nope"),
        ("cd /tmp; ls", f"command not found: cd /tmp; ls{LINE}"),
        ("/", "permission denied: /"),
        ("~/train.sh", f"command not found: ~/train.sh{LINE}"),
        ("$HOME/x.sh", f"command not found: $HOME/x.sh{LINE}"),
        ("--help", "command not found: --help"),
        ("ünï", "command not found: ünï"),
        ("a: b", f"command not found: a: b{LINE}"),
        ("two\nlines", f"command not found: two\nlines{LINE}"),
        ("*", f"command not found: *{LINE}"),
        ("cd", f"command not found: cd{LINE}"),
        ("A=1", f"command not found: A=1{LINE}"),
        ("python", f"command not found: python{WHOLE}"),
    ],
)
def test_a_command_that_is_not_there_is_named_plainly(program: str, shown: str) -> None:
    result = enveloped([program], PATH="/usr/bin/nothing-here")
    assert run.said_by(result.stderr).decode() == f"{shown}\n"
    assert result.code == (126 if program == "/" else 127)


def test_error_messages_of_a_command_are_printed_unchanged() -> None:
    said = enveloped(["sh", "-c", "cd /nowhere; ls /nowhere"]).stderr
    assert said.count(b"\n") == 2
    assert run.said_by(said) == said


def test_a_command_is_a_program_and_never_what_a_shell_has_under_its_name() -> None:
    """/bin/sh has built-in versions of these programs: dash interprets escapes that the program prints."""
    assert enveloped(["echo", r"a\tb"]).stdout == b"a\\tb\n"
    assert enveloped(["exit", "5"]).code == 127


def test_a_word_is_no_program_s_path_to_a_login_shell_that_looks_for_one() -> None:
    """As zsh does for =ls."""
    words = ["=ls", "a=b", "it's", "=it's", "$HOME", ""]
    line = envelope.joined(words)
    assert shlex.split(line) == words
    assert [word for word in line.split(" ") if word.startswith("=")] == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("trap 'kill 0' EXIT; sleep 600 >/dev/null 2>&1 & true", 128 + signal.SIGTERM),
        ("trap '' TERM; kill 0; exit 3", 3),
        ("kill -INT 0; exec sleep 600", 128 + signal.SIGINT),
        ("kill -HUP 0; exec sleep 600", 128 + signal.SIGHUP),
    ],
)
def test_a_command_that_signals_its_own_group_has_its_exit_code(line: str, code: int) -> None:
    begun = time.monotonic()
    assert enveloped(["/bin/sh", "-c", line]).code == code
    assert time.monotonic() - begun < 4, "it was waited for as if its time were over"


@pytest.mark.parametrize(
    ("code", "shown"), [(7, "exit code 7"), (137, "exit code 137 (SIGKILL)"), (255, "exit code 255")]
)
def test_a_signal_that_ended_a_command_is_named(code: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    run.show([Result("pod-w0", code, b"", b"")])
    assert capsys.readouterr().out == f"--- pod-w0: {shown}\n"


BINARY = b"\0\r\n\xff\x80 no line end"


def test_the_output_of_one_worker_is_printed_byte_by_byte(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    run.show([Result("pod-w0", 0, BINARY, BINARY)])
    assert capsysbinary.readouterr() == (BINARY, BINARY)


def test_output_of_several_workers_that_is_not_utf_8_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    run.show([*(Result(f"pod-w{index}", 0, BINARY) for index in range(2)), Result("pod-w2", 0, b"text", b"\xff")])
    out, err = capsys.readouterr()
    shown = BINARY.decode(errors="replace")
    assert out == f"--- pod-w[0-1] (2 workers)\n{shown}\n--- pod-w2\ntext\n"
    replaced = "is not UTF-8; invalid bytes were replaced"
    assert err.splitlines() == [
        "\ufffd",
        f"warning: pod-w[0-1]: the standard output of each, {len(BINARY)} bytes, {replaced}",
        f"warning: pod-w2: the standard error, 1 byte, {replaced}",
        "  fix: for the unchanged bytes, run the command on one worker (pod-w0), or use --json",
    ]


@pytest.mark.parametrize(("data", "whole"), [(BINARY, base64.b64encode(BINARY).decode()), (b"text", None), (b"", None)])
def test_json_has_the_bytes_of_output_that_is_not_utf_8(data: bytes, whole: str | None) -> None:
    for row in (run.row(Result("pod-w0", 0, data)), run.row(Result("pod-w0", 0, stderr=data))):
        stream = "stdout" if row["stdout"] or not row["stderr"] else "stderr"
        assert (row[stream], row[f"{stream}_base64"]) == (data.decode(errors="replace"), whole)


def test_a_command_that_ignores_sigterm_is_killed_after_its_timeout(tmp_path: Path) -> None:
    """Its parent ends at the first signal, so that no process waits for it."""
    there = tmp_path / "pid"
    deaf = f"trap '' TERM; echo $$ >{there}; exec sleep 600"
    line = f"sh -c {shlex.quote(deaf)} >/dev/null 2>&1 & exec sleep 600"
    result = enveloped(["/bin/sh", "-c", line], limit=1.0)
    assert result.code is None, "its end was never seen"
    deadline = time.monotonic() + 5
    while Path(f"/proc/{there.read_text().strip()}").exists():
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)  # polls until the killed process has gone, or the deadline passes
