"""How runs on two real workers begin: who wins, who is missing, who is not let in. Absence is read past tpu_ops."""

from __future__ import annotations

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.runs.conftest import BOTH
from tests.runs.test_on_workers import ask, bare_spec
from tests.support.runs import Bench

pytestmark = pytest.mark.lab

#: Puts a launcher in the place of worker 1's that hangs when it is asked to start a run, and the old one back.
HANG = r"""
cd /usr/local/sbin && mv tpu-host tpu-host.real && cat >tpu-host <<'END' && chmod 755 tpu-host
#!/bin/sh
read -r line
case $line in *'"action": "start"'*) touch /run/asked; exec sleep 61 ;; esac
printf '%s\n' "$line" | /usr/local/sbin/tpu-host.real
END
"""
UNHANG = "cd /usr/local/sbin && mv tpu-host.real tpu-host; rm -f /run/asked; pkill -x -f 'sleep 61'"
#: The same with one that holds the request back until it is let go, and then carries it out.
HOLD = HANG.replace(
    "exec sleep 61",
    """until [ -e /run/go ]; do sleep 0.05; done
    line=$(printf '%s' "$line" | sed 's/"attended": true/"attended": false/')""",
)
KEY = "5a" * 32
BARRIER = 15


def spec_of(bench: Bench, rank: int, run_id: str, port: int = 0, **changes: Any) -> dict[str, object]:
    """Return the spec of one of two ranks as a controller sends it."""
    peers = bench.specs[0].peers
    net = {"address": peers[rank], "hub": peers[0], "port": port, "key": KEY}
    own: dict[str, Any] = {"rank": rank, "world_size": 2, "worker": f"pod-w{rank}", "workers": ["pod-w0", "pod-w1"]}
    return bare_spec(run_id, **{**own, "barrier": BARRIER, "argv": ["sleep", "600"], "net": net, **changes})


def refused(bench: Bench, index: int, run_id: str) -> dict[str, Any]:
    """Return the record of a run that did not begin, and see that nothing of it is left."""
    bench.await_clean(index)
    record = bench.record(index, run_id)
    assert (record["state"], record["exit"]) == ("refused", None)
    assert bench.inside(index, f"cat /var/lib/tpu_ops/runs/{run_id}/log/* 2>/dev/null", check=False) == ""
    return record


def test_a_worker_that_is_too_late_is_named(bench: Bench) -> None:
    """The launcher of worker 1 hangs at `start` until the others have given up: the run begins nowhere."""
    try:
        bench.inside(1, HANG)
        starter = bench.popen("train", "pod", "--barrier", "5", "--name", "late", "--", "true")
        bench.await_(lambda: bench.inside(1, "ls /run/asked", check=False), "worker 1 is asked to start")
        record = refused(bench, 0, "late")
        assert starter.poll() is None
    finally:
        bench.inside(1, UNHANG, check=False)
    _, said = starter.communicate(timeout=60)
    assert starter.returncode == 1, said
    assert "pod-w1" in said
    assert record["reason"].partition(";")[0] == "not ready within 5 s: rank 1 (pod-w1)"
    assert bench.tpu_ops("train", "pod", "--", "true").returncode == 0, "the pod is free again"


def test_a_stop_at_the_barrier_is_told_to_who_started_the_run(bench: Bench) -> None:
    try:
        bench.inside(1, HOLD)
        starter = bench.popen("train", "pod", "--name", "halted", "--", "true")
        bench.await_(lambda: bench.inside(1, "ls /run/asked", check=False), "worker 1 is asked to start")
        ended = bench.tpu_ops("stop", "halted", "--grace", "1")
        bench.inside(1, "touch /run/go")
        _, said = starter.communicate(timeout=60)
    finally:
        bench.inside(1, UNHANG + "; rm -f /run/go", check=False)
    assert ended.returncode == 0, ended.stderr
    assert (starter.returncode, "error: the run was not started: run halted was stopped by ada" in said) == (1, True)
    assert "firewall" not in said
    refused(bench, 0, "halted")
    bench.await_clean(1)


def test_a_rank_that_finds_no_hub_ends_at_once_by_itself(bench: Bench) -> None:
    answer = ask(bench, "ada", "start", index=1, spec=spec_of(bench, 1, "lonely", port=8519, barrier=600))
    assert "rank 0 (pod-w0" in answer["error"]["message"]
    assert answer["error"]["blamed"] == []
    assert "the run was given up" in refused(bench, 1, "lonely")["reason"]


def test_only_the_internal_network_reaches_those_who_wait(bench: Bench) -> None:
    """Read past tpu_ops: what listens beyond what listened before does so at the internal address alone."""
    listening = "ss -Hltn | awk '{print $4}' | sort -u"
    before = set(bench.inside(0, listening).split())
    port = ask(bench, "ada", "start", spec=spec_of(bench, 0, "inward"), reserve=True)["record"]["port"]
    during = set(bench.inside(0, listening).split())
    assert during - before == {f"{bench.specs[0].peers[0]}:{number}" for number in (port, 8482)}
    ask(bench, "ada", "stop", run_id="inward", grace=1)
    assert set(bench.inside(0, listening).split()) == before
    refused(bench, 0, "inward")


