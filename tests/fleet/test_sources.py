"""The places that snapshots are read from and written to (`test_members.py` covers the resulting view)."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from google.api_core.exceptions import Forbidden, Unauthorized
from google.auth.exceptions import RefreshError

from tests.support.published import NOW, SOLO, certificate, text, web
from tpu_ops import config, files, texts
from tpu_ops.cloud import buckets
from tpu_ops.cloud.auth import Auth
from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.fleet import origin, view
from tpu_ops.fleet.publishing import sources

# --- from where ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("api", ""),
        ("snapshot.json", "/here/snapshot.json"),
        ("/there/snapshot.json", "/there/snapshot.json"),
        ("~/snapshot.json", "/home/ada/snapshot.json"),
        ("gs://bucket/a/b.json", "gs://bucket/a/b.json"),
        ("https://example.com/x.json?sig=1", "https://example.com/x.json?sig=1"),
        ("http://127.0.0.1:8000/x", "http://127.0.0.1:8000/x"),
        ("http://[::1]/x", "http://[::1]/x"),
        ("http://localhost/x", "http://localhost/x"),
        ("ssh:bastion", "ssh:bastion"),
        ("ssh:ada@bastion.example.com:/srv/x y", "ssh:ada@bastion.example.com:/srv/x y"),
        ("ssh:[fe80::1]:~/x", "ssh:[fe80::1]:~/x"),
    ],
)
def test_forms_of_a_source(monkeypatch, written, source):
    monkeypatch.setenv("HOME", "/home/ada")
    assert sources.parse(written, Path("/here"), "--from") == source


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x\ny",
        "ftp://example.com/x",
        "file:///etc/passwd",
        "http://example.com/x",
        "http://127.0.0.1.example.com/x",
        "https://",
        "https://ada:secret@example.com/x",
        "https://example.com:port/x",
        "gs://bucket",
        "gs://bucket/",
        "gs://bucket/folder/",
        "gs://B/x",
        "ssh:",
        "ssh:-oProxyCommand=id",
        "ssh:ada@-oProxyCommand=id",
        "ssh:-l@host",
        "ssh:host;id",
        "ssh:host:",
        "ssh:host name",
    ],
)
def test_an_invalid_source_is_refused_before_any_request(written):
    with pytest.raises(UsageError):
        sources.parse(written, Path("/here"), "--from")


def test_the_home_of_an_unknown_user_is_reported_with_its_place(member):
    for ask, where in (
        (lambda: sources.parse("~nobodyhere/x", Path("/here"), "--from"), "--from"),
        (lambda: origin.source_of(member.settings(TPU_OPS_SNAPSHOT="~nobodyhere/x")), "TPU_OPS_SNAPSHOT"),
        (lambda: member.settings(TPU_OPS_STATE="~nobodyhere/x"), "TPU_OPS_STATE"),
        (lambda: config.find_file(None, {"TPU_OPS_FLEET": "~nobodyhere/x"}, Path("/")), "TPU_OPS_FLEET"),
        (lambda: config.find_file("~nobodyhere/x", {}, Path("/")), "--fleet"),
    ):
        with pytest.raises(UsageError, match="~nobodyhere") as caught:
            ask()
        assert where in caught.value.where


def test_a_signed_address_is_not_shown():
    assert sources.shown("https://example.com/x?signature=abc") == "https://example.com/x"


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_a_source_that_is_not_a_regular_file_is_refused_by_path(member, tmp_path, kind):
    path = tmp_path / "x"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CloudError) as caught:
        view.refresh(member.settings(), source=str(path))
    assert caught.value.where == str(path)


def test_a_snapshot_of_a_web_server(member, tmp_path, monkeypatch):
    """https with a certificate that is checked; http on this machine only, past any proxy; redirects to https only."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    own = certificate(tmp_path)
    body = text().encode()
    with (
        web({"/x": (200, {}, body)}, own) as secure,
        web(
            {
                "/x": (200, {}, body),
                "/up": (302, {"Location": f"{secure}/x"}, b""),
                "/down": (302, {"Location": "http://127.0.0.1:1/x?signature=abc"}, b""),
                "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            }
        ) as plain,
    ):
        monkeypatch.delenv("no_proxy")
        assert sources.read(f"{plain}/x", member.settings()) == body
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(CloudError, match="CERTIFICATE_VERIFY_FAILED"):
            sources.read(f"{secure}/x", member.settings())
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        assert sources.read(f"{secure}/x", member.settings()) == body
        assert sources.read(f"{plain}/up", member.settings()) == body
        for path, words in (("/down", "not https"), ("/file", "302")):
            with pytest.raises(CloudError, match=words) as caught:
                sources.read(f"{plain}{path}", member.settings())
            assert "signature" not in str(caught.value)
        with pytest.raises(CloudError, match="HTTP 404"):
            sources.read(f"{plain}/y?signature=abc", member.settings())
    with pytest.raises(CloudError, match="refused"):
        sources.read(f"{plain}/x", member.settings())


def test_more_than_a_snapshot_may_have_is_not_read(member, tmp_path, monkeypatch, ssh):
    monkeypatch.setattr(sources, "LARGEST", 1000)
    path = tmp_path / "large"
    path.write_bytes(b" " * 1001)
    ssh(f"cat {path}")
    with web({"/x": (200, {}, b" " * 1001)}) as plain:
        for source in (str(path), f"{plain}/x", "ssh:host"):
            with pytest.raises(CloudError, match="larger than"):
                sources.read(source, member.settings())


@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
    ],
    ids=["body", "header", "chunk size"],
)
def test_a_web_server_that_never_ends_is_given_up(member, head, drop):
    settings = member.settings()._replace(request_timeout=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(head)
                while not over.wait(0.05):
                    try:
                        client.sendall(drop)
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(CloudError, match=r"the download took longer than 0\.5 s"):
                sources.read(f"http://127.0.0.1:{server.getsockname()[1]}/x", settings)
        finally:
            over.set()
            thread.join()


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A stand-in for ssh: given a shell line, it runs that; returns its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(line):
        (folder / "ssh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/arguments\n{line}\n')
        (folder / "ssh").chmod(0o755)
        return folder / "arguments"

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return make


def test_a_snapshot_of_a_host_that_ssh_reaches(member, file, ssh):
    arguments = ssh(f'echo "noise of an rc file"; cat {file}')
    fleet, _ = view.refresh(member.settings(), source="ssh:ada@bastion")
    assert [node.name for node in fleet.nodes] == ["pod", "solo"]
    said = arguments.read_text().splitlines()
    assert said[-3:] == ["--", "ada@bastion", f"cat -- {sources.PATH_THERE}"]
    assert "BatchMode=yes" in said
    sources.read("ssh:[::1]:/srv/it's; id", member.settings())
    assert arguments.read_text().splitlines()[-2:] == ["::1", "cat -- '/srv/it'\"'\"'s; id'"]


def test_a_host_that_does_not_answer_is_said_in_sshs_words(member, ssh, tmp_path):
    ssh("echo 'ada@bastion: Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(CloudError, match="Permission denied"):
        sources.read("ssh:bastion", member.settings())
    # A wrapper's child holds the pipe open, whether the wrapper waits for it or has ended; the last one has closed it.
    over = tmp_path / "over"
    slow = f"sh -c 'sleep 60; touch {over}'"
    for line in (f"exec {slow}", f"{slow}; true", f"{slow} & exit 0", f"exec >&-; exec {slow}"):
        ssh(line)
        with pytest.raises(CloudError, match=r"ssh took longer than 0\.3 s"):
            sources.read("ssh:bastion", member.settings()._replace(request_timeout=0.3))
        assert not over.exists()


def test_a_snapshot_of_a_bucket(member, fleet_api, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fleet_api.rest)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    settings = member.settings()
    assert fleet_api.call("POST", "storage/v1/b?project=lab0", {"name": "published"})[0] == 200
    uri = "gs://published/a fleet/snapshot.json"
    with pytest.raises(CloudError, match="no such object"):
        view.refresh(settings, source=uri)
    sources.write(uri, text(), settings)
    assert [node.name for node in view.refresh(settings, source=uri)[0].nodes] == ["pod", "solo"]
    sources.write(uri, text([SOLO], asked_at=NOW + 1), settings)
    assert view.refresh(settings)[1].gone == ("pod",)
    with pytest.raises(CloudError, match="larger than"):
        buckets.read(uri, Auth(), limit=10, timeout=5)
    with pytest.raises(CloudError, match="no such object or bucket"):
        sources.write("gs://nobodys-bucket/x", text(), settings)
    fleet_api.fault(method="storage.objects.get", code="PERMISSION_DENIED", times=1)
    with pytest.raises(CloudError, match="no access"):
        sources.read(uri, settings)


def test_an_object_that_comes_otherwise_than_its_hash_says_is_refused(monkeypatch):
    about = json.dumps({"name": "x", "bucket": "bucket", "size": "4", "generation": "1"}).encode()
    content = (200, {"X-Goog-Hash": "crc32c=AAAAAA==,md5=AAAAAAAAAAAAAAAAAAAAAA==", "Content-Length": "4"}, b"text")
    path = "/storage/v1/b/bucket/o/x"
    with web({path: (200, {"Content-Type": "application/json"}, about), f"/download{path}": content}) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(CloudError, match="differs from the stored data"):
            buckets.read("gs://bucket/x", Auth(), limit=10, timeout=5)


def test_without_an_emulator_reads_are_anonymous_and_writes_need_a_login(member):
    """Public objects need no credentials. Writes need them, and these credentials are empty."""
    assert buckets.client(Auth(), anonymous=True)._credentials.token is None
    with pytest.raises(CloudError, match="no credentials"):
        buckets.write("gs://bucket/x", b"", Auth(), content_type="text/plain", timeout=1)


@pytest.mark.parametrize("refusal", [RefreshError("Reauthentication is needed."), Forbidden("insufficient scopes")])
@pytest.mark.parametrize("public", [True, False])
def test_a_public_object_is_read_even_with_a_broken_login(monkeypatch, refusal, public):
    asked = []

    class Client:
        _credentials: object = object()

        @staticmethod
        def create_anonymous_client():
            return Client()

    def content(client, *_):
        asked.append(client)
        if len(asked) == 1 or not public:
            raise refusal if len(asked) == 1 else Unauthorized("no anonymous caller")
        return b"text"

    monkeypatch.setattr(buckets, "client", lambda *_, **__: Client())
    monkeypatch.setattr(buckets, "_content", content)
    if public:
        assert buckets.read("gs://bucket/x", Auth(), limit=10, timeout=5) == b"text"
    else:
        with pytest.raises(CloudError, match="no access") as caught:
            buckets.read("gs://bucket/x", Auth(), limit=10, timeout=5)
        assert caught.value.__cause__ is refusal
    assert len(asked) == 2


# --- where to --------------------------------------------------------------------------------------------------------


def test_a_published_file_is_readable_by_all_and_replaced_at_once(member, tmp_path):
    path = tmp_path / "published.json"
    path.write_text("old")
    path.chmod(0o600)
    with path.open() as reader:
        sources.write(str(path), text(), member.settings())
        assert reader.read() == "old"
    assert (path.stat().st_mode & 0o777, json.loads(path.read_text())["asked_at"]) == (0o644, NOW)
    assert [entry.name for entry in tmp_path.iterdir() if "published" in entry.name] == ["published.json"]


@pytest.mark.parametrize("written", ["api", "https://x.org/x", "ssh:host", "ssh:", "s3://x/y", "", "a\nb"])
def test_an_unwritable_destination_is_refused_with_the_possible_kinds(written):
    with pytest.raises(UsageError, match="cannot be written to") as caught:
        sources.destination(written, Path("/here"), "--publish")
    assert caught.value.fix == "use a PATH or gs://BUCKET/OBJECT"


def test_a_file_that_cannot_be_written_is_said(member, tmp_path):
    for path in (tmp_path / "missing" / "x", tmp_path):
        with pytest.raises(OpsError) as caught:
            sources.write(str(path), text(), member.settings())
        assert caught.value.where == str(path)


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_not_replaced_by_a_file(member, tmp_path, linked):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    named = tmp_path / "link" if linked else pipe
    if linked:
        named.symlink_to(pipe)
    with pytest.raises(UsageError, match="not a regular file"):
        sources.write(str(named), text(), member.settings())
    for write in (lambda: files.replace(named, "x", 0o600), lambda: files.rewrite(named, b"x")):
        with pytest.raises(OSError, match="not a regular file"):
            write()
    assert (pipe.is_fifo(), named.is_symlink()) == (True, linked)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-86400, "in the future by this machine's clock"),
        (-5, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3599, "60 min ago"),
        (7200, "2 h ago"),
        (172800, "2 days ago"),
    ],
)
def test_ages(seconds, words):
    assert texts.ago(NOW, NOW + seconds) == words
