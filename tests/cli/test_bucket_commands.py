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
    several = "several regions: europe-west4, us-central2"
    failed(tpu_ops("bucket", "create", name), 2, several, "for example europe-west4")
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


LAYOUTS = "storage.buckets.getStorageLayout"


@pytest.fixture
def far(fleet, storage, name, ssh, monkeypatch):
    """A bucket far away from the node `pod`, whose workers do not answer."""
    monkeypatch.setenv("SSH_SAYS", "No route to host")
    fleet.create("pod")
    made(storage, fleet, name, "EUROPE-WEST4")
    fleet.api.forget_requests()
    return name


def train(tpu_ops, *argv):
    return tpu_ops("train", "pod", "--dry-run", *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("--", "python", "train.py", "--data=gs://NAME/train"),
        ("--shell", "--", "python train.py >gs://NAME/x"),
        ("--env", "OUT=gs://NAME", "--", "true"),
        ("--env-file", "env", "--", "true"),
        ("--bucket", "NAME", "--", "true"),
    ],
)
def test_a_run_does_not_start_far_away_from_its_bucket(fleet, tpu_ops, ssh, far, argv):
    (fleet.path / "env").write_text(f"OUT=gs://{far}/checkpoints\n")
    argv = [word.replace("NAME", far) for word in argv]
    words = f"gs://{far} is in the region europe-west4", "$0.15 per GiB", "--any-region", "--region us-central2"
    failed(train(tpu_ops, *argv), 2, *words)
    assert ssh() == []
    code, _, err = train(tpu_ops, "--any-region", *argv)
    assert (code, f"warning: gs://{far} is in the region europe-west4, on another continent" in err) == (4, True), err


def test_all_buckets_that_are_far_away_are_named(fleet, tpu_ops, storage, far, name):
    other = made(storage, fleet, f"{name}-other", "EU")
    words = f"    gs://{far} is in the region europe-west4", f"    gs://{other} is in the multi-region eu"
    failed(train(tpu_ops, "--bucket", other, "--", "true", f"gs://{far}"), 2, "several buckets are far", *words)


def test_a_near_bucket_is_asked_once_and_says_nothing(fleet, tpu_ops, storage, far, name):
    near, multi = made(storage, fleet, f"{name}-near", "us-central2"), made(storage, fleet, f"{name}-us", "US")
    fleet.api.forget_requests()
    words = (f"gs://{near}/a", f"gs://{near}/b", f"gs://{multi}/a")
    code, _, err = train(tpu_ops, "--bucket", near, "--", "true", *words)
    assert (code, near in err) == (4, False), err
    assert f"warning: gs://{multi} is in the multi-region us, on the same continent as the nodes in us-central2" in err
    assert fleet.api.requests(fleet.project)[LAYOUTS] == 2


def test_a_run_without_buckets_asks_nothing_and_an_unknown_place_is_a_warning(fleet, tpu_ops, far):
    assert train(tpu_ops, "--", "python", "s3://x")[0] == 4
    assert LAYOUTS not in fleet.api.requests(fleet.project)
    for method in (LAYOUTS, "storage.buckets.get"):
        fleet.api.fault(method=method, code="PERMISSION_DENIED")
    code, _, err = train(tpu_ops, "--", "true", f"gs://{far}")
    assert (code, f"warning: gs://{far}: the bucket's location cannot be read: no access" in err) == (4, True), err
    failed(train(tpu_ops, "--bucket", "gs://a/b", "--", "true"), 2, "is not the name of a bucket", "at:  --bucket")


def test_the_doctor_judges_a_bucket_for_each_node(fleet, tpu_ops, storage, far, name):
    near = made(storage, fleet, f"{name}-near", "us-central2")
    code, out, err = tpu_ops("doctor", "pod", "--bucket", far, "--bucket", near, "--json")
    *_, place, access = json.loads(out)
    assert (code, place["check"], place["passed"], place["workers"]) == (4, "bucket_place", False, ["pod-w0"]), err
    (fault,) = place["faults"]
    assert (fault["worker"], f"gs://{far} is in the region europe-west4" in fault["problem"]) == ("pod-w0", True)
    assert fault["fix"].endswith("`tpu_ops bucket create NAME --region us-central2`")
    assert (access["check"], access["passed"], access["workers"]) == ("bucket_access", None, [])
    out = tpu_ops("doctor", "--bucket", near)[1]
    assert "PASS  reading the buckets costs nothing (1 worker)\n" in out
    assert "----  the nodes' service accounts can use the buckets: no worker could be checked\n" in out
    failed(tpu_ops("doctor", "pod", "--write"), 2, "goes with --bucket only", "at:  --write")
    assert "bucket" not in tpu_ops("doctor", "pod", "--json")[1]
