"""Disks that fill up under a run: that of its log and that of its record. They are file systems in memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.runs.conftest import BOTH
from tests.support.runs import FULL, Bench, rounds
from tpu_ops.host.logs import SEGMENT
from tpu_ops.host.referee import SETTLE
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.spec import GRACE_FAILURE
from tpu_ops.ssh.fanout import Fanout

pytestmark = pytest.mark.lab

LEASE = 5.0
BLOCK = 4096
#: What the rank writes at least before the disk is filled, and the size of its log's disk, in bytes.
FLOOD = (200 if FULL else 48) * 2**20
DISK = 24 * 2**20
#: By how much the supervisor may grow meanwhile, in kilobytes, and how long one chunk of 4 MiB may take, in seconds.
GROWTH = 8 * 1024
SLOWEST = 2.0
#: From the last rank's end to the final record, in seconds.
MARGIN = 2.0


def block(number: int) -> bytes:
    """Return a part of the log, which tells where it belongs: no line end, and NUL bytes."""
    return (b"\0" + hashlib.sha256(b"%d" % number).digest()[1:].replace(b"\n", b"\0")) * 128


#: Rank 1 writes such blocks until it is told to end, and then how many bytes they were, and how long a chunk took.
WRITER = f"""
import hashlib, os, time
from pathlib import Path
{inspect.getsource(block)}
number, longest, told = 0, 0.0, Path("/run/told")
while not (told / "go").exists():
    time.sleep(0.05)
while not (told / "end").exists():
    chunk = memoryview(b"".join(map(block, range(number, number + 1024))))
    begun = time.monotonic()
    while chunk and os.environ["TPU_OPS_RANK"] == "1":
        chunk = chunk[os.write(1, chunk):]
    longest = max(longest, time.monotonic() - begun)
    number += 1024
    time.sleep(0.2)
