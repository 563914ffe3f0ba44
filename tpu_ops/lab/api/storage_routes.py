"""A part of Google Cloud Storage's JSON API, on the REST port: requests for buckets and objects."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from aiohttp import web

from tpu_ops.lab.api import storage_wire as wire
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.faults import Target
from tpu_ops.lab.api.rest import json_response, read_json
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.storage import Buckets, Upload
from tpu_ops.lab.api.storage_lists import listing
from tpu_ops.lab.api.storage_records import Conditions, StorageError, Stored, bad
from tpu_ops.lab.api.wire import Json

_CHUNK = 256 * 1024

P = ParamSpec("P")
R = TypeVar("R")
Answer = Callable[["Routes", web.Request, str, str], Awaitable[web.StreamResponse]]


@dataclass
class Session:
    """An upload in progress; a resumable upload takes several requests."""

    bucket: str
    name: str
    fields: Json
    expected: dict[str, str]
    conditions: Conditions
    upload: Upload
    stored: Stored | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Routes:
    """Handlers of HTTP requests for buckets and objects."""

    def __init__(self, service: Service, buckets: Buckets) -> None:
        self._service = service
        self._buckets = buckets
        self._changing = asyncio.Lock()
        self._sessions: dict[str, Session] = {}

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """Handle one HTTP request for a bucket or an object."""
        base, _, rest = http.rel_url.raw_path.removeprefix("/").partition("storage/v1/")
        try:
            form, bucket, name = wire.split(rest)
            method, answer = self._method(base.removeprefix("resumable/").strip("/") or "storage", http.method, form)
            await self._service.faults.meet(Target(method, self._buckets.project(bucket) or self._project(http), ""))
            return await answer(self, http, bucket, name)
        except ApiError as failure:
            return _refuse(http, StorageError(failure.code.http, failure.code.name, failure.message))
        except StorageError as failure:
            return _refuse(http, failure)
        except ConnectionError:  # the client has disconnected and does not read the answer
            return web.Response(status=499)
        except OSError as failure:
            why = f"the lab cannot use the files of its buckets: {failure.strerror or failure}"
            return _refuse(http, StorageError(507, "insufficientStorage", why))
        except web.HTTPException:
            raise
        except Exception as failure:
            logging.getLogger(__name__).exception("%s %s failed", http.method, http.path)
            return _refuse(http, StorageError(500, "internalError", f"the lab's API failed: {failure}"))

    def _method(self, base: str, verb: str, form: str) -> tuple[str, Answer]:
        if (base, verb, form) not in METHODS:
            raise StorageError(
                501, "notImplemented", f"{verb} of {base} {form}: the lab's storage does not support this request"
            )
        return METHODS[base, verb, form]

    async def _change(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a blocking function that changes data in a thread; only one such call runs at a time."""
        async with self._changing:
            return await asyncio.to_thread(function, *args, **kwargs)

    def _project(self, http: web.Request) -> str:
        # google-cloud-storage sends <none> if STORAGE_EMULATOR_HOST is set and no project is.
        asked = http.query.get("project", "<none>")
        return self._service.projects[0] if asked == "<none>" else asked

    async def _list_buckets(self, http: web.Request, _bucket: str, _name: str) -> web.Response:
        found = self._buckets.buckets(self._service.check_project(self._project(http)), http.query.get("prefix", ""))
        return _json(
            {"kind": "storage#buckets", "items": [wire.bucket_json(bucket, _origin(http)) for bucket in found]}
        )

    async def _insert_bucket(self, http: web.Request, _bucket: str, _name: str) -> web.Response:
        project = self._service.check_project(self._project(http))
        made = await self._change(self._buckets.insert, project, await read_json(http))
        return _json(wire.bucket_json(made, _origin(http)))

    async def _get_bucket(self, http: web.Request, bucket: str, _name: str) -> web.Response:
        return _json(wire.bucket_json(self._buckets.bucket(bucket), _origin(http)))

    async def _get_layout(self, http: web.Request, bucket: str, _name: str) -> web.Response:
        return _json(wire.layout_json(self._buckets.bucket(bucket)))

    async def _delete_bucket(self, http: web.Request, bucket: str, _name: str) -> web.Response:
        await self._change(self._buckets.remove, bucket)
        return web.Response(status=204)

    async def _list(self, http: web.Request, bucket: str, _name: str) -> web.Response:
        objects = self._buckets.objects(bucket)
        page = listing(objects, wire.question(http.query))
        items = [wire.object_json(objects[name], _origin(http)) for name in page.names]
        answer: Json = {"kind": "storage#objects", "items": items, "prefixes": page.prefixes}
        return _json(answer | ({"nextPageToken": wire.page_token(page.last)} if page.last else {}))

    async def _delete(self, http: web.Request, bucket: str, name: str) -> web.Response:
        conditions, generation = wire.conditions(http.query), wire.number(http.query, "generation")
        await self._change(self._buckets.delete, bucket, name, conditions, generation)
        return web.Response(status=204)

    async def _get(self, http: web.Request, bucket: str, name: str) -> web.StreamResponse:
        generation = wire.number(http.query, "generation")
        found = self._buckets.get(bucket, name, wire.conditions(http.query), generation)
        if not _wants_content(http):
            return _json(wire.object_json(found, _origin(http)))
        first, end = wire.byte_range(http.headers.get("Range", ""), found.size)
        try:
            file = await asyncio.to_thread(self._buckets.content(found).open, "rb")
        except FileNotFoundError as failure:  # another request has just deleted the object
            raise StorageError(404, "notFound", f"No such object: {bucket}/{name}") from failure
        with file:
            file.seek(first)
            response = web.StreamResponse(headers=wire.content_headers(found))
            response.content_length = left = end - first
            if left < found.size:
                response.set_status(206)
                response.headers["Content-Range"] = f"bytes {first}-{end - 1}/{found.size}"
            await response.prepare(http)
            while left > 0 and (data := file.read(min(left, _CHUNK))):
                await response.write(data)
                left -= len(data)
        return response

    async def _insert(self, http: web.Request, bucket: str, _name: str) -> web.Response:
        kind, content_type = http.query.get("uploadType"), http.headers.get("Content-Type", "")
        if kind == "resumable":
            session = self._session(http, bucket, await read_json(http), http.headers.get("X-Upload-Content-Type", ""))
            key = secrets.token_urlsafe(24)
            self._sessions[key] = session
            where = f"{_origin(http)}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            return web.Response(headers={"Location": where, "X-GUploader-UploadID": key})
        if kind == "multipart":
            metadata, content_type, content = wire.multipart(content_type, await http.read())
            session = self._session(http, bucket, metadata, content_type)
            chunks = _one(content)
        elif kind == "media":
            session = self._session(http, bucket, {}, content_type)
            chunks = http.content.iter_chunked(_CHUNK)
        else:
            raise bad(f"uploadType: {kind!r} is not media, multipart or resumable")
        try:
            await _receive(chunks, session)
        except BaseException:
            session.upload.discard()
            raise
        return _json(wire.object_json(await self._finish(session), _origin(http)))

    def _session(self, http: web.Request, bucket: str, metadata: Json, content_type: str) -> Session:
        name = http.query.get("name") or metadata.get("name")
        if not isinstance(name, str):
            raise bad("Required parameter: name")
        conditions = wire.conditions(http.query)
        self._buckets.check(bucket, name, conditions)
        said = {"md5": metadata.get("md5Hash", ""), "crc32c": metadata.get("crc32c", "")}
        expected = {**said, **wire.hashes(http.headers.get("X-Goog-Hash", ""))}
        fields = wire.fields_of(metadata, content_type)
        return Session(bucket, name, fields, expected, conditions, self._buckets.upload())

    async def _finish(self, session: Session) -> Stored:
        """Verify the digests of a complete upload and create the object."""
        upload = session.upload
        try:
            for kind, found in (("md5", upload.md5), ("crc32c", upload.crc32c)):
                if session.expected.get(kind) not in (None, "", found):
                    raise bad(f"Provided {kind} hash {session.expected[kind]!r} doesn't match calculated {found!r}.")
            return await self._change(
                self._buckets.commit, upload, session.bucket, session.name, session.fields, session.conditions
            )
        finally:
            upload.discard()

    def _known(self, http: web.Request) -> Session:
        session = self._sessions.get(http.query.get("upload_id", ""))
        if session is None:
            raise StorageError(404, "notFound", "No such upload; begin the upload again.")
        return session

    async def _resume(self, http: web.Request, _bucket: str, _name: str) -> web.Response:
        session = self._known(http)
        async with session.lock:
            stored = session.stored or await self._complete(http, session)
        if stored is None:
            size = session.upload.size
            return web.Response(status=308, headers={"Range": f"bytes=0-{size - 1}"} if size else {})
        return _json(wire.object_json(stored, _origin(http)))

    async def _complete(self, http: web.Request, session: Session) -> Stored | None:
        """Handle a request that continues a resumable upload; return the object if the upload is complete, else None.

        The client can continue the upload after a lost connection; any other error ends the upload.
        """
        said = http.headers.get("Content-Range")
        try:
            first, total = wire.content_range(said)
            session.expected |= wire.hashes(http.headers.get("X-Goog-Hash", ""))
            if first is not None:
                await _receive(http.content.iter_chunked(_CHUNK), session, first)
            if said is not None and total != session.upload.size:
                return None
            session.stored = await self._finish(session)
        except ConnectionError:
            raise
        except BaseException:
            self._sessions.pop(http.query["upload_id"], None)
            session.upload.discard()
            raise
        return session.stored

    async def _cancel(self, http: web.Request, _bucket: str, _name: str) -> web.Response:
        session = self._known(http)
        async with session.lock:
            self._sessions.pop(http.query["upload_id"], None)
            session.upload.discard()
        return web.Response(status=499)


