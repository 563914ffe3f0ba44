"""The real gcloud, unmodified, with void credentials and a configuration directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.lab_api import LabApi
from tpu_ops.lab.api.records import by_number

pytestmark = pytest.mark.gcloud

Run = Callable[..., subprocess.CompletedProcess[str]]
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabApi]:
    """An API process for all gcloud tests."""
    found = LabApi(tmp_path_factory.mktemp("lab") / "state.json")
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def gcloud(api: LabApi, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run gcloud against the API and return what it said; ``ok=False`` where it is to fail."""
    assert shutil.which("gcloud"), "gcloud is not installed; leave these tests out with -m 'not gcloud'"
    home = tmp_path_factory.mktemp("gcloud")
    environment = os.environ | {
        "CLOUDSDK_CONFIG": str(home),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{api.rest}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{api.rest}/compute/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1",
        "CLOUDSDK_CORE_PROJECT": "lab",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
        "CLOUDSDK_COMPUTE_ZONE": "us-central2-b",
        "GOOGLE_APPLICATION_CREDENTIALS": str(home / "void.json"),
    }

    def run(*words: str, ok: bool = True, alpha: bool = False, group: str = "tpus") -> subprocess.CompletedProcess[str]:
        command = ["gcloud", *(["alpha"] if alpha else []), "compute", group, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert (done.returncode == 0) is ok, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done

    return run


def shown(run: Run, *words: str, **how: Any) -> Any:
    """Return a command's result as data."""
    return json.loads(run(*words, "--format=json", **how).stdout)


def test_zones_accelerator_types_and_runtime_versions_are_offered(gcloud: Run) -> None:
    assert "us-central2-b" in [entry["locationId"] for entry in shown(gcloud, "locations", "list")]
    assert "v4-32" in [entry["type"] for entry in shown(gcloud, "accelerator-types", "list")]
    assert "v4-32" in [entry["type"] for entry in shown(gcloud, "tpu-vm", "accelerator-types", "list")]
    assert "tpu-ubuntu2204-base" in [entry["version"] for entry in shown(gcloud, "tpu-vm", "versions", "list")]
    one = shown(gcloud, "tpu-vm", "accelerator-types", "describe", "v4-16", alpha=True)
    assert one["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x2"}]


def test_a_node_from_create_to_delete(gcloud: Run) -> None:
    kind = ("--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base")
    said = gcloud("tpu-vm", "create", "pod", *kind, "--spot", "--labels=team=x", "--metadata=a=b")
    assert "Created tpu [pod]" in said.stderr
    node = shown(gcloud, "tpu-vm", "describe", "pod")
    assert (node["state"], node["apiVersion"], node["schedulingConfig"]) == ("READY", "V2", {"spot": True})
    assert (node["labels"], node["metadata"], len(node["networkEndpoints"])) == ({"team": "x"}, {"a": "b"}, 4)
    assert shown(gcloud, "tpu-vm", "list") == [node]
    assert shown(gcloud, "tpu-vm", "list", "--zone=-") == [node]

    assert "ALREADY_EXISTS" in gcloud("tpu-vm", "create", "pod", *kind, ok=False).stderr
    gcloud("tpu-vm", "update", "pod", "--update-labels=more=y", "--add-tags=t")
    node = shown(gcloud, "tpu-vm", "describe", "pod")
    assert (node["labels"], node["tags"]) == ({"team": "x", "more": "y"}, ["t"])
    gcloud("tpu-vm", "stop", "pod")
    assert shown(gcloud, "tpu-vm", "describe", "pod")["state"] == "STOPPED"
    assert "FAILED_PRECONDITION" in gcloud("tpu-vm", "stop", "pod", ok=False).stderr
    gcloud("tpu-vm", "start", "pod")
    attributes = gcloud("tpu-vm", "get-guest-attributes", "pod", "--format=value(key,worker_id)", alpha=True)
    published = [line.split() for line in attributes.stdout.splitlines()]
    assert sorted(published) == sorted([key, str(index)] for key in ("hostname", "ssh-ed25519") for index in range(4))
    assert "Deleted tpu [pod]" in gcloud("tpu-vm", "delete", "pod").stderr
    assert "NOT_FOUND" in gcloud("tpu-vm", "describe", "pod", ok=False).stderr


