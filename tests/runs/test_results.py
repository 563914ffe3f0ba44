"""Copying files from workers whose homes are directories here: the real rsync, and a stand-in for ssh."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.runs import results
from tpu_ops.runs.results import Source
from tpu_ops.ssh.replies import Result

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
    assert [(one.problem, one.count, one.size > 2000) for one in found] == [("", 3, True)] * 2
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
    assert (found.problem, found.count) == ("", 4)
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
