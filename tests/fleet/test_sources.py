"""Published snapshots, as a member without credentials reads them: from where, and what comes of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.nodes import key
from tests.support.published import KEYS, NOW, POD, SOLO, certificate, document, web
from tpu_ops import config, files
from tpu_ops.cloud import buckets
from tpu_ops.cloud.auth import Auth
from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.fleet import publish, published, sources, view
from tpu_ops.fleet.hostkeys import HostKeyAlarm
from tpu_ops.fleet.ssh_files import parse_known_hosts


def text(nodes=(POD, SOLO), keys=KEYS, asked_at=NOW) -> str:
    return document(nodes, keys, asked_at).text()


@pytest.fixture
def file(tmp_path):
    """A published snapshot."""
    path = tmp_path / "snapshot.json"
    path.write_text(text())
    return path


def state(member) -> dict[str, str]:
    folder = member.settings().state_dir
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


# --- what comes of it ------------------------------------------------------------------------------------------------


def test_a_member_has_hosts_and_keys_and_the_source_is_asked_again(member, file):
    settings = member.settings()
    fleet, changes = view.refresh(settings, source=str(file))
    assert (changes.first, fleet.source, fleet.asked_at, fleet.warnings) == (True, str(file), NOW, ())
    assert [worker.host for worker in fleet.workers] == ["pod-w0", "pod-w1", "solo-w0"]
    assert parse_known_hosts(fleet.known_hosts.read_text()) == KEYS
    assert "HostName 34.0.1.1" in fleet.ssh_config.read_text()
    moved = replace(POD, external_ips=("34.0.9.0", "34.0.9.1"))
    file.write_text(text([moved, SOLO], asked_at=NOW + 60))
    assert view.current(settings).asked_at == NOW
    assert [change.new for change in view.look(settings)[1].addresses] == ["34.0.9.0", "34.0.9.1"]
    fleet, changes = view.refresh(settings)
    assert [change.new for change in changes.addresses] == ["34.0.9.0", "34.0.9.1"]
    assert "HostName 34.0.9.1" in fleet.ssh_config.read_text()


def test_the_first_command_of_a_member_reads_what_the_settings_name(member, file, monkeypatch):
    monkeypatch.setenv("TPU_OPS_SNAPSHOT", str(file))
    assert view.current(member.settings(TPU_OPS_SNAPSHOT=str(file))).source == str(file)


def test_a_relative_path_in_the_settings_begins_at_the_fleets_file(member):
    (member.file.parent / "published.json").write_text(text())
    member.write(snapshot="published.json")
    assert view.current(member.settings()).source == str(member.file.parent / "published.json")


def test_the_api_is_not_asked_for_no_project(member, file):
    member.write(projects=[], snapshot=str(file), endpoint="127.0.0.1:1")
    with pytest.raises(UsageError, match="no project is set"):
        view.look(member.settings(), source=sources.parse("api", file.parent, "--from"))


def test_what_the_settings_name_wins_over_what_is_remembered(member, file, tmp_path):
    view.refresh(member.settings(), source=str(file))
    other = tmp_path / "other.json"
    other.write_text(text([SOLO], asked_at=NOW + 1))
    member.write(projects=["lab", "other"], snapshot=str(other))
    assert view.source_of(member.settings()) == str(other)
    assert view.known(member.settings()) is None
    assert [node.name for node in view.current(member.settings()).nodes] == ["solo"]
    # An older one does not take what is newer away: it is said and passed over.
    other.write_text(text([SOLO], asked_at=NOW - 1))
    file.write_text(text(asked_at=NOW + 2))
    view.refresh(replace(member.settings(), snapshot=""), source=str(file))
    assert view.current(member.settings()).source == str(file)


def test_back_to_the_api_needs_credentials_and_what_is_known_stays(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    with pytest.raises(CloudError, match="no credentials") as caught:
        view.refresh(member.settings(), source=sources.API)
    assert "log in" in caught.value.fix
    assert str(file) in caught.value.fix
    assert state(member) == before


def test_the_api_replaces_a_published_snapshot_whatever_its_time(fleet, tmp_path):
    """The clock of the machine that published may be ahead."""
    fleet.create("pod", "v4-16")
    path = tmp_path / "snapshot.json"
    path.write_text(publish.document(time.time() + 300, (fleet.project,), (), (), {}).text())
    assert view.refresh(fleet.settings(), source=str(path))[0].nodes == ()
    found, changes = view.refresh(fleet.settings(), source=sources.API)
    assert ([node.name for node in found.nodes], changes.new, found.source) == (["pod"], ("pod",), "")


def test_an_older_snapshot_is_refused_and_nothing_is_written(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    file.write_text(text([SOLO], asked_at=NOW - 3600))
    for ask in (view.refresh, view.look):
        with pytest.raises(published.OutdatedError, match="older than what is known") as caught:
            ask(member.settings())
        assert "--from api" in caught.value.fix
    assert state(member) == before


def test_a_changed_key_of_the_same_node_is_an_alarm_and_nothing_is_written(member, file):
    view.refresh(member.settings(), source=str(file))
    before = state(member)
    file.write_text(text(keys=KEYS | {"tpu-1-w1": {"ssh-ed25519": key("evil")}}, asked_at=NOW + 1))
    with pytest.raises(HostKeyAlarm, match=r"pod-w1.*CHANGED"):
        view.refresh(member.settings())
    assert state(member) == before


def test_a_recreated_node_comes_with_its_new_keys(member, file):
    view.refresh(member.settings(), source=str(file))
    anew = replace(POD, node_id="77")
    file.write_text(text([anew], {"tpu-77-w0": {"ssh-ed25519": key("n")}}, NOW + 1))
    fleet, changes = view.refresh(member.settings())
    assert (changes.recreated, changes.gone) == (("pod",), ("solo",))
    assert set(parse_known_hosts(fleet.known_hosts.read_text())) == {"tpu-2-w0", "tpu-77-w0"}
    assert any("pod-w1" in warning and "the published snapshot holds none" in warning for warning in fleet.warnings)


@pytest.mark.parametrize(
    ("options", "names", "warnings"),
    [
        ({"projects": ["other"]}, ["solo"], []),
        ({"projects": ["lab"], "zones": ["us-central2-b"]}, ["pod"], []),
        ({"projects": ["lab", "mine"]}, ["pod"], ["project mine"]),
        ({"projects": ["lab", "other"], "names": ["so*"]}, ["solo"], []),
        ({"projects": ["lab", "other"], "labels": {"team": "vision"}}, ["pod"], []),
        ({"snapshot": "unset"}, ["pod", "solo"], []),
    ],
)
def test_a_members_own_projects_zones_and_filters_hold(member, file, options, names, warnings):
    member.write(**{name: str(file) if name == "snapshot" else value for name, value in options.items()})
    fleet, _ = view.refresh(member.settings(), source=str(file))
    assert [node.name for node in fleet.nodes] == names
    assert [warning.partition(":")[0] for warning in fleet.warnings] == warnings


def test_a_snapshot_of_other_projects_is_an_error_and_no_empty_fleet(member, file):
    member.write(projects=["mine"])
    with pytest.raises(UsageError, match="of lab and other, this fleet asks for mine"):
        view.refresh(member.settings(), source=str(file))


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
def test_what_is_no_source_is_refused_before_anything_is_asked(written):
    with pytest.raises(UsageError):
        sources.parse(written, Path("/here"), "--from")


def test_the_home_of_a_user_that_there_is_not_is_said_with_where_it_stands(member):
    for ask, where in (
        (lambda: sources.parse("~nobodyhere/x", Path("/here"), "--from"), "--from"),
        (lambda: view.source_of(member.settings(TPU_OPS_SNAPSHOT="~nobodyhere/x")), "TPU_OPS_SNAPSHOT"),
        (lambda: member.settings(TPU_OPS_STATE="~nobodyhere/x"), "TPU_OPS_STATE"),
        (lambda: config.find_fleet(None, {"TPU_OPS_FLEET": "~nobodyhere/x"}, Path("/")), "TPU_OPS_FLEET"),
        (lambda: config.find_fleet("~nobodyhere/x", {}, Path("/")), "--fleet"),
    ):
        with pytest.raises(UsageError, match="~nobodyhere") as caught:
            ask()
        assert where in caught.value.where


def test_a_signed_address_is_not_shown():
    assert sources.shown("https://example.com/x?signature=abc") == "https://example.com/x"


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_what_is_no_file_is_said(member, tmp_path, kind):
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
            with pytest.raises(CloudError, match="more than"):
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
    settings = replace(member.settings(), request_timeout=0.5)
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
            with pytest.raises(CloudError, match=r"did not end within 0\.5 s"):
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


def test_a_host_that_does_not_answer_is_said_in_sshs_words(member, ssh):
    ssh("echo 'ada@bastion: Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(CloudError, match="Permission denied"):
        sources.read("ssh:bastion", member.settings())
    # A wrapper's child holds the pipe open, whether the wrapper waits for it or has ended; the last one has closed it.
    for line in ("exec sleep 60", "sleep 60; true", "sleep 60 & exit 0", "exec >&-; exec sleep 60"):
        ssh(line)
        began = time.monotonic()
        with pytest.raises(CloudError, match=r"did not end within 0\.3 s"):
            sources.read("ssh:bastion", replace(member.settings(), request_timeout=0.3))
        assert time.monotonic() - began < 30


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
    with pytest.raises(CloudError, match="more than"):
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
        with pytest.raises(CloudError, match="not what is kept there"):
            buckets.read("gs://bucket/x", Auth(), limit=10, timeout=5)


def test_a_bucket_without_an_emulator_is_read_by_nobody_and_written_by_somebody(member):
    """Public objects need no credentials; what is written needs them, and these are void."""
    assert buckets._client(Auth(), anonymous=True)._credentials.token is None
    with pytest.raises(CloudError, match="no credentials"):
        buckets.write("gs://bucket/x", b"", Auth(), content_type="text/plain", timeout=1)


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


@pytest.mark.parametrize("written", ["api", "https://example.com/x", "ssh:host", "ssh:host:/x"])
def test_what_can_only_be_read_is_not_written_to(written):
    with pytest.raises(UsageError, match="not written to"):
        sources.destination(written, Path("/here"), "--publish")


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
    with pytest.raises(UsageError, match="no regular file"):
        sources.write(str(named), text(), member.settings())
    for write in (lambda: files.replace(named, "x", 0o600), lambda: files.rewrite(named, b"x")):
        with pytest.raises(OSError, match="no regular file"):
            write()
    assert (pipe.is_fifo(), named.is_symlink()) == (True, linked)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3599, "60 min ago"),
        (7200, "2 h ago"),
        (172800, "2 days ago"),
    ],
)
def test_ages(seconds, words):
    assert sources.ago(NOW, NOW + seconds) == words