def test_alpha_maintenance_changes_the_addresses(gcloud: Run) -> None:
    gcloud("tpu-vm", "create", "mine", "--type=v4", "--topology=2x2x2", "--version=tpu-ubuntu2204-base", alpha=True)
    before = shown(gcloud, "tpu-vm", "list", alpha=True)[0]
    assert before["acceleratorType"] == "v4-16"
    gcloud("tpu-vm", "simulate-maintenance-event", "mine", "--workers=1", alpha=True)
    after = shown(gcloud, "tpu-vm", "describe", "mine", alpha=True)
    assert after["state"] == "READY"
    addresses = [
        {endpoint["accessConfig"]["externalIp"] for endpoint in node["networkEndpoints"]} for node in (before, after)
    ]
    assert not addresses[0] & addresses[1]
    gcloud("tpu-vm", "delete", "mine", alpha=True)


def test_create_without_waiting(gcloud: Run, api: LabApi) -> None:
    kind = ("--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base", "--internal-ips")
    said = gcloud("tpu-vm", "create", "later", *kind, "--async")
    operation = said.stderr.split("[projects/")[1].split("]")[0]
    assert api.call("POST", f"v2/projects/{operation}:wait", {})[1]["done"] is True
    assert "accessConfig" not in api.node("later")["networkEndpoints"][0]


def test_a_disk_from_create_to_delete(gcloud: Run, api: LabApi) -> None:
    source = "projects/lab/zones/us-central2-b/disks/data"
    kind = ("--zone=us-central2-b", "--size=10GB", "--type=pd-balanced")
    assert "Created [" in gcloud("create", "data", *kind, group="disks").stderr
    assert "already exists" in gcloud("create", "data", *kind, ok=False, group="disks").stderr
    (disk,) = shown(gcloud, "list", group="disks")
    assert (disk["name"], disk["sizeGb"], disk["type"].rpartition("/")[2]) == ("data", "10", "pd-balanced")
    api.create("reader")
    gcloud("tpu-vm", "attach-disk", "reader", f"--disk={source}", "--mode=read-only", alpha=True)
    assert api.node("reader")["dataDisks"] == [{"sourceDisk": source, "mode": "READ_ONLY"}]
    used = gcloud("delete", "data", "--zone=us-central2-b", ok=False, group="disks")
    assert "already being used by" in used.stderr
    gcloud("tpu-vm", "detach-disk", "reader", f"--disk={source}", alpha=True)
    assert "Deleted [" in gcloud("delete", "data", "--zone=us-central2-b", group="disks").stderr
    assert shown(gcloud, "list", group="disks") == []


@pytest.mark.parametrize("alpha", [False, True])
def test_a_queued_resource(gcloud: Run, api: LabApi, alpha: bool) -> None:
    name = "qa" if alpha else "qg"
    kind = ("--accelerator-type=v4-8", "--runtime-version=tpu-ubuntu2204-base", "--spot")
    gcloud("queued-resources", "create", name, "--node-count=2", f"--node-prefix={name}n", *kind, alpha=alpha)
    deadline = time.monotonic() + TIMEOUT
    path = f"v2/projects/lab/locations/us-central2-b/queuedResources/{name}"
    while api.call("GET", path)[1]["state"]["state"] != "ACTIVE":
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls until the deadline
    (listed,) = shown(gcloud, "queued-resources", "list", alpha=alpha)
    params = "multiNodeParams" if alpha else "multisliceParams"
    assert (listed["state"]["state"], listed["tpu"]["nodeSpec"][0][params]["nodeCount"]) == ("ACTIVE", 2)
    assert api.node(f"{name}n-1")["queuedResource"] == by_number(path.removeprefix("v2/"))
    assert "set force" in gcloud("queued-resources", "delete", name, ok=False, alpha=alpha).stderr
    gcloud("queued-resources", "delete", name, "--force", alpha=alpha)
    assert shown(gcloud, "queued-resources", "list", alpha=alpha) == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("tpu-vm", "list", "--project=no"), "PERMISSION_DENIED"),
        (("tpu-vm", "list", "--zone=mars"), "PERMISSION_DENIED"),
        (("tpu-vm", "create", "n", "--accelerator-type=v5p-8", "--version=tpu-vm-base"), "INVALID_ARGUMENT"),
        (("tpu-vm", "create", "n", "--accelerator-type=v4-8", "--version=win95"), "INVALID_ARGUMENT"),
    ],
)
def test_refusals_arrive_with_their_code(gcloud: Run, words: tuple[str, ...], code: str) -> None:
    assert code in gcloud(*words, ok=False).stderr


