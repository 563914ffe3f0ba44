"""The JSON and HTTP of Google Cloud Storage: parsing of requests for buckets and objects, and forms of answers."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Mapping
from email.message import Message
from urllib.parse import quote, unquote

from aiohttp import web

from tpu_ops.lab.api.rest import json_response
from tpu_ops.lab.api.storage_lists import Question
from tpu_ops.lab.api.storage_records import Bucket, Conditions, StorageError, Stored, bad
from tpu_ops.lab.api.wire import Json

#: Metadata of an object that a client may set, and the header with it in downloads.
SETTABLE = {
    "cacheControl": "Cache-Control",
    "contentDisposition": "Content-Disposition",
    "contentEncoding": "Content-Encoding",
    "contentLanguage": "Content-Language",
    "contentType": "Content-Type",
    "customTime": "X-Goog-Custom-Time",
    "metadata": "",
    "storageClass": "X-Goog-Storage-Class",
}
#: Parameters that the lab does not support, and that cannot be ignored without a wrong answer.
REFUSED = ("includeTrailingDelimiter", "matchGlob", "softDeleted")

_LIMIT = 1000
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(?:(\d+)|\*)")


def split(path: str) -> tuple[str, str, str]:
    """Split the quoted path after ``/storage/v1/`` into its form, the bucket and the object.

    The form is ``b``, ``b/B``, ``b/B/o`` or ``b/B/o/O``; any other path is returned unchanged.

    Raises:
        StorageError: 400; a name is not UTF-8.
    """
    parts = path.split("/", 3)
    forms = ["b", "b/B", "b/B/o", "b/B/o/O"]
    if parts[0] != "b" or (len(parts) > 2 and parts[2] != "o"):
        return path, "", ""
    try:
        bucket, name = ([unquote(part, errors="strict") for part in parts[1::2]] + ["", ""])[:2]
    except UnicodeDecodeError as failure:
        raise bad(f"Invalid name in {path}") from failure
    return forms[len(parts) - 1], bucket, name


def bucket_json(bucket: Bucket, origin: str) -> Json:
    """Return a bucket in the service's form.

    Args:
        bucket: The bucket.
        origin: ``http://host:port`` as the client uses it.
    """
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "selfLink": f"{origin}/storage/v1/b/{bucket.name}",
        "projectNumber": "1",
        "metageneration": "1",
        "etag": "CAE=",
        "timeCreated": bucket.created,
        "updated": bucket.created,
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"},
        **bucket.fields,
    }


def object_json(stored: Stored, origin: str) -> Json:
    """Return an object in the service's form; 64-bit numbers are strings.

    Args:
        stored: The object.
        origin: ``http://host:port`` as the client uses it.
    """
    path = f"storage/v1/b/{stored.bucket}/o/{quote(stored.name, safe='')}"
    return {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
        "name": stored.name,
        "bucket": stored.bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "selfLink": f"{origin}/{path}",
        "mediaLink": f"{origin}/download/{path}?generation={stored.generation}&alt=media",
        "size": str(stored.size),
        "md5Hash": stored.md5,
        "crc32c": stored.crc32c,
        "etag": etag(stored),
        "timeCreated": stored.created,
        "updated": stored.created,
        "timeStorageClassUpdated": stored.created,
        "storageClass": "STANDARD",
        **stored.fields,
    }


def etag(stored: Stored) -> str:
    """Return a text that differs for different content."""
    return b64encode(str(stored.generation).encode()).decode()


def content_headers(stored: Stored) -> dict[str, str]:
    """Return the headers of an object's content, except its length."""
    said = {SETTABLE[key]: value for key, value in stored.fields.items() if SETTABLE[key]}
    return {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "ETag": f'"{etag(stored)}"',
        "X-Goog-Generation": str(stored.generation),
        "X-Goog-Metageneration": "1",
        "X-Goog-Hash": f"crc32c={stored.crc32c},md5={stored.md5}",
        "X-Goog-Stored-Content-Encoding": stored.fields.get("contentEncoding", "identity"),
        "X-Goog-Stored-Content-Length": str(stored.size),
        "X-Goog-Storage-Class": "STANDARD",
        **said,
    }


def error_response(failure: StorageError, *, plain: bool) -> web.Response:
    """Return an error in the service's form: text for downloads, else JSON."""
    if failure.status == 304:
        return web.Response(status=304)
    if plain:
        return web.Response(text=failure.message, status=failure.status)
    cause = {"message": failure.message, "domain": "global", "reason": failure.reason}
    error = {"code": failure.status, "message": failure.message, "errors": [cause]}
    return json_response(json.dumps({"error": error}), failure.status)


