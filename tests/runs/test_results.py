"""Copying files from workers whose homes are directories here: the real rsync, and a stand-in for ssh."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.cli import run_end
from tpu_ops.errors import HostError, OpsError, UsageError
from tpu_ops.runs import results
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.results import Source
from tpu_ops.ssh.replies import Reply, Result

#: Runs the command of ssh here, in the home of the named worker.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -F|-o) shift ;; esac; shift; done
cd "$HOMES/$1" || { echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }
shift
HOME="$PWD" exec /bin/sh -c "$*"
"""


class Workers:
    """Workers whose homes stand side by side."""

    ssh_config = Path("/unused")

    def __init__(self, homes: Path) -> None:
        self.homes = homes

    async def run(self, hosts: Sequence[str], argv: Sequence[str], *, limit: float) -> dict[str, Result]:
        assert limit > 0
        found = {}
        for host in hosts:
            process = await asyncio.create_subprocess_exec(
                *argv, env={**os.environ, "HOME": str(self.homes / host)}, stdout=-1, stderr=-1
            )
            stdout, stderr = await process.communicate()
            found[host] = Result(host, process.returncode, stdout, stderr)
        return found


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMES", str(tmp_path / "homes"))
    for host in ("w0", "w1"):
        place = tmp_path / "homes" / host / "tpu_ops" / "digits" / "my results"
        place.mkdir(parents=True)
        (place / "loss.txt").write_text(f"of {host}")
        (place / "$(touch owned) ~*.bin").write_bytes(bytes(2000))
    return Workers(tmp_path / "homes")


def fetch(workers: Workers, sources: Sequence[Source], path: str) -> list[results.Fetched]:
    fanout: Any = workers
    return asyncio.run(results.fetch(fanout, sources, path))


def test_a_path_of_each_rank_is_copied_once_and_odd_names_stay_names(workers: Workers, tmp_path: Path) -> None:
    sources = [Source(f"w{rank}", tmp_path / "here" / f"rank-{rank}", folder="tpu_ops/digits") for rank in range(2)]
    found = fetch(workers, sources, "my results")
    assert [(one.problem, one.count, one.size > 2000) for one in found] == [("", 2, True)] * 2
    assert (tmp_path / "here/rank-1/my results/loss.txt").read_text() == "of w1"
    assert [(one.problem, one.count) for one in fetch(workers, sources, "my results")] == [("", 0)] * 2
    (workers.homes / "w1/tpu_ops/digits/my results/loss.txt").write_text("newer, of w1")
    assert [one.count for one in fetch(workers, sources, "my results")] == [0, 1]
    assert [path.name for path in tmp_path.rglob("owned")] == []


def test_a_fetch_tells_the_bytes_of_each_worker_and_counts_the_same_files(workers: Workers, tmp_path: Path) -> None:
    (workers.homes / "w0/tpu_ops/digits/my results/weights").write_bytes(os.urandom(3_000_000))
    told: list[tuple[str, int, int, bool]] = []
    fanout: Any = workers
    sources = [Source("w0", tmp_path / "here", folder="tpu_ops/digits")]
    (found,) = asyncio.run(results.fetch(fanout, sources, "my results", lambda *one: told.append(one)))
    assert (found.problem, found.count) == ("", 3)
    assert told[0] == ("w0", 0, 0, False)
    assert told[-1] == ("w0", found.size, 0, True)
    assert max(size for _, size, _, done in told if not done) >= 3_000_000


def test_a_path_starts_in_the_home_or_is_absolute(workers: Workers, tmp_path: Path) -> None:
    (found,) = fetch(workers, [Source("w0", tmp_path / "one")], "tpu_ops/digits/my results/loss.txt")
    assert (found.problem, (tmp_path / "one/loss.txt").read_text()) == ("", "of w0")
    absolute = workers.homes / "w1/tpu_ops/digits/my results/loss.txt"
    (found,) = fetch(workers, [Source("w1", tmp_path / "two")], str(absolute))
    assert (found.problem, (tmp_path / "two/loss.txt").read_text()) == ("", "of w1")


def test_a_worker_without_the_path_costs_only_itself(workers: Workers, tmp_path: Path) -> None:
    (workers.homes / "w0/tpu_ops/digits/my results/loss.txt").unlink()
    sources = [Source(host, tmp_path / host, folder="tpu_ops/digits") for host in ("w0", "w1")]
    lost, copied = fetch(workers, sources, "my results/loss.txt")
    assert "No such file or directory" in lost.problem
    assert (lost.reached, copied.problem) == (True, "")
    assert (tmp_path / "w1/loss.txt").exists()


