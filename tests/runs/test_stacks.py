"""How the stacks of ranks are folded, from data that their workers have given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tpu_ops.cli import stacks as cli
from tpu_ops.runs import stacks
from tpu_ops.runs.control import RunRef
from tpu_ops.ssh.replies import Reply, reply_of

TRAIN, DATA = "/home/ada/code/train.py", "/home/ada/code/data.py"
ARRAY = "/opt/venvs/jax/lib/python3.12/site-packages/jax/_src/array.py"
QUEUE = "/usr/lib/python3.12/multiprocessing/queues.py"
AT_STEP = [["_value", ARRAY, 600], ["step", TRAIN, 88], ["<module>", TRAIN, 120]]
AT_BATCH = [["next_batch", DATA, 41], ["step", TRAIN, 80], ["<module>", TRAIN, 120]]
AT_QUEUE = [["get", QUEUE, 103], ["load", DATA, 12], ["run", "/usr/lib/python3.12/multiprocessing/process.py", 108]]


def python(pid: int, *threads: Sequence[Any], parent: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a Python process; each thread has a name and frames."""
    return {
        "pid": pid,
        "parent": parent,
        "user": "ada",
        "command": "/opt/venvs/jax/bin/python train.py",
        "state": "S",
        "source": "py-spy",
        "why": "",
        "threads": [{"name": name, "active": False, "frames": frames} for name, frames in threads],
    } | changes


def program(pid: int, command: str, wait: str, state: str = "S", **changes: Any) -> dict[str, Any]:
    """Return a process of which only the kernel has told something."""
    frames = [[wait, "", 0]] if wait else []
    threads = [{"name": command, "active": state == "R", "state": state, "frames": frames}]
    return python(pid, source="kernel", command=command, state=state) | {"threads": threads} | changes


def rank(number: int, *processes: dict[str, Any], **facts: Any) -> stacks.RankStacks:
    data = {"at": 100.0, "processes": list(processes), "omitted": 0}
    value = {"ok": True, "rank": number, "attempt": 1, "state": "running", "kept": False, "stacks": data} | facts
    return stacks.of_reply(number, Reply(f"pod-w{number}", value))


MAIN = ("MainThread", AT_STEP)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(
            [*(rank(number, python(10, MAIN)) for number in range(3)), rank(3, python(11, ("MainThread", AT_BATCH)))],
            [
                "ranks 0-2: step (train.py:88), in _value (array.py:600)",
                "rank 3: next_batch (data.py:41)",
            ],
            id="one rank is elsewhere",
        ),
        pytest.param(
            [rank(0, program(5, "/bin/bash run.sh", "do_wait"), python(10, MAIN, parent=5))],
            ["rank 0: step (train.py:88), in _value (array.py:600)"],
            id="a wrapper is left out",
        ),
        pytest.param(
            [
                rank(n, python(10, MAIN), *(python(20 + i, ("MainThread", AT_QUEUE), parent=10) for i in range(4)))
                for n in range(2)
            ],
            [
                "ranks 0-1: step (train.py:88), in _value (array.py:600)",
                "ranks 0-1, 4 child processes each: load (data.py:12), in get (queues.py:103)",
            ],
            id="children",
        ),
        pytest.param(
            [rank(0, python(10, MAIN), python(11, MAIN)), rank(1, python(10, MAIN))],
            ["ranks 0-1, 3 processes: step (train.py:88), in _value (array.py:600)"],
            id="several processes of a rank",
        ),
        pytest.param(
            [rank(0, python(10, ("MainThread", [["wait", QUEUE, 7]])))], ["rank 0: wait (queues.py:7)"], id="library"
        ),
        pytest.param(
            [rank(0, program(5, "bash", "do_wait"), program(6, "/usr/bin/sleep 60", "hrtimer_nanosleep", parent=5))],
            ["rank 0: bash waits in do_wait", "rank 0, 1 child process: sleep waits in hrtimer_nanosleep"],
            id="no Python",
        ),
        pytest.param(
            [rank(0, python(10, MAIN), program(7, "gsutil", "nfs_wait", "D", parent=10), program(8, "a", "", "R"))],
            [
                "rank 0: step (train.py:88), in _value (array.py:600)",
                "rank 0, 1 child process: gsutil waits in nfs_wait, inside the kernel (state D)",
            ],
            id="a process inside the kernel",
        ),
        pytest.param(
            [rank(0, python(10, MAIN)), rank(1, python(10, MAIN, state="D", wait="nfs_wait"))],
            [
                "rank 0: step (train.py:88), in _value (array.py:600)",
                "rank 1: step (train.py:88), in _value (array.py:600), waits in nfs_wait, inside the kernel (state D)",
            ],
            id="a Python inside the kernel",
        ),
        pytest.param(
            [rank(0, python(10, ("MainThread", [["load", DATA, 12]]), state="D"))],
            ["rank 0: load (data.py:12), inside the kernel (state D)"],
            id="a launcher that does not tell what is waited for",
        ),
        pytest.param(
            [rank(0, program(10, "python train.py", "", "R", why="py-spy is not installed"))],
            ["rank 0: python runs"],
            id="a Python without stacks",
        ),
        pytest.param([rank(0, python(10, why="the process has ended meanwhile"))], [], id="ended meanwhile"),
        pytest.param([rank(0, python(10, ("MainThread", [])))], ["rank 0: python, without a frame of Python"], id="C"),
    ],
)
def test_each_place_is_one_line(found: list[stacks.RankStacks], expected: list[str]) -> None:
    assert stacks.short(found) == expected