#: First word of the path, HTTP method, form of the path after ``/storage/v1/`` -> name of the API method, handler.
METHODS: dict[tuple[str, str, str], tuple[str, Answer]] = {
    ("storage", "GET", "b"): ("storage.buckets.list", Routes._list_buckets),
    ("storage", "POST", "b"): ("storage.buckets.insert", Routes._insert_bucket),
    ("storage", "GET", "b/B"): ("storage.buckets.get", Routes._get_bucket),
    ("storage", "GET", "b/B/storageLayout"): ("storage.buckets.getStorageLayout", Routes._get_layout),
    ("storage", "DELETE", "b/B"): ("storage.buckets.delete", Routes._delete_bucket),
    ("storage", "GET", "b/B/o"): ("storage.objects.list", Routes._list),
    ("storage", "GET", "b/B/o/O"): ("storage.objects.get", Routes._get),
    ("storage", "DELETE", "b/B/o/O"): ("storage.objects.delete", Routes._delete),
    ("download", "GET", "b/B/o/O"): ("storage.objects.get", Routes._get),
    ("upload", "POST", "b/B/o"): ("storage.objects.insert", Routes._insert),
    ("upload", "PUT", "b/B/o"): ("storage.objects.insert", Routes._resume),
    ("upload", "DELETE", "b/B/o"): ("storage.objects.insert", Routes._cancel),
}
NAMES = frozenset(name for name, _ in METHODS.values())


