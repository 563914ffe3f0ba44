"""Try whether this host's service account can read and write buckets, and print the outcome as one line of JSON.

The module runs on a worker with the system's Python, 3.8 or newer, and uses only the standard library. Its argument is
JSON with the names of the buckets and whether to write. It uses the environment variables of Google's own clients:
GCE_METADATA_HOST, and STORAGE_EMULATOR_HOST, with which no credentials are sent.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from typing import Any

#: Seconds for each request.
TIMEOUT = 10.0
_ACCOUNT = "http://{}/computeMetadata/v1/instance/service-accounts/default/"
#: Beginning of the name of the object that is written.
PREFIX = "tpu_ops-access-"


class Refused(Exception):
    """A request has failed; the text says why."""


def fetched(url: str, headers: dict[str, str], method: str, body: bytes | None, *, proxied: bool) -> bytes:
    """Return the body of the answer to a request.

    Args:
        url: The URL.
        headers: The headers of the request.
        method: The HTTP method.
        body: The body of the request, if any.
        proxied: Whether a proxy of the environment is used.

    Raises:
        Refused: The server refused, or did not answer.
    """
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - always http or https
    handlers = [] if proxied else [urllib.request.ProxyHandler({})]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as failure:
        with failure:
            raise Refused("HTTP {}: {}".format(failure.code, _message(failure.read()) or failure.reason)) from failure
    except (OSError, ValueError) as failure:
        raise Refused(str(getattr(failure, "reason", failure)) or type(failure).__name__) from failure


def _message(body: bytes) -> str:
    """Return the message in the body of a refusal; empty if there is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _metadata(url: str) -> bytes:
    return fetched(url, {"Metadata-Flavor": "Google"}, "GET", None, proxied=False)


class Storage:
    """Cloud Storage, as this host's service account sees it; or an emulator, without an account.

    Raises:
        Refused: The metadata server has no token for this host.
    """

    def __init__(self) -> None:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        self.account, self.proxied = "", not emulator
        self.headers = {"Content-Type": "text/plain"}
        self.origin = (emulator if "://" in emulator else "http://" + emulator) if emulator else ""
        if not emulator:
            self.origin = "https://storage.googleapis.com"
            place = _ACCOUNT.format(os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal")
            token = json.loads(_metadata(place + "token"))["access_token"]
            self.account = _metadata(place + "email").decode().strip()
            self.headers["Authorization"] = "Bearer " + token

    def ask(self, path: str, method: str = "GET", body: bytes | None = None) -> bytes:
        """Return the body of the answer to a request."""
        return fetched(self.origin + path, self.headers, method, body, proxied=self.proxied)

    def read(self, bucket: str) -> None:
        """List one object of a bucket, and read its metadata."""
        place = "/storage/v1/b/" + bucket + "/o"
        listed = json.loads(self.ask(place + "?maxResults=1&fields=items(name)"))
        for item in listed.get("items", ()):
            self.ask(place + "/" + urllib.parse.quote(item["name"], safe="") + "?fields=name")

    def write(self, bucket: str) -> None:
        """Write a small object with a new name, and delete it."""
        name = PREFIX + uuid.uuid4().hex
        query = "?uploadType=media&ifGenerationMatch=0&name=" + name
        self.ask("/upload/storage/v1/b/" + bucket + "/o" + query, "POST", b"written by tpu_ops doctor\n")
        try:
            self.ask("/storage/v1/b/" + bucket + "/o/" + name, "DELETE")
        except Refused as failure:
            raise Refused("{} was written and cannot be deleted: {}".format(name, failure)) from failure


def outcome(buckets: list[str], write: bool) -> dict[str, Any]:
    """Return which requests have failed.

    Returns:
        ``problem``: why nothing could be tried; ``account``: the service account; ``read`` and ``write``: bucket ->
        why that failed.
    """
    found: dict[str, Any] = {"problem": "", "account": "", "read": {}, "write": {}}
    try:
        storage = Storage()
    except (Refused, ValueError, KeyError) as failure:
        found["problem"] = "the metadata server gives no token: {}".format(failure)
        return found
    found["account"] = storage.account
    for key, call in (("read", storage.read), ("write", storage.write)):
        for bucket in buckets if key == "read" or write else ():
            try:
                call(bucket)
            except (Refused, ValueError) as failure:
                found[key][bucket] = str(failure)
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(outcome(asked["buckets"], asked["write"])))
