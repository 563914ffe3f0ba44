"""Reports and profiles of real workers. The profiler and jax.collect_profile are stand-ins: the workers have no JAX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.conftest import BOTH
from tests.support import profiler
from tests.support.runs import Bench

pytestmark = pytest.mark.lab

PLACE = "/home/bob/modules"


def test_a_run_is_profiled_and_reported_with_the_use_of_the_fleet(bench: Bench, tmp_path: Path) -> None:
    for index in BOTH:
        for name, text in {
            "jax/__init__.py": "",
            "jax/collect_profile.py": profiler.COLLECT,
            "program.py": Path(profiler.__file__).read_text(),
        }.items():
            bench.inside(
                index, f"install -D -m 0644 /dev/null {PLACE}/{name}; cat >{PLACE}/{name} <<'END'\n{text}\nEND"
            )
    options = ("--env", f"PYTHONPATH={PLACE}")
    bench.started("python", f"{PLACE}/program.py", "9999", name="seen", person="bob", options=options)
    for index in BOTH:
        bench.await_log(index, "seen", "ready")

    done = bench.tpu_ops("profile", "seen", str(tmp_path / "profiles"), "--seconds", "0.5", "--json", person="bob")
    assert done.returncode == 0, done.stderr
    (session,) = (tmp_path / "profiles" / "plugins" / "profile").iterdir()
    assert sorted(path.name for path in session.iterdir()) == ["pod-w0.xplane.pb", "pod-w1.xplane.pb"]
    assert (session / "pod-w1.xplane.pb").read_text() == "9999 500 cpu"
    assert [bench.inside(index, "ls /tmp | grep -c tpu_ops-profile || true").strip() for index in BOTH] == ["0", "0"]
    # An administrator may run commands as bob, ada may not.
    done = bench.tpu_ops("profile", "seen", "--rank", "1", "--seconds", "0.5", str(tmp_path / "tpus"), person="tpu")
    assert (done.returncode, [path.name for path in (tmp_path / "tpus").rglob("*.pb")]) == (0, ["pod-w1.xplane.pb"])
    assert bench.inside(1, "ls /tmp | grep -c tpu_ops-profile || true").strip() == "0"
    denied = bench.tpu_ops("profile", "pod", str(tmp_path / "adas"), "--seconds", "0.5")
    assert (denied.returncode, "ask bob" in denied.stderr) == (1, True), denied.stderr

    bench.inside(1, f"kill -KILL {bench.record(1, 'seen')['pid']}")
    bench.await_state(0, "seen", "stopped")
    page = tmp_path / "seen.html"
    done = bench.tpu_ops("report", "seen", "--html", str(page), person="bob")
    assert done.returncode == 0, done.stderr
    assert "rank 1 (pod-w1): killed by SIGKILL" in page.read_text()
    found = json.loads(bench.tpu_ops("report", "seen", "--json").stdout)
    assert (found["state"], found["person"], found["first"]) == ("failed", "bob", "rank 1 (pod-w1): killed by SIGKILL")
    assert [one["text"] for one in found["tails"]] == ["ready"]
    assert found["argv"][:2] == ["python", f"{PLACE}/program.py"]

    used = json.loads(bench.tpu_ops("report", "--cached", "--days", "1", "--json").stdout)
    assert {one["person"] for one in used["people"]} >= {"bob"}
    assert used["nodes"][0]["chip_hours"] > 0
