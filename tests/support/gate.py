"""Holds a start back on one worker, so that its controller is in the midst of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tests.support.runs import Bench

#: Stands before the host program: passes every request on, but one to start a run, which it keeps.
GATE = r"""#!/usr/bin/python3
import os, subprocess, sys, time
line = b""
while not line.endswith(b"\n"):
    line += os.read(0, 65536)
if b'"action": "start"' in line:
    open("/run/gate", "w").write(str(os.getpid()))
    time.sleep(600)
source, sink = os.pipe()
program = subprocess.Popen(["/root/gated"], stdin=source)
os.close(source)
os.write(sink, line)
sys.exit(program.wait())
"""


@contextlib.contextmanager
def gate(bench: Bench, index: int) -> Iterator[Callable[[], bool]]:
    """Keep every start from a worker's host program; yields what tells whether one has come."""
    bench.inside(index, f"mv /usr/local/sbin/tpu-host /root/gated && cat >/root/gate <<'END'\n{GATE}END")
    bench.inside(index, "install -m 0755 /root/gate /usr/local/sbin/tpu-host")
    try:
        yield lambda: bool(bench.inside(index, "cat /run/gate 2>/dev/null || true"))
    finally:
        bench.inside(index, "kill $(cat /run/gate); rm -f /run/gate", check=False)
        bench.inside(index, "mv /root/gated /usr/local/sbin/tpu-host")
