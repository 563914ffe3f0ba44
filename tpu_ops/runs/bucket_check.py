"""Checks before a start whether the nodes of a run are near the buckets that its command line names."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from tpu_ops.cloud import bucket_places
from tpu_ops.cloud.bucket_places import Level, Verdict
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError

#: Seconds for all buckets together: a slow answer must not delay a start for longer.
LIMIT = 5.0

_log = logging.getLogger(__name__)


def check(names: Collection[str], regions: Iterable[str], settings: Settings, *, any_region: bool) -> None:
    """Log a warning for each bucket whose location costs money or is unknown; refuse buckets that are far away.

    Args:
        names: The buckets, each once.
        regions: The regions of the nodes.
        settings: The settings of the fleet, with the credentials.
        any_region: Whether buckets in any region are allowed; they get a warning.

    Raises:
        UsageError: A bucket is in another region, and ``any_region`` is not set.
    """
    if not names:
        return
    wanted = list(dict.fromkeys(regions))
    refused: list[str] = []
    for name, place in bucket_places.find_each(names, settings.auth, LIMIT).items():
        if isinstance(place, CloudError):
            _log.warning("%s: it is unknown what reading it from the nodes costs", place)
            continue
        for region in wanted:
            found = bucket_places.verdict(place, region)
            if found.level is Level.REFUSED and not any_region:
                refused.append(in_words(name, found))
            elif found.level is not Level.FINE:
                _log.warning("%s", in_words(name, found))
    if refused:
        raise refusal(refused, wanted)


def in_words(name: str, found: Verdict) -> str:
    """Return a verdict on a bucket as one sentence."""
    cost = f"costs {found.price}" if found.price else "is free"
    return f"gs://{name} is in {found.reason}: reading it {cost}"


def refusal(refused: Sequence[str], regions: Sequence[str]) -> UsageError:
    """Return the error for buckets that are far away from the nodes."""
    region = regions[0] if len(regions) == 1 else "REGION"
    make = f"`tpu_ops bucket create NAME --region {region}`"
    fix = f"use a bucket near the nodes ({make} makes one), or add --any-region and pay for the transfer"
    if len(refused) == 1:
        return UsageError(refused[0], where="the run's buckets", fix=fix)
    return UsageError(
        "several buckets are far away from the nodes", where="the run's buckets", fix=fix, details=refused
    )