async def _receive(chunks: AsyncIterable[bytes], session: Session, first: int = 0) -> None:
    """Append content to an upload; bytes that were received before are skipped.

    Args:
        chunks: The content of the request, in pieces.
        session: The upload.
        first: Offset of this content in the whole object.

    Raises:
        StorageError: 400; bytes before this content are missing.
    """
    known = session.upload.size - first
    if known < 0:
        raise bad(f"Invalid request: bytes {session.upload.size} to {first - 1} are missing.")
    async for data in chunks:
        session.upload.write(data[known:])
        known = max(0, known - len(data))


async def _one(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _origin(http: web.Request) -> str:
    return f"http://{http.host}"


def _json(answer: Json) -> web.Response:
    return json_response(json.dumps(answer))


def _wants_content(http: web.Request) -> bool:
    return http.path.startswith("/download/") or http.query.get("alt") == "media"


def _refuse(http: web.Request, failure: StorageError) -> web.Response:
    return wire.error_response(failure, plain=_wants_content(http))


def add_routes(apps: Iterable[web.Application], service: Service) -> None:
    """Add the routes for buckets and objects to each application; their files are stored beside the state file.

    Raises:
        UsageError: A stored file is damaged.
        OSError: The stored files cannot be read.
    """
    path = service.store.path
    routes = Routes(service, Buckets(path.with_name(f"{path.name}.buckets")))
    for app in apps:
        for base in ("", "/upload", "/resumable/upload", "/download"):
            app.router.add_route("*", f"{base}/storage/v1/{{rest:.*}}", routes.answer)
