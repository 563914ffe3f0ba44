"""Buckets and objects of the lab, judged by google-cloud-storage's own client."""

from __future__ import annotations

import hashlib
import http.client
import io
import itertools
import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.support.lab_api import LabApi
from tpu_ops.lab.api.storage_wire import multipart

_NUMBERS = itertools.count(1)
MIB = 1 << 20


def client_of(api: LabApi, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", api.rest)
    return storage.Client(project="lab", credentials=AnonymousCredentials())


@pytest.fixture
def client(shared_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """google-cloud-storage's client."""
    made = client_of(shared_api, monkeypatch)
    yield made
    made.close()
    shared_api.clear_faults()


@pytest.fixture
def bucket(client: Any) -> Any:
    """A new bucket."""
    return client.create_bucket(f"bucket{next(_NUMBERS)}", location="us-central2")


def directory(api: LabApi) -> Path:
    return api.state.with_name("state.json.buckets")


def put(bucket: Any, *names: str) -> None:
    for name in names:
        bucket.blob(name).upload_from_string(f"content of {name}")


def names(found: Any) -> list[str]:
    return [blob.name for blob in found]


TRICKY = {
    "empty": b"",
    "text": "snapshot ü\n".encode(),
    "line ends": b"\r\n\r\n--\r\n",
    "boundaries": b"\r\n--" + b"=" * 15 + b"0123456789==\r\n\r\n",
    "all bytes": bytes(range(256)) * 300,
}


@pytest.mark.parametrize("content", TRICKY.values(), ids=TRICKY)
def test_what_was_uploaded_is_what_is_read(bucket: Any, content: bytes) -> None:
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


def test_what_is_said_of_an_object_is_kept(bucket: Any) -> None:
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
def test_what_is_not_there_is_named(client: Any, bucket: Any, read: str) -> None:
    with pytest.raises(exceptions.NotFound, match=f"No such object: {bucket.name}/no/such"):
        getattr(bucket.blob("no/such"), read)()
    with pytest.raises(exceptions.NotFound, match="The specified bucket does not exist"):
        getattr(client.bucket("nobodys").blob("a"), read)()


@pytest.mark.parametrize("size", [1, 9 * MIB])
def test_nothing_is_uploaded_to_a_bucket_that_is_not_there(client: Any, size: int) -> None:
    with pytest.raises(exceptions.NotFound, match="The specified bucket does not exist"):
        client.bucket("nobodys").blob("a").upload_from_string(b"." * size)


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
def test_a_bucket_is_called_as_the_service_allows(shared_api: LabApi, client: Any, name: str) -> None:
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
def test_a_bucket_has_a_place(client: Any, asked: str | None, location: str, kind: str) -> None:
    made = client.create_bucket(f"place{next(_NUMBERS)}", location=asked)
    for found in (made, client.get_bucket(made.name)):
        assert (found.location, found.location_type, found.storage_class) == (location, kind, "STANDARD")


def test_a_bucket_lies_in_two_chosen_regions(client: Any) -> None:
    made = client.create_bucket(
        f"place{next(_NUMBERS)}", location="US", data_locations=["US-EAST1", "us-west1"], enable_object_retention=False
    )
    assert client.get_bucket(made.name).data_locations == ["US-EAST1", "US-WEST1"]
    assert made.location_type == "dual-region"
    with pytest.raises(exceptions.BadRequest, match="location constraint"):
        client.create_bucket(f"place{next(_NUMBERS)}", location="../nowhere")


def test_buckets_belong_to_projects_and_go_when_they_are_empty(client: Any, bucket: Any) -> None:
    other = client.create_bucket(f"other{next(_NUMBERS)}", project="other")
    assert other.name in names(client.list_buckets(project="other"))
    assert other.name not in names(client.list_buckets(project="lab"))
    assert names(client.list_buckets(project="lab", prefix=bucket.name)) == [bucket.name]
    with pytest.raises(exceptions.Conflict, match="already own it"):
        client.create_bucket(bucket.name)
    with pytest.raises(exceptions.Forbidden):
        client.create_bucket("mine", project="nobodys")
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


def test_an_upload_that_breaks_off_goes_on_where_it_did(shared_api: LabApi, bucket: Any) -> None:
    host = shared_api.rest.removeprefix("http://")
    content = hashlib.shake_128(b"seed").digest(3 * MIB)

    def ask(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        connection = http.client.HTTPConnection(host, timeout=10)
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, url, body, sent)
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    path = f"/upload/storage/v1/b/{bucket.name}/o?uploadType=resumable&name=a"
    whole = f"bytes 0-{len(content) - 1}/{len(content)}"
    status, headers, _ = ask("POST", path, "{}")
    url = headers["Location"].removeprefix(shared_api.rest)
    assert status == 200
    assert ask("PUT", url, Content_Range="bytes */*")[0] == 308

    with socket.create_connection((host.split(":")[0], int(host.split(":")[1])), timeout=10) as broken:
        head = f"PUT {url} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\nContent-Range: {whole}\r\n\r\n"
        broken.sendall(head.encode() + content[:MIB])
    status, headers, _ = ask("PUT", url, Content_Range="bytes */*")
    there = int(headers.get("Range", "bytes=0--1").removeprefix("bytes=0-")) + 1
    assert (status, 0 <= there <= MIB) == (308, True)
    assert not bucket.blob("a").exists()
    status, _, body = ask("PUT", url, content, Content_Range=whole)
    assert (status, json.loads(body)["size"]) == (200, str(len(content)))
    assert bucket.blob("a").download_as_bytes() == content
    assert ask("PUT", url, Content_Range="bytes */*")[0] == 200

    url = ask("POST", path, "{}")[1]["Location"].removeprefix(shared_api.rest)
    for range_, expected in (("bytes 0-3/9", 308), ("bytes 5-8/9", 400), ("bytes */*", 404)):
        assert ask("PUT", url, b"0123" if "-" in range_ else None, Content_Range=range_)[0] == expected


@pytest.mark.parametrize("kind", ["multipart", "media", "resumable"])
def test_content_that_is_not_what_the_client_says_is_refused(shared_api: LabApi, bucket: Any, kind: str) -> None:
    blob = bucket.blob("a")
    path = f"{shared_api.rest}/upload/storage/v1/b/{bucket.name}/o?name=a&uploadType={kind}"
    session = bucket.client._http
    wrong = "crc32c=AAAAAA==,md5=AAAAAAAAAAAAAAAAAAAAAA=="
    if kind == "multipart":
        body = b'--x\r\n\r\n{"crc32c":"AAAAAA=="}\r\n--x\r\n\r\ncontent\r\n--x--'
        answer = session.post(path, data=body, headers={"Content-Type": "multipart/related; boundary=x"})
    elif kind == "media":
        answer = session.post(path, data=b"content", headers={"X-Goog-Hash": wrong})
    else:
        url = session.post(path).headers["Location"]
        answer = session.put(url, data=b"content", headers={"X-Goog-Hash": wrong})
    assert (answer.status_code, "doesn't match calculated" in answer.json()["error"]["message"]) == (400, True)
    assert not blob.exists()


def test_media_is_uploaded_by_name(shared_api: LabApi, bucket: Any) -> None:
    path = f"{shared_api.rest}/upload/storage/v1/b/{bucket.name}/o?name=a%2Fb&uploadType=media"
    answer = bucket.client._http.post(path, data=b"content", headers={"Content-Type": "text/x-log"})
    assert (answer.status_code, answer.json()["name"]) == (200, "a/b")
    assert bucket.get_blob("a/b").content_type == "text/x-log"


@pytest.mark.parametrize("end", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
@pytest.mark.parametrize("quoted", ["x=y", '"x=y"', "'x=y'"])
def test_a_multipart_body_is_read_as_its_sender_writes_it(end: bytes, quoted: str) -> None:
    content = b"\r\n--x\n--x\r\n\n" + end * 3
    lines = [b"--x=y", b"Content-Type: application/json", b"", b'{"name": "a"}', b"--x=y"]
    lines += [b"content-type: text/x", b"", content, b"--x=y--", b""]
    found = multipart(f"multipart/related; boundary={quoted}", end.join(lines))
    assert found == ({"name": "a"}, "text/x", content)


@pytest.mark.parametrize(
    "case",
    [
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=multipart&name=a", {}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=carrier-pigeon&name=a", {}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable", {}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable", {"name": 7}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable", {"name": "\ud800"}, 400),
        ("POST", "storage/v1/b", {"name": "place", "customPlacementConfig": "US-EAST1"}, 400),
        ("POST", "storage/v1/b", {"name": "place", "customPlacementConfig": {"dataLocations": [1]}}, 400),
        ("POST", "storage/v1/b", {"name": ["place"]}, 400),
        ("POST", "storage/v1/b", {"name": "place", "location": 7}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable", {"name": "a", "metadata": [1]}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable", {"name": "a", "contentType": "a\r\nb"}, 400),
        ("POST", "upload/storage/v1/b/BUCKET/o?uploadType=resumable&ifGenerationMatch=x", {"name": "a"}, 400),
        ("PUT", "upload/storage/v1/b/BUCKET/o?upload_id=no", None, 404),
        ("GET", "storage/v1/b/BUCKET/o?pageToken=%25", None, 400),
        ("GET", "storage/v1/b/BUCKET/o?maxResults=many", None, 400),
        ("GET", "storage/v1/b/BUCKET/o?matchGlob=*", None, 501),
        ("GET", "storage/v1/b/BUCKET/o?softDeleted=true", None, 501),
        ("GET", "storage/v1/b/BUCKET/o/%FF", None, 400),
        ("PATCH", "storage/v1/b/BUCKET/o/a", {}, 501),
        ("GET", "storage/v1/b/BUCKET/iam", None, 501),
        ("GET", "storage/v1/nonsense", None, 501),
    ],
)
def test_every_refusal_is_json_in_words(shared_api: LabApi, bucket: Any, case: tuple[str, str, Any, int]) -> None:
    method, path, body, status = case
    found, answer = shared_api.call(method, path.replace("BUCKET", bucket.name), body)
    assert (found, answer["error"]["code"]) == (status, status)
    assert answer["error"]["message"]


def test_faults_hit_buckets_as_well(shared_api: LabApi, bucket: Any) -> None:
    put(bucket, "a")
    shared_api.forget_requests()
    shared_api.fault(method="storage.objects.get", project="lab", code="PERMISSION_DENIED", message="not you")
    with pytest.raises(exceptions.Forbidden, match="not you"):
        bucket.blob("a").download_as_bytes()
    put(bucket, "b")
    shared_api.fault(method="storage.buckets.insert", project="other", code="RESOURCE_EXHAUSTED", times=1)
    client = bucket.client
    with pytest.raises(exceptions.TooManyRequests):
        client.create_bucket("nomore", project="other", retry=None)
    client.create_bucket(f"more{next(_NUMBERS)}")
    counted = {"storage.buckets.insert": 1, "storage.objects.get": 1, "storage.objects.insert": 1}
    assert shared_api.requests("lab") == counted


def test_a_full_disk_is_said_and_the_earlier_object_stays(lab_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = client_of(lab_api, monkeypatch).create_bucket("full")
    put(bucket, "a")
    # A file in a directory's place fails as a full disk does, for root too.
    uploads = directory(lab_api) / ".uploads"
    uploads.rmdir()
    uploads.write_text("")
    with pytest.raises(exceptions.GoogleAPICallError, match="the lab cannot keep it"):
        bucket.blob("a").upload_from_string("new")
    assert bucket.blob("a").download_as_bytes() == b"content of a"