def test_a_stockout_and_a_full_quota_arrive_as_the_services_own(gcloud: Run, api: LabApi) -> None:
    node = ("--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base")
    capacity = {
        "stockouts": [{"zone": "us-central2-b", "type": "v4"}],
        "quotas": [{"zone": "us-central2-b", "generation": "v4", "spot": True, "chips": 0}],
    }
    assert api.call("POST", "lab/capacity", capacity)[0] == 200
    assert "There is no more capacity in the zone" in gcloud("tpu-vm", "create", "scarce", *node, ok=False).stderr
    names = [one["name"].rpartition("/")[2] for one in shown(gcloud, "tpu-vm", "list")]
    assert "scarce" not in names
    said = gcloud("tpu-vm", "create", "scarce", *node, "--spot", ok=False).stderr
    assert ("RESOURCE_EXHAUSTED" in said, "Limit: 0 in zone us-central2-b." in said) == (True, True), said
    assert api.call("POST", "lab/capacity", {"stockouts": [], "quotas": []})[0] == 200
    gcloud("tpu-vm", "create", "scarce", *node)
    gcloud("tpu-vm", "delete", "scarce")


def test_firewall_rules_and_the_metadata_of_a_project(gcloud: Run, api: LabApi) -> None:
    rules = {"group": "firewall-rules"}
    narrow = ("--allow=tcp:22", "--source-ranges=203.0.113.7/32")
    gcloud("create", "ssh", *narrow, **rules)
    (listed,) = shown(gcloud, "list", **rules)
    assert listed["allowed"] == [{"IPProtocol": "tcp", "ports": ["22"]}]
    assert (listed["sourceRanges"], listed["priority"], listed["direction"]) == (["203.0.113.7/32"], 1000, "INGRESS")
    assert "already exists" in gcloud("create", "ssh", *narrow, ok=False, **rules).stderr
    assert "CIDR" in gcloud("create", "odd", "--allow=tcp:22", "--source-ranges=10.0.0.1/8", ok=False, **rules).stderr
    said = gcloud("create", "other", "--network=nope", *narrow, ok=False, **rules).stderr
    assert "global/networks/nope' was not found" in said
    gcloud("update", "ssh", "--source-ranges=198.51.100.0/24", **rules)
    assert shown(gcloud, "describe", "ssh", **rules)["sourceRanges"] == ["198.51.100.0/24"]
    gcloud("delete", "ssh", **rules)
    assert shown(gcloud, "list", **rules) == []

    project = {"group": "project-info"}
    gcloud("add-metadata", "--metadata=a=b,c=d", **project)
    gcloud("remove-metadata", "--keys=c", **project)
    metadata = shown(gcloud, "describe", **project)["commonInstanceMetadata"]
    assert metadata["items"] == [{"key": "a", "value": "b"}]
    stale = api.call("POST", "compute/v1/projects/lab/setCommonInstanceMetadata", {"items": [], "fingerprint": "bGFi"})
    assert (stale[0], stale[1]["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
