"""The answers of a worker's metadata server, and the interpreter that its startup script gets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab_workers.test_containers import WORKER
from tpu_ops.lab import containers, events
from tpu_ops.lab.image import metadata_server, startup_script

FLAVOR = {"Metadata-Flavor": "Google"}
V1 = "/computeMetadata/v1/"
SECRET = "#!/bin/sh\necho ä\n"
NODE = replace(WORKER, metadata={"startup-script": SECRET, "agent-worker-number": "7", "empty": ""})


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """The file that the lab writes for a worker."""
    file = tmp_path / "metadata.json"
    file.write_bytes(containers.metadata_file(NODE))
    return file


@pytest.fixture
def server(metadata: Path) -> Iterator[metadata_server.Server]:
    """A metadata server of that worker, on a free port of loopback."""
    with metadata_server.Server(socket.create_server(("127.0.0.1", 0)), metadata) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def answer(server: metadata_server.Server, path: str, **headers: str) -> tuple[int, str, str | None]:
    """Return status, body and flavor of an answer."""
    host, port = server.socket.getsockname()
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode(), response.headers["Metadata-Flavor"]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("instance/attributes/startup-script", SECRET),
        ("instance/attributes/empty", ""),
        # The platform's own entries win.
        ("instance/attributes/agent-worker-number", "1"),
        ("instance/attributes/accelerator-type", "v4-16"),
        ("instance/attributes/", "accelerator-type\nagent-worker-number\nempty\nstartup-script\n"),
        ("instance/zone", "projects/1/zones/us-central2-b"),
        ("instance/name", WORKER.hostname),
        ("instance/id", WORKER.instance_id),
        ("instance/hostname", f"{WORKER.hostname}.us-central2-b.c.lab.internal"),
        ("project/project-id", "lab"),
        ("", "instance/\nproject/\n"),
        ("instance/preempted", "FALSE"),
        ("instance/preempted?alt=json", '"FALSE"'),
        ("instance/maintenance-event", "NONE"),
    ],
)
def test_an_entry_is_answered_as_text(server: metadata_server.Server, path: str, text: str) -> None:
    assert answer(server, V1 + path, **FLAVOR) == (200, text, "Google")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (V1 + "instance/zone", {}, 403),
        (V1 + "instance/zone", {"Metadata-Flavor": "google"}, 403),
        (V1 + "instance/service-accounts/default/token", FLAVOR, 404),
        (V1 + "instance/attributes/other", FLAVOR, 404),
        (V1 + "instance/zone/name", FLAVOR, 404),
        (V1 + "instance/upcoming-maintenance?alt=json", FLAVOR, 404),
        (V1 + "instance/preempted?wait_for_change=true", FLAVOR, 501),
        ("/", FLAVOR, 404),
        ("/computeMetadata/v1beta1/instance/zone", FLAVOR, 404),
        (V1 + "instance/?recursive=true", FLAVOR, 501),
    ],
)
def test_another_request_is_refused(
    server: metadata_server.Server, path: str, headers: dict[str, str], status: int
) -> None:
    found, text, flavor = answer(server, path, **headers)
    assert (found, flavor) == (status, "Google")
    assert "us-central2-b" not in text


def test_a_change_of_the_metadata_is_answered_at_once(server: metadata_server.Server, metadata: Path) -> None:
    metadata.write_bytes(containers.metadata_file(replace(NODE, metadata={"key": "new"})))
    assert answer(server, f"{V1}instance/attributes/key", **FLAVOR)[1] == "new"


def test_an_announced_event_is_answered_until_it_is_over(
    server: metadata_server.Server, metadata: Path, tmp_path: Path
) -> None:
    events.write_notice([tmp_path], events.notice("maintenance", 1000.0, 3600.0))
    assert answer(server, f"{V1}instance/maintenance-event", **FLAVOR)[1] == "TERMINATE_ON_HOST_MAINTENANCE"
    window = json.loads(answer(server, f"{V1}instance/upcoming-maintenance?alt=json", **FLAVOR)[1])
    assert (window["window_start_time"], window["window_end_time"]) == ("1970-01-01T00:16:40Z", "1970-01-01T01:16:40Z")
    events.write_notice([tmp_path], events.notice("preempt", 1000.0, 0.0))
    assert answer(server, f"{V1}instance/preempted", **FLAVOR)[1] == "TRUE"
    events.write_notice([tmp_path, tmp_path / "gone"], {})
    assert answer(server, f"{V1}instance/preempted", **FLAVOR)[1] == "FALSE"
    assert not (tmp_path / "gone").exists()


def test_workers_of_a_node_are_instances_with_names_and_ids_of_their_own() -> None:
    servers = [
        json.loads(containers.metadata_file(replace(WORKER, index=index)))["server"]["instance"] for index in (0, 1)
    ]
    for key in ("name", "id", "hostname"):
        assert servers[0][key] != servers[1][key]
    assert servers[0]["id"].isdecimal()


@pytest.mark.parametrize(
    ("script", "code", "lines"),
    [
        ("#!/usr/bin/python3\nimport sys\nprint('ä')\nsys.exit(3)\n", 3, ["ä"]),
        ("echo one; echo two >&2\n[[ $BASH_VERSION ]]", 0, ["one", "two"]),
        ("printf 'no end\\xff'", 0, ["no end\N{REPLACEMENT CHARACTER}"]),
        ('cat; test -x "$0" && echo "${0##*/}"', 0, ["startup-script"]),
    ],
)
def test_a_startup_script_runs_with_the_interpreter_that_it_names(script: str, code: int, lines: list[str]) -> None:
    said: list[str] = []
    assert startup_script.run(script, said.append) == code
    assert said == [f"startup-script: {line}" for line in lines]
