"""A run of one worker whose supervisor is the test's own process; a directory plays its control group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.specs import good, myself
from tpu_ops.host import child, link, logs, rank_record, supervise
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec

#: What the spec of a run of one worker has of its own.
ALONE: dict[str, Any] = {"run_id": "r1", "rank": 0, "world_size": 1, "worker": "w0", "workers": ["w0"], "net": None}


def live(folder: Path, script: str) -> tuple[dict[str, Any], logs.Logger]:
    """Run a shell line as a rank from its start to its final record; return the record and what wrote the log.

    The signals of a supervisor have to wait, as the fixture `waits` has them do.
    """
    data = spec.check(good(**ALONE))
    supervisor = supervise.Supervisor(Store(str(folder)), "r1")
    supervisor.record = rank_record.new_record(data, myself(), os.getuid(), "")
    supervisor._keep()
    source, sink = os.pipe()
    supervisor.child = child.Child.fork(["sh", "-c", script], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink)
    os.close(sink)
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n{supervisor.child.pid}\n")
    supervisor.record["cgroup"] = str(folder)
    supervisor.link = link.Alone(link.team(data, "digest"), supervisor._waker())
    supervisor.link.start()
    assert supervisor._may_go()
    logger = logs.Logger(source, str(folder))
    logger.start()
    supervisor.child.go()
    supervisor._live(data, logger, "")
    return supervisor.record, logger
