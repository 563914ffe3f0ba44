"""A person's servers on workers: the order of commands and requests to a worker, and the meaning of its answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.cli import serving
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.protocol.servers import directory_of
from tpu_ops.runs import servers
from tpu_ops.ssh.replies import Reply, Result

HOST = "box-w0"
PREPARED, LISTENS = Result(HOST, 0, b"secret"), Result(HOST, 0)
STARTED, STOPPED = Reply(HOST, {"started": True}), Reply(HOST, {"stopped": True})
FACTS = {"hostname": "t1v-1", "venv": {"path": "/opt/venvs/jax"}}
BOARD = servers.tensorboard("/opt/venvs/jax", "runs")


class Worker:
    """A worker with fixed answers: results of commands, in turn, and replies by action of the launcher."""

    def __init__(self, results: Iterable[Result] = (PREPARED, LISTENS), **replies: Reply) -> None:
        self.results, self.replies = iter(results), {"server_start": STARTED, "server_stop": STOPPED, **replies}
        self.orders: list[str] = []

    async def run(
        self, hosts: Iterable[str], argv: Sequence[str], *, limit: float, stdin: bytes = b""
    ) -> dict[str, Result]:
        self.orders.append("run")
        return dict.fromkeys(hosts, next(self.results))

    async def call(self, requests: Mapping[str, Mapping[str, Any]], action: str, *, limit: float) -> dict[str, Reply]:
        self.orders.append(action)
        return dict.fromkeys(requests, self.replies[action])


async def start(worker: Worker) -> servers.Started:
    return await servers.start(worker, HOST, "ada", BOARD, FACTS)


async def test_a_server_is_prepared_started_and_awaited():
    worker = Worker()
    assert await start(worker) == servers.Started("secret", anew=True)
    assert worker.orders == ["run", "server_start", "run"]


DEAD = Result(HOST, 1, stderr=b"OSError: no space\n")
GONE = Result(HOST, None, problem="No route to host", reached=False)
OLD = Reply(HOST, {}, "old", "the worker's launcher is too old for this", "`tpu_ops configure box-w0` updates it")


@pytest.mark.parametrize(
    ("worker", "code", "orders", "words"),
    [
        (Worker([Result(HOST, 4)]), ExitCode.USAGE, 1, ["with other options", "tpu_ops tensorboard box-w0 --stop"]),
        (Worker([DEAD]), ExitCode.FAILED, 1, ["could not be installed: OSError: no space", "base_pip_index_url"]),
        (Worker([GONE]), ExitCode.UNREACHABLE, 1, ["No route to host"]),
        (Worker(server_start=OLD), ExitCode.FAILED, 2, ["launcher is too old", "tpu_ops configure"]),
        # A server that does not listen is ended, unless it was running before.
        (
            Worker([PREPARED, DEAD]),
            ExitCode.FAILED,
            4,
            ["did not start: OSError: no space", "~/.local/share/tpu_ops/tensorboard/t1v-1/log"],
        ),
        (
            Worker([PREPARED, DEAD], server_start=Reply(HOST, {"started": False})),
            ExitCode.FAILED,
            3,
            ["did not start"],
        ),
    ],
)
async def test_a_server_that_cannot_be_started_is_refused_with_a_fix(worker, code, orders, words):
    with pytest.raises(OpsError) as caught:
        await start(worker)
    assert (caught.value.exit_code, len(worker.orders)) == (code, orders)
    assert worker.orders[-1] == "server_stop" or orders < 4
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(("result", "running"), [(Result(HOST, 0), True), (Result(HOST, 3), False), (GONE, False)])
async def test_a_server_runs_if_its_unit_is_active(result, running):
    worker = Worker([result])
    assert await servers.is_running(worker, HOST, "ada", "jupyter") is running
    assert worker.orders == ["run"]


@pytest.mark.parametrize("running", [True, False])
async def test_a_server_that_runs_already_is_not_said_to_be_installed(capsys, running):
    facts = Reply(HOST, {"probe": {**FACTS, "venv": {"path": "/opt/venvs/jax", "exists": True}}})
    active = Result(HOST, 0 if running else 3)
    worker: Any = Worker([active, PREPARED, LISTENS], probe=facts, server_start=Reply(HOST, {"started": not running}))
    there: Any = SimpleNamespace(host=HOST)
    one = serving._Serving(argparse.Namespace(venv=""), lambda _: BOARD, "", "")
    await one._start(worker, there, "ada")
    starting = f"{HOST}: starting tensorboard; the first time, this installs tensorboard\n"
    assert capsys.readouterr().err == (f"{HOST}: tensorboard is running there already\n" if running else starting)


async def test_an_interrupt_while_a_server_starts_ends_the_server():
    class Slow(Worker):
        async def run(self, *args: Any, **more: Any) -> dict[str, Result]:
            if self.orders:
                task.cancel()
                await asyncio.Event().wait()
            return await super().run(*args, **more)

    worker = Slow()
    task = asyncio.create_task(start(worker))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.orders == ["run", "server_start", "server_stop"]


async def test_a_worker_without_an_environment_is_refused():
    for path, words in (("", "has no environment"), ("/opt/other", "no environment at /opt/other")):
        worker = Worker(probe=Reply(HOST, {"probe": {"venv": {"path": path, "exists": False}}}))
        with pytest.raises(OpsError, match=words):
            await servers.facts(worker, HOST, path)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home, and a systemctl that prints the files `active` and `system`."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        'case "$*" in\nis-system-running) cat system ;;\n--quiet*) grep -qx active active ;;\n*) cat active ;;\nesac\n'
    )
    program.chmod(0o755)
    (tmp_path / "active").write_text("active\n")
    (tmp_path / "system").write_text("running\n")
    return tmp_path


def shell(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}


def test_a_running_server_is_left_as_it_is_and_one_with_other_options_is_refused(home):
    place = home / directory_of("tensorboard", "t1v-1")
    place.mkdir(parents=True)
    (place / "start").write_text(BOARD.script)
    (place / "token").write_text("secret")
    argv = ["bash", "-c", servers._PREPARE, "bash", "unit", directory_of("tensorboard", "t1v-1"), "/none", "package"]
    for server, code, said in (
        (BOARD, 0, "secret"),
        (servers.tensorboard("/opt/venvs/jax", "other"), servers._DIFFERS, ""),
        (servers.tensorboard("/opt/venvs/jax", "runs", more=["xprof"]), servers._DIFFERS, ""),
    ):
        done = subprocess.run(argv, input=server.script, text=True, env=shell(home), capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert (place / "start").read_text() == BOARD.script


def test_the_watch_tells_the_end_of_a_server_from_that_of_the_worker_or_of_the_tunnel(home):
    argv = [word.replace("-rt 2", "-rt 0.05") for word in servers.watch("jupyter", "ada")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=shell(home)) as process:
        process.communicate()
    assert process.returncode == 1, "the tunnel has ended"
    (home / "active").write_text("inactive\n")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=shell(home)) as process:
        assert process.wait(10) == 0, "the server has ended"
    (home / "system").write_text("stopping\n")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=shell(home)) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.communicate()
    assert process.returncode == 1, "the worker has ended"


def test_a_start_script_writes_its_files_and_takes_any_words_as_they_are(tmp_path):
    server = servers.tensorboard("/opt/my venv", "its 'runs' $HOME", more=["a b"])
    (tmp_path / "start").write_text(server.script)
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$VIRTUAL_ENV"\n')
    python.chmod(0o755)
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["/bin/bash", tmp_path / "start"], env=environ, check=True)
    said = (tmp_path / "log").read_text().splitlines()
    assert said == [f"{tmp_path}/board.py", "--load_fast=false", "--logdir=its 'runs' $HOME", "/opt/my venv"]
    compile((tmp_path / "board.py").read_text(), "board.py", "exec")


def test_a_bucket_s_event_files_need_one_more_package():
    assert "gcsfs" in servers.tensorboard("/v", "gs://bucket/runs").packages
    assert "gcsfs" not in BOARD.packages
