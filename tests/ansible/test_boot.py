"""A worker that configures itself when it boots, with a bucket and a metadata server on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import inspect
import json
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.ansible import boot

#: In place of the receiver and what it becomes: shows what it got, then answers as the order says.
RECEIVER = """
import json, sys
kept, python, *archives = sys.argv[1:]
print(json.dumps({"python": "python3", "found": "3.12", "missing": archives[1:]}), flush=True)
(size,) = sys.stdin.readline().split() or sys.exit()
data = sys.stdin.read(int(size))
order = json.loads(sys.stdin.readline())
print(json.dumps({"step": {"outcome": "changed", "task": f"Took {data} as {order['host']}"}}))
print(json.dumps({"step": {"outcome": "ok", "task": "Look"}}))
print(json.dumps({"outcome": order["outcome"]}), flush=True)
"""
BUNDLE, ARCHIVE = "bucket/a place/pod.json", b"the project"
DONE: dict[str, Any] = {"code": 0, "failures": []}
FAILED: dict[str, Any] = {"code": 2, "failures": [{"task": "Install uv", "message": "no space left"}]}


class Cloud(http.server.ThreadingHTTPServer):
    """Answers requests for paths from a table; metadata only with Google's header."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, bytes] = {"/computeMetadata/v1/instance/attributes/agent-worker-number": b"1"}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, data: bytes) -> str:
        """Store an object; return its digest."""
        bucket, _, key = name.partition("/")
        self.answers[f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}?alt=media"] = data
        return hashlib.sha256(data).hexdigest()

    def bundle(self, *outcomes: dict[str, Any]) -> str:
        """Store a bundle whose workers end so; return its digest."""
        archives = [hashlib.sha256(data).hexdigest() for data in (b"never sent", ARCHIVE)]
        self.put(f"bucket/a place/{archives[1][:16]}.tar.gz", ARCHIVE)
        orders = [
            {"playbook": "site", "host": f"pod-w{index}", "outcome": outcome} for index, outcome in enumerate(outcomes)
        ]
        more = {"archives": archives, "digits": 16, "receiver": RECEIVER, "kept": "/kept", "python": "3.11"}
        return self.put(BUNDLE, json.dumps({"orders": orders, **more}).encode())


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    server: Cloud

    def do_GET(self) -> None:
        data = self.server.answers.get(self.path)
        if self.path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] != "Google":
            data = None
        self.send_response(200 if data is not None else 404)
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def booted(cloud: Cloud, digest: str, state: Path) -> tuple[int, str, Any]:
    """Run the startup script; return its exit code, its output and the state that it wrote."""
    call = f"sys.exit(configure({BUNDLE!r}, {digest!r}, {cloud.url!r}, {str(state)!r}))"
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=f"{inspect.getsource(boot)}\n{call}\n",
        capture_output=True,
        text=True,
        env={"GCE_METADATA_HOST": cloud.url.removeprefix("http://")},
        timeout=60,
        check=False,
    )
    assert not done.stderr
    with contextlib.suppress(FileNotFoundError):
        return done.returncode, done.stdout, json.loads((state / boot.FILE).read_text())
    return done.returncode, done.stdout, None


def test_a_worker_takes_its_own_order_and_what_it_lacks_from_the_bucket_once(cloud: Cloud, tmp_path: Path) -> None:
    digest = cloud.bundle(FAILED, DONE)
    code, said, state = booted(cloud, digest, tmp_path / "boot")
    assert (code, state) == (0, {"state": "done", "failures": []})
    assert "changed: Took the project as pod-w1" in said
    assert "Look" not in said
    cloud.answers.clear()
    code, said, state = booted(cloud, digest, tmp_path / "boot")
    assert (code, said, state["state"]) == (0, "tpu_ops: site.yml has run at an earlier boot\n", "done")


def test_what_failed_is_recorded_and_said(cloud: Cloud, tmp_path: Path) -> None:
    code, said, state = booted(cloud, cloud.bundle(DONE, FAILED), tmp_path)
    assert (code, state) == (1, {"state": "failed", "failures": ["Install uv: no space left"]})
    assert "failed: Install uv: no space left" in said


def test_a_boot_that_was_interrupted_is_done_again(cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / boot.FILE).write_text('{"state": "running", "failures": []}')
    assert booted(cloud, cloud.bundle(DONE, DONE), tmp_path)[2]["state"] == "done"


@pytest.mark.parametrize("changed", ["bundle", "archive"])
def test_nothing_runs_that_was_not_published_for_the_node(cloud: Cloud, tmp_path: Path, changed: str) -> None:
    digest = cloud.bundle(DONE, DONE)
    for path, data in cloud.answers.items():
        if (b"orders" in data) if changed == "bundle" else data == ARCHIVE:
            cloud.answers[path] = data.replace(b"p", b"q")
    code, said, state = booted(cloud, digest, tmp_path)
    assert (code, state["state"]) == (1, "failed")
    assert "is not the object that was published for this node" in state["failures"][0]
    assert "Took" not in said