def number(query: Mapping[str, str], key: str) -> int | None:
    """Return a numeric query parameter; None if it is missing.

    Raises:
        StorageError: 400.
    """
    text = query.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII):
        raise bad(f"Invalid value for {key}: {text!r}")
    return int(text)


def conditions(query: Mapping[str, str]) -> Conditions:
    """Return the preconditions of a request.

    Raises:
        StorageError: 400.
    """
    names = ("ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch")
    return Conditions(*(number(query, name) for name in names))


def question(query: Mapping[str, str]) -> Question:
    """Return the parameters of a list.

    Raises:
        StorageError: 400 or 501.
    """
    for key in REFUSED:
        if query.get(key, "false").lower() != "false":
            raise StorageError(501, "notImplemented", f"{key}: the lab's buckets do not have it")
    limit = number(query, "maxResults")
    try:
        after = b64decode(query.get("pageToken", ""), altchars="-_", validate=True).decode()
    except ValueError as failure:
        raise bad("Invalid value for pageToken") from failure
    return Question(
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        start=query.get("startOffset", ""),
        end=query.get("endOffset", ""),
        after=after,
        limit=max(1, min(limit if limit is not None else _LIMIT, _LIMIT)),
    )


def page_token(last: str) -> str:
    """Return the token of the page after an entry."""
    return urlsafe_b64encode(last.encode()).decode()


def fields_of(metadata: Json, content_type: str) -> Json:
    """Return the metadata to store for an object.

    Args:
        metadata: The client's metadata.
        content_type: The content type in the request's headers; may be empty.

    Raises:
        StorageError: 400.
    """
    found = {key: metadata[key] for key in SETTABLE if metadata.get(key)}
    found.setdefault("contentType", content_type or "application/octet-stream")
    for key, value in found.items():
        if key == "metadata":
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise bad("Invalid value for metadata: not an object of strings")
        elif not isinstance(value, str) or not value.isprintable() or not value.isascii():
            raise bad(f"Invalid value for {key}: {value!r}")
    return found


def hashes(text: str) -> dict[str, str]:
    """Return the digests in an ``X-Goog-Hash`` header by their names."""
    return dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)


def multipart(content_type: str, body: bytes) -> tuple[Json, str, bytes]:
    """Return the metadata, the content type and the content of a multipart/related upload.

    Raises:
        StorageError: 400.
    """
    header = Message()
    header["Content-Type"] = content_type
    # gcloud quotes the boundary differently, and uses line feeds only.
    boundary = b"--" + str(header.get_param("boundary") or "").strip("'").encode()
    end = b"\r\n" if body.partition(boundary)[2].startswith(b"\r") else b"\n"
    pieces = (end + body).split(end + boundary)
    if boundary == b"--" or len(pieces) != 4 or not pieces[3].startswith(b"--"):
        raise bad("Malformed multipart body.")
    (_, _, text), (about, _, content) = (piece.partition(end * 2) for piece in pieces[1:3])
    found = re.search(rb"^content-type:\s*(.*?)\s*$", about, re.IGNORECASE | re.MULTILINE)
    try:
        metadata = json.loads(text)
        kind = found[1].decode() if found else ""
    except ValueError as failure:
        raise bad(f"Malformed multipart body: {failure}") from failure
    if not isinstance(metadata, dict):
        raise bad("Malformed multipart body: its metadata is not an object.")
    return metadata, kind, content


def content_range(text: str | None) -> tuple[int | None, int | None]:
    """Return the first byte and the total size from the ``Content-Range`` header of a resumable upload.

    Both may be None if not given. Without a header, the body is the whole content.

    Raises:
        StorageError: 400.
    """
    if text is None:
        return 0, None
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise bad(f"Failed to parse Content-Range header: {text!r}")
    first, _, total = (int(part) if part else None for part in match.groups())
    return first, total


def byte_range(text: str, size: int) -> tuple[int, int]:
    """Return the first byte in a ``Range`` header, and the one after the last.

    Args:
        text: The header; one with several ranges, or an unknown form, means the whole content.
        size: Size of the content in bytes.

    Raises:
        StorageError: 416; the range is outside of the content.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", text, re.ASCII)
    if match is None or not (match[1] or match[2]):
        return 0, size
    first, last = (int(part) if part else None for part in match.groups())
    if first is None:
        first, last = max(0, size - (last or 0)), None
    end = size if last is None else min(last + 1, size)
    if first >= end:
        raise StorageError(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
    return first, end
