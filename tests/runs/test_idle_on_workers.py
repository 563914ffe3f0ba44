"""Which nodes are idle, asked of real workers."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.runs.conftest import BOTH
from tests.support.runs import Bench

pytestmark = pytest.mark.lab


def verdict(bench: Bench, duration: str) -> Any:
    done = bench.tpu_ops("list", "--idle", duration, "--cached", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return found


def test_a_node_is_idle_once_holder_run_and_login_are_old(bench: Bench) -> None:
    for index in BOTH:
        # Logins are recorded if this file exists, as on TPU VMs.
        bench.inside(index, "install -m 0664 -g utmp /dev/null /var/log/wtmp; rm -f /var/log/wtmp.1")
    bench.hold(1, "bob")
    found = verdict(bench, "0.001s")
    assert (found["use"], found["sign"].partition(":")[0]) == ("used", "process of bob on a chip")
    bench.tpu_ops("unlock", "pod", "--yes", person="bob")

    bench.started("sleep", "600", name="awake")
    assert (verdict(bench, "0.001s")["use"], verdict(bench, "0.001s")["sign"]) == ("used", "run awake of ada")
    assert bench.tpu_ops("stop", "awake").returncode == 0
    found = verdict(bench, "1h")
    assert (found["use"], found["sign"]) == ("used", "run awake of ada")
    assert (verdict(bench, "0.001s")["use"], verdict(bench, "0.001s")["sign"]) == ("idle", "run awake of ada")

    command = ["ssh", "-tt", "-F", str(bench.ssh_config()), "pod-w1", "true"]
    done = subprocess.run(command, env=bench.environ(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = verdict(bench, "1h")
    assert (found["use"], found["sign"].partition(" (")[0]) == ("used", "login of ada")
    bench.inside(0, "rm /var/log/wtmp")
    found = verdict(bench, "0.001s")
    assert (found["use"], found["reason"]) == ("unknown", "pod-w0: it keeps no record of logins (/var/log/wtmp)")
