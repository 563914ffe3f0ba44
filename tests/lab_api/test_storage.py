"""Buckets and objects of the lab, judged by google-cloud-storage's own client."""

from __future__ import annotations

import hashlib
import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import storage

from tests.support.buckets import MIB, NUMBERS, client_of, directory, names, put
from tests.support.lab_api import LabApi

TRICKY = {
    "empty": b"",
    "text": "snapshot ü\n".encode(),
    "line ends": b"\r\n\r\n--\r\n",
    "boundaries": b"\r\n--" + b"=" * 15 + b"0123456789==\r\n\r\n",
    "all bytes": bytes(range(256)) * 300,
}


@pytest.mark.parametrize("content", TRICKY.values(), ids=TRICKY)
def test_an_uploaded_object_is_read_back_unchanged(bucket: Any, content: bytes) -> None:
    blob = bucket.blob("dir/a name with ü, %2F and ?#")
    blob.upload_from_string(content, content_type="application/x-thing")
    read = bucket.get_blob(blob.name)
    assert (read.size, read.content_type) == (len(content), "application/x-thing")
    assert read.md5_hash == b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    assert read.generation == blob.generation
    assert (read.time_created.year > 2000, read.metageneration, read.storage_class) == (True, 1, "STANDARD")
    for checksum in ("md5", "crc32c"):
        assert bucket.blob(blob.name).download_as_bytes(checksum=checksum) == content
        assert read.download_as_bytes(checksum=checksum) == content  # by its media link


