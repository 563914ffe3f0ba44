"""The commit of a clone, read from its files, and the message of a run whose clone was moved."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.specs import good, myself
from tpu_ops.host import child, clone
from tpu_ops.host.command import NotReady
from tpu_ops.protocol import spec

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Run git without anybody's configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "ada")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ada@example.org")

    def run(place: Path, *words: str) -> str:
        done = subprocess.run(["git", "-C", place, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    return run


@pytest.fixture
def made(tmp_path: Path, git: Git) -> Path:
    """A clone with two commits on its branch."""
    place = tmp_path / "vision"
    place.mkdir()
    git(place, "init", "--quiet", "--initial-branch=feature/a-1")
    for text in ("first", "second"):
        git(place, "commit", "--quiet", "--allow-empty", "--message", text)
    return place


def told(git: Git, place: Path) -> bool:
    """Return whether the files of a clone tell what git says of it."""
    return clone.head(str(place)) == git(place, "rev-parse", "HEAD")


def test_the_commit_is_told_however_it_is_kept(tmp_path: Path, made: Path, git: Git) -> None:
    assert told(git, made), "of a branch with a file"
    git(made, "pack-refs", "--all")
    assert not (made / ".git/refs/heads/feature").exists()
    assert told(git, made), "of a branch that is packed"
    git(made, "commit", "--quiet", "--allow-empty", "--message", "third")
    assert told(git, made), "of one that is packed at an older commit"
    git(made, "checkout", "--quiet", "--detach", "HEAD^")
    assert told(git, made), "of none"
    git(made, "worktree", "add", "--quiet", "-b", "beside", "../beside", "HEAD^")
    assert told(git, tmp_path / "beside"), "of a worktree"
    git(made, "pack-refs", "--all")
    assert told(git, tmp_path / "beside"), "of a worktree's branch that is packed"
    git(made, "symbolic-ref", "refs/heads/alias", "refs/heads/beside")
    git(made, "symbolic-ref", "HEAD", "refs/heads/alias")
    assert told(git, made), "of a branch that stands for another"
    assert clone.head(str(made)) == clone.head(str(tmp_path / "beside"))


@pytest.mark.parametrize("options", [("--separate-git-dir=../elsewhere",), ("--object-format=sha256",)])
def test_the_commit_is_told_of_other_kinds_of_clones(tmp_path: Path, git: Git, options: tuple[str, ...]) -> None:
    place = tmp_path / "other"
    place.mkdir()
    git(place, "init", "--quiet", *options)
    assert clone.head(str(place)) == "", "there is none yet"
    git(place, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert told(git, place)


def test_an_unreadable_commit_does_not_count_as_changed(tmp_path: Path, made: Path) -> None:
    head = made / ".git/HEAD"
    for text in ("ref: refs/heads/.invalid\n", "ref: refs/../../precious\n", "ref: /precious\n", "", "\0\n"):
        head.write_text(text)
        assert clone.head(str(made)) == ""
    (made / ".git/precious").write_text("0" * 40)
    head.write_text("ref: refs/heads/loop\n")
    (made / ".git/refs/heads/loop").write_text("ref: refs/heads/loop\n")
    assert clone.head(str(made)) == ""
    head.unlink()
    os.mkfifo(head)
    assert clone.head(str(made)) == "", "and nobody is waited for"
    assert clone.head(str(tmp_path / "no clone")) == ""
    clone.require(str(made), "0" * 40)


def test_a_clone_that_was_moved_since_the_start_looked_starts_nothing(made: Path, git: Git) -> None:
    wanted = git(made, "rev-parse", "HEAD")

    def fork() -> None:
        path = {b"PATH": b"/usr/bin:/bin"}
        with Path(os.devnull).open("wb") as sink:
            held = child.Child.fork(["true"], path, str(made), myself(), sink.fileno(), commit=wanted)
        held.drop()
        os.waitpid(held.pid, 0)

    fork()
    git(made, "checkout", "--quiet", "--detach", "HEAD^")
    now = git(made, "rev-parse", "HEAD")
    with pytest.raises(NotReady) as raised:
        fork()
    said = f"{made} is at {now[:12]} and no longer at {wanted[:12]}; somebody else has checked out another commit"
    assert str(raised.value).startswith(said)
    assert f"`git -C {made} reflog`" in str(raised.value)


@pytest.mark.parametrize(
    ("cwd", "digest", "commit"),
    [
        ("/srv/vision", "0" * 40, "0" * 40),
        ("/srv/vision", "0" * 64, "0" * 64),
        ("/srv/vision", "", ""),
        # Of what is copied it is another digest.
        ("tpu_ops/digits", "0" * 40, ""),
        ("", "", ""),
    ],
)
def test_only_the_clone_of_a_project_is_to_be_at_a_commit(cwd: str, digest: str, commit: str) -> None:
    assert spec.commit(spec.check(good(cwd=cwd, code_digest=digest))) == commit
