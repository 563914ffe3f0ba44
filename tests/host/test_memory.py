"""A rank counts as out of memory if the kernel has just killed a process of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.alone import live
from tpu_ops.host import proc, supervise


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(
    ("script", "tick", "reason"),
    [
        ("touch {kill}; sleep 1; exit 7", 0.1, "exit code 7"),
        ("sleep 1; touch {kill}; sleep 0.2; exit 7", 0.1, "exit code 7: out of memory"),
        ("touch {kill}; exit 7", 60, "exit code 7: out of memory"),
        ("exit 7", 60, "exit code 7"),
    ],
    ids=["of long ago", "of just now", "that is seen with the end", "none"],
)
def test_a_kill_of_the_kernel_explains_an_end_that_follows_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, tick: float, reason: str
) -> None:
    kill = tmp_path / "killed"
    monkeypatch.setattr(proc, "oom_kills", lambda: int(kill.exists()))
    monkeypatch.setattr(supervise, "chips_after", lambda _: {"holders": []})
    monkeypatch.setattr(supervise, "_TICK", tick)
    monkeypatch.setattr(supervise, "_OOM_SPAN", 0.6, raising=False)
    record, _ = live(tmp_path, script.format(kill=kill))
    assert record["reason"] == reason
