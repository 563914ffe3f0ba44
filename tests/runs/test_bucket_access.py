"""What the doctor finds out about buckets: the program for workers runs here, against the lab's storage."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tests.support.buckets import NUMBERS, client_of
from tests.support.lab_api import LabApi
from tpu_ops.cloud.bucket_places import bucket_place
from tpu_ops.errors import CloudError
from tpu_ops.runs import bucket_access, bucket_probe
from tpu_ops.ssh.replies import Result

ACCOUNT = "train@lab.iam.gserviceaccount.com"


class Here:
    """Workers that are processes of this machine, with variables of their own."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ
        self.hosts: list[str] = []

    async def run(self, hosts: Sequence[str], argv: Sequence[str], *, limit: float) -> Mapping[str, Result]:
        self.hosts = list(hosts)
        found = {}
        for host in hosts:
            done = await asyncio.to_thread(
                subprocess.run, argv, env=os.environ | self.environ, capture_output=True, check=False, timeout=limit
            )
            found[host] = Result(host, done.returncode, done.stdout, done.stderr)
        return found


@contextlib.contextmanager
def metadata(answers: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Serve the last parts of paths, as the metadata server does; give ``host:port``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.get(self.path.rpartition("/")[2], (404, "")) if self._asked() else (403, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def _asked(self) -> bool:
            return self.headers["Metadata-Flavor"] == "Google" and "/instance/service-accounts/default/" in self.path

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def bucket(fleet_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield client_of(fleet_api, monkeypatch).create_bucket(f"access{next(NUMBERS)}", project="lab0", location="US")
    fleet_api.clear_faults()


async def tried(here: Here, names: Sequence[str], *, write: bool = False) -> list[tuple[str, str]]:
    fanout: Any = here
    finding = await bucket_access.access(fanout, pod()[:1], names, write=write)
    assert finding.asked == ("pod-w0",)
    return [(fault.problem, fault.fix) for fault in finding.faults]


async def test_reading_and_writing_leave_nothing_behind(fleet_api: LabApi, bucket: Any) -> None:
    here = Here(STORAGE_EMULATOR_HOST=fleet_api.rest, http_proxy="http://127.0.0.1:9")
    bucket.blob("a folder/ü").upload_from_string("x")
    fleet_api.forget_requests()
    assert await tried(here, [bucket.name]) == []
    asked = fleet_api.requests("lab0")
    assert (asked["storage.objects.list"], asked["storage.objects.get"]) == (1, 1)
    assert "storage.objects.insert" not in asked
    assert await tried(here, [bucket.name], write=True) == []
    assert fleet_api.requests("lab0")["storage.objects.insert"] == 1
    assert [blob.name for blob in bucket.list_blobs()] == ["a folder/ü"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("storage.objects.list", "cannot read gs://NAME: HTTP 403: no, not you"),
        ("storage.objects.get", "cannot read gs://NAME: HTTP 403: no, not you"),
        ("storage.objects.insert", "cannot write gs://NAME: HTTP 403: no, not you"),
        ("storage.objects.delete", "was written and cannot be deleted: HTTP 403: no, not you"),
    ],
)
async def test_each_right_that_is_missing_is_a_fault(fleet_api: LabApi, bucket: Any, method: str, words: str) -> None:
    bucket.blob("a").upload_from_string("x")
    fleet_api.fault(method=method, code="PERMISSION_DENIED", message="no, not you")
    ((problem, _),) = await tried(Here(STORAGE_EMULATOR_HOST=fleet_api.rest), [bucket.name], write=True)
    assert words.replace("NAME", bucket.name) in problem


async def test_a_bucket_that_does_not_exist_is_a_fault(fleet_api: LabApi, bucket: Any) -> None:
    here = Here(STORAGE_EMULATOR_HOST=fleet_api.rest.removeprefix("http://"))
    ((problem, fix),) = await tried(here, [bucket.name, "absent-bucket"])
    assert problem.startswith("the worker cannot read gs://absent-bucket: HTTP 404: The specified bucket")
    assert fix == "check the name of gs://absent-bucket"


def test_the_token_of_the_service_account_is_sent(fleet_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    answers = {"token": (200, '{"access_token": "secret", "expires_in": 9}'), "email": (200, ACCOUNT)}
    with metadata(answers) as host:
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        storage = bucket_probe.Storage()
    assert (storage.account, storage.origin) == (ACCOUNT, "https://storage.googleapis.com")
    assert (storage.headers["Authorization"], storage.proxied) == ("Bearer secret", True)


async def test_a_node_without_service_account_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with metadata({}) as host:
        ((problem, fix),) = await tried(Here(GCE_METADATA_HOST=host), ["data"])
    assert problem == "the metadata server gives no token: HTTP 404: Not Found"
    assert "--service-account" in fix
    ((problem, _),) = await tried(Here(GCE_METADATA_HOST="127.0.0.1:9"), ["data"])
    assert problem.startswith("the metadata server gives no token: ")
    assert "refused" in problem


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("HTTP 403: denied", f"--member=serviceAccount:{ACCOUNT} --role=roles/storage.objectUser"),
        ("HTTP 403: Request had insufficient authentication scopes.", "--scope"),
        ("timed out", "check the network"),
    ],
)
def test_a_fault_has_the_fix_of_its_reason(why: str, fix: str) -> None:
    told = {"problem": "", "account": ACCOUNT, "read": {"data": why}, "write": {}}
    (fault,) = bucket_access.faults_of(Result("pod-w0", 0, json.dumps(told).encode()))
    assert (fault.worker, fix in fault.fix) == ("pod-w0", True)
    assert fault.problem == f"{ACCOUNT} cannot read gs://data: {why}"


@pytest.mark.parametrize(
    ("result", "words", "unreachable"),
    [
        (Result("w", 1, b"", b"Traceback\nOSError: no\n"), "OSError: no", False),
        (Result("w", 0, b"[]"), "exit code 0", False),
        (Result("w", None, problem="No route to host", reached=False), "No route to host", True),
    ],
)
def test_an_answer_that_is_none_is_a_fault(result: Result, words: str, unreachable: bool) -> None:
    (fault,) = bucket_access.faults_of(result)
    assert fault.problem == f"the access to the buckets could not be tried: {words}"
    assert fault.unreachable == unreachable


def test_one_worker_of_each_node_is_asked_and_far_buckets_are_faults(caplog: pytest.LogCaptureFixture) -> None:
    workers = [*pod(), *pod(name="other", node_id="2", subnet=1)]
    chosen = bucket_access.one_of_each(workers, {"pod-w0"})
    assert [worker.host for worker in chosen] == ["pod-w1", "other-w0"]
    lost = CloudError("the bucket's location cannot be read: no access", where="gs://c")
    finding = bucket_access.places(chosen, {"a": bucket_place("EU"), "b": bucket_place("US"), "c": lost})
    assert {fault.worker for fault in finding.faults} == {"pod-w1", "other-w0"}
    assert all("gs://a is in the multi-region eu" in fault.problem for fault in finding.faults)
    assert [("gs://b" in text, "gs://c" in text) for text in caplog.messages] == [(True, False), (False, True)]
    assert bucket_access.places(chosen, {"c": lost}).asked == ()
