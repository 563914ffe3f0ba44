"""What `ansible-inventory --list` says of a fleet in which everything occurs, against a committed file.

Where a change is wanted: delete the file, run this test twice, and read the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import FleetDir, fleet_dir
from tests.support.inventory import HOSTILE
from tests.support.lab_api import LabApi
from tpu_ops.config import STATES
from tpu_ops.lab.api.fleet_file import write_fleet

GOLDEN = Path(__file__).parent / "golden" / "mixed.json"
US, WEST = "us-central2-b", "us-west4-a"
DISK = {"sourceDisk": f"projects/lab0/zones/{US}/disks/data", "mode": "READ_ONLY"}
SLICE = {"acceleratorType": "v4-16", "multisliceNode": True}
SLICE["queuedResource"] = f"projects/lab0/locations/{US}/queuedResources/big.one"


def node(name: str, zone: str = US, project: str = "lab0") -> str:
    """Return the full name of a node."""
    return f"projects/{project}/locations/{zone}/nodes/{name}"


NODES: dict[str, dict[str, Any]] = {
    node("solo"): {"acceleratorType": "v4-8", "labels": {"team": "vision"}},
    node("pod"): {"acceleratorType": "v4-32", "dataDisks": [DISK], "labels": {"evil": HOSTILE}},
    node("lite", WEST): {
        "acceleratorType": "v5litepod-16",
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "schedulingConfig": {"spot": True},
        "serviceAccount": {"email": "trainer@lab0.iam.gserviceaccount.com"},
    },
    node("reserved"): {"acceleratorType": "v4-8", "schedulingConfig": {"reserved": True}},
    node("preemptible", "us-central1-a"): {"acceleratorType": "v3-8", "schedulingConfig": {"preemptible": True}},
    # One name in two zones, and one in two zones and two projects.
    node("twin"): {"acceleratorType": "v4-8"},
    node("twin", WEST): {"acceleratorType": "v5litepod-8"},
    node("triplet"): {"acceleratorType": "v4-8"},
    node("triplet", WEST): {"acceleratorType": "v5litepod-1"},
    node("triplet", US, "other0"): {"acceleratorType": "v4-8"},
    # Two names that fall on one group.
    node("a-b", US, "other0"): {"acceleratorType": "v4-8"},
    node("a_b", US, "other0"): {"acceleratorType": "v4-8"},
    node("inside"): {"acceleratorType": "v4-16", "networkConfig": {}},
    node("big-0"): SLICE,
    node("big-1"): SLICE,
    # One that is being created has no workers yet.
    **{node(f"is-{state.lower()}"): {"acceleratorType": "v4-8", "state": state} for state in STATES},
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabApi]:
    """An API that serves this fleet and nothing else."""
    state = tmp_path_factory.mktemp("golden") / "state.json"
    write_fleet(state, NODES)
    api = LabApi(state, projects="lab0,other0")
    api.start()
    yield api
    api.close()


def stable(text: str, fleet: FleetDir) -> Any:
    """Return a listing with what differs from run to run replaced: ids, addresses, paths, times."""
    names = {}
    for host, found in json.loads(text)["_meta"]["hostvars"].items():
        names[found["tpu_node_id"]] = f"ID-{found['tpu_node_label']}"
        names |= {found[f"tpu_{kind}_ip"]: f"{kind.upper()}-{host}" for kind in ("internal", "external")}
    text = text.replace(str(fleet.settings().state_dir), "STATE").replace(str(fleet.path.parent), "HOME")
    text = re.sub(r'(ControlPath=)[^ "]*', r"\1MUX", text)
    # The person who runs the tests may have some for all hosts.
    text = re.sub(r' -o \'?Identity(?:Agent|File)=\\"[^"]*\\"\'?', "", text)
    text = re.sub(r'("tpu_create_time": )"\d{4}-\d\d-\d\dT[\d:.]+Z"', r'\1"TIME"', text)
    volatile = "|".join(re.escape(name) for name in names if name)
    return json.loads(re.sub(rf"\b({volatile})\b", lambda match: names[match[0]], text))


def test_a_fleet_in_which_everything_occurs_is_listed_as_before(api, tmp_path, monkeypatch):
    fleet = fleet_dir(api, tmp_path, monkeypatch)
    fleet.write(
        projects=["lab0", "other0"],
        states=list(STATES),
        connect_with=["external"],
        keyed_groups=[{"key": "tpu_labels", "prefix": "label"}],
        groups={"first_workers": "tpu_is_first_worker"},
        compose={"rank": "tpu_worker_index * 10"},
        strict=True,
    )
    done = fleet.ansible("ansible-inventory", "--list")
    assert done.returncode == 0, done.stderr
    warning = " ".join(done.stderr.split())
    assert "[WARNING]: 15 workers cannot be reached, each has no external address: inside-w[0-1]," in warning
    assert warning.count("WARNING") == 1
    found = stable(done.stdout, fleet)
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        pytest.fail(f"{GOLDEN.name} was written: read it, then run this again")
    assert found == json.loads(GOLDEN.read_text())
