"""The line in a user's own ssh config is added once at the top and removed; nothing else changes."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.nodes import node
from tpu_ops.cloud.node import workers_of
from tpu_ops.errors import OpsError
from tpu_ops.ssh import client_config, include, openssh
from tpu_ops.ssh.ways import Way

WORKERS = workers_of([node()])
MUX = Path("/tmp")


def fragment_of(folder: Path, workers=WORKERS) -> Path:
    """Write a fleet's ssh config as `tpu_ops` does."""
    folder.mkdir(parents=True, exist_ok=True)
    ways = [(worker, Way(worker.external_ip)) for worker in workers]
    options = client_config.common_options(folder / "known_hosts")
    (folder / "ssh_config").write_text(
        client_config.ssh_config(ways, user="ada", private_key=None, options=options, mux=MUX)
    )
    return folder / "ssh_config"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home that ssh looks into."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setattr(openssh, "home", lambda: path)
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def fragment(tmp_path):
    """The ssh config of a fleet."""
    return fragment_of(tmp_path / "state")


@pytest.fixture
def own(home):
    """A person's own ssh config, not there yet."""
    return home / ".ssh" / "config"


def written(own: Path, content: bytes, mode: int = 0o600) -> Path:
    own.parent.mkdir(mode=0o700, exist_ok=True)
    own.write_bytes(content)
    own.chmod(mode)
    return own


