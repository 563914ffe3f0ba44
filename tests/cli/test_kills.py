"""Every command that changes the cloud is killed with SIGKILL at its requests, and run again."""

from __future__ import annotations

import datetime as dt
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import ZONE, FleetDir, fleet_dir
from tests.support.kills import Commands, changing
from tests.support.lab_api import PATIENCE, LabApi
from tests.support.runs import FULL

pytestmark = [pytest.mark.signals, pytest.mark.usefixtures("silent")]
HOME = "203.0.113.7/32"
NODE = ("--type", "v4-8", "--zone", ZONE)
DISK = {"sizeGb": "10"}
SPEC = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
#: Conditions that end by themselves.
BETWEEN = {"CREATING", "DELETING", "STARTING", "STOPPING", "RESTARTING", "ACCEPTED", "PROVISIONING", "SUSPENDING"}
#: What differs between two nodes that were made by the same request.
OWN = ("id", "name", "createTime", "networkEndpoints", "ipAddress", "cidrBlock", "creationTimestamp", "selfLink")
DECLARED = "nodes:\n- {name: 'made,kept', type: v4-8, zones: [us-central2-b], labels: {a: b}}\n"
LINES = "\nlines:\n- 32 on-demand Cloud TPU v4 chips in zone us-central2-b\n"


def source(fleet: FleetDir, name: str) -> str:
    return f"projects/{fleet.project}/zones/{ZONE}/disks/{name}"


def blank(fleet: FleetDir, *names: str) -> None:
    for name in names:
        place = f"compute/v1/projects/{fleet.project}/zones/{ZONE}/disks"
        assert fleet.api.call("POST", place, {"name": name, **DISK})[0] == 200


def with_disk(fleet: FleetDir) -> None:
    blank(fleet, "data")
    fleet.create("pod")


def attached(fleet: FleetDir) -> None:
    blank(fleet, "data")
    fleet.create("pod", dataDisks=[{"sourceDisk": source(fleet, "data"), "mode": "READ_WRITE"}])


def queued(fleet: FleetDir, **policy: Any) -> None:
    tpu = {"nodeSpec": [{"parent": fleet.location(), "nodeId": "pod", "node": SPEC}]}
    place = f"v2/{fleet.location()}/queuedResources"
    fleet.api.done("POST", f"{place}?queuedResourceId=pod", {"tpu": tpu, **policy})


def failed(fleet: FleetDir) -> None:
    queued(fleet, queueingPolicy={"validUntilDuration": "0s"})


def stopped(fleet: FleetDir) -> None:
    fleet.create("pod")
    fleet.act("stop", "pod")


def declared(fleet: FleetDir) -> None:
    (fleet.path / "nodes.yml").write_text(DECLARED)
    fleet.create("extra")


def ended(fleet: FleetDir) -> None:
    fleet.create("pod")
    (fleet.path / "grant.yml").write_text(f"ends: {dt.datetime.now(dt.UTC).isoformat()}{LINES}")


