"""Commands in a cloud whose capacity is limited: `tpu_ops lab capacity` against a real API process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import failed
from tests.support.fleet import PROJECTS, ZONE, FleetDir, fleet_dir
from tests.support.lab_api import PATIENCE, LabApi
from tpu_ops.cli.main import main
from tpu_ops.cloud import creation
from tpu_ops.cloud.client import connect
from tpu_ops.cloud.creation import Anywhere, Created, CreationTerms, Order
from tpu_ops.cloud.wish import Wish
from tpu_ops.lab import instance, process

Command = Callable[..., tuple[int, str, str]]
NO_CAPACITY = f'There is no more capacity in the zone "{ZONE}"'


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabApi]:
    """One API process for all tests here: stockouts hit the projects of all tests."""
    made = LabApi(tmp_path_factory.mktemp("lab") / "state.json", seconds=0, projects=PROJECTS)
    made.start()
    yield made
    made.close()


@pytest.fixture
def fleet(api: LabApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: object) -> Iterator[FleetDir]:
    """A fleet in the cloud of the lab `default`; its workers cannot be reached, and its capacity is unlimited."""
    assert ssh
    monkeypatch.setenv("SSH_SAYS", "No route to host")
    lab = instance.instance()
    lab.directory.mkdir(parents=True)
    assert api._process
    pid = api._process.pid
    process.Record(pid, process.start_time(pid), api.grpc, api.rest).write(lab.process_file)
    yield fleet_dir(api, tmp_path, monkeypatch)
    parts: dict[str, object] = {"quotas": [], "stockouts": [], "preemption": {}}
    assert api.call("POST", "lab/capacity", parts)[0] == 200


@pytest.fixture
def limit(tpu_ops: Command) -> Callable[..., str]:
    """Runs `tpu_ops lab capacity` with options, and returns its output."""

    def run(*options: str) -> str:
        code, out, err = tpu_ops("lab", "capacity", *options)
        assert code == 0, err
        return out

    return run


def names(fleet: FleetDir, zone: str = ZONE, collection: str = "nodes") -> dict[str, str]:
    """Return the state of each node or queued resource in a zone."""
    found = fleet.api.call("GET", f"v2/{fleet.location(zone)}/{collection}")[1].get(collection, [])
    return {
        one["name"].rpartition("/")[2]: one["state"] if collection == "nodes" else one["state"]["state"]
        for one in found
    }


def waits(fleet: FleetDir, name: str, said: list[str], *, during: Callable[[], None]) -> Created:
    """Create a v4-8 as `create --until-capacity` does, with short pauses.

    Args:
        fleet: The fleet.
        name: Name of the node.
        said: Takes the messages.
        during: Called after each message.
    """
    wish = Wish(name, fleet.project, ZONE, "v4-8", "tpu-ubuntu2204-base")
    terms = CreationTerms("ada:ssh-ed25519 AAAA ada", wait=True, timeout=PATIENCE, patience=30, first_pause=0.05)

    def say(text: str) -> None:
        said.append(text)
        during()

    with connect(fleet.api.grpc, timeout=PATIENCE) as tpu:
        (done,) = creation.create_all(
            tpu, [Order(name, (wish,))], terms, claims=Anywhere(), say=say, progress=lambda _: lambda *_: None
        )
    return done


def test_a_stockout_ends_create_and_is_waited_out_with_exactly_one_node(
    fleet: FleetDir, tpu_ops: Command, limit: Callable[..., str]
) -> None:
    assert f"{ZONE}: no capacity for v4 for another " in limit("--stockout", f"{ZONE}:v4=1h")
    failed(tpu_ops("create", "a", "--type", "v4-8", "--zone", ZONE), 3, NO_CAPACITY, "--until-capacity")
    assert names(fleet) == {}

    def end_soon() -> None:
        if len(said) == 1:
            limit("--stockout", f"{ZONE}:v4=0.5s")

    said: list[str] = []
    done = waits(fleet, "a", said, during=end_soon)
    assert (done.outcome, names(fleet)) == ("created", {"a": "READY"})
    assert NO_CAPACITY in said[0]
    assert limit() == "everything else is unlimited\n"


def test_the_second_zone_takes_what_the_first_has_no_capacity_for(
    fleet: FleetDir, tpu_ops: Command, limit: Callable[..., str]
) -> None:
    limit("--stockout", "us-east5-a:v6e-4")
    code, _, err = tpu_ops("create", "a", "--type", "v6e-4", "--zone", "us-east5-a,us-east5-b")
    assert code == 0, err
    assert (names(fleet, "us-east5-a"), names(fleet, "us-east5-b")) == ({}, {"a": "READY"})
    code, _, err = tpu_ops("create", "b", "--type", "v6e-8", "--zone", "us-east5-a")
    assert code == 0, err


def test_a_full_quota_refuses_until_a_node_is_deleted(
    fleet: FleetDir, tpu_ops: Command, limit: Callable[..., str]
) -> None:
    limit("--quota", f"{ZONE}:v4=4", "--quota", f"{ZONE}:v4:spot=0")
    node = ("--type", "v4-8", "--zone", ZONE)
    assert tpu_ops("create", "a", *node)[0] == 0
    full = "Quota limit 'TPUV4sPodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone us-central2-b."
    failed(tpu_ops("create", "b", *node), 3, full, "RESOURCE_EXHAUSTED")
    # Waiting does not help where there is no quota at all: this ends at once.
    none = "'TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0"
    failed(tpu_ops("create", "b", *node, "--spot", "--until-capacity"), 3, none)
    fleet.create("theirs", project=fleet.second)
    used = json.loads(limit("--json"))["quotas"][0]["used"]
    assert (used[fleet.project], used[fleet.second]) == (4, 4)

    def delete() -> None:
        if "a" in names(fleet):
            fleet.act("delete", "a")

    done = waits(fleet, "b", [], during=delete)
    assert (done.outcome, names(fleet)) == ("created", {"b": "READY"})


def test_a_queued_resource_waits_for_capacity_and_uses_quota_meanwhile(
    fleet: FleetDir, tpu_ops: Command, limit: Callable[..., str]
) -> None:
    limit("--quota", f"{ZONE}:v4=4", "--stockout", ZONE)
    node = ("--type", "v4-8", "--zone", ZONE)
    code, _, err = tpu_ops("create", "q", *node, "--queued", "--no-wait")
    assert code == 0, err
    failed(tpu_ops("create", "r", *node, "--queued", "--no-wait"), 3, "Quota limit", "Limit: 4")
    failed(tpu_ops("create", "b", *node), 3, "Quota limit", "Limit: 4")
    deadline = time.monotonic() + PATIENCE
    while names(fleet, collection="queuedResources") != {"q": "WAITING_FOR_RESOURCES"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls until the deadline
    limit("--quota", f"{ZONE}:v4=8")
    assert names(fleet, collection="queuedResources") == {"q": "WAITING_FOR_RESOURCES"}, "a new quota ends no stockout"
    assert limit("--unlimited") == "everything else is unlimited\n"
    code, _, err = tpu_ops("create", "q", *node, "--queued")
    assert (code, names(fleet)) == (0, {"q": "READY"}), err
    assert names(fleet, collection="queuedResources") == {"q": "ACTIVE"}


def test_a_node_that_cannot_be_started_stays_stopped(
    fleet: FleetDir, tpu_ops: Command, limit: Callable[..., str]
) -> None:
    fleet.create("a")
    fleet.act("stop", "a")
    limit("--stockout", ZONE)
    failed(tpu_ops("node", "start", "a"), 3, NO_CAPACITY)
    assert names(fleet) == {"a": "STOPPED"}
    limit("--unlimited")
    assert tpu_ops("node", "start", "a")[0] == 0
    assert names(fleet) == {"a": "READY"}


def test_watch_brings_back_nodes_that_are_preempted_at_a_rate(fleet: FleetDir, limit: Callable[..., str]) -> None:
    (fleet.path / "nodes.yml").write_text(
        f"nodes: [{{name: dev, type: v4-8, spot: true, zones: [{ZONE}], keep: true}}]\n"
    )
    fleet.create("dev", schedulingConfig={"spot": True})
    limit("--preempt-per-hour", "3600", "--seed", "7")
    argv = [sys.executable, "-m", "tpu_ops.cli.main", "apply", "--watch", "0.1", "--no-configure"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stderr
            said: list[str] = []
            for line in watch.stderr:
                said.append(line)
                if "".join(said).count("node dev: make again") == 2:
                    break
            limit("--preempt-per-hour", "0")
            deadline = time.monotonic() + 3 * PATIENCE
            while names(fleet) != {"dev": "READY"}:
                assert time.monotonic() < deadline, "".join(said)
                time.sleep(0.05)  # polls until the deadline
            watch.send_signal(signal.SIGTERM)
            said += watch.communicate(timeout=30)[1].splitlines(keepends=True)
        finally:
            watch.kill()
    assert watch.returncode == 0, "".join(said)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--quota", "us-central2-b=32", "is not a quota: write it as in"),
        ("--stockout", "us-central2-b:v4=soon", "is not a duration"),
        ("--stockout", "", "is not a stockout: write it as in"),
    ],
)
def test_a_limit_of_another_form_is_a_usage_error(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["lab", "capacity", option, value])
    assert (code, words in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--stockout", "mars"), "'mars' is not a zone of the lab"),
        (("--preempt-per-hour", "nan"), "per_hour: nan must be between 0 and"),
    ],
)
def test_a_limit_that_the_cloud_does_not_know_is_refused(
    fleet: FleetDir, tpu_ops: Command, argv: tuple[str, ...], words: str
) -> None:
    assert fleet
    failed(tpu_ops("lab", "capacity", *argv), 3, words)
