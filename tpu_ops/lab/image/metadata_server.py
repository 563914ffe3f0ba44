"""Metadata server of a worker, in the place of Google's at ``http://metadata.google.internal``.

Runs inside the worker with its system Python (3.8 or newer), standard library only. systemd listens on the address and
starts this program at the first connection. The content is read from the lab's ``metadata.json`` for each request, so
that a change of the node's metadata needs no restart. The lab announces a maintenance or a preemption in
``notices.json`` beside it.

Two answers differ from Google's on purpose. The path ``/`` does not exist: Google's clients would otherwise take the
worker for a VM with credentials. Query parameters other than ``alt=json`` get the status 501.
"""

from __future__ import annotations

import json
import socket
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METADATA = Path("/var/lib/tpu-lab/worker/metadata.json")
#: Name of the file, beside `METADATA`, with the entries of the instance that announce an event; missing without one.
NOTICES = "notices.json"
#: The entries of an instance without an announced event. ``upcoming-maintenance`` does not exist then.
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}
ROOT = "/computeMetadata/v1/"
FLAVOR = ("Metadata-Flavor", "Google")
#: First file descriptor of a socket that systemd passes to a service (sd_listen_fds(3)).
LISTENING = 3


def tree(data: dict[str, Any], notices: dict[str, Any]) -> dict[str, Any]:
    """Return the entries below `ROOT` as nested directories, from the content of ``metadata.json`` and `NOTICES`."""
    server: dict[str, Any] = data["server"]
    instance = {**server["instance"], **QUIET, **notices}
    return {**server, "instance": {**instance, "attributes": {**data["metadata"], **instance["attributes"]}}}


def lookup(entries: dict[str, Any], path: str, *, as_json: bool = False) -> str | None:
    """Return the text of an entry, or the names in a directory, one a line; None if the path does not exist.

    With ``as_json``, return the entry or the directory with its content as JSON.
    """
    if not path.startswith(ROOT):
        return None
    found: Any = entries
    for name in path[len(ROOT) :].rstrip("/").split("/"):
        if name:
            found = found.get(urllib.parse.unquote(name)) if isinstance(found, dict) else None
    if as_json and found is not None:
        return json.dumps(found)
    if isinstance(found, dict):
        return "".join(f"{name}/\n" if isinstance(found[name], dict) else f"{name}\n" for name in sorted(found))
    return found if isinstance(found, str) else None


class Server(ThreadingHTTPServer):
    """Answers requests on a listening socket from the content of a file ``metadata.json``."""

    def __init__(self, listening: socket.socket, metadata: Path) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.metadata = metadata


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server

    def version_string(self) -> str:
        """Return the value of the header Server."""
        return "Metadata Server for VM"

    def do_GET(self) -> None:
        """Answer a request for an entry or a directory."""
        if self.headers.get(FLAVOR[0]) != FLAVOR[1]:
            self._answer(HTTPStatus.FORBIDDEN, f"Missing {':'.join(FLAVOR)} header.\n")
            return
        path, _, query = self.path.partition("?")
        entries = tree(json.loads(self.server.metadata.read_text()), self._notices())
        found = lookup(entries, path, as_json=query == "alt=json")
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND, f"{path} was not found on this server.\n")
        elif query not in ("", "alt=json", "alt=text"):
            self._answer(HTTPStatus.NOT_IMPLEMENTED, "The lab's metadata server supports no such query parameters.\n")
        else:
            self._answer(HTTPStatus.OK, found)

    def _notices(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.server.metadata.with_name(NOTICES).read_text())
        except FileNotFoundError:
            return {}
        return found

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header(*FLAVOR)
        self.send_header("Content-Type", "application/text")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Server(socket.socket(fileno=LISTENING), METADATA).serve_forever()
