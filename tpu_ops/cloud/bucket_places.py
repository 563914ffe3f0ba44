"""Locations of buckets, what it costs to read a bucket from a region, and the creation of buckets."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from tpu_ops.cloud import buckets
from tpu_ops.cloud.auth import Auth
from tpu_ops.errors import CloudError, UsageError

REGION, DUAL_REGION, MULTI_REGION = "region", "dual-region", "multi-region"

#: Predefined dual-regions -> their regions (Cloud Storage's documentation, "Bucket locations").
DUAL_REGIONS = {
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}
#: Multi-regions. A configurable dual-region has one of these as its location, too.
MULTI_REGIONS = ("asia", "eu", "us")
#: First letters of a location -> its continent, in the sense of Cloud Storage's prices.
_CONTINENTS = {
    "africa": "Africa",
    "asia": "Asia",
    "australia": "Oceania",
    "eu": "Europe",
    "eur": "Europe",
    "europe": "Europe",
    "me": "the Middle East",
    "nam": "North America",
    "northamerica": "North America",
    "southamerica": "South America",
    "us": "North America",
}
#: Rounded list prices of reading a bucket from another place, for each GiB, as of September 2026.
_SAME_CONTINENT = {"North America": "about $0.02 per GiB", "Europe": "about $0.02 per GiB"}
_ELSEWHERE_ON_IT = "more than $0.02 per GiB"
_OTHER_CONTINENT = "about $0.05 to $0.15 per GiB"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
#: A URI in other text. Characters of a shell's expansion belong to the match: such a name is no bucket's name.
_IN_TEXT = re.compile(r"gs://([\w.$*?{}\[\]-]+)", re.ASCII)


class Level(StrEnum):
    """How well a bucket's place fits a region."""

    FINE = "fine"
    WARNING = "warning"
    REFUSED = "refused"


class BucketPlace(NamedTuple):
    """The place of a bucket; all names are in lower case.

    Attributes:
        location: A region, a dual-region or a multi-region.
        kind: ``region``, ``dual-region`` or ``multi-region``.
        regions: The two regions of a dual-region, or the region; empty for a multi-region, and if the regions of a
            dual-region are unknown.
    """

    location: str
    kind: str
    regions: tuple[str, ...] = ()

    def __str__(self) -> str:
        also = f" of {' and '.join(self.regions)}" if self.kind == DUAL_REGION and self.regions else ""
        return f"the {self.kind} {self.location}{also}"


class Verdict(NamedTuple):
    """Whether nodes in a region should use a bucket.

    Attributes:
        level: Whether the place is fine.
        reason: The reason in words.
        price: What it costs to read from the bucket, in words; empty if it is free.
    """

    level: Level
    reason: str
    price: str = ""


def name_of(text: str, where: str = "") -> str:
    """Return the name of a bucket, given ``NAME`` or ``gs://NAME``.

    Raises:
        UsageError: The text is something else.
    """
    name = text.removeprefix("gs://").removesuffix("/")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{text!r:.80} is not the name of a bucket", where=where, fix="write it as NAME or gs://NAME")
    return name


def region_of(text: str, where: str = "") -> str:
    """Return the name of a region in lower case.

    Raises:
        UsageError: The text names something else, such as a zone.
    """
    if not _REGION.fullmatch(text.lower()):
        raise UsageError(f"{text!r:.80} is not a region", where=where, fix="name a region, as in us-central2")
    return text.lower()


def named_in(texts: Iterable[str]) -> list[str]:
    """Return the names of buckets whose URIs are in texts, as in ``--data=gs://bucket/folder``; each name once."""
    found = (match.rstrip(".") for text in texts for match in _IN_TEXT.findall(text))
    return list(dict.fromkeys(name for name in found if _NAME.fullmatch(name)))


def bucket_place(location: str, kind: str = "", regions: Iterable[str] = ()) -> BucketPlace:
    """Return a bucket's place.

    Args:
        location: The bucket's location, as the API gives it: mostly in upper case.
        kind: The type of the location, as the API gives it; may be empty. The location counts more.
        regions: The regions of a configurable dual-region.
    """
    name, chosen = location.lower(), tuple(region.lower() for region in regions)
    if name in DUAL_REGIONS:
        return BucketPlace(name, DUAL_REGION, DUAL_REGIONS[name])
    if kind.lower() == DUAL_REGION or (name in MULTI_REGIONS and chosen):
        return BucketPlace(name, DUAL_REGION, chosen)
    if kind.lower() == MULTI_REGION or name in MULTI_REGIONS:
        return BucketPlace(name, MULTI_REGION)
    # The bucket of a single zone has the zone's region as its location.
    return BucketPlace(name, REGION, (name,))


