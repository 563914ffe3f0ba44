"""What the lab knows of a bucket and an object, and what a request may ask of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_ops.lab.api.wire import Json

MULTI_REGIONS = ("ASIA", "EU", "US")
DUAL_REGIONS = ("ASIA1", "EUR4", "EUR5", "EUR7", "EUR8", "NAM4")

_REGION = re.compile(r"[A-Z]+(-[A-Z]+[0-9]+)+")


class StorageError(Exception):
    """What the service answers instead of a result.

    Args:
        status: HTTP status.
        reason: The word that stands for it in JSON.
        message: One sentence.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


def bad(message: str) -> StorageError:
    """A request that can never succeed as it is."""
    return StorageError(400, "invalid", message)


@dataclass(frozen=True)
class Bucket:
    """A bucket.

    Attributes:
        name: Its name, the same in all projects.
        project: The project that it belongs to.
        created: When it was made, as the API writes it.
        fields: What the client chose: location, its type, storage class, labels.
    """

    name: str
    project: str
    created: str
    fields: Json


@dataclass(frozen=True)
class Stored:
    """An object.

    Attributes:
        bucket: Its bucket.
        name: Its name: any text.
        generation: Grows with each content; microseconds since 1970 where the clock does.
        size: Bytes.
        md5: Digest of the content, in base64.
        crc32c: Likewise.
        created: When it was uploaded, as the API writes it.
        fields: What the client said of it.
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
    """What must hold of an object for a request to be done; None asks nothing."""

    generation: int | None = None
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, found: Stored | None, *, reading: bool = False) -> None:
        """Refuse a request unless they hold.

        Args:
            found: The object; None where there is none, which is generation 0.
            reading: Whether it is only looked at: what was to differ and does not is then not modified.

        Raises:
            StorageError: 412, or 304.
        """
        generation, metageneration = (found.generation, 1) if found else (0, 0)
        if self.generation not in (None, generation) or self.metageneration not in (None, metageneration):
            raise StorageError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
        if self.generation_not == generation or self.metageneration_not == metageneration:
            raise StorageError(304 if reading else 412, "conditionNotMet", "The object is the one named.")


def bucket_fields(body: Json) -> Json:
    """Return what is kept of a bucket that a client asks for.

    Raises:
        StorageError: 400; its location is none.
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
    return fields
