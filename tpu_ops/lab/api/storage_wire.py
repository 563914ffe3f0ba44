"""Google Cloud Storage's JSON API: parsing of requests for buckets and objects, and rendering of answers."""

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
from tpu_ops.lab.backend import PROJECT_NUMBER

#: Metadata field of an object that a client can set -> the header with this field in downloads (empty: no header).
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
#: Parameters of lists that the lab refuses: it does not support them, and a list that ignores them would be wrong.
REFUSED = ("includeTrailingDelimiter", "matchGlob", "softDeleted")

_LIMIT = 1000
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(?:(\d+)|\*)")


def split(path: str) -> tuple[str, str, str]:
    """Split the percent-encoded path after ``/storage/v1/`` into its form and the names of bucket and object.

    The form is ``b``, ``b/B``, ``b/B/storageLayout``, ``b/B/o`` or ``b/B/o/O``; for any other path, the form is the
    unchanged path.

    Raises:
        StorageError: 400; a name is not UTF-8.
    """
    parts = path.split("/", 3)
    forms = ["b", "b/B", "b/B/o", "b/B/o/O"]
    if parts[2:] == ["storageLayout"]:
        forms[2] = "b/B/storageLayout"
    elif parts[0] != "b" or (len(parts) > 2 and parts[2] != "o"):
        return path, "", ""
    try:
        bucket, name = ([unquote(part, errors="strict") for part in parts[1::2]] + ["", ""])[:2]
    except UnicodeDecodeError as failure:
        raise bad(f"Invalid name in {path}") from failure
    return forms[len(parts) - 1], bucket, name


def bucket_json(bucket: Bucket, origin: str) -> Json:
    """Return a bucket as JSON in Google's form.

    Args:
        bucket: The bucket.
        origin: ``http://host:port`` of the client's request.
    """
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "selfLink": f"{origin}/storage/v1/b/{bucket.name}",
        "projectNumber": PROJECT_NUMBER,
        "metageneration": "1",
        "etag": "CAE=",
        "timeCreated": bucket.created,
        "updated": bucket.created,
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"},
        **bucket.fields,
    }


def layout_json(bucket: Bucket) -> Json:
    """Return a bucket's storage layout as JSON in Google's form; it lacks the regions of a dual-region."""
    return {
        "kind": "storage#storageLayout",
        "bucket": bucket.name,
        "location": bucket.fields["location"],
        "locationType": bucket.fields["locationType"],
        "hierarchicalNamespace": {"enabled": False},
    }


def object_json(stored: Stored, origin: str) -> Json:
    """Return an object as JSON in Google's form; 64-bit numbers are strings.

    Args:
        stored: The object.
        origin: ``http://host:port`` of the client's request.
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
    """Return an object's entity tag, which is different for each upload."""
    return b64encode(str(stored.generation).encode()).decode()


def content_headers(stored: Stored) -> dict[str, str]:
    """Return the HTTP headers for the download of an object, except Content-Length."""
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
    """Return the HTTP response for an error: plain text for downloads, else JSON in Google's form."""
    if failure.status == 304:
        return web.Response(status=304)
    if plain:
        return web.Response(text=failure.message, status=failure.status)
    cause = {"message": failure.message, "domain": "global", "reason": failure.reason}
    error = {"code": failure.status, "message": failure.message, "errors": [cause]}
    return json_response(json.dumps({"error": error}), failure.status)


def number(query: Mapping[str, str], key: str) -> int | None:
    """Return the number in a query parameter; None if the parameter is missing.

    Raises:
        StorageError: 400; the parameter is not a number.
    """
    text = query.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII):
        raise bad(f"Invalid value for {key}: {text!r}")
    return int(text)


def conditions(query: Mapping[str, str]) -> Conditions:
    """Return the preconditions in the query of a request.

    Raises:
        StorageError: 400; a precondition is not a number.
    """
    names = ("ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch")
    return Conditions(*(number(query, name) for name in names))


def question(query: Mapping[str, str]) -> Question:
    """Return the parameters of a list from the query of a request.

    Raises:
        StorageError: 400; a parameter is invalid. 501; a parameter is not supported.
    """
    for key in REFUSED:
        if query.get(key, "false").lower() != "false":
            raise StorageError(501, "notImplemented", f"{key}: the lab's storage does not support this parameter")
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
    """Return the page token for the page that begins after this entry."""
    return urlsafe_b64encode(last.encode()).decode()


def fields_of(metadata: Json, content_type: str) -> Json:
    """Return the metadata to store for an object.

    Args:
        metadata: The client's metadata.
        content_type: The content type in the request's headers; can be empty.

    Raises:
        StorageError: 400; a field is invalid.
    """
    found = {key: metadata[key] for key in SETTABLE if metadata.get(key)}
    found.setdefault("contentType", content_type or "application/octet-stream")
    for key, value in found.items():
        if key == "metadata":
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise bad("Invalid value for metadata: not a JSON object of strings")
        elif not isinstance(value, str) or not value.isprintable() or not value.isascii():
            raise bad(f"Invalid value for {key}: {value!r}")
    return found


def hashes(text: str) -> dict[str, str]:
    """Return name -> value of each digest in an ``X-Goog-Hash`` header."""
    return dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)


def multipart(content_type: str, body: bytes) -> tuple[Json, str, bytes]:
    """Return the metadata, the content type and the content of a multipart/related upload.

    Raises:
        StorageError: 400; the body is malformed.
    """
    header = Message()
    header["Content-Type"] = content_type
    # gcloud writes the boundary in single quotes, and ends lines with a line feed only.
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
        raise bad("Malformed multipart body: the metadata is not a JSON object.")
    return metadata, kind, content


def content_range(text: str | None) -> tuple[int | None, int | None]:
    """Return the offset of the first byte, and the total size, from a resumable upload's ``Content-Range`` header.

    A value that the header does not contain is None. Without the header, the body is the whole content, and the offset
    is 0.

    Raises:
        StorageError: 400; the header is invalid.
    """
    if text is None:
        return 0, None
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise bad(f"Failed to parse Content-Range header: {text!r}")
    first, _, total = (int(part) if part else None for part in match.groups())
    return first, total


def byte_range(text: str, size: int) -> tuple[int, int]:
    """Return the offset of the first requested byte, and the offset after the last requested byte.

    Args:
        text: The ``Range`` header. A header with several ranges, or in an unknown form, means the whole content.
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
