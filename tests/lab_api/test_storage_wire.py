"""Buckets past what clients send by themselves: broken uploads, refusals, faults, a full disk."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from typing import Any

import pytest
from google.api_core import exceptions

from tests.support.buckets import MIB, NUMBERS, client_of, directory, put
from tests.support.lab_api import LabApi
from tpu_ops.lab.api.storage_wire import multipart


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
    client.create_bucket(f"more{next(NUMBERS)}")
    counted = {"storage.buckets.insert": 1, "storage.objects.get": 1, "storage.objects.insert": 1}
    assert shared_api.requests("lab") == counted


def test_a_full_disk_is_said_and_the_earlier_object_stays(lab_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = client_of(lab_api, monkeypatch).create_bucket("full")
    put(bucket, "a")
    # A file in a directory's place fails as a full disk does, for root too.
    uploads = directory(lab_api) / ".uploads"
    uploads.rmdir()
    uploads.write_text("")
    with pytest.raises(exceptions.GoogleAPICallError, match="the lab cannot use the files of its buckets"):
        bucket.blob("a").upload_from_string("new")
    assert bucket.blob("a").download_as_bytes() == b"content of a"
