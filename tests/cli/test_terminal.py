"""Colours, progress lines and wrapped tables: on a terminal, for which a pseudo terminal stands, and never in pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import termios

import pytest

from tpu_ops.cli import terminal
from tpu_ops.cli.progress import Tasks, Transfers

RED, GREEN, YELLOW, END, ERASE = "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m", "\r\x1b[K"


def environ(**env: str) -> dict[str, str]:
    """Return this environment without the variables that decide how a terminal is used."""
    plain = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    return plain | {"TERM": "xterm"} | env


def on_terminal(program: str, columns: int = 60, **env: str) -> str:
    """Run a Python program on a terminal of a width; return what it printed, with plain newlines."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=slave, env=environ(**env)
    )
    os.close(slave)
    said = b""
    try:
        while piece := os.read(master, 4096):
            said += piece
    except OSError:
        pass  # Linux reports the end of the other side as an error.
    finally:
        os.close(master)
    assert process.wait() == 0, said
    return said.decode().replace("\r\n", "\n")


def in_pipe(program: str) -> str:
    """Run a Python program with pipes; return what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ(), check=True)
    return done.stdout + done.stderr


MESSAGES = """
from tpu_ops.cli import output
from tpu_ops.cli.terminal import Meaning
from tpu_ops.errors import OpsError
output.line("fine", Meaning.OK)
output.info("new", Meaning.CHANGED)
output.warning("beware")
output.error(OpsError("broken", where="here"))
output.table([{"host": "a", "ok": 2, "changed": 0, "state": "FAILED"}], ("host", "ok", "changed", "state"))
"""
PLAIN = "fine\nnew\nwarning: beware\nerror: broken\n  at:  here\nHOST  OK  CHANGED  STATE\na     2   0        FAILED\n"


def test_colours_tell_what_failed_changed_and_is_well() -> None:
    coloured = on_terminal(MESSAGES)
    assert coloured == (
        f"{GREEN}fine{END}\n{YELLOW}new{END}\n{YELLOW}warning:{END} beware\n{RED}error:{END} broken\n  at:  here\n"
        f"HOST  OK  CHANGED  STATE\na     {GREEN}2{END}   0        {RED}FAILED{END}\n"
    )


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_there_are_no_colours_where_they_are_not_wanted(env: dict[str, str]) -> None:
    assert on_terminal(MESSAGES, 60, **env) == PLAIN


def test_there_are_no_colours_in_pipes() -> None:
    assert sorted(in_pipe(MESSAGES).splitlines()) == sorted(PLAIN.splitlines())


TABLE = """
from tpu_ops.cli import output
words = "the disk is full and a-very-long-name-without-a-space-in-it follows"
output.table([{"host": "pod-w0", "why": words, "n": 1}, {"host": "b", "why": "", "n": 2}], ("host", "why", "n"))
"""


def test_long_cells_are_wrapped_to_the_width_of_the_terminal() -> None:
    assert on_terminal(TABLE, columns=40).splitlines() == [
        "HOST    WHY                            N",
        "pod-w0  the disk is full and a-very-l  1",
        "        ong-name-without-a-space-in-i",
        "        t follows",
        "b                                      2",
    ]
    assert on_terminal(TABLE, columns=200) == in_pipe(TABLE)
    assert max(map(len, in_pipe(TABLE).splitlines())) > 70


PROGRESS = """
import time
from tpu_ops.cli import output, progress
progress.DRAWN = 0.01
def text(elapsed):
    drawn.append(elapsed)
    return f"copying {len(drawn)} " + "x" * 100
drawn = []
with progress.shown(text, told=TOLD):
    while len(drawn) < 2:
        time.sleep(0.005)
        if TOLD is None:
            break
    output.info("a message")
    output.line("a result")
output.info("the end")
"""


def test_a_progress_line_fits_and_is_erased_before_other_output() -> None:
    said = on_terminal(PROGRESS.replace("TOLD", "False"), columns=30)
    before, _, after = said.partition("a message\n")
    assert before.startswith(f"{ERASE}copying 1 x")
    assert before.endswith(ERASE)
    assert {len(text) for text in before.split(ERASE)[1:-1]} == {29}, "the last column stays free"
    assert after.replace(ERASE, "").endswith("the end\n")
    assert re.sub(r"\r\x1b\[K(?:copying \d+ x+)?", "", said) == "a message\na result\nthe end\n"


def test_a_progress_line_is_not_in_pipes() -> None:
    assert sorted(in_pipe(PROGRESS.replace("TOLD", "None")).splitlines()) == ["a message", "a result", "the end"]


def test_a_playbook_prints_its_progress_at_intervals_in_pipes() -> None:
    program = PROGRESS.replace("TOLD", "True").replace("DRAWN", "TOLD")
    said = in_pipe(program.replace("progress.True", "progress.TOLD"))
    assert said.startswith("a result\ncopying 1 x")
    assert "\x1b" not in said


def test_waiting_prints_each_state_and_keeps_it_up_to_date_in_the_last_line() -> None:
    program = """
from tpu_ops.cli import options
wait = options.Waiting("node pod")
for elapsed, state in ((0, "working"), (1, "working"), (2, "CREATING")):
    wait(elapsed, state)
"""
    assert (
        on_terminal(program) == f"node pod: working, 0 s\n{ERASE}node pod: working, 1 s{ERASE}node pod: CREATING, 2 s\n"
    )
    assert in_pipe(program) == "node pod: working, 0 s\nnode pod: CREATING, 2 s\n"


def test_copies_show_bytes_rate_and_the_slowest_worker() -> None:
    moved = Transfers("syncing")
    assert moved.text(1.0) == "syncing, 1 s"
    for host, *state in (
        ("a", 0, 4_000_000, False),
        ("b", 1_000_000, 4_000_000, False),
        ("c", 4_000_000, 4_000_000, True),
    ):
        moved(host, *state)  # type: ignore[arg-type]
    assert moved.text(2.0) == "syncing: 5.0 of 12.0 MB, 2.5 MB/s, 1 of 3 workers done, slowest: a (0%)"
    one = Transfers("fetching")
    one("a", 3_000_000, 0, False)
    assert one.text(2.0) == "fetching: 3.0 MB, 1.5 MB/s"


def test_playbooks_show_the_task_and_the_slowest_host() -> None:
    tasks = Tasks("configuring")
    assert tasks.text(3.0) == "configuring, 3 s"
    for host, task, ended in (
        ("a", "one", False),
        ("b", "one", False),
        ("a", "one", True),
        ("b", "one", True),
        ("a", "two", False),
        ("b", "two", False),
        ("a", "two", True),
    ):
        tasks.at(host, task, ended)
    assert tasks.text(65.0) == "configuring, 1 min 5 s: task 2, two: 1 of 2 hosts done, slowest: b"
    # A worker that is behind, as when workers run the playbook on themselves.
    tasks.at("a", "three", True)
    assert tasks.text(66.0).endswith("task 3, three: 1 of 2 hosts done, slowest: b")


def test_meanings_are_those_of_words_and_of_counts() -> None:
    found = [
        terminal.meaning(*cell) for cell in (("changed", "3"), ("changed", "0"), ("state", "READY"), ("host", "x"))
    ]
    assert found == [terminal.Meaning.CHANGED, terminal.Meaning.NONE, terminal.Meaning.OK, terminal.Meaning.NONE]
