"""Buckets and their objects as files: the lab's storage behind the API of Google Cloud Storage.

A bucket is a directory with ``bucket.json`` and two files for each object: the content, and JSON with the object's
metadata and the generation of the valid content. An upload takes effect when this JSON is replaced. The names of both
files contain a digest of the object's name; the object's name itself is never used as a path.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import time
from base64 import b64encode
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import google_crc32c  # installed with google-cloud-storage, which verifies this checksum

from tpu_ops import files
from tpu_ops.errors import UsageError
from tpu_ops.lab.api.records import timestamp
from tpu_ops.lab.api.storage_records import Bucket, Conditions, StorageError, Stored, bad, bucket_fields
from tpu_ops.lab.api.wire import Json

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_PARTIAL = ".uploads"

T = TypeVar("T", "Bucket", "Stored")


class Upload:
    """The content of an object that is being uploaded.

    Args:
        path: The temporary file for the content.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb")
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc32c = 0

    def write(self, data: bytes) -> None:
        """Append data to the content."""
        self._file.write(data)
        self._md5.update(data)
        self._crc32c = google_crc32c.extend(self._crc32c, data)
        self.size += len(data)

    @property
    def md5(self) -> str:
        """MD5 digest of the data written so far, in base64."""
        return b64encode(self._md5.digest()).decode()

    @property
    def crc32c(self) -> str:
        """CRC32C checksum of the data written so far, in base64."""
        return b64encode(self._crc32c.to_bytes(4, "big")).decode()

    def finish(self) -> None:
        """Write all data to the disk and close the temporary file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Close and remove the temporary file, unless `Buckets.commit` has made it the content of an object."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class Buckets:
    """All buckets of the lab, stored in one directory.

    A method that changes data returns when the data is on the disk. Only one such method must run at a time.

    Args:
        directory: The directory of the buckets, which is created with the first bucket.

    Raises:
        UsageError: A file in the directory is damaged.
        OSError: The directory cannot be read, or temporary files of an earlier process cannot be removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._buckets: dict[str, Bucket] = {}
        self._objects: dict[str, dict[str, Stored]] = {}
        self._generation = 0
        self._uploads = itertools.count()
        shutil.rmtree(directory / _PARTIAL, ignore_errors=True)
        for path in sorted(directory.glob("*/bucket.json")):
            self._load(path)

    def _load(self, path: Path) -> None:
        bucket = _read(path, Bucket)
        found = [_read(entry, Stored) for entry in path.parent.glob("*.object.json")]
        self._buckets[bucket.name] = bucket
        self._objects[bucket.name] = {stored.name: stored for stored in found}
        self._generation = max([self._generation, *(stored.generation for stored in found)])
        kept = {self.content(stored) for stored in found}
        for entry in set(path.parent.glob("*.content")) - kept:
            entry.unlink()
        for missing in kept - set(path.parent.glob("*.content")):
            logging.getLogger(__name__).warning("%s is gone: the object cannot be downloaded", missing)

    def buckets(self, project: str, prefix: str = "") -> list[Bucket]:
        """Return a project's buckets whose names begin with a prefix, sorted by name."""
        found = [bucket for bucket in self._buckets.copy().values() if bucket.project == project]
        return sorted((bucket for bucket in found if bucket.name.startswith(prefix)), key=lambda bucket: bucket.name)

    def project(self, name: str) -> str:
        """Return the project of a bucket; empty if the bucket does not exist."""
        return self._buckets[name].project if name in self._buckets else ""

    def bucket(self, name: str) -> Bucket:
        """Return the bucket with this name.

        Raises:
            StorageError: 404; the bucket does not exist.
        """
        if name not in self._buckets:
            raise StorageError(404, "notFound", "The specified bucket does not exist.")
        return self._buckets[name]

    def insert(self, project: str, body: Json) -> Bucket:
        """Create a bucket and return it.

        Args:
            project: The project that owns the bucket.
            body: The JSON that the client has sent.

        Raises:
            StorageError: 400; the name or a setting is invalid. 409; the name is in use.
        """
        name = body.get("name")
        if not isinstance(name, str) or not _BUCKET.fullmatch(name) or ".." in name:
            raise bad(f"Invalid bucket name: {name!r}")
        if name in self._buckets:
            raise StorageError(
                409, "conflict", "Your previous request to create the named bucket succeeded and you already own it."
            )
        bucket = Bucket(name, project, timestamp(time.time()), bucket_fields(body))
        (self.directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace(self.directory / name / "bucket.json", json.dumps(asdict(bucket)), 0o600)
        self._objects[name] = {}
        self._buckets[name] = bucket
        return bucket

    def remove(self, name: str) -> None:
        """Delete an empty bucket.

        Raises:
            StorageError: 404; the bucket does not exist. 409; the bucket has objects.
        """
        self.bucket(name)
        if self._objects[name]:
            raise StorageError(409, "conflict", "The bucket you tried to delete is not empty.")
        shutil.rmtree(self.directory / name)
        del self._buckets[name], self._objects[name]

    def find(self, bucket: str, name: str) -> Stored | None:
        """Return the object with this name; None if it does not exist.

        Raises:
            StorageError: 404; the bucket does not exist.
        """
        return self._objects[self.bucket(bucket).name].get(name)

    def get(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> Stored:
        """Return the object with this name.

        Args:
            bucket: Name of the bucket.
            name: Name of the object.
            conditions: The preconditions of the request.
            generation: The requested generation; only the latest generation exists.

        Raises:
            StorageError: 404; the object does not exist. 304 or 412; a precondition does not hold.
        """
        found = self.find(bucket, name)
        if found is None or generation not in (None, found.generation):
            raise StorageError(404, "notFound", f"No such object: {bucket}/{name}")
        conditions.check(found, reading=True)
        return found

    def content(self, stored: Stored) -> Path:
        """Return the path of the file with an object's content."""
        return self.directory / stored.bucket / f"{_digest(stored.name)}.{stored.generation}.content"

    def _entry(self, bucket: str, name: str) -> Path:
        return self.directory / bucket / f"{_digest(name)}.object.json"

    def upload(self) -> Upload:
        """Begin an upload, and return its empty content."""
        folder = self.directory / _PARTIAL
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Upload(folder / str(next(self._uploads)))

    def check(self, bucket: str, name: str, conditions: Conditions) -> None:
        """Reject an upload that could not become an object.

        Raises:
            StorageError: 400; the name is invalid. 404; the bucket does not exist. 412; a precondition does not hold.
        """
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            size = 0
        if not 0 < size <= 1024 or name in (".", "..") or {"\r", "\n"} & set(name):
            raise bad(f"Invalid object name: {name!r}")
        conditions.check(self.find(bucket, name))

    def commit(self, upload: Upload, bucket: str, name: str, fields: Json, conditions: Conditions) -> Stored:
        """Create an object from an upload and return it; an existing object of this name is replaced.

        Raises:
            StorageError: 400; the name is invalid. 404; the bucket does not exist. 412; a precondition does not hold.
            OSError: The object cannot be written; an existing object of this name is kept.
        """
        upload.finish()
        self.check(bucket, name, conditions)
        now = time.time()
        generation = max(int(now * 1e6), self._generation + 1)
        earlier = self.find(bucket, name)
        stored = Stored(bucket, name, generation, upload.size, upload.md5, upload.crc32c, timestamp(now), fields)
        content = self.content(stored)
        upload.path.replace(content)
        try:
            files.replace(self._entry(bucket, name), json.dumps(asdict(stored)), 0o600)
        except OSError:
            content.unlink()
            raise
        self._generation = generation
        self._objects[bucket][name] = stored
        if earlier:
            self.content(earlier).unlink(missing_ok=True)
        return stored

    def delete(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> None:
        """Delete an object.

        Raises:
            StorageError: 404; the object does not exist. 412; a precondition does not hold.
        """
        found = self.get(bucket, name, Conditions(), generation)
        conditions.check(found)
        self._entry(bucket, name).unlink(missing_ok=True)
        del self._objects[bucket][name]
        self.content(found).unlink(missing_ok=True)

    def objects(self, bucket: str) -> dict[str, Stored]:
        """Return name -> object for all objects of a bucket.

        Raises:
            StorageError: 404; the bucket does not exist.
        """
        return self._objects[self.bucket(bucket).name].copy()


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _read(path: Path, kind: type[T]) -> T:
    try:
        return kind(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as failure:
        raise UsageError(
            f"cannot use the lab's buckets: a file is damaged ({type(failure).__name__}: {failure})",
            where=str(path),
            fix="move the damaged file away",
        ) from failure