def test_an_interrupted_copy_is_continued(workers: Workers, tmp_path: Path) -> None:
    """rsync keeps what it has of a file under its name, and transfers only the rest."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/loss.txt").write_text("of")
    (found,) = fetch(workers, [Source("w0", tmp_path / "here")], "tpu_ops/digits/my results/loss.txt")
    assert (found.problem, (tmp_path / "here/loss.txt").read_text()) == ("", "of w0")
    assert "--partial" in results.command(Source("w0", tmp_path), "/x", Path("/c"))


def test_another_account_reads_its_files_through_sudo() -> None:
    words = results.command(Source("w0", Path("/here"), user="ada"), "/home/ada/x y", Path("/s/config"))
    assert "--rsync-path=sudo -n -H -u ada rsync" in words
    assert words[-2:] == ["w0:/home/ada/x y", "/here/"]


def test_a_directory_that_cannot_be_made_here_is_one_error(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OpsError, match="file"):
        fetch(workers, [Source("w0", tmp_path / "file" / "below")], "x")


# --- at the end of a run ------------------------------------------------------------------------------------

HOSTS = ("w0", "w1")


class Ended(Workers):
    """Workers on which a run has ended; they know its directory unless they are silent."""

    silent = False

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        assert action == "status"
        record = {"state": "failed", "person": {"name": "ada"}, "cwd": "tpu_ops/digits"}
        if self.silent:
            return {host: Reply(host, {}, "unreachable", "no route to host") for host in requests}
        return {host: Reply(host, {"record": record}) for host in requests}


class Following:
    """Follows a run that ends with an exit code, with an error, or not at all while it is followed."""

    def __init__(self, workers: Workers, *words: str) -> None:
        parser = argparse.ArgumentParser()
        run_end.add_arguments(parser)
        args = parser.parse_args(words)
        run_end.check(args)
        self.workers = Ended(workers.homes)
        nodes = tuple(SimpleNamespace(host=host, label="w") for host in HOSTS)
        self.fleet: Any = SimpleNamespace(settings=SimpleNamespace(user="ada"), workers=nodes)
        connect: Any = lambda _: self.workers  # noqa: E731
        self.end = run_end.RunEnd(args, lambda: self.fleet, connect)

    def __call__(self, code: int, state: str = "succeeded", *, error: OpsError | None = None, on: bool = False) -> int:
        def work() -> int:
            if error:
                raise error
            return code

        ended = None if on or error else (state, [Outcome(rank, host, state) for rank, host in enumerate(HOSTS)])
        return self.end.after(work, lambda: RunRef("exp", HOSTS), lambda: ended)


@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (1, "failed"), (7, "failed")])
def test_files_of_rank_0_are_copied_at_the_end_and_the_exit_code_stays(
    workers: Workers, tmp_path: Path, capsys: Any, code: int, state: str
) -> None:
    assert Following(workers, "--fetch", "my results/loss.txt")(code, state) == code
    assert (tmp_path / "exp/loss.txt").read_text() == "of w0"
    assert f"w0: my results/loss.txt is in {tmp_path}/exp: 1 file, 5 B\n" in capsys.readouterr().err
    assert Following(workers, "--fetch", "my results", "--fetch-to", "other place")(code, state) == code
    assert (tmp_path / "other place/my results/loss.txt").read_text() == "of w0"


@pytest.mark.parametrize(("silent", "of_copy"), [(False, 1), (True, 4)])
def test_a_failed_copy_is_an_error_and_replaces_no_failure_of_the_run(
    workers: Workers, tmp_path: Path, capsys: Any, *, silent: bool, of_copy: int
) -> None:
    for code, state, ends in ((0, "succeeded", of_copy), (7, "failed", 7)):
        following = Following(workers, "--fetch", "no such", "--notify", "printf %s $TPU_OPS_RUN_EXIT_CODE >code")
        following.workers.silent = silent
        assert following(code, state) == ends
        assert (tmp_path / "code").read_text() == str(ends)
        said = capsys.readouterr().err
        assert "the run is over, but no such was not copied:\nerror: " in said
        assert "  fix: `tpu_ops fetch exp 'no such' exp` tries again\n" in said


def test_a_run_that_goes_on_copies_and_tells_nothing(workers: Workers, tmp_path: Path, capsys: Any) -> None:
    assert Following(workers, "--fetch", "my results", "--notify", "touch told")(130, on=True) == 130
    assert not (tmp_path / "exp").exists()
    assert not (tmp_path / "told").exists()
    assert "`tpu_ops attach exp --fetch 'my results' --notify ...` does it\n" in capsys.readouterr().err


def test_an_error_that_ends_the_following_is_told(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(HostError):
        Following(workers, "--notify", "cat >notice")(0, error=HostError("not started again"))
    told = json.loads((tmp_path / "notice").read_text())
    assert (told["state"], told["exit_code"], told["reason"]) == ("unknown", 1, "not started again")
    assert (told["targets"], told["duration"]) == (["w"], None)


def test_a_failed_notice_is_a_warning_and_the_others_are_sent(workers: Workers, tmp_path: Path, capsys: Any) -> None:
    assert Following(workers, "--notify", "exit 5", "--notify", "touch told")(0) == 0
    assert (tmp_path / "told").exists()
    warning = "warning: --notify: command 'exit 5' was not told of the end of run exp: exit code 5\n"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "detached"),
    [
        (["--fetch", ""], False),
        (["--fetch-to", "x"], False),
        (["--notify", ""], False),
        (["--fetch", "x"], True),
        (["--notify", "x"], True),
    ],
)
def test_options_of_the_end_that_cannot_work_are_refused(words: list[str], *, detached: bool) -> None:
    parser = argparse.ArgumentParser()
    run_end.add_arguments(parser)
    with pytest.raises(UsageError):
        run_end.check(parser.parse_args(words), detached=detached)
