"""Notices of the end of a run: what a command and a webhook get, and what is said if they fail."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.runs import notices
from tpu_ops.runs.notices import Notice

NOTICE = Notice("exp", "failed", 1, ["a", "b"], 61.4, "rank 2 (b-w0): exit code 7")
TEXT = "run exp on a, b: failed after 61 s: rank 2 (b-w0): exit code 7"


class _Hook(BaseHTTPRequestHandler):
    """Stores each request; answers /gone with an error, and /moved with a redirect to a path that works."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.got.append((self.command, self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response({"/gone": 410, "/moved": 302}.get(self.path, 204))
        self.send_header("Location", "/works")
        self.end_headers()

    do_GET = lambda self: self.send_response(200)  # noqa: E731 - the name that the base class calls

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("no_proxy", "*")
    server: Any = HTTPServer(("127.0.0.1", 0), _Hook)
    server.got = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_command_gets_the_end_in_its_environment_and_on_its_input(tmp_path: Path) -> None:
    command = f"cd '{tmp_path}' && env >variables && cat >notice"
    assert notices.send(NOTICE, [command]) == [""]
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
    assert {name: value for name, value in variables.items() if name.startswith("TPU_OPS_RUN_")} == {
        "TPU_OPS_RUN_ID": "exp",
        "TPU_OPS_RUN_STATE": "failed",
        "TPU_OPS_RUN_EXIT_CODE": "1",
        "TPU_OPS_RUN_TARGETS": "a,b",
        "TPU_OPS_RUN_DURATION": "61",
    }
    assert json.loads((tmp_path / "notice").read_text()) == {
        "run_id": "exp",
        "state": "failed",
        "exit_code": 1,
        "targets": ["a", "b"],
        "duration": 61.4,
        "reason": "rank 2 (b-w0): exit code 7",
        "text": TEXT,
    }


def test_a_command_that_fails_or_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert notices.send(NOTICE, ["exit 3", "true"]) == ["exit code 3", ""]
    monkeypatch.setattr(notices, "COMMAND_LIMIT", 0.5)
    # The shell waits for another program, which is ended as well: the pipe has no writer then.
    os.mkfifo(pipe := tmp_path / "pipe")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert notices.send(NOTICE, [f"sleep 60 >'{pipe}' & wait"]) == ["ended, since it was not done after 0.5 s"]
        os.set_blocking(reader.fileno(), True)
        begun = time.monotonic()
        assert reader.read() == ""
    assert time.monotonic() - begun < 30


def test_slow_webhooks_delay_the_end_once_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(notices, "WEBHOOK_LIMIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip() -> None:
            """Answer with one byte at a time: each arrives within the timeout of a single read."""
            client, _ = server.accept()
            with client:
                client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not ended.wait(0.05):
                    client.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}/{path}" for path in ("drips", "silent")]
        begun = time.monotonic()
        assert notices.send(NOTICE, [*urls, "true"]) == ["no answer within 10 s", "no answer within 10 s", ""]
        assert time.monotonic() - begun < 5
        ended.set()
        thread.join()


def test_a_webhook_gets_the_json_with_a_text(hook: Any) -> None:
    assert notices.send(NOTICE, [f"http://127.0.0.1:{hook.server_port}/T1/secret"]) == [""]
    assert hook.got == [("POST", "/T1/secret", "application/json", NOTICE.to_json())]


@pytest.mark.parametrize(("path", "said"), [("/gone", "HTTP 410 Gone"), ("/moved", "HTTP 302 Found")])
def test_a_webhook_that_refuses_or_redirects_is_a_failure(hook: Any, path: str, said: str) -> None:
    assert notices.send(NOTICE, [f"http://127.0.0.1:{hook.server_port}{path}"]) == [said]
    assert len(hook.got) == 1


def test_a_webhook_without_a_server_is_a_failure_and_its_path_is_not_shown() -> None:
    with HTTPServer(("127.0.0.1", 0), _Hook) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/T1/secret"
    assert "refused" in notices.send(NOTICE, [url])[0]
    assert notices.named(url) == "webhook of 127.0.0.1"


@pytest.mark.parametrize("to", ["", " ", "https://", "https:///path", "http://[::1/x", "https://host/a b"])
def test_an_empty_command_or_an_invalid_url_is_refused(to: str) -> None:
    with pytest.raises(UsageError, match="--notify"):
        notices.check(to)


def test_a_url_with_a_password_is_refused_without_saying_it() -> None:
    with pytest.raises(UsageError, match="--notify") as caught:
        notices.check("https://me:secret@hooks.example.org/x")
    assert "secret" not in str(caught.value)


def test_commands_and_urls_are_accepted() -> None:
    for to in ("notify-send done", "https://hooks.slack.com/services/T/B/x", "HTTP://127.0.0.1:80"):
        notices.check(to)
