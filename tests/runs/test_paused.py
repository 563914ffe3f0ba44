"""Workers that stop answering under open connections, many followers of one, and a stop that is killed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.runs.conftest import BOTH
from tests.support.folded import lines_of
from tests.support.runs import Bench
from tpu_ops.host.referee import SETTLE
from tpu_ops.protocol.wire import UNLOCK_GRACE
from tpu_ops.runs import sync
from tpu_ops.runs.control import LIMIT
from tpu_ops.runs.follow import ALONE_LIMIT, STOP_MARGIN
from tpu_ops.runs.spec import GRACE_FAILURE, GRACE_STOP

pytestmark = pytest.mark.lab

LEASE = 5.0
#: For a command to begin, to ask for the worker's address, which no deadline counts, and to end: many at once, on a
#: busy machine. In seconds.
MARGIN = 45.0
#: Of the run whose stop is killed, longer than its helpers may take to go; and from its end to the final record.
GRACE, ENDING = 15.0, 2.0
CODE = "DIR"
#: What each command is, who gives it, and within how many seconds it returns.
COMMANDS = {
    "stop": (("stop", "under-way"), "ada", GRACE_STOP + STOP_MARGIN),
    "attach": (("attach", "under-way", "--rank", "all"), "ada", LEASE + SETTLE + GRACE_FAILURE + LIMIT + ALONE_LIMIT),
    "status": (("status", "under-way"), "ada", LIMIT),
    "who": (("who", "pod"), "bob", LIMIT),
    "unlock": (("unlock", "pod", "--yes"), "bob", LIMIT + LIMIT + UNLOCK_GRACE + 20.0),
    "doctor": (("doctor", "pod"), "bob", LIMIT),
    "train": (("train", "pod", "--", "true"), "bob", LIMIT),
    "sync": (("sync", "pod", CODE), "bob", sync._STEP_LIMIT),
}
SEEING = ("attach", "status")


def test_a_worker_that_is_paused_is_named_by_every_command_within_its_deadline(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    bench.started("sleep", "600", name="under-way", options=("--lease", f"{LEASE}"))
    assert bench.tpu_ops("run", "pod", "--", "true", person="bob").returncode == 0
    with bench.paused(1):
        at = time.monotonic()
        begun = {}
        for word, (argv, person, _) in COMMANDS.items():
            words = [str(tmp_path / "code") if one == CODE else one for one in argv]
            begun[word] = bench.popen(*words, person=person)
        took: dict[str, float] = {}

        def ended() -> bool:
            over = [word for word, process in begun.items() if process.poll() is not None]
            took.update((word, time.monotonic() - at) for word in over if word not in took)
            return len(took) == len(begun)

        bench.await_(ended, "every command returns", max(limit for _, _, limit in COMMANDS.values()) + MARGIN)
        late = {word: seconds for word, seconds in took.items() if seconds > COMMANDS[word][2] + MARGIN}
        assert late == {}
        said = {word: "".join(process.communicate(timeout=20)) for word, process in begun.items()}
        # The other worker has ended its rank meanwhile, whether it was told to stop or that the paused one is lost.
        bench.await_clean(0)
    codes = {word: process.returncode for word, process in begun.items()}
    # Whoever looks at the run may learn that it has failed meanwhile.
    assert all(code in ((1, 4) if word in SEEING else (4,)) for word, code in codes.items()), (codes, said)
    assert [word for word, text in said.items() if "pod-w1" not in text or "Traceback" in text] == []
    assert "FAIL  ssh and the launcher answer: failed on pod-w1" in said["doctor"].splitlines()
    for index in BOTH:
        bench.await_clean(index)
    assert bench.record(0, "under-way")["state"] == "stopped"
    # Whichever comes first there: its supervisor learns how long it slept, or of the stop from before worker 0 gave it
    # up, or systemd's watchdog does.
    record = bench.record(1, "under-way")
    assert re.search("lost contact|watchdog|^stopped by ada$", record["reason"])
    if record["reason"] == "stopped by ada":
        assert record["intent"]["by"] == "ada"


def test_twelve_followers_of_one_worker_see_every_line(bench: Bench) -> None:
    """More than the ten sessions that sshd lets one connection have."""
    script = "n=0; until [ -e $TPU_OPS_RUN_DIR/end ]; do n=$((n + 1)); echo line $n; sleep 0.2; done"
    bench.started("sh", "-c", script, name="popular")
    followers = [bench.popen("logs", "popular", "--follow") for _ in range(12)]
    for follower in followers:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "[0] line 1\n"
    for index in BOTH:
        bench.inside(index, "touch /var/lib/tpu_ops/runs/popular/files/end")
    # Each has read its first line, and with it more than that.
    told = [follower.stdout.read() for follower in followers if follower.stdout is not None]
    assert [follower.wait(20) for follower in followers] == [0] * 12
    lines = lines_of(bench.tpu_ops("logs", "popular").stdout, 0)
    assert lines == [f"line {number}" for number in range(1, len(lines) + 1)]
    assert [lines_of(out, 0) for out in told] == [lines[1:]] * 12
    bench.clean()


def test_a_killed_stop_leaves_no_helper_and_the_run_is_ended_all_the_same(bench: Bench) -> None:
    bench.started("sh", "-c", "trap '' TERM; while :; do sleep 1; done", name="tough")
    stopper = bench.popen("stop", "tough", "--grace", f"{GRACE}")
    bench.await_(lambda: all(bench.helpers(index) for index in BOTH), "a stop")
    bench.await_(lambda: bench.record(0, "tough")["state"] == "ending", "the end")
    stopper.kill()
    stopper.communicate(timeout=20)
    bench.await_(lambda: not any(map(bench.helpers, BOTH)), "no helper", 10)
    assert bench.record(0, "tough")["state"] == "ending", "the helpers went before the run did"
    for index in BOTH:
        bench.await_clean(index)
        record = bench.record(index, "tough")
        assert record["intent"]["by"] == "ada"
        assert record["ended"] - record["intent"]["at"] < GRACE + ENDING
    assert json.loads(bench.tpu_ops("status", "tough", "--json").stdout)[0]["state"] == "stopped"
