"""The files of a directory that go to the workers, listed by the real git, or by rsync without git."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_ops.errors import OpsError, UsageError
from tpu_ops.runs import listing

Git = Callable[..., str]


@pytest.fixture(autouse=True)
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Return what git says in a directory; its settings are none but these."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "t")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "t@example.org")

    def run(directory: Path, *words: str) -> str:
        command = ["git", "-C", str(directory), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return run


def made(folder: Path, *paths: str, ignore: str | None = None) -> Path:
    """Make files, or directories where there is a slash at the end."""
    for path in paths:
        (folder / path if path.endswith("/") else (folder / path).parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            (folder / path).write_bytes(os.fsencode(path))
    if ignore is not None:
        (folder / ".gitignore").write_text(ignore)
    return folder


def files(folder: Path) -> list[str]:
    return [entry for entry in listing.entries(folder) if not entry.endswith("/") and entry != ".gitignore"]


@pytest.fixture(params=["in a work tree", "in none"])
def code(tmp_path: Path, git: Git, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    if request.param == "in a work tree":
        git(folder, "init", "--quiet")
    return folder


@pytest.mark.parametrize(
    ("ignore", "paths", "brought"),
    [
        ("*.json\n!config.json\n", ["config.json", "big.json", "sub/config.json"], ["config.json", "sub/config.json"]),
        ("data/raw\n", ["data/raw/x", "src/data/raw/x"], ["src/data/raw/x"]),
        ("/out\nlogs/\n", ["out/x", "sub/out", "logs/x", "sub/logs/x", "sub2/logs"], ["sub/out", "sub2/logs"]),
        ("a/**/b\n", ["a/b", "a/x/y/b", "c"], ["c"]),
        ("sub/*\n!sub/keep\n", ["sub/keep", "sub/drop", "a/sub/drop"], ["a/sub/drop", "sub/keep"]),
        ("; \n\\#x\n\\!y\nz   \n", ["; ", "#x", "!y", "z"], ["; "]),
        ("[ab].py\nq?\n", ["a.py", "c.py", "q1", "q12"], ["c.py", "q12"]),
    ],
)
def test_gitignore_means_what_git_means(code: Path, ignore: str, paths: list[str], brought: list[str]) -> None:
    assert files(made(code, *paths, ignore=ignore)) == brought


def test_directories_are_brought_also_where_git_keeps_none_of_them(code: Path) -> None:
    made(
        code, "a/x.py", "empty/deep/", "runs/a.ckpt", "out/", "a/__pycache__/x.pyc", "__pycache__/", "a/out/y", ".git/"
    )
    made(code / "a", ignore="!keep/\n")
    made(code, ignore="*.ckpt\nout/\nkeep/\n")
    made(code, "keep/", "a/keep/")
    assert listing.entries(code) == (
        ".gitignore",
        "a/",
        "a/.gitignore",
        "a/keep/",
        "a/x.py",
        "empty/",
        "empty/deep/",
        "runs/",
    )


def test_nothing_is_written_where_no_repository_is(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "x", ignore="y\n")
    assert files(code) == ["x"]
    assert sorted(path.name for path in code.iterdir()) == [".gitignore", "x"]


def test_tracked_files_are_synced_and_deleted_files_are_not(tmp_path: Path, git: Git) -> None:
    code = made(tmp_path / "code", "kept.bin", "gone.py", "pkg/a.py", "was/a.py", "turned", ignore="*.bin\nout/\n")
    made(code, "out/kept", "out/new", "__pycache__/tracked")
    git(code, "init", "--quiet")
    git(code, "add", "--force", ".gitignore", "kept.bin", "gone.py", "pkg", "was", "turned", "out/kept", "__pycache__")
    (code / "gone.py").unlink()
    shutil.rmtree(code / "was")
    (code / "was").symlink_to("pkg")
    (code / "turned").unlink()
    made(code, "turned/now", "turned/now.bin", "new.bin", "new.py")
    assert files(code) == ["kept.bin", "new.py", "out/kept", "pkg/a.py", "turned/now", "was"]


def test_in_a_part_of_a_work_tree_what_stands_above_counts(tmp_path: Path, git: Git) -> None:
    top = made(tmp_path / "top", "code/a.bin", "code/raw/x", "code/lib/raw/x", "code/b.py", "code/s", "other")
    made(top, ignore="*.bin\n/code/raw\n")
    git(top, "init", "--quiet")
    (top / ".git" / "info" / "exclude").write_text("s\n")
    assert files(top / "code") == ["b.py", "lib/raw/x"]


@pytest.mark.parametrize("ignore", ["*\n", "code/\n", "/code/*\n/code\n"])
def test_an_ignored_directory_is_listed_by_its_own_gitignore(tmp_path: Path, git: Git, ignore: str) -> None:
    """For example, a home may be a work tree in which git ignores nearly everything."""
    top = made(tmp_path / "top", "code/a.py", "code/b.bin", ignore=ignore)
    git(top, "init", "--quiet")
    made(top / "code", ignore="*.bin\n")
    assert files(top / "code") == ["a.py"]


def test_repositories_within_are_listed_by_the_same_rule(tmp_path: Path, git: Git) -> None:
    library = made(tmp_path / "library", "lib.py", "keep.bin", ignore="*.bin\n")
    git(library, "init", "--quiet")
    git(library, "add", "--force", ".")
    git(library, "commit", "--quiet", "-m", "x")
    code = made(tmp_path / "code", "train.py", "sub/x.py", ignore="*.log\nleft/\n")
    git(code, "init", "--quiet")
    git(code, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "vendor/one")
    git(code, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "vendor/two")
    git(code, "submodule", "--quiet", "deinit", "--force", "vendor/two")
    for name in ("clone", "left"):
        git(tmp_path, "clone", "--quiet", str(library), str(code / name))
    made(code, "vendor/one/new.bin", "vendor/one/new.log", "clone/new.bin", "clone/new.py", "new/deep/a.py")
    git(code / "new" / "deep", "init", "--quiet")
    vendored = [f"vendor/one/{name}" for name in (".gitignore", "keep.bin", "lib.py", "new.log")]
    cloned = [f"clone/{name}" for name in (".gitignore", "keep.bin", "lib.py", "new.py")]
    others = [".gitmodules", "new/deep/a.py", "sub/x.py", "train.py"]
    assert files(code) == sorted([*vendored, *cloned, *others])
    assert {"vendor/", "vendor/one/", "vendor/two/", "clone/", "new/deep/"} <= {*listing.entries(code)}
    # Whoever was never fetched may have been filled by hand.
    made(code, "vendor/two/by-hand.py", "vendor/two/x.o")
    made(code / "vendor" / "two", ignore="*.o\n")
    assert files(code) == sorted([*vendored, *cloned, *others, "vendor/two/.gitignore", "vendor/two/by-hand.py"])


def test_a_linked_work_tree_is_one(tmp_path: Path, git: Git) -> None:
    code = made(tmp_path / "code", "a.py", ignore="*.bin\n")
    git(code, "init", "--quiet")
    git(code, "add", ".")
    git(code, "commit", "--quiet", "-m", "x")
    git(code, "worktree", "add", "--quiet", str(tmp_path / "linked"))
    assert files(made(tmp_path / "linked", "b.py", "c.bin")) == ["a.py", "b.py"]


@pytest.mark.parametrize("broken", [".git/", ".git/HEAD", ".git"])
def test_a_directory_with_a_broken_git_entry_is_not_a_repository(tmp_path: Path, broken: str) -> None:
    code = made(tmp_path / "code", "a.py", "b.bin", broken, "sub/c.py", "sub/.git/", ignore="*.bin\n")
    made(code, "only/c.bin", "only/.git/")
    if broken == ".git":
        (code / ".git").write_text("gitdir: /nowhere\n")
    assert files(code) == ["a.py", "sub/c.py"]
    assert "only/" in listing.entries(code)


def test_a_repository_within_that_is_empty_is_a_directory(code: Path, git: Git) -> None:
    git(made(code, "new/"), "init", "--quiet", "new")
    assert listing.entries(code) == ("new/",)


def test_names_of_any_kind_and_links_are_listed(code: Path) -> None:
    odd = [os.fsdecode(name) for name in (b"two\nlines", b"\xff\xfe", b"-n", b":(top)x", b"a*", b" ", b"tab\t", b"\\x")]
    made(code, *odd, *(f"empty {name}/" for name in odd), *(f"{name}dir/f" for name in odd), ignore="a[*]\n")
    for name, target in (("to-file", odd[0]), ("to-folder", f"{odd[0]}dir"), ("to-nothing", "nowhere"), ("up", "..")):
        (code / name).symlink_to(target)
    found = {*listing.entries(code)} - {".gitignore"}
    brought = {*odd} - {"a*"}
    assert found == {
        *brought,
        *(f"empty {name}/" for name in odd),
        *(f"{name}dir/" for name in odd),
        *(f"{name}dir/f" for name in odd),
        *("to-file", "to-folder", "to-nothing", "up"),
    }


def test_names_that_git_takes_for_more_than_names_are_left_out_like_others(code: Path) -> None:
    assert listing.entries(made(code, ":(top)x/", "-v/", "!y/", "z/", ignore=":*\n-*\n\\!*\n")) == (".gitignore", "z/")


def test_a_pipe_is_listed_unless_it_is_left_out(code: Path) -> None:
    made(code, "sub/", ignore="left\n")
    for name in ("pipe", "sub/pipe", "left"):
        os.mkfifo(code / name)
    assert files(code) == ["pipe", "sub/pipe"]


def test_variables_that_mean_another_repository_are_not_heard(
    code: Path, tmp_path: Path, git: Git, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = made(tmp_path / "other", "of-the-other", ignore="*.py\n")
    git(other, "init", "--quiet")
    git(other, "add", ".")
    made(code, "a.py", "b.bin", ignore="*.bin\n")
    for name, value in {"DIR": other / ".git", "WORK_TREE": other, "INDEX_FILE": other / ".git" / "index"}.items():
        monkeypatch.setenv(f"GIT_{name}", str(value))
    assert files(code) == ["a.py"]


def test_the_users_own_gitignore_counts(code: Path, tmp_path: Path) -> None:
    made(tmp_path / "home" / ".config" / "git", "ignore").joinpath("ignore").write_text("*.swp\n")
    assert files(made(code, "a.py", "a.swp")) == ["a.py"]


def test_a_repository_of_somebody_else_is_refused_with_what_allows_it(
    tmp_path: Path, git: Git, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = made(tmp_path / "code", "a.py")
    git(code, "init", "--quiet")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match="belongs to somebody else") as refused:
        listing.entries(code)
    assert f"git config --global --add safe.directory {code}" in refused.value.fix


def test_a_repository_that_git_cannot_read_is_an_error_and_not_brought_whole(tmp_path: Path, git: Git) -> None:
    code = made(tmp_path / "code", "a.py")
    git(code, "init", "--quiet")
    (code / ".git" / "index").write_text("broken")
    with pytest.raises(UsageError, match=r"git cannot list this directory: .*index file"):
        listing.entries(code)


def test_a_directory_that_cannot_be_read_is_an_error(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(code, "sub/x", "left/", ignore="left/\n")
    scandir = os.scandir

    def closed(path: str | int) -> object:
        if str(path).endswith(("/sub", "/left")):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UsageError, match="cannot be read: Permission denied") as refused:
        listing.entries(code)
    assert refused.value.where == f"--sync {code}/sub"


def test_all_of_a_copy_is_listed_wherever_it_stands(tmp_path: Path, git: Git) -> None:
    git(made(tmp_path, ignore="*\n"), "init", "--quiet")
    code = made(tmp_path / "code", "a.py", "kept.bin", "empty/", "sub/b.py", ignore="*.bin\n")
    (code / "link").symlink_to("sub")
    brought = (".gitignore", "a.py", "empty/", "kept.bin", "link", "sub/", "sub/b.py")
    assert listing.everything(code) == brought


# --- without git ------------------------------------------------------------------------------------------------


@pytest.fixture
def without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with nothing but rsync."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rsync").symlink_to(shutil.which("rsync") or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.usefixtures("without_git")
def test_without_git_rsync_reads_what_both_read_alike(tmp_path: Path) -> None:
    ignore = "# a/b ! \\\n\n*.bin\n/out\nlogs/\r\n/data/raw\n[a-c].py\n"
    paths = ["x.bin", "out/x", "sub/out", "logs/x", "data/raw/x", "src/data/raw/x", "a.py", "z.py", ".git/x", "e/"]
    code = made(tmp_path / "code", *paths, ignore=ignore)
    made(code, os.fsdecode(b"\xff\n"), "__pycache__/x")
    brought = ["src/data/raw/x", "sub/out", "z.py", os.fsdecode(b"\xff\n")]
    assert files(code) == brought
    assert {"e/", "src/data/"} <= {*listing.entries(code)}


@pytest.mark.usefixtures("without_git")
@pytest.mark.parametrize("line", ["!keep.json", "data/raw", "a/b/", "sub/*", "**/x", "a\\ b", "x ", ";y"])
@pytest.mark.parametrize("folder", ["", "sub/"])
def test_without_git_what_rsync_would_misread_is_refused(tmp_path: Path, line: str, folder: str) -> None:
    code = made(tmp_path / "code", "a.py", "sub/")
    (code / folder / ".gitignore").write_text(f"*.bin\n{line}\n")
    with pytest.raises(UsageError, match="by git, which is not installed") as refused:
        listing.entries(code)
    assert refused.value.where == f"{code}/{folder}.gitignore, line 2"
    assert repr(line) in refused.value.what
    assert "install git" in refused.value.fix


@pytest.mark.usefixtures("without_git")
def test_without_rsync_either_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "bin" / "rsync").unlink()
    with pytest.raises(OpsError, match="rsync is not installed"):
        listing.entries(made(tmp_path / "code", "a.py"))
