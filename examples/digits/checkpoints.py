"""Where a checkpoint is kept: a file of this worker, or an object in a bucket, which outlives the worker.

A path that begins with gs:// needs the package google-cloud-storage on the workers (jax_packages in group_vars).
"""

from __future__ import annotations

import os
from pathlib import Path


def read(place: str) -> bytes | None:
    """Return what was written last, None if there is nothing yet."""
    if not place.startswith("gs://"):
        return Path(place).read_bytes() if Path(place).exists() else None
    from google.api_core.exceptions import NotFound

    try:
        return _object(place).download_as_bytes()
    except NotFound:
        return None


def write(place: str, data: bytes) -> None:
    """Write a checkpoint completely or not at all."""
    if place.startswith("gs://"):
        _object(place).upload_from_string(data, content_type="application/octet-stream")
        return
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _object(place: str):
    from google.cloud import storage

    return storage.Blob.from_uri(place, client=storage.Client())
