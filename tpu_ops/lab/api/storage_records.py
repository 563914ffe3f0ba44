"""Buckets and objects of the lab's storage, and preconditions of requests, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_ops.lab.api.wire import Json

MULTI_REGIONS = ("ASIA", "EU", "US")
DUAL_REGIONS = ("ASIA1", "EUR4", "EUR5", "EUR7", "EUR8", "NAM4")

_REGION = re.compile(r"[A-Z]+(-[A-Z]+[0-9]+)+")


class StorageError(Exception):
    """An error that the lab's storage answers to a request.

    Args:
        status: HTTP status.
        reason: The field ``reason`` of the JSON error.
        message: The text of the error, one sentence.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


def bad(message: str) -> StorageError:
    """Return the error for an invalid request."""
    return StorageError(400, "invalid", message)


@dataclass(frozen=True)
class Bucket:
    """A bucket of the lab's storage.

    Attributes:
        name: The bucket's name, unique in all projects.
        project: The project that owns the bucket.
        created: When the bucket was created, as RFC 3339 text.
        fields: The client's settings: location, type of the location, storage class, labels, access.
    """

    name: str
    project: str
    created: str
    fields: Json


@dataclass(frozen=True)
class Stored:
    """An object in a bucket.

    Attributes:
        bucket: Name of the bucket.
        name: The object's name, which can be any text.
        generation: Number of the content: microseconds since 1970, but always greater than earlier numbers.
        size: Size of the content in bytes.
        md5: MD5 digest of the content, in base64.
        crc32c: CRC32C checksum of the content, in base64.
        created: When the content was uploaded, as RFC 3339 text.
        fields: The metadata that the client has set.
    """

    bucket: str
    name: str
    generation: int
    size: int
    md5: str
    crc32c: str
    created: str
    fields: Json


@dataclass(frozen=True)
class Conditions:
    """The preconditions of a request for an object; None means that the request does not set the condition."""

    generation: int | None = None
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, found: Stored | None, *, reading: bool = False) -> None:
        """Raise an error unless an object meets the preconditions.

        Args:
            found: The object; None if it does not exist. A missing object counts as generation 0.
            reading: Whether the request only reads the object; if so, the error for an unchanged object is 304.

        Raises:
            StorageError: 412 or 304; a precondition does not hold.
        """
        generation, metageneration = (found.generation, 1) if found else (0, 0)
        if self.generation not in (None, generation) or self.metageneration not in (None, metageneration):
            raise StorageError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
        if self.generation_not == generation or self.metageneration_not == metageneration:
            raise StorageError(
                304 if reading else 412, "conditionNotMet", "The object still has the excluded generation."
            )


def bucket_fields(body: Json) -> Json:
    """Return the settings to store for a bucket that a client creates.

    Raises:
        StorageError: 400; the location or the placement is invalid.
    """
    location = str(body.get("location") or "US").upper()
    placement = body.get("customPlacementConfig") or {}
    regions = placement.get("dataLocations") if isinstance(placement, dict) else placement
    if regions and not (isinstance(regions, list) and all(isinstance(region, str) for region in regions)):
        raise bad(f"Invalid value for customPlacementConfig: {placement!r}")
    if not (location in (*MULTI_REGIONS, *DUAL_REGIONS) or _REGION.fullmatch(location)):
        raise bad(f"The specified location constraint is not valid: {location!r}")
    dual = bool(regions) or location in DUAL_REGIONS
    kind = "dual-region" if dual else "multi-region" if location in MULTI_REGIONS else "region"
    fields: Json = {"location": location, "locationType": kind, "storageClass": body.get("storageClass") or "STANDARD"}
    if regions:
        fields["customPlacementConfig"] = {"dataLocations": [region.upper() for region in regions]}
    if body.get("labels"):
        fields["labels"] = body["labels"]
    if body.get("iamConfiguration"):
        fields["iamConfiguration"] = body["iamConfiguration"]
    return fields
