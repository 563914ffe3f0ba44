"""Other host programs on a worker: one that is installed while a run is on, and one whose clock is wrong."""

from __future__ import annotations

import contextlib
import io
import re
import time
import zipfile
from collections.abc import Iterator

import pytest

from tests.runs.conftest import BOTH
from tests.support.runs import Bench
from tpu_ops.host import build
from tpu_ops.host.referee import SETTLE
from tpu_ops.runs.spec import GRACE_FAILURE

pytestmark = pytest.mark.lab

#: An hour behind, and ten minutes for what only measures how long something takes.
WRONG_CLOCK = b"""
import time
wall, steady = time.time, time.monotonic
time.time, time.monotonic = lambda: wall() - 3600, lambda: steady() - 600
"""
LEASE = 5.0
#: From the end of one rank to that of the whole run, the supervisors' own waits included, in seconds.
MARGIN = 2.0


@contextlib.contextmanager
def installed(bench: Bench, index: int, first: bytes) -> Iterator[str]:
    """Have a host program on a worker that begins with these lines, beside the other one, as an upgrade brings it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(build.archive())) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, first * (name == "__main__.py") + old.read(name))
    program = bench.folder / "other-host"
    program.write_bytes(b"#!/usr/bin/python3 -IS\n" + buffer.getvalue())
    bench.backend.engine.call("cp", str(program), f"{bench.container(index)}:/root/other-host")
    link, folder = "/usr/local/sbin/tpu-host", "/usr/local/lib/tpu_ops/other"
    before = bench.inside(index, f"readlink {link}").strip()
    bench.inside(index, f"install -D -m 0755 /root/other-host {folder}/tpu-host && ln -sfn {folder}/tpu-host {link}")
    bench.inside(index, f"{link} compile")
    try:
        yield before
    finally:
        bench.inside(index, f"ln -sfn {before} {link} && rm -r {folder}")


def test_an_upgrade_in_the_midst_of_a_run_leaves_it_alone(bench: Bench) -> None:
    bench.started("sh", "-c", "while :; do echo tick; sleep 0.1; done", name="upgraded")
    with contextlib.ExitStack() as upgrades:
        for index in BOTH:
            old = upgrades.enter_context(installed(bench, index, b"# another version\n"))
            supervisor = bench.record(index, "upgraded")["supervisor"]["pid"]
            assert old in bench.inside(index, f"tr '\\0' ' ' </proc/{supervisor}/cmdline")
        before = bench.inside(1, "cat /var/lib/tpu_ops/runs/upgraded/log/*").count("tick")
        bench.await_log(1, "upgraded", "tick\n" * (before + 3))
        assert "upgraded: running" in bench.tpu_ops("status", "upgraded").stderr
        done = bench.tpu_ops("stop", "upgraded")
        assert done.returncode == 0, done.stderr
        assert [bench.record(index, "upgraded")["state"] for index in BOTH] == ["stopped", "stopped"]
        bench.clean()
        started = bench.tpu_ops("train", "pod", "--", "true")
        assert started.returncode == 0, started.stderr


def test_a_wrong_clock_is_found_before_a_start_and_changes_nothing_in_a_run(bench: Bench) -> None:
    # By the worker's own clock its rank would have failed ten minutes before the other one.
    script = "until [ -s /run/at ]; do sleep 0.05; done; "
    script += "sleep $(awk -v now=$(date +%s.%N) -v rank=$TPU_OPS_RANK '{print $1 + rank * 0.8 - now}' /run/at)"
    with installed(bench, 1, WRONG_CLOCK):
        refused = bench.tpu_ops("train", "pod", "--", "true")
        assert refused.returncode == 1
        assert "the worker's clock is -3600 s off\n  at:  pod-w1\n  fix: tpu_ops configure pod-w1" in refused.stderr
        train = ("train", "pod", "--detach", "--force", "--name", "clocks", "--lease", f"{LEASE}")
        started = bench.tpu_ops(*train, "--", "sh", "-c", f"{script}; exit $((TPU_OPS_RANK + 3))")
        assert started.returncode == 0, started.stderr
        # Longer than the lease, by clocks that do not agree.
        at = time.time() + LEASE + 1
        for index in BOTH:
            bench.inside(index, f"echo {at} >/run/at")
        done = bench.tpu_ops("logs", "clocks", "--follow")
        for index in BOTH:
            bench.await_clean(index)
            bench.inside(index, "rm /run/at")
        assert at < bench.record(0, "clocks")["ended"] < at + SETTLE + GRACE_FAILURE + MARGIN
    assert re.search(r"pod-w1: the worker's clock is -3600 s off; overridden by --force", started.stderr)
    for index in BOTH:
        first = bench.record(index, "clocks")["first"]
        assert first == {"rank": 0, "worker": "pod-w0", "cause": "exit code 3"}
    assert done.returncode == 1
    assert "rank 0 (pod-w0) failed first: exit code 3" in done.stderr