def test_processes_that_name_each_other_as_parents_are_shown() -> None:
    found = stacks.short([rank(0, python(10, MAIN, parent=11), python(11, MAIN, parent=10))])
    assert found == ["rank 0, 2 child processes: step (train.py:88), in _value (array.py:600)"]


def test_equal_stacks_of_threads_are_one_and_first_threads_come_first() -> None:
    waits = [["wait", "/usr/lib/python3.12/threading.py", 355]]
    loaders = [(f"loader-{number}", waits) for number in range(3)]
    bash = program(5, "bash", "do_wait")
    found = [rank(0, bash, python(10, MAIN, *loaders)), rank(1, bash, python(10, MAIN, *loaders))]
    groups = stacks.full([*found, rank(2, python(12, ("MainThread", AT_BATCH)))])
    assert [group.title for group in groups] == [
        "ranks 0-1, 1 thread each: MainThread",
        "rank 2, 1 thread: MainThread, of pid 12: /opt/venvs/jax/bin/python train.py",
        "ranks 0-1, 3 threads each: loader-0, loader-1 and 1 more",
        "ranks 0-1, 1 thread each: bash, state S",
    ]
    assert groups[0].frames[0] == stacks.Frame("_value", ARRAY, 600)


def test_equal_reasons_are_one() -> None:
    why = "py-spy is not installed on this worker"
    found = [rank(number, program(10, "python", "", why=why), program(11, "python", "", why=why)) for number in (0, 1)]
    assert stacks.problems(found) == [f"ranks 0-1, 2 processes each: {why}"]


def test_processes_that_were_left_out_are_counted() -> None:
    data = {"at": 1.0, "processes": [python(10, MAIN)], "omitted": 3}
    assert stacks.problems([rank(2, stacks=data)]) == ["rank 2: 3 more processes left out"]


def test_a_rank_without_kept_stacks_and_one_with_an_error_have_none() -> None:
    ended = rank(0, stacks=None, kept=True, state="stopped")
    silent = stacks.of_reply(1, Reply("pod-w1", {}, "timeout", "did not answer within 30 s"))
    assert (ended.kept, ended.at, ended.processes) == (True, 0.0, ())
    assert stacks.short([ended, silent]) == []
    shown = stacks.to_json(RunRef("r1", ("pod-w0", "pod-w1")), [ended, silent])
    assert [(one["state"], one["stacks"], one["problem"]) for one in shown["ranks"]] == [
        ("stopped", None, ""),
        ("", None, "did not answer within 30 s"),
    ]


def test_a_launcher_without_this_action_is_said_to_be_too_old() -> None:
    refusal = {"ok": False, "error": {"kind": "invalid", "message": "unknown action 'stacks'"}}
    found = stacks.of_reply(0, reply_of("pod-w0", refusal, "", 0))
    assert found.reply is not None
    assert found.reply.problem == "the worker's launcher is too old for this"
    assert "tpu_ops configure pod-w0" in found.reply.fix


def test_names_of_a_program_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread, a function, a file and a command line are text of the program."""
    nasty = "\x1b]0;owned\x07\u202e\r\n"
    frames = [[f"f{nasty}", f"/home/ada/{nasty}.py", 3]]
    process = python(10, (f"t{nasty}", frames), command=f"python {nasty}", why=f"py-spy failed: {nasty}")
    cli.show([rank(0, process)], full=True)
    out, err = capsys.readouterr()
    assert [line for line in (*out.split("\n"), *err.split("\n")) if not line.isprintable()] == []
    assert len(out.splitlines()) == 4, "a place, an empty line, a title and a frame"
    assert "warning: rank 0: py-spy failed: \\x1b]0;owned\\x07\\u202e" in err
