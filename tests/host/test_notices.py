"""The notices of a host's metadata server: what its answers mean, and an absent or strange server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tpu_ops.host import notices
from tpu_ops.host.notices import Notices, notice_of
from tpu_ops.protocol import watch

WINDOW = {
    "can_reschedule": "true",
    "maintenance_status": "PENDING",
    "window_start_time": "2026-12-01T19:00:00Z",
    "window_end_time": "2026-12-01T21:00:00Z",
}
PLANNED = "maintenance of this worker's host is planned from 2026-12-01T19:00:00Z to 2026-12-01T21:00:00Z"


@pytest.mark.parametrize(
    ("preempted", "event", "upcoming", "found"),
    [
        ("FALSE", "NONE", "{}", None),
        (None, None, None, None),
        ("FALSE", "NONE", "NONE", None),
        ("FALSE", "NONE", '{"error": "no notifications have been received yet, try again later"}', None),
        ("FALSE", "NONE", '["x"]', None),
        ("TRUE", "NONE", "{}", ("preempted", "this worker is being preempted")),
        ("TRUE\n", "TERMINATE_ON_HOST_MAINTENANCE", "", ("preempted", "this worker is being preempted")),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "", ("maintenance", "the host of this worker goes down")),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", "", ("maintenance", "this worker is being moved")),
        ("FALSE", "NONE", json.dumps(WINDOW), ("maintenance", PLANNED)),
        ("FALSE", "NONE", json.dumps({"windowStartTime": "2026-12-01T19:00:00Z"}), ("maintenance", PLANNED[:70])),
        (
            "FALSE",
            "NONE",
            json.dumps({**WINDOW, "maintenance_status": "ONGOING"}),
            ("maintenance", "maintenance of this worker's host is under way since"),
        ),
        ("FALSE", "NONE", json.dumps({"window_start_time": "\x1b[2J"}), ("maintenance", "maintenance of")),
    ],
)
def test_what_the_answers_mean(
    preempted: str | None, event: str | None, upcoming: str | None, found: tuple[str, str] | None
) -> None:
    notice = notice_of(preempted, event, upcoming)
    if found is None:
        assert notice is None
        return
    assert notice is not None
    assert notice["kind"] == found[0]
    now = found[1].startswith((watch.BEING_PREEMPTED, "the host of this worker goes down", watch.UNDER_WAY))
    assert watch.announced("rank 1 (pod-w1): " + notice["what"]) == (found[0] if now else "")
    assert notice["what"].startswith(found[1])
    assert notice["what"].isprintable()


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], tuple[str, int]]]:
    """Return a function that starts a server with one answer to every request, and returns its address."""
    made: list[socket.socket] = []

    def start(answer: bytes) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        made.append(listener)

        def run() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        host, port = listener.getsockname()
        return host, port

    yield start
    for listener in made:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\nTRUE\n", "TRUE"),
        (b"HTTP/1.0 404 Not Found\r\nMetadata-Flavor: Google\r\n\r\nno", None),
    ],
)
def test_an_entry_of_the_metadata_server(
    serve: Callable[[bytes], tuple[str, int]], answer: bytes, text: str | None
) -> None:
    assert notices.get("preempted", serve(answer)) == text


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\nTRUE",
        b"HTTP/1.0 503 Busy\r\nMetadata-Flavor: Google\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        b"x" * 200_000,
    ],
)
def test_another_server_is_not_believed(serve: Callable[[bytes], tuple[str, int]], answer: bytes) -> None:
    with pytest.raises(OSError, match="metadata server"):
        notices.get("preempted", serve(answer))


def test_an_absent_server_is_soon_asked_rarely() -> None:
    asked = []

    def get(name: str) -> None:
        asked.append(name)
        raise OSError("no route to host")

    found, now = Notices(get), 0.0
    while now < 3600:
        found.ask(now, now)
        now = found.due
    assert (len(asked), found.newest) == (3 + 5, None)


def test_a_notice_keeps_its_first_time_and_goes_when_it_is_withdrawn() -> None:
    entries = {"preempted": "FALSE", "maintenance-event": "NONE", "upcoming-maintenance?alt=json": json.dumps(WINDOW)}
    found = Notices(entries.get)
    for now in (0.0, 5.0):
        found.ask(now, 1000.0 + now)
        assert found.newest == {"at": 1000.0, "kind": "maintenance", "what": PLANNED}
    entries["preempted"] = "TRUE"
    found.ask(10.0, 1010.0)
    assert found.newest == {"at": 1010.0, "kind": "preempted", "what": "this worker is being preempted"}
    entries.update({"preempted": "FALSE", "upcoming-maintenance?alt=json": "{}"})
    found.ask(70.0, 1070.0)
    assert found.newest is None