def effective(own: Path, host: str = "pod-w1") -> list[str]:
    """Return what OpenSSH makes of a config for a host."""
    done = subprocess.run(["ssh", "-F", own, "-G", host], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_missing_file_is_made_for_this_person_only(own, fragment):
    assert include.install(own, fragment).word == "installed"
    assert own.read_text() == f'Include "{fragment}"\n'
    assert [stat.S_IMODE(path.stat().st_mode) for path in (own, own.parent)] == [0o600, 0o700]
    assert "hostkeyalias tpu-1-w1" in effective(own)


#: A person's file, and whether ssh would find the workers by the `OURS` in it already.
CONFIGS = {
    "empty": (b"", False),
    "no line end": (b"Host *\n    User eve", False),
    "a comment that names it": (b"# OURS\nHost *\n", False),
    "first": (b"OURS\nHost *\n    User eve\n", True),
    "moved down, still before any Host": (b"# mine\nServerAliveInterval 5\n\n  OURS\nHost a\n", True),
    "written by hand": (b"include=PATH\nHost a\n", True),
    "among others": (b"Include ~/.ssh/other PATH\nHost a\n", True),
    "by a pattern": (b"INCLUDE DIRECTORY/ssh_*\n", True),
    "in a Host block": (b"Host a\n    User b\n\nOURS\n", False),
    "in a Match block": (b"match user eve\nOURS\n", False),
    "behind a Host, whatever it matches": (b"HOST=*\nOURS\n", False),
    "in quotes that are not closed": (b'Include "PATH\n', False),
    "behind a comment sign": (b"Include a # PATH\n", False),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_the_line_is_put_on_top_unless_it_holds_already(own, fragment, what):
    content, there = CONFIGS[what]
    for old, new in ((b"OURS", openssh.include(fragment)), (b"PATH", fragment), (b"DIRECTORY", fragment.parent)):
        content = content.replace(old, os.fsencode(str(new)))
    written(own, content)
    line = os.fsencode(openssh.include(fragment)) + b"\n"
    outcome = include.install(own, fragment)
    assert outcome.word == ("already there" if there else "installed")
    assert own.read_bytes() == (content if there else line + content)
    assert include.install(own, fragment).word == "already there"
    if b'"%s\n' % os.fsencode(fragment) not in content:
        assert "hostkeyalias tpu-1-w1" in effective(own)
        assert include.unseen(own, WORKERS) == ""


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_an_included_pipe_or_device_is_said_and_never_waited_for(own, fragment, tmp_path, kind):
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    written(own, f"Include {path}\n".encode())
    assert include.install(own, fragment).word == "installed"
    assert "not a regular file" in include.unseen(own, WORKERS)
    assert include.uninstall(own, fragment).word == "removed"


@pytest.mark.parametrize("kind", ["pipe", "large"])
def test_an_own_config_that_is_none_is_an_error_and_stays(own, fragment, kind):
    own.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(own)
    else:
        own.write_bytes(b"#" * (include._LARGEST + 1))
    for change in (include.install, include.uninstall):
        with pytest.raises(OpsError, match=r"not a regular file|large") as caught:
            change(own, fragment)
        assert caught.value.where == str(own)
    assert own.is_fifo() == (kind == "pipe")


@pytest.mark.parametrize("block", ["Host a", "Match host b"])
def test_a_line_that_holds_for_some_hosts_only_is_named(own, fragment, block):
    line = openssh.include(fragment)
    written(own, f"# mine\n{block}\n    {line}\n".encode())
    outcome = include.install(own, fragment)
    assert outcome.word == "installed"
    assert len(outcome.warnings) == 1
    assert f"{own}, line 3" in outcome.warnings[0]
    assert own.read_text() == f"{line}\n# mine\n{block}\n    {line}\n"


LINES = st.lists(
    st.sampled_from([b"Host a", b"Include x", b"\xff\xfe", b"", b"\t", b"# c", b"Match all", b"a\rb", b"\x0b"])
)


@settings(deadline=None)
@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.binary(max_size=20))
def test_an_inserted_line_is_removed_again_to_the_byte(lines, end, closed, more):
    content = end.join(lines) + (end if closed else b"") + more
    fragment = Path("/state/a b/ssh_config")
    changed = include.with_line(content, fragment)
    assert changed.endswith(content)
    assert include.without_line(changed, fragment) == content
    assert include.without_line(content, fragment) == content


def test_line_ends_of_another_system_are_kept(own, fragment):
    content = b"# caf\xe9\r\nHost a\r\n    User b\r\n"
    written(own, content)
    include.install(own, fragment)
    assert own.read_bytes() == os.fsencode(openssh.include(fragment)) + b"\r\n" + content
    assert "hostkeyalias tpu-1-w1" in effective(own)
    assert "user b" in effective(own, "a")
    assert include.uninstall(own, fragment).word == "removed"
    assert own.read_bytes() == content


def test_mode_owner_and_a_link_stay(own, fragment, tmp_path):
    target = tmp_path / "dotfiles" / "ssh"
    target.parent.mkdir()
    written(own, b"").unlink()
    written(target, b"Host a\n", 0o640)
    if os.getuid() == 0:
        os.chown(target, 1234, 1235)
    before = target.stat()
    own.symlink_to(os.path.relpath(target, own.parent))
    include.install(own, fragment)
    assert own.is_symlink()
    assert target.read_text() == f"{openssh.include(fragment)}\nHost a\n"
    after = target.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [path.name for path in target.parent.iterdir()] == ["ssh"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(own, fragment, tmp_path):
    own.parent.mkdir()
    own.symlink_to(tmp_path / "dotfiles" / "ssh")
    include.install(own, fragment)
    assert (tmp_path / "dotfiles" / "ssh").read_text() == f"{openssh.include(fragment)}\n"
    assert own.is_symlink()


def test_an_included_link_that_leads_back_to_itself_is_told_in_sshs_words(own, fragment, home):
    content = b"Include loop\nHost a\n"
    written(own, content)
    (home / ".ssh" / "loop").symlink_to("loop")
    assert include.install(own, fragment) == include.Outcome("installed")
    assert "Too many levels of symbolic links" in include.unseen(own, WORKERS[:1])
    assert include.uninstall(own, fragment) == include.Outcome("removed")
    assert own.read_bytes() == content


def test_links_in_a_circle_are_an_error_in_words(own, fragment):
    own.parent.mkdir()
    own.symlink_to(own)
    with pytest.raises(OpsError, match="cannot be changed"):
        include.install(own, fragment)


def test_a_directory_in_its_place_is_an_error_in_words(own, fragment):
    own.mkdir(parents=True)
    with pytest.raises(OpsError) as caught:
        include.install(own, fragment)
    assert caught.value.where == str(own)
    assert "tpu_ops ssh-config" in caught.value.fix


def test_a_dry_run_writes_nothing(own, fragment):
    assert include.install(own, fragment, dry_run=True).word == "installed"
    assert not own.parent.exists()
    written(own, b"Host a\n")
    before = own.stat()
    assert include.install(own, fragment, dry_run=True).word == "installed"
    include.install(own, fragment)
    content = own.read_bytes()
    assert include.uninstall(own, fragment, dry_run=True).word == "removed"
    assert own.read_bytes() == content
    assert before.st_size != own.stat().st_size


def test_uninstall_keeps_a_line_that_the_user_wrote(own, fragment):
    assert include.uninstall(own, fragment).word == "not there"
    assert not own.exists()
    written(own, f"Include {fragment}\n".encode())
    before = own.stat().st_mtime_ns
    outcome = include.uninstall(own, fragment)
    assert outcome.word == "not there"
    assert "line 1 still includes this fleet" in outcome.warnings[0]
    assert own.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "name", ["a b", "100%h", "it's", 'q"q', "back\\slash", "[x]", "*", "${HOME}", "tab\there", "ü"]
)
def test_ssh_finds_the_fragment_whatever_its_path(own, tmp_path, name):
    fragment = fragment_of(tmp_path / name)
    assert include.install(own, fragment).word == "installed"
    assert "hostkeyalias tpu-1-w1" in effective(own)
    assert include.install(own, fragment).word == "already there"
    assert include.uninstall(own, fragment).word == "removed"


@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")])
def test_hosts_of_the_same_names_in_two_fleets_are_named(own, tmp_path, order):
    others = workers_of([node(node_id="7"), node("solo", node_id="8")])
    files = {"ours": fragment_of(tmp_path / "ours"), "theirs": fragment_of(tmp_path / "theirs", others)}
    written(own, b"")
    for name in reversed(order):
        include.install(own, files[name])
    outcome = include.install(own, files["ours"])
    assert outcome.word == "already there"
    (warning,) = outcome.warnings
    assert f"{files['theirs']} is included as well: pod-w0, pod-w1" in warning
    assert "solo" not in warning
    winner = "theirs" if order[0] == "theirs" else "ours"
    assert ("means another fleet's" if winner == "theirs" else "means this fleet's") in warning
    assert f"hostkeyalias tpu-{7 if winner == 'theirs' else 1}-w1" in effective(own)
    assert bool(include.unseen(own, WORKERS)) == (winner == "theirs")


def test_a_file_that_ssh_refuses_is_said(own, fragment):
    written(own, b"NoSuchKeyword yes\n")
    include.install(own, fragment)
    assert "NoSuchKeyword".lower() in include.unseen(own, WORKERS).lower()


def test_the_home_that_ssh_looks_into_is_that_of_the_password_file(monkeypatch, tmp_path):
    real = openssh.home()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert openssh.home() == real != tmp_path
    said = subprocess.run(["ssh", "-v", "-G", "h"], capture_output=True, text=True, check=True).stderr
    assert str(tmp_path) not in said