def ruled(fleet: FleetDir) -> None:
    place = f"compute/v1/projects/{fleet.project}/global/firewalls"
    rule = {
        "name": "tpu-ops-ssh-default",
        "network": f"projects/{fleet.project}/global/networks/default",
        "direction": "INGRESS",
        "sourceRanges": ["198.51.100.1/32"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
    }
    assert fleet.api.call("POST", place, rule)[0] == 200


@dataclass(frozen=True)
class Case:
    """A command that changes something.

    Attributes:
        argv: Its arguments; PROJECT stands for the fleet's project.
        before: Makes what it needs.
        gone: What the same command says if it had been complete before, where that is an error.
    """

    argv: tuple[str, ...]
    before: Callable[[FleetDir], object] = lambda _: None
    gone: str = ""


CASES = {
    "create": Case(
        ("create", "pod", *NODE, "--metadata", "a=b", "--disk", "data:ro"), lambda fleet: blank(fleet, "data")
    ),
    "create of a set": Case(("create", "pod-[1-3]", *NODE)),
    "create --queued": Case(("create", "pod", *NODE, "--queued")),
    "create --queued of a set": Case(("create", "pod-[1-3]", *NODE, "--queued")),
    "apply": Case(("apply", "--yes", "--no-configure", "--prune"), declared),
    "delete": Case(("delete", "pod", "--yes"), lambda fleet: fleet.create("pod"), "no node is called 'pod'"),
    "delete of a queued node": Case(("delete", "pod", "--yes"), queued, "no node"),
    "delete --failed": Case(("delete", "--failed", "--yes"), failed),
    "node start": Case(("node", "start", "pod"), stopped),
    "node stop": Case(("node", "stop", "pod", "--yes"), lambda fleet: fleet.create("pod")),
    "node restart": Case(("node", "restart", "pod", "--yes"), lambda fleet: fleet.create("pod")),
    "disk create": Case(("disk", "create", "data", "--size", "10", "--zone", ZONE)),
    "disk attach": Case(("disk", "attach", "data", "pod"), with_disk),
    "disk detach": Case(("disk", "detach", "data", "pod", "--no-unmount"), attached),
    "disk delete": Case(
        ("disk", "delete", "data", "--yes"), lambda fleet: blank(fleet, "data"), "no disk is called 'data'"
    ),
    "keys push NODE": Case(("keys", "push", "kept")),
    "keys push PROJECT": Case(("keys", "push", "PROJECT")),
    "firewall": Case(("firewall", "ssh", "--source", HOME, "--yes")),
    "firewall --replace": Case(("firewall", "ssh", "--source", HOME, "--yes", "--replace"), ruled),
    "grant --delete-after-end": Case(("grant", "--delete-after-end"), ended),
    "bucket create": Case(("bucket", "create", "PROJECT-kills", "--region", "us-central2")),
}


@pytest.fixture
def silent(ssh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every connection to a worker fail at once: the API's nodes have no workers here."""
    monkeypatch.setenv("SSH_SAYS", "No route to host")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands in processes of their own."""
    made = Commands(tmp_path_factory.mktemp("commands"))
    yield made
    made.close()


def found(fleet: FleetDir) -> dict[str, Any]:
    """Return what is in the project once no change is under way; without what differs between two equal projects."""
    tpu, compute = f"v2/{fleet.location()}", f"compute/v1/projects/{fleet.project}"
    deadline = time.monotonic() + PATIENCE
    while True:
        nodes = fleet.api.call("GET", f"{tpu}/nodes")[1].get("nodes", [])
        queues = fleet.api.call("GET", f"{tpu}/queuedResources")[1].get("queuedResources", [])
        states = {one["state"] for one in nodes} | {one["state"]["state"] for one in queues}
        if not states & BETWEEN:
            break
        assert time.monotonic() < deadline, states
        time.sleep(0.01)  # polls until the deadline
    disks = fleet.api.call("GET", f"{compute}/zones/{ZONE}/disks")[1].get("items", [])
    rules = fleet.api.call("GET", f"{compute}/global/firewalls")[1].get("items", [])
    buckets = fleet.api.call("GET", f"storage/v1/b?project={fleet.project}")[1].get("items", [])
    return {
        "nodes": {one["name"].rpartition("/")[2]: _plain(fleet, one) for one in nodes},
        "queued resources": {one["name"].rpartition("/")[2]: one["state"]["state"] for one in queues},
        "disks": sorted((one["name"], one["sizeGb"]) for one in disks),
        "rules": {one["name"]: (one["sourceRanges"], one["allowed"]) for one in rules},
        "metadata": fleet.api.call("GET", compute)[1]["commonInstanceMetadata"].get("items", []),
        "buckets": [(one["name"].replace(fleet.project, ""), one["location"]) for one in buckets],
    }


def _plain(fleet: FleetDir, node: dict[str, Any]) -> str:
    """Return a node as text, without what another node of the same request would not have."""
    kept = {key: value for key, value in node.items() if key not in OWN}
    # The API names a queued resource by the number of its project.
    return re.sub(r"projects/[0-9]+/", "projects/PROJECT/", str(kept).replace(fleet.project, "PROJECT"))


@dataclass(frozen=True)
class Kept:
    """Projects that are equal at first, and commands in them."""

    api: LabApi
    commands: Commands
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def fleet(self, case: Case, name: str) -> FleetDir:
        """Return a new fleet in which the command has something to do."""
        made = fleet_dir(self.api, self.folder / name, self.monkeypatch)
        blank(made, "others")
        disks = [{"sourceDisk": source(made, "others"), "mode": "READ_WRITE"}]
        made.create("kept", dataDisks=disks, metadata={"ssh-keys": "bob:key of bob", "theirs": "x"})
        place = f"compute/v1/projects/{made.project}"
        mark = self.api.call("GET", place)[1]["commonInstanceMetadata"]["fingerprint"]
        items = [{"key": "ssh-keys", "value": "bob:key of bob"}, {"key": "theirs", "value": "x"}]
        body = {"fingerprint": mark, "items": items}
        assert self.api.call("POST", f"{place}/setCommonInstanceMetadata", body)[0] == 200
        case.before(made)
        found(made)
        return made

    def run(self, fleet: FleetDir, case: Case, **kill: Any) -> Any:
        """Run the command in a fleet."""
        argv = [word.replace("PROJECT", fleet.project) for word in case.argv]
        environ = {
            **os.environ,
            "TPU_OPS_STATE": str(fleet.path.parent / "state"),
            "TPU_OPS_REST_ENDPOINT": self.api.rest,
            "STORAGE_EMULATOR_HOST": self.api.rest,
        }
        return self.commands.run(argv, environ, **kill)


@pytest.fixture
def projects(fleet_api: LabApi, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Makes equal projects and runs commands in them."""
    return Kept(fleet_api, commands, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_the_same_command_completes_what_sigkill_interrupted(
    projects: Kept, name: str, record_property: Callable[[str, object], None]
) -> None:
    case, wrong = CASES[name], list[str]()
    fleet = projects.fleet(case, "whole")
    whole = projects.run(fleet, case)
    assert whole.code == 0, whole.output
    wanted, ends = found(fleet), 0
    for at, sent in points(whole.steps):
        fleet = projects.fleet(case, f"{at}-{sent}")
        first = projects.run(fleet, case, at=at, sent=sent)
        if first.code == 0:
            # There was less to wait for than before.
            continue
        assert first.code == -signal.SIGKILL, first.output
        again, ends = projects.run(fleet, case), ends + 1
        complete = again.code == 0 or (case.gone != "" and case.gone in again.output)
        result = found(fleet)
        good = complete and result == wanted
        record_property("kill", (name, at, first.killed, "after" if sent else "before", good))
        if not good:
            wrong.append(f"killed at {at}, {first.killed}: {again.code} {again.output}\n{result}\n{wanted}")
    assert not wrong, "\n".join(wrong)
    assert ends


def points(steps: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the number of a request, and whether the command is killed after its answer; for each end of a command.

    Numbers of requests after whose answer a command is killed count only requests that change something. Between
    these, nothing is different in the cloud, so that only `make bench` kills at the others.
    """
    every = range(1, len(steps) + 1 if FULL else 1)
    changes = range(1, len([step for step in steps if changing(step)]) + 1)
    return [(at, False) for at in every] + [(at, True) for at in changes]