def verdict(place: BucketPlace, region: str) -> Verdict:
    """Return whether nodes in a region should use a bucket in a place."""
    region = region.lower()
    if region in place.regions:
        same = "where the nodes are" if place.kind == REGION else f"which contains the nodes' region {region}"
        return Verdict(Level.FINE, f"{place}, {same}")
    theirs, ours = _continent(place.location), _continent(region)
    if not theirs or not ours:
        # A place that is missing in these tables must not stop anybody.
        reason = f"{place}, and how far that is from the nodes in {region} is unknown"
        return Verdict(Level.WARNING, reason, "an unknown amount")
    if theirs != ours:
        return Verdict(Level.REFUSED, f"{place}, on another continent than the nodes in {region}", _OTHER_CONTINENT)
    price = _SAME_CONTINENT.get(ours, _ELSEWHERE_ON_IT)
    if place.regions:
        return Verdict(Level.REFUSED, f"{place}, and the nodes are in {region}", price)
    unknown = "" if place.kind == MULTI_REGION else "; its two regions cannot be read"
    return Verdict(Level.WARNING, f"{place}, on the same continent as the nodes in {region}{unknown}", price)


def _continent(place: str) -> str:
    """Return the continent of a region, a dual-region or a multi-region; empty if it is unknown."""
    return _CONTINENTS.get(re.split(r"[-0-9]", place, maxsplit=1)[0], "")


def find(name: str, auth: Auth, timeout: float) -> BucketPlace:
    """Return the place of a bucket.

    Args:
        name: The bucket.
        auth: The credentials; a public bucket is found without them.
        timeout: Seconds for each request, including retries.

    Raises:
        CloudError: The bucket does not exist, or its place cannot be read.
    """
    with buckets.requests(f"gs://{name}", "the bucket's location cannot be read"):
        return buckets.anonymously_if_refused(auth, lambda client: _find(client, name, timeout))


def _find(client: Any, name: str, timeout: float) -> BucketPlace:
    from google.api_core.exceptions import ClientError

    more = {"timeout": timeout, "retry": buckets.retry(timeout)}
    found: Mapping[str, Any] = {}
    # The layout needs only the right to list objects. The bucket itself needs a right that the object roles lack.
    with contextlib.suppress(ClientError):
        found = client._get_resource(f"/b/{name}/storageLayout", **more)
    kind = found.get("locationType", "")
    place = bucket_place(found.get("location", ""), kind)
    if place.location and (place.regions or kind == MULTI_REGION):
        return place
    # The layout does not contain the regions of a configurable dual-region.
    bucket = client.bucket(name)
    try:
        bucket.reload(**more)
    except ClientError:
        if place.location:
            return place
        raise
    return bucket_place(bucket.location or "", bucket.location_type or "", bucket.data_locations or ())


def find_each(names: Collection[str], auth: Auth, limit: float) -> dict[str, BucketPlace | CloudError]:
    """Return the place of each bucket, or why it is unknown. All buckets are asked for at once.

    Args:
        names: The buckets, each once.
        auth: The credentials.
        limit: Seconds until this function returns.
    """
    answers = queue.SimpleQueue[tuple[str, BucketPlace | Exception]]()

    def look(name: str) -> None:
        try:
            answers.put((name, find(name, auth, limit)))
        except Exception as exc:  # the exception is handled by the thread that waits
            answers.put((name, exc))

    for name in names:
        threading.Thread(target=look, args=(name,), name=f"bucket {name}", daemon=True).start()
    found: dict[str, BucketPlace | CloudError] = {}
    ends = time.monotonic() + limit
    while len(found) < len(names):
        try:
            name, answer = answers.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, Exception) and not isinstance(answer, CloudError):
            raise answer
        found[name] = answer
    late = "the bucket's location cannot be read: no answer in time"
    return {name: found.get(name) or CloudError(late, where=f"gs://{name}", fix="check the network") for name in names}


def create(name: str, region: str, project: str, auth: Auth, timeout: float) -> bool:
    """Create a bucket without public access, whose rights are those of the whole bucket.

    Args:
        name: The bucket.
        region: Its location.
        project: The project that owns it.
        auth: The credentials.
        timeout: Seconds for each request, including retries.

    Returns:
        Whether the bucket is new; else the project has had it already, in this region.

    Raises:
        CloudError: The bucket cannot be created, exists in another place, or is another project's.
    """
    from google.api_core.exceptions import Conflict

    more = {"timeout": timeout, "retry": buckets.retry(timeout)}
    with buckets.requests(f"gs://{name}", "the bucket cannot be created"):
        client = buckets.client(auth, anonymous=False)
        bucket = client.bucket(name)
        bucket.iam_configuration.uniform_bucket_level_access_enabled = True
        bucket.iam_configuration.public_access_prevention = "enforced"
        try:
            client.create_bucket(bucket, project=project, location=region, **more)
        except Conflict as exc:
            owned = client.list_buckets(project=project, prefix=name, **more)
            found = next((one for one in owned if one.name == name), None)
            if found is None:
                what = "the name belongs to a bucket of another project: all of Google Cloud shares these names"
                raise CloudError(what, where=f"gs://{name}", fix="choose another name") from exc
            place = bucket_place(found.location or "", found.location_type or "", found.data_locations or ())
            if place != bucket_place(region):
                what = f"the project already has this bucket, in {place}"
                raise CloudError(what, where=f"gs://{name}", fix="choose another name") from exc
            return False
    return True
