"""Recording profiles on workers whose processes run here: stand-ins for profilers, the real launcher and rsync."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_results import SSH
from tests.support import profiler
from tpu_ops.errors import HostError, OpsError, UnreachableError
from tpu_ops.host import profile, stacks
from tpu_ops.protocol.wire import UNKNOWN_ACTION
from tpu_ops.runs import profiles
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.profiles import Profile
from tpu_ops.ssh.replies import Reply, Result, reply_of

LOGIN = getpass.getuser()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Workers:
    """Workers w0, w1 and so on, whose runs are processes here."""

    ssh_config = Path("/unused")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, dict[str, Any]] = {}
        self.processes: list[subprocess.Popen[str]] = []
        self.old: set[str] = set()

    def start(self, *commands: Sequence[str], **environ: str) -> None:
        """Add a worker whose rank has these processes; they have said that they are ready."""
        host = f"w{len(self.records)}"
        group = self.folder / "groups" / host / "below"
        group.mkdir(parents=True)
        (self.folder / "homes" / host).mkdir(parents=True)
        for argv in commands:
            process = subprocess.Popen(argv, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        mine = self.processes[len(self.processes) - len(commands) :]
        (group / "cgroup.procs").write_text("".join(f"{process.pid}\n" for process in mine))
        self.records[host] = {
            "state": "running",
            "person": {"name": LOGIN},
            "supervisor": {"pid": 0},
            "pid": 0,
            "cgroup": str(group.parent),
            "venv": "/nonexistent",
            "attempt": 1,
            "rank": int(host[1:]),
        }

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        if action == "status":
            return {host: Reply(host, {"record": self.records[host]}) for host in requests}
        assert action == "profile"
        return {host: await asyncio.to_thread(self._recorded, host, request) for host, request in requests.items()}

    def _recorded(self, host: str, request: Any) -> Reply:
        if host in self.old:
            refusal = {"kind": "invalid", "message": f"{UNKNOWN_ACTION} 'profile'"}
            return reply_of(host, {"ok": False, "error": refusal}, "", 0)
        record = self.records[host]
        pids = stacks.processes_of(record)
        place = str(self.folder / "place")
        return Reply(host, profile.recorded(pids, record["venv"], request["milliseconds"], request["port"], place))

    async def run(
        self, hosts: Sequence[str], argv: Sequence[str], *, limit: float, stdin: bytes | Mapping[str, bytes] = b""
    ) -> dict[str, Result]:
        assert limit > 0

        async def one(host: str) -> Result:
            environ = {**os.environ, "HOME": str(self.folder / "homes" / host)}
            process = await asyncio.create_subprocess_exec(*argv, env=environ, stdin=-1, stdout=-1, stderr=-1)
            out, said = await process.communicate(stdin if isinstance(stdin, bytes) else stdin.get(host, b""))
            return Result(host, process.returncode, out, said)

        return {result.host: result for result in await asyncio.gather(*map(one, hosts))}


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOMES", str(tmp_path / "homes"))
    (tmp_path / "place").mkdir()
    profiler.install(tmp_path / "modules")
    profiler.install(tmp_path / "lacking", profiler.LACKING)
    found = Workers(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def server(port: int, *words: str) -> list[str]:
    return [sys.executable, profiler.__file__, str(port), *words]


def collect(workers: Workers, *, port: int | None = None) -> list[Profile]:
    fanout: Any = workers
    hosts = tuple(workers.records)
    into = workers.folder / "here"
    run = RunRef("r1", hosts)
    return asyncio.run(profiles.collect(fanout, run, range(len(hosts)), into, seconds=0.5, port=port, login=LOGIN))


def test_the_profiles_of_all_ranks_are_one_session(workers: Workers) -> None:
    ports = [free_port() for _ in range(3)]
    # The ranks use other ports too: one that says nothing, and two profilers on one worker.
    modules = str(workers.folder / "modules")
    workers.start(server(ports[0]), server(free_port(), "silent"), PYTHONPATH=modules)
    workers.start(server(ports[1]), server(ports[2]), PYTHONPATH=modules)
    found = collect(workers)
    assert [(one.rank, one.problem) for one in found] == [(0, ""), (1, "")]
    (session,) = (workers.folder / "here" / "plugins" / "profile").iterdir()
    assert sorted(path.name for path in session.iterdir()) == sorted(
        ["w0.xplane.pb", *(f"w1_{port}.xplane.pb" for port in ports[1:])]
    )
    assert (session / "w0.xplane.pb").read_text() == f"{ports[0]} 500 cpu"
    assert [path.name for path in (workers.folder / "here").iterdir()] == ["plugins"]
    assert not list((workers.folder / "place").iterdir())
    assert profiles.error("r1", found) is None


def test_ranks_without_a_profiler_or_its_package_are_named(workers: Workers) -> None:
    workers.start(server(free_port()), PYTHONPATH=str(workers.folder / "modules"))
    workers.start(server(free_port(), "silent"))
    workers.start(server(free_port()), PYTHONPATH=str(workers.folder / "lacking"))
    workers.start()
    workers.records["w3"]["state"] = "failed"
    found = collect(workers)
    assert [(one.rank, one.kind, bool(one.files)) for one in found] == [
        (0, "", True),
        (1, "server", False),
        (2, "package", False),
        (3, "failed", False),
    ]
    assert "This script requires `xprof` to be installed." in found[2].problem
    assert not list((workers.folder / "place").iterdir())
    failure = profiles.error("r1", found)
    assert failure is not None
    assert (failure.where, type(failure)) == ("ranks 1-3 of r1", HostError)
    assert profiles.LINE in failure.fix


def test_a_port_that_is_named_has_to_be_the_runs_own(workers: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        workers.start(server(free_port()))
        (found,) = collect(workers, port=port)
    assert (found.kind, found.problem) == ("server", f"the run does not listen on port {port}")


def test_a_run_that_has_ended_has_no_profile(workers: Workers) -> None:
    workers.start()
    workers.records["w0"]["state"] = "succeeded"
    with pytest.raises(HostError, match=r"no rank is active \(succeeded\)"):
        collect(workers)


@pytest.mark.parametrize(
    ("kind", "error", "fix"),
    [
        ("server", HostError, profiles.LINE),
        ("package", HostError, "jax[xprof]"),
        ("failed", HostError, "`tpu_ops logs r1 --rank 1`"),
        ("unreachable", UnreachableError, "`tpu_ops status r1`"),
    ],
)
def test_each_problem_has_its_fix(kind: str, error: type[OpsError], fix: str) -> None:
    found = profiles.error("r1", [Profile(0, "w0"), Profile(1, "w1", "ada", kind=kind, problem="why")])
    assert isinstance(found, error)
    assert (found.what, found.where, fix in found.fix) == ("no profile of 1 rank: why", "rank 1 of r1", True)


def test_workers_with_an_old_launcher_are_named_with_the_fix(workers: Workers) -> None:
    workers.start()
    workers.start(server(free_port()), PYTHONPATH=str(workers.folder / "modules"))
    workers.start()
    workers.old = {"w0", "w2"}
    found = collect(workers)
    assert [(one.kind, bool(one.files)) for one in found] == [("old", False), ("", True), ("old", False)]
    failure = profiles.error("r1", found)
    assert failure is not None
    assert failure.what == "no profile of 2 ranks: the worker's launcher is too old for this"
    assert failure.fix == "`tpu_ops configure w0,w2` brings the launcher of this version"
