"""Worker 0 of a slice downloads once for all of its workers, and uv accepts only what it can verify."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from roles.python.module_utils.uv_program import Fault, Uv, listens
from tests.support.environments import UV, plain_wheel
from tests.support.fleet import ROOT
from tests.support.slice_index import serving

WHEEL = "sample-1-py3-none-any.whl"


class Source(http.server.SimpleHTTPRequestHandler):
    """A package index of plain files that cuts answers short while `cut` is set."""

    requests: list[str]
    cut: list[bool]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.cut and self.path.endswith(".whl"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"PK")
            return
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Any]:
    """The index that worker 0 asks, as its class of requests with the URL in `url`."""
    root = tmp_path / "source"
    plain_wheel(root, "sample", "1")
    page = root / "simple" / "sample"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../{WHEEL}#sha256={digest(root)}">{WHEEL}</a>')
    kind: Any = type("Own", (Source,), {"requests": [], "cut": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kind.url, kind.root = f"http://127.0.0.1:{server.server_port}/simple", root
        yield kind
        server.shutdown()


def digest(root: Path) -> str:
    return hashlib.sha256((root / WHEEL).read_bytes()).hexdigest()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the test's own server
        return bytes(answer.read())


def test_a_file_comes_from_the_source_once_for_all_workers(source: Any) -> None:
    with serving("127.0.0.1", source.url, Counter()) as url, ThreadPoolExecutor(8) as pool:
        found = set(pool.map(read, [f"{url}/files/sample/{WHEEL}"] * 8))
    assert found == {(source.root / WHEEL).read_bytes()}
    assert sorted(source.requests) == [f"/{WHEEL}", "/simple/sample/"]


@pytest.mark.parametrize(
    "path", ["files/sample/other.whl", "files/../sample", "simple/%2e%2e", "simple/a%2fb", "python/1/2/3", "etc/passwd"]
)
def test_only_files_that_the_index_lists_are_served(source: Any, path: str) -> None:
    with serving("127.0.0.1", source.url, Counter()) as url, pytest.raises(urllib.error.HTTPError, match="404"):
        read(f"{url}/{path}")


def test_only_workers_of_the_slice_may_read(source: Any) -> None:
    with (
        serving("127.0.0.1", source.url, Counter(), readers=("10.0.0.2",)) as url,
        pytest.raises(urllib.error.HTTPError, match="403"),
    ):
        read(f"{url}/simple/sample/")
    assert source.requests == []


def test_a_file_that_was_cut_short_is_fetched_again(source: Any) -> None:
    with serving("127.0.0.1", source.url, Counter()) as url:
        source.cut.append(True)
        with pytest.raises(http.client.IncompleteRead):
            read(f"{url}/files/sample/{WHEEL}")
        source.cut.clear()
        assert read(f"{url}/files/sample/{WHEEL}") == (source.root / WHEEL).read_bytes()


def installed(tmp_path: Path, source: Any, slice_index: str) -> str:
    """Install the lock with uv into a directory, and return why the slice's index was not used."""
    lock = tmp_path / "lock.txt"
    lock.write_text(f"sample==1 --hash=sha256:{digest(source.root)}\n")
    uv = Uv(UV, str(tmp_path / "cache"), 60, slice_index)
    arguments = ["pip", "install", "--no-config", "--target", str(tmp_path / "site"), "--no-deps", "--require-hashes"]
    missed = uv.run_sharing(*arguments, "--requirements", str(lock), place=str(tmp_path))[1]
    assert (tmp_path / "site" / "sample.py").read_text() == "x = 1\n"
    return missed


@pytest.mark.parametrize("fault", ["", "forged", "gone", "empty"])
def test_uv_installs_from_worker_0_or_from_the_source(
    tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", source.url)
    forged = tmp_path / "forged"
    plain_wheel(forged, "sample", "1", "evil")
    body = (forged / WHEEL).read_bytes()

    class Forger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{WHEEL}#sha256={digest(source.root)}">{WHEEL}</a>'.encode()
            self.send_response(200 if fault == "forged" else 404)
            answer = body if self.path.endswith(".whl") else page
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forger) as other,
        serving("127.0.0.1", source.url, Counter()) as good,
    ):
        threading.Thread(target=other.serve_forever, daemon=True).start()
        addresses = {"": good, "gone": "http://127.0.0.1:9"}
        missed = installed(tmp_path, source, addresses.get(fault, f"http://127.0.0.1:{other.server_port}"))
        other.shutdown()
    said = {"": "", "gone": "does not answer", "forged": "Hash mismatch", "empty": "sample"}
    assert said[fault] in missed
    assert bool(missed) is bool(fault)


def test_a_failure_of_worker_0_and_of_the_source_is_the_failure_of_the_source(
    tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(Fault, match=r"127\.0\.0\.1:9/simple"):
        installed(tmp_path, source, "")
    assert not listens("http://127.0.0.1:9")


def test_the_server_ends_when_nobody_uses_it() -> None:
    program = (ROOT / "roles/python/files/slice_index.py").read_text()
    assert "IDLE = 120\n" in program
    argv = [sys.executable, "-", "127.0.0.1", "0", "http://127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1"]
    subprocess.run(argv, input=program.replace("IDLE = 120\n", "IDLE = 0.1\n"), text=True, timeout=20, check=True)


FOUR = [f"10.0.0.{number}" for number in range(2, 6)]


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://10.0.0.2:8519"),
        ({"launcher_ports": [9000, 9010]}, "http://10.0.0.2:9010"),
        ({"base_pip_index_url": "https://mirror.example/simple"}, "http://10.0.0.2:8519"),
        ({"base_pip_index_url": "https://ada:s3cret@mirror.example/simple"}, ""),
        ({"tpu_internal_ips": FOUR[:1]}, ""),
        ({"tpu_internal_ips": ["", "10.0.0.3"]}, ""),
        ({"tpu_internal_ips": None}, ""),
        ({"python_share_downloads": False}, ""),
        ({"files": {"/etc/uv/uv.toml": {"state": "file"}}}, ""),
    ],
)
def test_downloads_are_shared_within_a_node_and_never_with_a_login(variables: dict[str, Any], url: str) -> None:
    kept = DataLoader().load_from_file(str(ROOT / "roles/python/vars/main.yml"), trusted_as_template=True)
    given = {"python_share_downloads": True, "tpu_internal_ips": FOUR} | variables
    given["ansible_facts"] = {"worker": {"files": given.pop("files", {})}}
    given = {name: value for name, value in given.items() if value is not None}
    assert Templar(DataLoader(), kept | given).template(kept["__python_slice_index"]) == url


def test_the_hash_of_uv_is_known_for_the_default_version() -> None:
    default, kept = (
        DataLoader().load_from_file(str(ROOT / f"roles/python/{name}/main.yml")) for name in ("defaults", "vars")
    )
    version = default["python_uv_version"]
    assert set(kept["__python_uv_wheels"]) == {f"{version} x86_64", f"{version} aarch64"}
    assert all(
        re.fullmatch(rf"uv-{version}-\S+\.whl#sha256=[0-9a-f]{{64}}", file)
        for file in kept["__python_uv_wheels"].values()
    )
