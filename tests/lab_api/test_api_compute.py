"""Disks of Compute Engine over REST, as clients without a library call them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lab_api import LabApi

ZONE = "compute/v1/projects/lab/zones/us-central2-b"
SOURCE = "projects/lab/zones/us-central2-b/disks/data"


def insert(api: LabApi, name: str = "data", zone: str = ZONE, query: str = "", **fields: Any) -> tuple[int, Any]:
    return api.call("POST", f"{zone}/disks{query}", {"name": name, "sizeGb": "10", **fields})


def test_a_disk_from_insert_to_delete(lab_api: LabApi) -> None:
    status, operation = insert(lab_api, type=f"{ZONE}/diskTypes/pd-ssd", labels={"team": "x"})
    assert (status, operation["status"], operation["operationType"]) == (200, "RUNNING", "insert")
    path = f"{ZONE}/operations/{operation['name']}"
    assert lab_api.call("GET", path)[1]["status"] == lab_api.call("POST", f"{path}/wait", {})[1]["status"] == "DONE"
    lab_api.restart()
    disk = lab_api.call("GET", f"{ZONE}/disks/data")[1]
    assert (disk["sizeGb"], disk["type"].rpartition("/")[2], disk["labels"]) == ("10", "pd-ssd", {"team": "x"})
    assert lab_api.call("GET", f"{ZONE}/disks")[1]["items"] == [disk]
    lab_api.create("box", dataDisks=[{"sourceDisk": SOURCE, "mode": "READ_WRITE"}])
    assert len(lab_api.call("GET", f"{ZONE}/disks/data")[1]["users"]) == 1
    status, refused = lab_api.call("DELETE", f"{ZONE}/disks/data")
    assert (status, refused["error"]["errors"][0]["reason"]) == (400, "resourceInUseByAnotherResource")
    lab_api.done("DELETE", "v2/projects/lab/locations/us-central2-b/nodes/box")
    assert lab_api.call("DELETE", f"{ZONE}/disks/data")[0] == 200
    status, gone = lab_api.call("GET", f"{ZONE}/disks/data")
    assert (status, gone["error"]["errors"][0]["reason"]) == (404, "notFound")


def test_all_zones_are_listed_in_pages(lab_api: LabApi) -> None:
    west = ZONE.replace("us-central2-b", "us-west4-a")
    for zone, name in ((ZONE, "a"), (ZONE, "b"), (west, "a")):
        assert insert(lab_api, name, zone)[0] == 200
    assert insert(lab_api, "a", ZONE.replace("lab", "other"))[0] == 200
    found, token = [], ""
    for _ in range(3):
        page = lab_api.call("GET", f"compute/v1/projects/lab/aggregated/disks?maxResults=1&pageToken={token}")[1]
        found += [(scope, disk["name"]) for scope, part in page["items"].items() for disk in part.get("disks", [])]
        token = page.get("nextPageToken", "")
    assert (sorted(found), token) == (
        [("zones/us-central2-b", "a"), ("zones/us-central2-b", "b"), ("zones/us-west4-a", "a")],
        "",
    )
    assert page["items"]["zones/us-east1-d"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"


def test_a_request_that_is_repeated_with_its_id_begins_one_operation(shared_api: LabApi, unique: str) -> None:
    first, again = (insert(shared_api, unique, query="?requestId=7") for _ in range(2))
    assert first == again
    assert insert(shared_api, unique, query="?requestId=8")[0] == 409


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"name": "Data"}, 400),
        ({"sizeGb": "9"}, 400),
        ({"sizeGb": "x"}, 400),
        ({"type": "floppy"}, 400),
        ({"zone": ZONE.replace("us-central2-b", "mars")}, 400),
        ({"zone": ZONE.replace("lab", "nobody")}, 403),
    ],
)
def test_invalid_disks_are_refused(shared_api: LabApi, fields: dict[str, Any], status: int) -> None:
    assert insert(shared_api, **fields)[0] == status