def test_a_supervisor_that_is_killed_at_the_barrier_is_no_started_run(bench: Bench) -> None:
    with ThreadPoolExecutor() as pool:
        # A third rank that never comes keeps the two waiting.
        team: dict[str, Any] = {"barrier": 60, "world_size": 3, "workers": ["pod-w0", "pod-w1", "pod-w2"]}
        port = ask(bench, "ada", "start", spec=spec_of(bench, 0, "doomed", **team), reserve=True)["record"]["port"]
        answer = pool.submit(ask, bench, "ada", "start", 1, spec=spec_of(bench, 1, "doomed", port, **team))
        active = "systemctl is-active tpu-run.service"
        bench.await_(lambda: bench.inside(1, active, check=False).strip() == "active", "the unit to wait", 60)
        bench.inside(1, f"kill -KILL {bench.record(1, 'doomed')['supervisor']['pid']}")
        error = answer.result(timeout=60)["error"]
    assert "the supervisor ended" in error["message"]
    assert "blamed" not in error, "it is this worker's own fault"
    bench.await_clean(1)
    assert bench.record(1, "doomed")["began"] is None
    assert refused(bench, 0, "doomed")["blamed"] == [1]


def test_a_rank_that_cannot_start_is_told_to_the_others(bench: Bench) -> None:
    port = ask(bench, "ada", "start", spec=spec_of(bench, 0, "split", barrier=60), reserve=True)["record"]["port"]
    wrong = spec_of(bench, 1, "split", port, barrier=60, argv=["no-such-program"])
    answer = ask(bench, "ada", "start", index=1, spec=wrong)
    assert answer["error"]["blamed"] == [1]
    reason = "rank 1 (pod-w1): no-such-program is not on PATH"
    assert [refused(bench, index, "split")["reason"].startswith(reason) for index in BOTH] == [True, True]


def test_a_starter_that_is_interrupted_gives_the_pod_back(bench: Bench) -> None:
    try:
        bench.inside(1, HANG)
        starter = bench.popen("train", "pod", "--barrier", "60", "--name", "thought-better", "--", "true")
        bench.await_(lambda: bench.inside(1, "ls /run/asked", check=False), "worker 1 to be asked", 60)
        starter.send_signal(signal.SIGINT)
        _, said = starter.communicate(timeout=60)
    finally:
        bench.inside(1, UNHANG, check=False)
    assert starter.returncode == 130, said
    assert "its start was interrupted" in refused(bench, 0, "thought-better")["reason"]


#: Argument: address, port, path of what to send. Opens many sockets, sends that on each, and holds them open.
STRANGER = """
import socket, sys, time
data = bytes.fromhex(sys.argv[3])
crowd = []
for _ in range(150):
    try:
        crowd.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5))
        crowd[-1].sendall(data)
    except OSError:
        pass
print(len(crowd), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("slow", b"\0\0"),
        ("huge", b"\x80\0\0\0" + b"x" * 4096),
        ("attempt", b"\0\0\0\x64" + b'{"version": 1, "run_id": "attempt", "attempt": 2, "nonce": "'.ljust(100, b"0")),
    ],
    ids=["slow", "2 GB frame", "wrong attempt"],
)
def test_strangers_on_the_barriers_port_keep_nobody_out(bench: Bench, name: str, data: bytes) -> None:
    common: dict[str, Any] = {"barrier": 60, "argv": ["sh", "-c", "env; exec sleep 600"]}
    port = ask(bench, "ada", "start", spec=spec_of(bench, 0, name, **common), reserve=True)["record"]["port"]
    words = [STRANGER, bench.specs[0].peers[0], str(port), data.hex()]
    stranger = subprocess.Popen(
        [*bench.backend.engine.command, "exec", "--user", "bob", bench.container(1), "python3", "-c", *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stranger.stdout is not None
        assert int(stranger.stdout.readline()) > 100
        answer = ask(bench, "ada", "start", index=1, spec=spec_of(bench, 1, name, port, **common))
        assert answer["ok"], answer
        bench.await_log(1, name, "TPU_OPS_RANK=1")
        for index in BOTH:
            bench.await_state(index, name, "running")
            # The supervisor holds the key; nothing that anybody could read does.
            folder = f"/var/lib/tpu_ops/runs/{name}"
            where = f"systemctl show tpu-run.service; journalctl --no-pager; cat {folder}/record.json {folder}/log/*; "
            where += "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; grep -r 5a5a5a /run/tpu_ops /run/systemd"
            assert KEY not in bench.inside(index, f"({where}) 2>/dev/null", check=False)
            assert f":{port:04X} 00000000:0000 0A" not in bench.inside(index, "cat /proc/net/tcp"), "nobody listens"
    finally:
        bench.inside(1, "pkill -KILL -u bob python3", check=False)
        stranger.communicate(timeout=30)
    stopped = ask(bench, "ada", "stop", index=1, run_id=name, grace=1)
    assert stopped["record"]["state"] == "stopped"
    bench.await_clean(0)
    assert bench.record(0, name)["intent"]["by"] == "ada", "worker 1 alone was told"


def test_a_stop_reaches_a_worker_that_nobody_can_log_in_to(bench: Bench) -> None:
    bench.started("sleep", "600", name="cut-off")
    bench.inside(1, "systemctl stop ssh")
    subprocess.run(["ssh", "-F", str(bench.ssh_config()), "-O", "exit", "pod-w1"], capture_output=True, check=True)
    bench.inside(1, "pkill -u ada sshd", check=False)
    try:
        done = bench.tpu_ops("stop", "cut-off", "--grace", "1", "--json", timeout=180)
    finally:
        bench.inside(1, "systemctl start ssh")
    ranks = json.loads(done.stdout)[0]["ranks"]
    assert [rank["state"] for rank in ranks] == ["stopped", "unreachable"]
    bench.await_clean(1)
    assert bench.record(1, "cut-off")["intent"]["by"] == "ada"
