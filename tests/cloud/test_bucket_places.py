"""Where buckets are, and what it costs to read them from a region."""

from __future__ import annotations

import time

import pytest

from tests.support.buckets import NUMBERS, client_of
from tpu_ops.cloud import bucket_places, buckets
from tpu_ops.cloud.auth import Auth
from tpu_ops.cloud.bucket_places import DUAL_REGION, MULTI_REGION, REGION, BucketPlace, bucket_place, verdict
from tpu_ops.cloud.node import Node
from tpu_ops.errors import CloudError, UsageError

LIMIT = 5.0


@pytest.mark.parametrize(
    ("location", "region", "level", "price"),
    [
        (("US-CENTRAL2", "region", ()), "us-central2", "fine", ""),
        (("us-central2", "", ()), "US-Central2", "fine", ""),
        (("US-CENTRAL1", "zone", ()), "us-central1", "fine", ""),
        # A whole word counts: "us" and "us-central1" are parts of other names.
        (("US", "multi-region", ()), "us-central2", "warning", "$0.02"),
        (("US-CENTRAL1", "region", ()), "us-central11", "refused", "$0.02"),
        (("US-CENTRAL2", "region", ()), "us-central1", "refused", "$0.02"),
        (("EU", "multi-region", ()), "europe-west4", "warning", "$0.02"),
        (("ASIA", "multi-region", ()), "asia-east1", "warning", "more than $0.02"),
        (("US", "multi-region", ()), "northamerica-northeast1", "warning", "$0.02"),
        (("EU", "multi-region", ()), "us-central2", "refused", "$0.15"),
        (("US", "multi-region", ()), "europe-west4", "refused", "$0.15"),
        (("US", "region", ()), "us-central2", "warning", "$0.02"),
        (("EUROPE-WEST4", "region", ()), "us-central2", "refused", "$0.15"),
        (("AUSTRALIA-SOUTHEAST1", "region", ()), "asia-east1", "refused", "$0.15"),
        (("NAM4", "dual-region", ()), "us-central1", "fine", ""),
        (("NAM4", "dual-region", ()), "us-east1", "fine", ""),
        (("NAM4", "dual-region", ()), "us-east5", "refused", "$0.02"),
        (("EUR4", "dual-region", ()), "europe-west4", "fine", ""),
        (("EUR5", "dual-region", ()), "europe-west1", "fine", ""),
        (("EUR7", "dual-region", ()), "europe-west3", "fine", ""),
        (("EUR8", "dual-region", ()), "europe-west6", "fine", ""),
        (("ASIA1", "dual-region", ()), "asia-northeast1", "fine", ""),
        (("ASIA1", "dual-region", ()), "asia-east1", "refused", "more than $0.02"),
        (("US", "dual-region", ("US-CENTRAL1", "US-WEST1")), "us-west1", "fine", ""),
        (("US", "dual-region", ("US-CENTRAL1", "US-WEST1")), "us-east1", "refused", "$0.02"),
        (("US", "dual-region", ()), "us-east1", "warning", "$0.02"),
        (("EUR9", "dual-region", ()), "europe-west4", "warning", "$0.02"),
        (("EUR9", "dual-region", ()), "us-east1", "refused", "$0.15"),
        (("ATLANTIS", "multi-region", ()), "us-east1", "warning", "unknown"),
        (("ATLANTIS-EAST1", "region", ()), "atlantis-east1", "fine", ""),
    ],
)
def test_verdict(location, region, level, price):
    found = verdict(bucket_place(*location), region)
    assert (found.level, price in found.price, bool(found.price)) == (level, True, bool(price)), found


@pytest.mark.parametrize(
    ("zone", "level"), [("us-central1-ai1a", "fine"), ("us-central1-f", "fine"), ("us-south1-ai1b", "refused")]
)
def test_an_ai_zone_is_in_the_region_of_its_name(zone, level):
    region = Node("pod", "p", zone, "1", "v6e-8").region
    assert verdict(bucket_place("US-CENTRAL1", "region"), region).level == level


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("--data=gs://my-data/train/*.tfrecord", ["my-data"]),
        ("gs://a-1,gs://b_2/x gs://a-1/y", ["a-1", "b_2"]),
        ("'gs://with.dots.org'", ["with.dots.org"]),
        ("see gs://data1.", ["data1"]),
        ("gs://$BUCKET/x gs://${BUCKET}-eu/x gs://run-$ID/x gs://", []),
        ("s3://data1 gs:/data1 GS-data1", []),
    ],
)
def test_buckets_are_found_in_text(text, names):
    assert bucket_places.named_in([text]) == names