Path(os.environ["TPU_OPS_RUN_DIR"], "written").write_text(f"{{number * {BLOCK}}} {{longest}}")
"""


@dataclass
class Reader:
    """Reads rank 1's log as a follower gets it.

    Attributes:
        at: Offset behind the last byte that came.
        received: How many bytes came.
        wrong: Offsets of pieces that were not what the rank has written there.
        said: What the follower was told.
    """

    at: int = 0
    received: int = 0
    wrong: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    async def read(self, bench: Bench, name: str, enough: float = float("inf")) -> None:
        """Go on from where it stands until so many bytes are behind, or to the run's end."""
        reached = asyncio.Event()

        def take(rank: int, offset: int, data: bytes) -> None:
            if rank != 1:
                return
            first = offset // BLOCK
            whole = b"".join(map(block, range(first, (offset + len(data)) // BLOCK + 1)))
            if whole[offset - first * BLOCK :][: len(data)] != data:
                self.wrong.append(offset)
            self.received += len(data)
            self.at = offset + len(data)
            if self.at >= enough:
                reached.set()

        follower = Follower(
            Fanout(bench.ssh_config()),
            name,
            ["pod-w0", "pod-w1"],
            shown=(),
            line=lambda ranks, text: None,
            say=self.said.append,
            data=take,
            offsets=(0, self.at),
        )
        tasks = {asyncio.ensure_future(follower.run()), asyncio.ensure_future(reached.wait())}
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=120)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert done, self.said

    @property
    def announced(self) -> int:
        """The bytes that are said to be missing.

        A follower that ends between that message and the data after it is followed by one that says it again.
        """
        found = [
            re.match(r"rank 1: (\d+) bytes before byte (\d+) are not in the log on pod-w1", one) for one in self.said
        ]
        ends_by_first = {int(match[2]) - int(match[1]): int(match[2]) for match in found if match}
        return sum(end - first for first, end in ends_by_first.items())


@contextlib.contextmanager
def small_disk(bench: Bench, index: int, path: str, size: int) -> Iterator[None]:
    """Give a directory of a worker a disk of its own for as long as the block lasts."""
    bench.inside(index, f"mkdir -p {path} && mount -t tmpfs -o size={size},mode=755 tpu-test {path}")
    try:
        yield
    finally:
        bench.inside(index, f"umount --lazy {path}")


@contextlib.contextmanager
def filled(bench: Bench, index: int, path: str) -> Iterator[None]:
    """Have something else take all room there is on a disk, again and again, for as long as the block lasts."""
    script = f"while :; do cat /dev/zero >>{path}/other 2>/dev/null; sleep 0.02; done"
    pid = bench.inside(index, f"setsid sh -c '{script}' >/dev/null 2>&1 </dev/null & echo $!").strip()
    try:
        yield
    finally:
        bench.inside(index, f"kill -TERM -{pid}; rm {path}/other")


def peak(bench: Bench, index: int, name: str) -> int:
    """Return the most memory that a supervisor has had, in kilobytes."""
    pid = bench.record(index, name)["supervisor"]["pid"]
    return int(bench.inside(index, f"grep VmHWM /proc/{pid}/status").split()[1])


@pytest.fixture
def told(bench: Bench) -> Iterator[None]:
    """The directory by which commands are told what to do."""
    for index in BOTH:
        bench.inside(index, "mkdir /run/told")
    yield
    for index in BOTH:
        bench.inside(index, "rm -r /run/told")


def tell(bench: Bench, word: str) -> None:
    """Tell it to the commands on both workers."""
    for index in BOTH:
        bench.inside(index, f"touch /run/told/{word}")


@rounds(1, 3)
@pytest.mark.usefixtures("told")
def test_a_flood_on_a_disk_that_fills_up_blocks_neither_rank_nor_heartbeat_and_what_is_lost_is_told(
    bench: Bench, number: int
) -> None:
    name = f"flood-{number}"
    log = f"/var/lib/tpu_ops/runs/{name}/log"
    bench.started("python", "-c", WRITER, name=name, options=("--lease", f"{LEASE}"))
    memory = peak(bench, 1, name)

    def segments() -> list[tuple[int, int]]:
        shown = bench.inside(1, f"cd {log} && stat --format '%n %s' *.log 2>/dev/null || true")
        return [(int(row.split(".")[0]), int(row.split()[1])) for row in shown.splitlines()]

    def crowded_out() -> bool:
        return sum(size for _, size in segments()) < 2**16

    with small_disk(bench, 1, log, DISK):
        tell(bench, "go")
        reader = Reader()
        asyncio.run(reader.read(bench, name, 4 * 2**20))
        left = reader.at
        asleep = bench.popen("logs", name, "--follow", "--rank", "1")
        assert asleep.stdout is not None
        assert asleep.stdout.readline()
        asleep.send_signal(signal.SIGSTOP)
        # Three segments and more have gone since, and what the first reader has not seen with them.
        bench.await_(lambda: segments() and segments()[0][0] >= 3 * SEGMENT, "three rotations", 60)
        bench.await_(lambda: sum(segments()[-1]) >= FLOOD, "the flood", 60)
        with filled(bench, 1, log):
            bench.await_(crowded_out, "next to no room for a log", 60)
            bench.await_(lambda: time.time() - bench.record(1, name)["began"] > 2 * LEASE, "two leases have passed")
            assert [bench.record(index, name)["state"] for index in BOTH] == ["running", "running"]
        bench.await_(lambda: sum(size for _, size in segments()) > 2**20, "a log again")
        asyncio.run(reader.read(bench, name, sum(segments()[-1])))
        with filled(bench, 1, log):
            bench.await_(crowded_out, "next to no room for a log", 60)
            assert peak(bench, 1, name) - memory < GROWTH
            tell(bench, "end")
            for index in BOTH:
                bench.await_clean(index)
        asyncio.run(reader.read(bench, name))
        asleep.send_signal(signal.SIGCONT)
        _, said = asleep.communicate(timeout=60)
    record = bench.record(1, name)
    total, longest = bench.inside(1, f"cat /var/lib/tpu_ops/runs/{name}/files/written").split()
    assert [bench.record(index, name)["state"] for index in BOTH] == ["succeeded", "succeeded"]
    assert float(longest) < SLOWEST
    assert record["log"]["fault"] == "No space left on device"
    assert record["log"]["bytes"] + record["log"]["dropped"] == int(total)
    assert min(record["log"]["dropped"], record["log"]["rotated"]) > 0
    assert left < reader.received < int(total)
    assert reader.wrong == []
    assert reader.received + reader.announced == int(total), reader.said
    assert re.search(r"rank 1: \d+ bytes before byte \d+ are not in the log on pod-w1", said)
    assert asleep.returncode == 0, said
    bench.clean()


@pytest.mark.usefixtures("told")
def test_a_run_whose_end_no_disk_takes_ends_in_time_and_says_how(bench: Bench) -> None:
    runs = "/var/lib/tpu_ops/runs"
    script = "exec 3</dev/accel0; while [ ! -e /run/told/end ]; do sleep 0.05; done; "
    script += "[ $TPU_OPS_RANK = 1 ] && exit 7; exec sleep 600"
    with small_disk(bench, 1, runs, 4 * 2**20):
        bench.started("sh", "-c", script, name="recordless")
        with filled(bench, 1, runs):
            bench.await_(lambda: "100%" in bench.inside(1, f"df {runs}"), "a full disk")
            tell(bench, "end")
            at = time.time()
            for index in BOTH:
                bench.await_clean(index)
            assert time.time() - at < SETTLE + GRACE_FAILURE + MARGIN
            done = bench.tpu_ops("status", "recordless", "--json")
        status = json.loads(done.stdout)[0]
        assert done.returncode == 1
        assert status["first_failure"] == {"rank": 1, "host": "pod-w1", "cause": "exit code 7"}
        assert [rank["state"] for rank in status["ranks"]] == ["stopped", "failed"]
        # What was full is none of the next run's business.
        again = bench.tpu_ops("train", "pod", "--", "true")
        assert again.returncode == 0, again.stderr
        assert bench.record(1, "recordless")["exit"] == {"code": 7}