@pytest.mark.parametrize("chunk", [None, MIB], ids=["one request", "chunks"])
def test_a_large_file_is_uploaded_in_a_resumable_way(bucket: Any, tmp_path: Path, chunk: int | None) -> None:
    file = tmp_path / "checkpoint"
    content = hashlib.shake_128(b"seed").digest(11 * MIB + 5)
    file.write_bytes(content)
    bucket.blob("large", chunk_size=chunk).upload_from_filename(str(file), checksum="crc32c")
    bucket.blob("large", chunk_size=chunk).download_to_filename(str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == content


def test_a_stream_of_unknown_size_is_uploaded(bucket: Any) -> None:
    content = b"0123456789" * MIB
    for size in (0, 256 * 1024, 256 * 1024 + 1):
        bucket.blob("stream", chunk_size=256 * 1024).upload_from_file(Endless(content[:size]))
        assert bucket.blob("stream").download_as_bytes() == content[:size]
    with bucket.blob("written").open("wb", chunk_size=256 * 1024) as file:
        file.write(content)
    assert bucket.blob("written").download_as_bytes() == content


class Endless(io.BytesIO):
    """A stream that does not say how long it is."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation


def test_parts_are_read(bucket: Any) -> None:
    bucket.blob("a").upload_from_string("0123456789")
    assert bucket.blob("a").download_as_bytes(start=2, end=4) == b"234"
    assert bucket.blob("a").download_as_bytes(start=7) == b"789"
    assert bucket.blob("a").download_as_bytes(start=7, end=100) == b"789"
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        bucket.blob("a").download_as_bytes(start=10)
    with bucket.blob("a").open("rb") as file:
        file.seek(3)
        assert file.read(2) == b"34"


def test_the_metadata_of_an_object_is_kept(bucket: Any) -> None:
    blob = bucket.blob("a")
    blob.metadata = {"fleet": "{{ lookup('pipe', 'id') }}"}
    blob.cache_control = "no-store"
    blob.upload_from_string("text")
    read = bucket.get_blob("a")
    assert (read.metadata, read.cache_control) == (blob.metadata, "no-store")
    fresh = bucket.blob("a")
    fresh.download_as_bytes()
    assert (fresh.cache_control, fresh.content_type) == ("no-store", "text/plain")


@pytest.mark.parametrize(
    ("question", "objects", "prefixes"),
    [
        ({}, ["a", "d/", "d/e/f", "d/x", "d/y", "dd", "ü/1"], set()),
        ({"prefix": "d"}, ["d/", "d/e/f", "d/x", "d/y", "dd"], set()),
        ({"prefix": "d/"}, ["d/", "d/e/f", "d/x", "d/y"], set()),
        ({"prefix": "none"}, [], set()),
        ({"delimiter": "/"}, ["a", "dd"], {"d/", "ü/"}),
        ({"prefix": "d/", "delimiter": "/"}, ["d/", "d/x", "d/y"], {"d/e/"}),
        ({"start_offset": "d/x", "end_offset": "dd"}, ["d/x", "d/y"], set()),
        ({"max_results": 2}, ["a", "d/"], set()),
    ],
)
@pytest.mark.parametrize("page", [None, 1, 2])
def test_objects_are_listed_in_order(
    bucket: Any, question: dict[str, Any], objects: list[str], prefixes: set[str], page: int | None
) -> None:
    put(bucket, "ü/1", "dd", "d/y", "d/x", "d/e/f", "d/", "a")
    found = bucket.list_blobs(page_size=page, **question)
    assert names(found) == objects
    assert found.prefixes == prefixes


def test_a_generation_is_another_with_each_content_and_only_the_last_is_kept(bucket: Any) -> None:
    blob = bucket.blob("a")
    generations = []
    for content in ("1", "2", "2"):
        blob.upload_from_string(content)
        generations.append(blob.generation)
    assert generations == sorted(set(generations))
    assert bucket.blob("a", generation=generations[2]).download_as_bytes() == b"2"
    with pytest.raises(exceptions.NotFound):
        bucket.blob("a", generation=generations[0]).download_as_bytes()


def test_preconditions_are_kept(bucket: Any) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string("1", if_generation_match=0)
    first = blob.generation
    for refused in ({"if_generation_match": 0}, {"if_generation_match": first + 1}, {"if_metageneration_match": 2}):
        with pytest.raises(exceptions.PreconditionFailed, match="pre-conditions you specified did not hold"):
            bucket.blob("a").upload_from_string("2", **refused)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a").upload_from_file(io.BytesIO(b"2" * 9 * MIB), **refused)
    assert bucket.blob("a").download_as_bytes() == b"1"
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("a").delete(if_generation_match=first + 1)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("a").reload(if_generation_match=first + 1)
    with pytest.raises(exceptions.NotModified):
        bucket.blob("a").reload(if_generation_not_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("b").upload_from_string("1", if_generation_match=first)
    bucket.blob("a").upload_from_string("3", if_generation_match=first)
    assert bucket.blob("a").download_as_bytes(if_generation_not_match=first) == b"3"


def test_a_deleted_object_is_gone_from_the_disk_as_well(shared_api: LabApi, bucket: Any) -> None:
    put(bucket, "a", "b")
    put(bucket, "a")
    bucket.blob("a").delete()
    assert (bucket.blob("a").exists(), bucket.blob("b").exists()) == (False, True)
    assert names(bucket.list_blobs()) == ["b"]
    assert len(list((directory(shared_api) / bucket.name).iterdir())) == 3
    with pytest.raises(exceptions.NotFound, match=f"No such object: {bucket.name}/a"):
        bucket.blob("a").delete()


@pytest.mark.parametrize("read", ["download_as_bytes", "reload"])
def test_a_missing_object_or_bucket_is_named(storage_client: Any, bucket: Any, read: str) -> None:
    with pytest.raises(exceptions.NotFound, match=f"No such object: {bucket.name}/no/such"):
        getattr(bucket.blob("no/such"), read)()
    with pytest.raises(exceptions.NotFound, match="The specified bucket does not exist"):
        getattr(storage_client.bucket("nobodys").blob("a"), read)()


@pytest.mark.parametrize("size", [1, 9 * MIB])
def test_nothing_is_uploaded_to_a_bucket_that_is_not_there(storage_client: Any, size: int) -> None:
    with pytest.raises(exceptions.NotFound, match="The specified bucket does not exist"):
        storage_client.bucket("nobodys").blob("a").upload_from_string(b"." * size)


HOSTILE = [
    "../../x",
    "../bucket.json",
    "/etc/passwd",
    "a//b",
    "a/../b",
    "~",
    "%2e%2e/x",
    "a\\b",
    "bucket.json",
    "x" * 1024,
]


def test_no_name_of_an_object_leaves_its_bucket(shared_api: LabApi, bucket: Any) -> None:
    before = {path for path in shared_api.state.parent.rglob("*") if path.is_file()}
    put(bucket, *HOSTILE)
    new = {path for path in shared_api.state.parent.rglob("*") if path.is_file()} - before
    assert {path.parent for path in new} == {directory(shared_api) / bucket.name}
    assert len(new) == 2 * len(HOSTILE)
    assert names(bucket.list_blobs()) == sorted(HOSTILE)
    for name in HOSTILE:
        assert bucket.blob(name).download_as_bytes() == f"content of {name}".encode()
    assert bucket.exists()


@pytest.mark.parametrize("name", [".", "..", "a\nb", "x" * 1025, "ü" * 513])
def test_a_name_that_the_service_does_not_take_is_refused(bucket: Any, name: str) -> None:
    with pytest.raises(exceptions.BadRequest, match="Invalid object name"):
        bucket.blob(name).upload_from_string("")
    assert names(bucket.list_blobs()) == []


@pytest.mark.parametrize("name", ["../x", "a", "UPPER", "a..b", "-a", "a/b", "x" * 64])
def test_a_bucket_is_called_as_the_service_allows(shared_api: LabApi, storage_client: Any, name: str) -> None:
    status, answer = shared_api.call("POST", "storage/v1/b?project=lab", {"name": name})
    assert (status, answer["error"]["message"]) == (400, f"Invalid bucket name: {name!r}")


@pytest.mark.parametrize(
    ("asked", "location", "kind"),
    [
        ("us-central2", "US-CENTRAL2", "region"),
        ("europe-west4", "EUROPE-WEST4", "region"),
        (None, "US", "multi-region"),
        ("eu", "EU", "multi-region"),
        ("nam4", "NAM4", "dual-region"),
    ],
)
def test_a_bucket_has_a_place(storage_client: Any, asked: str | None, location: str, kind: str) -> None:
    made = storage_client.create_bucket(f"place{next(NUMBERS)}", location=asked)
    for found in (made, storage_client.get_bucket(made.name)):
        assert (found.location, found.location_type, found.storage_class) == (location, kind, "STANDARD")
    layout = storage_client._get_resource(f"/b/{made.name}/storageLayout")
    assert (layout["kind"], layout["bucket"]) == ("storage#storageLayout", made.name)
    assert (layout["location"], layout["locationType"]) == (location, kind)


def test_a_bucket_lies_in_two_chosen_regions(storage_client: Any) -> None:
    made = storage_client.create_bucket(
        f"place{next(NUMBERS)}", location="US", data_locations=["US-EAST1", "us-west1"], enable_object_retention=False
    )
    assert storage_client.get_bucket(made.name).data_locations == ["US-EAST1", "US-WEST1"]
    assert made.location_type == "dual-region"
    with pytest.raises(exceptions.BadRequest, match="location constraint"):
        storage_client.create_bucket(f"place{next(NUMBERS)}", location="../nowhere")


def test_the_access_of_a_new_bucket_is_kept(storage_client: Any) -> None:
    bucket = storage_client.bucket(f"access{next(NUMBERS)}")
    bucket.iam_configuration.public_access_prevention = "enforced"
    storage_client.create_bucket(bucket)
    assert storage_client.get_bucket(bucket.name).iam_configuration.public_access_prevention == "enforced"


def test_an_object_can_have_the_name_of_the_layout(storage_client: Any, bucket: Any) -> None:
    put(bucket, "storageLayout", "a/storageLayout")
    assert names(bucket.list_blobs()) == ["a/storageLayout", "storageLayout"]
    assert bucket.blob("storageLayout").download_as_bytes() == b"content of storageLayout"
    with pytest.raises(exceptions.NotFound, match="does not exist"):
        storage_client._get_resource("/b/no-such-bucket/storageLayout")


def test_buckets_belong_to_projects_and_go_when_they_are_empty(storage_client: Any, bucket: Any) -> None:
    other = storage_client.create_bucket(f"other{next(NUMBERS)}", project="other")
    assert other.name in names(storage_client.list_buckets(project="other"))
    assert other.name not in names(storage_client.list_buckets(project="lab"))
    assert names(storage_client.list_buckets(project="lab", prefix=bucket.name)) == [bucket.name]
    with pytest.raises(exceptions.Conflict, match="already own it"):
        storage_client.create_bucket(bucket.name)
    with pytest.raises(exceptions.Forbidden):
        storage_client.create_bucket("mine", project="nobodys")
    put(bucket, "a")
    with pytest.raises(exceptions.Conflict, match="not empty"):
        bucket.delete()
    bucket.delete(force=True)
    assert not bucket.exists()


def test_without_project_and_credentials_the_client_finds_the_lab(
    shared_api: LabApi, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared_api.rest)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    plain = storage.Client()
    assert bucket.name in names(plain.list_buckets())
    put(plain.bucket(bucket.name), "a")


def test_a_new_process_has_them_all(lab_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = client_of(lab_api, monkeypatch).create_bucket("kept", location="us-central2")
    put(bucket, "a", "../../x", "gone", "twice")
    put(bucket, "twice")
    bucket.blob("gone").delete()
    before = {blob.name: blob.generation for blob in bucket.list_blobs()}
    folder = directory(lab_api) / "kept"
    (folder / "left-by-a-kill.content").write_bytes(b"half")

    lab_api.kill()
    lab_api.restart()
    again = client_of(lab_api, monkeypatch).get_bucket("kept")
    assert {blob.name: blob.generation for blob in again.list_blobs()} == before
    assert (again.location, again.location_type) == ("US-CENTRAL2", "region")
    assert again.blob("../../x").download_as_bytes() == b"content of ../../x"
    assert again.get_blob("twice").download_as_bytes() == b"content of twice"
    assert len(list(folder.iterdir())) == 1 + 2 * len(before)
    again.blob("a").upload_from_string("new", if_generation_match=before["a"])
    assert again.get_blob("a").generation > max(before.values())


@pytest.mark.parametrize(
    ("file", "content"), [("bucket.json", '{"name": "b"'), ("bucket.json", '{"name": "b"}'), ("x.object.json", "[]")]
)
def test_a_file_that_is_no_buckets_is_refused_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, content: str
) -> None:
    api = LabApi(tmp_path / "state.json")
    damaged = directory(api) / "b" / file
    damaged.parent.mkdir(parents=True)
    good = {"name": "b", "project": "lab", "created": "", "fields": {}}
    (damaged.parent / "bucket.json").write_text(json.dumps(good))
    damaged.write_text(content)
    with pytest.raises(AssertionError, match="ended with 2"):
        api.start()
    said = capfd.readouterr().err
    assert "cannot use the lab's buckets: a file is damaged" in said
    assert str(damaged) in said
    assert damaged.read_text() == content