def test_the_name_of_a_bucket_may_be_a_uri():
    assert [bucket_places.name_of(text) for text in ("data", "gs://data", "gs://data/")] == ["data"] * 3
    for text in ("gs://data/x", "Data", "x", "gs://"):
        with pytest.raises(UsageError, match="is not the name of a bucket"):
            bucket_places.name_of(text, "--bucket")


@pytest.fixture
def storage(fleet_api, monkeypatch):
    """The client of a lab API process that is shared by many tests."""
    yield client_of(fleet_api, monkeypatch)
    fleet_api.clear_faults()


def unique() -> str:
    return f"placed{next(NUMBERS)}"


#: Arguments of a new bucket -> its place.
PLACES = [
    ({"location": "us-central2"}, BucketPlace("us-central2", REGION, ("us-central2",))),
    ({"location": "US"}, BucketPlace("us", MULTI_REGION)),
    ({"location": "NAM4"}, BucketPlace("nam4", DUAL_REGION, ("us-central1", "us-east1"))),
    (
        {"location": "US", "data_locations": ["US-EAST1", "US-WEST1"]},
        BucketPlace("us", DUAL_REGION, ("us-east1", "us-west1")),
    ),
]


@pytest.mark.parametrize(("made", "place"), PLACES)
def test_the_right_to_list_objects_is_enough_for_a_place(fleet_api, storage, made, place):
    name = storage.create_bucket(unique(), project="lab0", **made).name
    assert bucket_places.find(name, Auth(), LIMIT) == place
    fleet_api.fault(method="storage.buckets.get", code="PERMISSION_DENIED")
    chosen = "data_locations" in made
    assert bucket_places.find(name, Auth(), LIMIT) == (place._replace(regions=()) if chosen else place)


def test_the_bucket_is_asked_where_its_layout_is_refused(fleet_api, storage):
    name = storage.create_bucket(unique(), project="lab0", location="EU").name
    fleet_api.fault(method="storage.buckets.getStorageLayout", code="PERMISSION_DENIED")
    assert bucket_places.find(name, Auth(), LIMIT) == BucketPlace("eu", MULTI_REGION)
    fleet_api.fault(method="storage.buckets.get", code="PERMISSION_DENIED")
    with pytest.raises(CloudError, match=r"location cannot be read: no access") as caught:
        bucket_places.find(name, Auth(), LIMIT)
    assert caught.value.where == f"gs://{name}"


def test_many_buckets_are_asked_at_once_and_within_the_limit(fleet_api, storage):
    names = [storage.create_bucket(unique(), project="lab0", location="us-east1").name for _ in range(4)]
    fleet_api.fault(method="storage.buckets.getStorageLayout", seconds=0.4)
    begun = time.monotonic()
    found = bucket_places.find_each([*names, "absent-bucket"], Auth(), LIMIT)
    assert time.monotonic() - begun < 0.4 * len(names)
    assert [found[name] for name in names] == [bucket_place("us-east1")] * 4
    assert "no such bucket" in str(found["absent-bucket"])
    fleet_api.clear_faults()
    fleet_api.fault(method="storage.buckets.getStorageLayout", seconds=30)
    begun = time.monotonic()
    late = bucket_places.find_each(names[:1], Auth(), 0.3)
    assert "location cannot be read: no answer in time" in str(late[names[0]])
    assert time.monotonic() - begun < 2


def test_a_new_bucket_is_private_and_made_once(storage):
    name = unique()
    assert bucket_places.create(name, "us-central2", "lab0", Auth(), LIMIT)
    found = storage.get_bucket(name)
    assert (found.location, found.iam_configuration.uniform_bucket_level_access_enabled) == ("US-CENTRAL2", True)
    assert found.iam_configuration.public_access_prevention == "enforced"
    assert not bucket_places.create(name, "US-central2", "lab0", Auth(), LIMIT)
    with pytest.raises(CloudError, match="already has this bucket, in the region us-central2"):
        bucket_places.create(name, "us-east1", "lab0", Auth(), LIMIT)
    with pytest.raises(CloudError, match="bucket of another project"):
        bucket_places.create(name, "us-central2", "other0", Auth(), LIMIT)


def test_without_credentials_no_bucket_is_created(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert buckets.client(Auth(), anonymous=True)._credentials.token is None
    with pytest.raises(CloudError, match="no credentials"):
        bucket_places.create("data", "us-central2", "lab0", Auth(), 1)
