"""Package index for the workers of one slice: downloads each file once, and passes it on to all of them.

Worker 0 runs this program while the role python installs packages. Nothing depends on its honesty: uv and pip accept
only files whose hashes they have from elsewhere. It answers the listed addresses only. It supports Python 3.8.

Usage: slice_index.py ADDRESS PORT INDEX BUILDS READER...

ADDRESS and PORT are where it listens, INDEX is the URL of the package index (empty for pip's default), BUILDS that of
uv's builds of Python, and each READER is the address of a worker. These are the paths:

    /simple/PROJECT/        the project's page, with links to this server
    /files/PROJECT/FILE     a file that the page lists, or its metadata
    /python/RELEASE/FILE    a build of Python
"""

from __future__ import annotations

import glob
import html
import http.client
import http.server
import os
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

CHUNK = 1 << 18
#: Seconds to wait for the source.
TIMEOUT = 20
#: Seconds after the last connection at which the server ends. Between two playbooks, pages become stale.
IDLE = 120
#: A name in a path: no separator, and not only dots.
NAME = re.compile(r"[\w.+!-]*\w[\w.+!-]*")


def default_index() -> str:
    """Return the URL of pip's default index, as the copy of pip says with which Python makes environments."""
    import ensurepip

    # Debian and Ubuntu keep this copy apart from Python.
    places = [os.path.join(os.path.dirname(ensurepip.__file__), "_bundled"), "/usr/share/python-wheels"]
    sys.path[:0] = [path for place in places for path in glob.glob(os.path.join(place, "pip-*.whl"))]
    from pip._internal.models.index import PyPI  # type: ignore[import-not-found] # not in every environment

    return str(PyPI.simple_url)


def opened(url: str, **headers: str) -> http.client.HTTPResponse:
    """Request a URL."""
    if not url.startswith(("https://", "http://")):
        raise urllib.error.URLError("not a URL of HTTP")
    answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310 - checked above
        urllib.request.Request(url, headers=headers),  # noqa: S310 - checked above
        timeout=TIMEOUT,
    )
    return answer


class Download:
    """One file that is being downloaded; several readers can follow it while it grows."""

    def __init__(self, url: str) -> None:
        self._source = opened(url)
        self.length = int(self._source.headers["Content-Length"])
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - kept until the program ends
        self._here, self._ended, self._grown = 0, False, threading.Condition()
        threading.Thread(target=self._download, daemon=True).start()

    def _download(self) -> None:
        try:
            with self._source:
                while chunk := self._source.read(CHUNK):
                    self._file.write(chunk)
                    self._file.flush()
                    with self._grown:
                        self._here += len(chunk)
                        self._grown.notify_all()
        finally:
            with self._grown:
                self._ended = True
                self._grown.notify_all()

    @property
    def failed(self) -> bool:
        """Whether the download ended before the file was complete."""
        return self._ended and self._here < self.length

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's content as it arrives; end early if the download fails."""
        sent = 0
        with open(self._file.name, "rb") as file:
            while sent < self.length and not self.failed:
                with self._grown:
                    while self._here <= sent and not self._ended:
                        self._grown.wait()
                chunk = file.read(CHUNK)
                sent += len(chunk)
                yield chunk


class Index:
    """The pages and files that were requested so far."""

    def __init__(self, index: str, builds: str) -> None:
        self._index, self._builds = index.rstrip("/"), builds.rstrip("/")
        self._kept: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def _once(self, url: str, make: Callable[[str], Any]) -> Any:
        with self._lock:
            lock = self._locks.setdefault(url, threading.Lock())
        with lock:
            if url not in self._kept or getattr(self._kept[url], "failed", False):
                self._kept[url] = make(url)
            return self._kept[url]

    def page(self, project: str) -> tuple[bytes, dict[str, str]]:
        """Return a project's page with links to this server, and the original link of each file."""

        def read(url: str) -> tuple[bytes, dict[str, str]]:
            with opened(url, **{"Accept": "text/html", "Accept-Encoding": "gzip"}) as answer:
                data, base = answer.read(), answer.url
                if answer.headers["Content-Encoding"] == "gzip":
                    data = zlib.decompress(data, 31)
            links: dict[str, str] = {}

            def here(match: re.Match[str]) -> str:
                link, _, fragment = html.unescape(match[1]).partition("#")
                name = link.partition("?")[0].rpartition("/")[2]
                links[urllib.parse.unquote(name)] = urllib.parse.urljoin(base, link)
                return f'href="{html.escape(f"/files/{project}/{name}#{fragment}")}"'

            return re.sub(r'href="([^"]*)"', here, data.decode()).encode(), links

        found: tuple[bytes, dict[str, str]] = self._once(f"{self._index}/{project}/", read)
        return found

    def file(self, project: str, name: str) -> Download:
        """Return the download of a project's file, or of its metadata.

        Raises:
            KeyError: The project has no such file.
        """
        suffix = ".metadata" if name.endswith(".metadata") else ""
        link = self.page(project)[1][name[: len(name) - len(suffix)]]
        found: Download = self._once(link + suffix, Download)
        return found

    def build(self, release: str, name: str) -> Download:
        """Return the download of a build of Python."""
        found: Download = self._once(f"{self._builds}/{release}/{name}", Download)
        return found


class Server(http.server.ThreadingHTTPServer):
    """A server that all workers of a large slice can connect to at once."""

    request_queue_size = 1024

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: The time of the last connection.
        self.used = time.monotonic()

    def service_actions(self) -> None:
        """End the server when it was idle for long enough."""
        if time.monotonic() - self.used > IDLE and threading.active_count() == 1:
            raise SystemExit

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self.used = time.monotonic()
        super().process_request(request, client_address)


def handler(index: Index, readers: Container[str]) -> type[http.server.BaseHTTPRequestHandler]:
    """Return the class that answers requests of these addresses."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: Seconds after which an idle connection is closed.
        timeout = 60

        def do_GET(self) -> None:
            if self.client_address[0] not in readers:
                self.send_error(403)
                return
            kind, *names = [urllib.parse.unquote(part) for part in self.path.split("/") if part] or [""]
            try:
                if not all(NAME.fullmatch(name) for name in names):
                    self.send_error(404)
                elif kind == "simple" and len(names) == 1:
                    page = index.page(names[0])[0]
                    self.answer([page], len(page), "text/html")
                elif kind in ("files", "python") and len(names) == 2:
                    download = index.file(*names) if kind == "files" else index.build(*names)
                    self.answer(download.chunks(), download.length, "application/octet-stream")
                    self.close_connection = download.failed
                else:
                    self.send_error(404)
            except KeyError:
                self.send_error(404)
            except urllib.error.HTTPError as exc:
                self.send_error(exc.code)
            except urllib.error.URLError:
                self.send_error(502)

        # uv asks in this way whether it can read a part of a file.
        do_HEAD = do_GET

        def answer(self, chunks: Iterable[bytes], length: int, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            for chunk in chunks if self.command == "GET" else ():
                self.wfile.write(chunk)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def main(address: str, port: str, index: str, builds: str, *readers: str) -> None:
    """Serve until nothing was requested for some time."""
    with Server((address, int(port)), handler(Index(index or default_index(), builds), readers)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
