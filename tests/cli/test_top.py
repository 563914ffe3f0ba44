"""`tpu_ops top`: its screen with the keys of a user, its table and JSON, and what Prometheus gets."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from textual.widgets import DataTable

from tests.support import chips
from tests.support.chips import NOW, answer, busy, process, use
from tests.support.fleet import ROOT
from tests.support.published import Member
from tpu_ops.cli import top
from tpu_ops.cli.top_screen import Screen
from tpu_ops.errors import ExitCode, UnreachableError
from tpu_ops.runs import usage_lines
from tpu_ops.runs.usage import Use
from tpu_ops.runs.usage_metrics import METRICS, Collector
from tpu_ops.runs.usage_poll import Place, Poll
from tpu_ops.ssh.replies import Reply

SIZE = (160, 40)


class Never:
    """Workers that never answer: the screen shows what the poll knew before. Counts their questions."""

    asked = 0

    async def call(self, requests: Any, action: str, *, limit: float) -> dict[str, Reply]:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


class There(NamedTuple):
    """A screen, the poll that it shows, the workers behind it, and the commands that it has started."""

    screen: Screen
    poll: Poll
    workers: Never
    started: list[tuple[str, str]]


def there(*uses: Use) -> There:
    """Return a screen of workers."""
    nodes, workers, started = {use.rows[0].worker: use.rows[0].node for use in uses}, Never(), list[tuple[str, str]]()
    poll = Poll(lambda: Place(workers, nodes, {}), 1)
    poll.uses.update({use.rows[0].worker: use for use in uses})
    return There(Screen(poll, "all", lambda *what: started.append(what)), poll, workers, started)


def column(shown: Screen, name: str = "worker") -> list[str]:
    """Return the cells of a column, without the marks of unfolding."""
    cells = shown.query_one(DataTable).get_column(name)
    return [cell.plain.strip(" \u25b8\u25be") for cell in cells]


async def test_256_workers_fit_into_40_lines_and_unfold_one_by_one() -> None:
    shown, *_ = there(*chips.fleet())
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert column(shown) == ["box-w0", "gone-w[0-2]", "idle-w[0-59]", "mid-w[0-63]", "pod-w[0-127]"]
        text = "\n".join(strip.text for strip in shown.screen._compositor.render_strips())
        assert len(text.splitlines()) == 40
        assert "256 workers: 193 in use, 60 free, 3 no answer, 1 run stalled" in text
        assert "90..97 %" in text
        await pilot.press("end", "space")
        assert column(shown)[4:6] == ["pod-w[0-127]", "pod-w0"]
        await pilot.press("down", "enter")
        assert column(shown, "chips")[4:8] == ["512", "4", "id 0", "id 1"]
        await pilot.press("up", "space")
        assert len(column(shown)) == 5
        await pilot.press("f")
        assert len(column(shown)) == 5 + 3 + 60 + 64 + 128
        await pilot.press("f", "f")
        assert len(column(shown)) == 5


async def test_keys_sort_reverse_and_filter() -> None:
    shown, *_ = there(*chips.fleet())
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.press("greater_than_sign", "greater_than_sign", "greater_than_sign")
        assert column(shown)[:2] == ["pod-w[0-127]", "mid-w[0-63]"], "by duty, the largest first"
        await pilot.press("R")
        assert column(shown)[:2] == ["mid-w[0-63]", "pod-w[0-127]"]
        await pilot.press("less_than_sign", "slash", *"stalled")
        assert column(shown, "run") == ["small"]
        await pilot.press("enter")
        assert (column(shown, "run"), type(shown.focused)) == (["small"], type(shown.query_one(DataTable)))
        await pilot.press("slash", *"nobody", "enter")
        assert column(shown) == []
        await pilot.press("escape")
        assert len(column(shown)) == 5


async def test_a_click_on_a_heading_sorts_by_it() -> None:
    shown, *_ = there(*chips.fleet())
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.pause()
        at = 2 + len("mid-w[0-63]   ") + 2
        await pilot.click(DataTable, offset=(at, 0))
        assert column(shown)[0] == "pod-w[0-127]", "by chips"


async def test_logs_and_stacks_open_for_the_run_of_the_line() -> None:
    shown, _, workers, started = there(*chips.fleet())
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.press("l")
        assert started == [], "the first line has no run"
        await pilot.press("end", "l")
        await pilot.press("up", "s")
        await pilot.pause()
        assert started == [("logs", "big"), ("stacks", "small")]
        assert workers.asked == 3 * 256, "at the start, and after each command"


async def test_the_cursor_stays_on_its_worker_while_answers_arrive() -> None:
    uses = {f"{name}-w0": use(f"{name}-w0", busy(90, run=name)) for name in "bcd"}
    shown, poll, _, started = there(*uses.values())
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.press("down")
        poll.uses["a-w0"] = use("a-w0", busy(90, run="a"))
        shown.draw()
        await pilot.press("l")
        await pilot.pause()
        assert started == [("logs", "c")]


async def test_the_cursor_is_on_the_first_line_whichever_worker_answers_first() -> None:
    uses = {f"{name}-w0": use(f"{name}-w0", busy(90, run=name)) for name in "abc"}
    shown, poll, *_ = there(*uses.values())
    for name in ("a-w0", "b-w0"):
        del poll.uses[name]
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert column(shown) == ["c-w0"]
        poll.uses.update(uses)
        shown.draw()
        assert shown.chosen is not None
        assert (column(shown), shown.chosen.run) == (["a-w0", "b-w0", "c-w0"], "a")


async def test_workers_that_do_not_answer_stay_with_the_reason_and_their_age() -> None:
    lost = Reply("", {}, "unreachable", "no route\x1b[31m to [bold]host", "`tpu_ops list` shows it")
    before = use("pod-w0", busy(90), now=time.time() - 130)
    shown, *_ = there(use("pod-w0", lost, before), use("pod-w1", busy(90)))
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.pause()
        said = "no answer for 2 min: no route\\x1b[31m to [bold]host"
        assert column(shown, "state") == [said, "ok"]
        text = "\n".join(strip.text for strip in shown.screen._compositor.render_strips())
        assert f"{said}  python" not in text
        assert "fix: `tpu_ops list` shows it" in text


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("ctrl+c", ExitCode.INTERRUPTED)])
async def test_q_and_ctrl_c_quit(key: str, code: int) -> None:
    shown, *_ = there()
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.press(key)
    assert (shown.return_code or 0) == code


async def test_a_core_with_an_error_is_named_on_one_line() -> None:
    text = "Core halted\x1b[31m " + "unexpectedly " * 9
    faulty = use("pod-w1", busy(90, states=chips.launched(7, errors={3: text})))
    shown, *_ = there(use("pod-w0", busy(90)), faulty)
    async with shown.run_test(size=SIZE) as pilot:
        await pilot.press("end")
        first, second = column(shown, "state")
        assert (first, second[:37], len(second)) == ("ok", r"core 3: Core halted\x1b[31m unexpecte", 64)
        screen = "\n".join(strip.text for strip in shown.screen._compositor.render_strips())
        assert "unexpectedly " * 8 in screen, "the last line has the whole text"


# --- the terminal -----------------------------------------------------------------------------------------------

LIVE = """
import os, sys
os.login_tty(int(sys.argv[1]))
from tests.support.chips import busy, use
from tpu_ops.cli import top_screen
from tpu_ops.runs.usage_poll import Place, Poll
from tests.cli.test_top import Never
poll = Poll(lambda: Place(Never(), {"pod-w0": "pod"}, {}), 1)
poll.uses["pod-w0"] = use("pod-w0", busy(90, run="--help"))
sys.exit(top_screen.show(poll, "all", 1.0, []))
"""


class Terminal:
    """A terminal in which the screen runs."""

    def __init__(self) -> None:
        self.master, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVE, str(inner)],
            pass_fds=[inner],
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"},
        )
        os.close(inner)
        self.said = ""

    def until(self, words: str) -> None:
        """Wait until the terminal shows some words."""
        begun, end = len(self.said), time.monotonic() + 60
        while words not in self.said[begun:]:
            assert select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0], self.said
            self.said += os.read(self.master, 65536).decode(errors="replace")

    def rest(self) -> str:
        """Return what the terminal shows until the program has ended."""
        begun = len(self.said)
        while True:
            try:
                piece = os.read(self.master, 65536)
            except OSError:
                return self.said[begun:]
            self.said += piece.decode(errors="replace")


@pytest.mark.parametrize(
    ("how", "code"), [("q", 0), ("\x03", ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.INTERRUPTED)]
)
def test_the_terminal_is_clean_afterwards(how: str | signal.Signals, code: int) -> None:
    terminal = Terminal()
    try:
        terminal.until("pod-w0")
        if isinstance(how, str):
            os.write(terminal.master, how.encode())
        else:
            terminal.process.send_signal(how)
        rest = terminal.rest()
        assert terminal.process.wait(30) == code
        # The usual screen is back, with its cursor, and mouse and paste are the terminal's again.
        for end in ("\x1b[?1049l", "\x1b[?25h", "\x1b[?1000l", "\x1b[?2004l"):
            assert end in rest
        assert "Traceback" not in terminal.said
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_a_command_gets_the_plain_terminal_before_the_screen_returns() -> None:
    terminal = Terminal()
    try:
        terminal.until("pod-w0")
        os.write(terminal.master, b"l")  # the run is called --help, so that the command prints its help
        terminal.until("Enter goes back to top")
        assert "usage: tpu_ops logs" in terminal.said.rpartition("\x1b[?1049l")[2]
        os.write(terminal.master, b"\r")
        terminal.until("\x1b[?1049h")
        os.write(terminal.master, b"s")
        terminal.until("Enter goes back to top")
        os.write(terminal.master, b"\x03")
        terminal.until("\x1b[?1049h")
        os.write(terminal.master, b"q")
        assert terminal.rest()
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


# --- the table, JSON, and Prometheus ------------------------------------------------------------------------------


def test_once_prints_one_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.show(list(chips.fleet()), NOW, None, as_json=False) == 0
    out, err = capsys.readouterr()
    heads, *lines = out.splitlines()
    assert heads.split() == [name.upper() for name in usage_lines.COLUMNS]
    assert [line.split()[0] for line in lines] == [
        "box-w0",
        "gone-w[0-2]",
        "idle-w[0-59]",
        "mid-w[0-63]",
        "pod-w[0-127]",
    ]
    assert "\x1b" not in out
    assert err == "256 workers: 193 in use, 60 free, 3 no answer, 1 run stalled\n"


def test_json_is_one_object_with_a_row_for_each_core_and_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    lost = UnreachableError("3 workers", where="gone-w[0-2]")
    with pytest.raises(UnreachableError):
        top.show(list(chips.fleet()), NOW, lost, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["at"], len(told["rows"]), len(told["faults"])) == (NOW, (128 + 64) * 4 + 60 + 1 + 3, 3)
    row = next(row for row in told["rows"] if row["worker"] == "mid-w7")
    assert (row["node"], row["core"], row["duty"], row["run"], row["last_output"]) == ("mid", 0, 0, "small", NOW - 840)


def test_a_live_screen_needs_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tpu_ops: Callable[..., tuple[int, str, str]]
) -> None:
    for name, value in Member(tmp_path, snapshot="/nowhere").environ().items():
        monkeypatch.setenv(name, value)
    code, _, err = tpu_ops("top")
    assert code == ExitCode.USAGE
    assert "fix: `tpu_ops top --once" in err


@pytest.mark.parametrize(
    ("words", "where"),
    [("9000", ("127.0.0.1", 9000)), (":9000", ("127.0.0.1", 9000)), ("[::1]:9000", ("::1", 9000))],
)
def test_the_address_of_serve_is_on_loopback_without_a_host(words: str, where: tuple[str, int]) -> None:
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    assert parser.parse_args(["--serve", words]).serve == where
    with pytest.raises(SystemExit):
        parser.parse_args(["--serve", f"{words}x"])


def scraped(*uses: Use) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return metric -> labels and value of its samples, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(Collector(lambda: uses))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {one.name: [(sample.labels, sample.value) for sample in one.samples] for one in families}


def test_prometheus_gets_base_units_and_the_labels_of_each_core() -> None:
    found = scraped(use("pod-w1", busy(96, 12, silent=840, stall="no output")), use("pod-w2", answer()))
    assert set(found) == {metric.name for metric in METRICS}
    labels = {"node": "pod", "worker": "pod-w1", "core": "0", "run": "exp", "person": "ada"}
    assert found["tpu_hbm_used_bytes"][0] == (labels, 12 * chips.GIB)
    assert found["tpu_duty_cycle_ratio"][0] == (labels, 0.96)
    assert len(found["tpu_duty_cycle_ratio"]) == 4
    of_run = {key: value for key, value in labels.items() if key != "core"}
    assert found["tpu_run_last_output_timestamp_seconds"] == [(of_run, NOW - 840)]
    assert found["tpu_run_stalled"] == [(of_run, 1)]
    assert [value for _, value in found["tpu_worker_up"]] == [1, 1]


def test_prometheus_gets_the_queue_and_errors_of_cores_that_tell_them() -> None:
    told = use("pod-w1", busy(96, states=chips.launched(7, errors={2: "Core halted"})))
    found = scraped(told, use("pod-w2", busy(96)))
    assert [(labels["worker"], value) for labels, value in found["tpu_queued_programs"]] == [("pod-w1", 2)] * 4
    assert [(labels["core"], value) for labels, value in found["tpu_core_error"]] == [
        ("0", 0),
        ("1", 0),
        ("2", 1),
        ("3", 0),
    ]


def test_a_worker_that_does_not_answer_is_down_and_has_no_values() -> None:
    lost = Reply("", {}, "timeout", "late")
    found = scraped(use("pod-w1", lost, use("pod-w1", busy(96)), now=NOW + 60))
    where = {"node": "pod", "worker": "pod-w1"}
    assert found["tpu_worker_up"] == [(where, 0)]
    assert found["tpu_worker_last_answer_timestamp_seconds"] == [(where, NOW)]
    assert (found["tpu_hbm_used_bytes"], found["tpu_run_stalled"]) == ([], [])


def test_hostile_names_are_labels_and_nothing_else() -> None:
    name = 'a"} 1\n# TYPE x counter\\\ud800'
    hostile = busy(96, run="exp")
    hostile["holder"]["run_id"] = hostile["run"]["run_id"] = hostile["holders"][0]["run"] = name
    found = scraped(use("pod-w1", hostile))
    assert found["tpu_hbm_used_bytes"][0][0]["run"] == name.replace("\ud800", "?")
    assert set(found) == {metric.name for metric in METRICS}


def test_a_core_that_two_processes_report_is_one_sample() -> None:
    services = [chips.service(pid, [chips.core(0)]) for pid in (100, 101)]
    processes = [process(pid, run="exp") for pid in (100, 101)]
    found = scraped(use("pod-w1", answer("exp", services=services, processes=processes)))
    assert len(found["tpu_hbm_used_bytes"]) == 1


SERVE = """
from tests.cli.test_top import there
from tests.support.chips import busy, use
from tpu_ops.cli import top
import signal, sys
# A shell without job control starts what is in its background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(top.serve(there(use("pod-w0", busy(90))).poll, "127.0.0.1", int(sys.argv[1])))
"""


def test_serve_answers_scrapes_while_workers_hang_until_it_is_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr
            assert serving.stderr.readline() == f"http://127.0.0.1:{port}/metrics until Ctrl-C\n"
            for _ in range(2):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answered:
                    assert b"\ntpu_duty_cycle_ratio{" in answered.read()
            second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert "cannot listen: Address already in use" in second.stderr
            serving.send_signal(signal.SIGINT)
            assert (serving.wait(30), serving.stderr.read()) == (0, "")
        finally:
            serving.kill()
