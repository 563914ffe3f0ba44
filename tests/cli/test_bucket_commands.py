"""`tpu_ops bucket` and the buckets of `tpu_ops train`, against a real API process."""

from __future__ import annotations

import json

import pytest

from tests.support.buckets import NUMBERS, client_of
from tests.support.commands import failed

EUROPE = "europe-west4-b"


@pytest.fixture
def storage(fleet, monkeypatch):
    """The client of the fleet's storage."""
    yield client_of(fleet.api, monkeypatch)
    fleet.api.clear_faults()


@pytest.fixture
def name():
    return f"command{next(NUMBERS)}"


def made(storage, fleet, name, location, **more):
    storage.create_bucket(name, project=fleet.project, location=location, **more)
    return name


def checked(tpu_ops, *argv):
    code, out, err = tpu_ops("bucket", "check", *argv, "--json")
    return code, {row["region"]: row["verdict"] for row in json.loads(out)["verdicts"]}, err


def test_a_bucket_is_created_in_the_region_of_the_nodes(fleet, tpu_ops, storage, name):
    fleet.create("pod")
    code, out, err = tpu_ops("bucket", "create", name, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(f"would create gs://{name} in us-central2, project {fleet.project}")
    assert storage.lookup_bucket(name) is None
    code, out, err = tpu_ops("bucket", "create", f"gs://{name}", "--json")
    told = {"bucket": name, "region": "us-central2", "project": fleet.project, "created": True, "dry_run": False}
    assert (code, json.loads(out)) == (0, told), err
    assert storage.get_bucket(name).location == "US-CENTRAL2"
    code, out, _ = tpu_ops("bucket", "create", name)
    assert (code, "exists already" in out) == (0, True)
    failed(tpu_ops("bucket", "create", name, "--region", "us-east1"), 3, "already has this bucket, in the region us-c")
    assert checked(tpu_ops, name)[:2] == (0, {"us-central2": "fine"})


def test_a_fleet_in_several_regions_or_projects_has_to_name_one(fleet, tpu_ops, storage, name):
    failed(tpu_ops("bucket", "create", name), 2, "the fleet has no region", "at:  --region")
    fleet.write(zones=["us-central2-b"])
    assert tpu_ops("bucket", "create", name, "--dry-run")[0] == 0
    fleet.write(projects=[fleet.project, fleet.second])
    failed(tpu_ops("bucket", "create", name, "--region", "us-east1"), 2, "several projects", "--project")
    fleet.write()
    fleet.create("one")
    fleet.create("two", "v5litepod-8", zone=EUROPE)
    failed(tpu_ops("bucket", "create", name), 2, "several regions: europe-west4, us-central2", "--region europe-west4")
    failed(tpu_ops("bucket", "create", name, "--region", EUROPE), 2, "is not a region", "at:  --region")
    failed(tpu_ops("bucket", "create", "No", "--region", "us-east1"), 2, "is not the name of a bucket")
    assert storage.lookup_bucket(name) is None


def test_a_check_has_a_verdict_for_each_region(fleet, tpu_ops, storage, name):
    made(storage, fleet, name, "US")
    fleet.create("one")
    fleet.create("two", "v5litepod-8", zone=EUROPE)
    assert checked(tpu_ops, name)[:2] == (1, {"europe-west4": "refused", "us-central2": "warning"})
    assert checked(tpu_ops, name, "one")[:2] == (0, {"us-central2": "warning"})
    code, out, _ = tpu_ops("bucket", "check", name)
    first, head, *rows = [line.split() for line in out.splitlines()]
    assert (code, " ".join(first)) == (1, f"gs://{name} is in the multi-region us")
    assert head == ["REGION", "NODES", "VERDICT", "READING"]
    assert [row[:3] for row in rows] == [["europe-west4", "two", "refused"], ["us-central2", "one", "warning"]]
    failed(tpu_ops("bucket", "check", "absent-bucket"), 3, "there is no such bucket", "at:  gs://absent-bucket")
