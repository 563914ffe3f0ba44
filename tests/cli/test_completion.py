"""Completion of command lines, as shells ask for it, and in bash as a user sees it."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops import config
from tpu_ops.cli.main import main
from tpu_ops.runs import records

BIN = Path(sys.executable).parent


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables for a stored fleet whose API cannot be reached, and on which one run was started."""
    published = tmp_path / "published.json"
    member = Member(tmp_path, snapshot=str(published))
    published.write_text(document([node(), node("box", node_id="2", count=1)]).text())
    for name, value in member.environ().items():
        monkeypatch.setenv(name, value)
    assert main(["refresh"]) == 0
    published.unlink()
    record = records.new("r-1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",))
    records.write(config.load().state_dir, record)
    (tmp_path / "my-code").mkdir()
    (tmp_path / "my-file").touch()
    monkeypatch.chdir(tmp_path)
    return dict(os.environ) | {"PATH": f"{BIN}:{os.environ['PATH']}"}


def completed(environ: dict[str, str], line: str, shell: str = "bash") -> list[str]:
    """Return the completions of a line, requested as the code of `tpu_ops completion` does."""
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n"}
    asks |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": ""}
    command = ["bash", "-c", "tpu_ops 8>&1 9>&2 1>/dev/null"]
    done = subprocess.run(command, env=environ | asks, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return sorted(word.strip() for word in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tpu_ops ru", ["run", "runs"]),
        ("tpu_ops train --de", ["--detach"]),
        ("tpu_ops disk attach data --m", ["--mode", "--mount"]),
        ("tpu_ops lab ma", ["maintenance"]),
        ("tpu_ops run --exit-code ", ["1", "rank"]),
        ("tpu_ops ssh pod", ["pod", "pod-w0", "pod-w1"]),
        ("tpu_ops delete b", ["box", "box-w0"]),
        ("tpu_ops drift box,pod-", ["box,pod-w0", "box,pod-w1"]),
        ("tpu_ops configure @node_", ["@node_pod", "@node_box"]),
        ("tpu_ops attach r", ["r-1"]),
        ("tpu_ops fetch ", ["r-1", "pod", "box", "pod-w0", "pod-w1", "box-w0"]),
        ("tpu_ops train pod --sync my", ["my-code/", "my-file"]),
        ("tpu_ops train pod -- python my", ["my-code/", "my-file"]),
        ("tpu_ops train pod -- python --", []),
        ("tpu_ops create new --zone ", []),
    ],
)
def test_words_are_completed_without_a_network(known: dict[str, str], line: str, words: list[str]) -> None:
    assert completed(known, line) == sorted(words)


def test_without_a_fleet_names_are_not_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {name: text for name, text in os.environ.items() if name != "TPU_OPS_FLEET"}
    assert completed(environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}, "tpu_ops ssh ") == []


@pytest.mark.parametrize(
    ("shell", "registers"),
    [("bash", "complete .*-F .* tpu_ops$"), ("zsh", "compdef .* tpu_ops$"), ("fish", "^complete --command tpu_ops ")],
)
def test_each_shell_gets_its_code(shell: str, registers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert re.search(registers, capsys.readouterr().out, re.MULTILINE)


def test_bash_completes_a_target_at_the_press_of_tab(known: dict[str, str]) -> None:
    master, slave = os.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=known | {"PS1": "$ ", "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        code = f"source <({shlex.quote(str(BIN / 'tpu_ops'))} completion bash) && echo loa''ded\n"
        os.write(master, code.encode())
        heard(master, "loaded")
        os.write(master, b"tpu_ops inventory bo\t")
        heard(master, "inventory box")
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


def heard(terminal: int, words: str) -> None:
    """Wait until a terminal shows some words."""
    said, until = "", time.monotonic() + 60
    while words not in said:
        assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], said
        said += os.read(terminal, 4096).decode().replace("\a", "")


@pytest.mark.parametrize("line", ["tpu_ops ssh ", "tpu_ops attach ", "tpu_ops configure @"])
def test_a_fleet_that_was_never_used_here_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    mark = tmp_path / "started"
    (tmp_path / "inventory").mkdir()
    template = f"{{{{ lookup('pipe', 'touch {mark}; echo my-project') }}}}"
    (tmp_path / "inventory" / "tpu_vm.yml").write_text(
        f'plugin: tpu_vm\nprojects: ["{template}"]\nzones: [us-central2-b]\n'
    )
    monkeypatch.chdir(tmp_path)
    environ = {name: text for name, text in os.environ.items() if not name.startswith("TPU_OPS_")}
    environ |= {"PATH": f"{BIN}:{os.environ['PATH']}", "TPU_OPS_STATE": str(tmp_path / "state")}
    assert completed(environ, line) == []
    assert not mark.exists()
