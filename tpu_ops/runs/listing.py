"""Lists the files of a directory that are copied to the workers: all files that git does not ignore.

git itself lists them, so that .gitignore has its usual meaning. On a machine without git, rsync reads .gitignore, and
patterns that rsync interprets differently are rejected.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops.errors import OpsError, UsageError

#: Maximum seconds for one call of git or rsync.
LIMIT = 600.0
READABLE = "make this path readable to you, or name it in .gitignore"
#: A directory of this name is never copied, whatever .gitignore says: Python creates its files again.
_COMPILED = "__pycache__"
#: This option prevents that a repository's settings start git's file system monitor, which would continue to run.
_GIT = ("git", "-c", "core.fsmonitor=false")
#: Environment variables that are removed for git: they would make git use another repository or other paths.
_ELSEWHERE = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_TEMPLATE_DIR",
    "GIT_LITERAL_PATHSPECS",
    "GIT_GLOB_PATHSPECS",
    "GIT_NOGLOB_PATHSPECS",
    "GIT_ICASE_PATHSPECS",
)
#: Parts of git's messages for a directory that is in no work tree.
_IN_NONE = ("not a git repository", "must be run in a work tree")
_FILTERS = ("--exclude=.git", "--exclude=__pycache__/", "--filter=:- .gitignore")
#: How rsync prints a byte of a name that is not printable, and a backslash before `#` and three octal digits.
_ESCAPE = re.compile(rb"\\#([0-3][0-7]{2})")
#: Lines of .gitignore that rsync interprets differently from git: exceptions (`!`), rsync's comments (`;`), escapes,
#: spaces at the end, `**`, and slashes within a pattern, which rsync matches in every directory.
_MISREAD = re.compile(rb"^[!;]|\\|[ \t]$|\*\*|^[^/]+/.*[^/\s]")


def entries(source: Path) -> tuple[str, ...]:
    """Return the paths below a directory that are copied to the workers; directories end with a slash.

    Raises:
        UsageError: The directory cannot be listed.
        OpsError: Neither git nor rsync is installed.
    """
    if not shutil.which("git"):
        return _by_rsync(source)
    with contextlib.ExitStack() as stack:
        return tuple(sorted(_Git(stack).below(str(source))))


def everything(source: Path) -> tuple[str, ...]:
    """Return all paths below a directory, in the form of `entries`.

    Raises:
        UsageError: The directory cannot be listed.
    """
    return tuple(sorted(_all_below(str(source), "")))


def _all_below(place: str, folder: str) -> Iterator[str]:
    for path, one in _scanned(place, folder):
        if one.is_dir(follow_symlinks=False):
            yield f"{path}/"
            yield from _all_below(place, path)
        else:
            yield path


def _scanned(place: str, folder: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return the entries of the directory ``folder`` below ``place``, each with its path relative to ``place``."""
    try:
        with os.scandir(f"{place}/{folder}") as found:
            return [(f"{folder}/{one.name}" if folder else one.name, one) for one in found]
    except OSError as exc:
        where = f"--sync {place}/{folder}"
        raise UsageError(f"cannot be read: {exc.strerror}", where=where, fix=READABLE) from exc


class _Git:
    """List directories with git.

    Args:
        stack: Removes temporary directories.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._empty = ""
        self._environment = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE}
        # LC_ALL=C keeps git from translating its messages, since this code compares them.
        self._environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}

    def below(self, place: str, *, alone: bool = False) -> Iterator[str]:
        """Yield the paths below a directory that are copied to the workers.

        Args:
            place: The directory.
            alone: Whether to list the directory as if it were in no repository.
        """
        git, names = self._listed(place, alone=alone)
        files, nested = _there(place, names)
        if folders := {path for path in nested if f"{path}/" not in names}:
            # git also lists a file that was replaced by a directory. Such a directory is no nested repository or
            # submodule.
            nested -= folders - self._submodules(git, place)
        yield from files
        known = {parent for path in files | nested for parent in _parents(path)}
        level = [""]
        while level:
            level, others = _step(place, level, files | nested, known)
            ignored = self._ignored(git, place, others)
            for path in others:
                if path in ignored:
                    continue
                if stat.S_ISDIR(_mode(f"{place}/{path}")):
                    level.append(path)
                else:
                    # The path is a pipe, socket or device, which `sync.read` rejects.
                    yield path
            yield from (f"{path}/" for path in level)
        for path in nested:
            yield f"{path}/"
            within = f"{place}/{path}"
            # A submodule that was never fetched has no repository of its own, so it is listed as if it were in no
            # repository.
            for entry in self.below(within, alone=not os.path.lexists(f"{within}/.git")):
                yield f"{path}/{entry}"

    def _listed(self, place: str, *, alone: bool) -> tuple[list[str], set[str]]:
        """Return git's command line for a directory, and the names that git lists in it."""
        listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if not alone:
            git = [*_GIT, "-C", place]
            done = self._run([*git, *listing])
            if not done.returncode:
                names = _names(done.stdout)
                # If the repository ignores the whole directory, do not return an empty list: the user has named this
                # directory.
                if names or not self._ignored(git, place, ["."]):
                    return git, names
            elif not any(words in done.stderr for words in _IN_NONE):
                raise _refused(place, done.stderr)
        if not self._empty:
            self._empty = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._must(self._empty, [*_GIT, "init", "--quiet", "--template=", self._empty])
        git = [*_GIT, "-C", place, f"--git-dir={self._empty}/.git", f"--work-tree={place}"]
        return git, _names(self._must(place, [*git, *listing]))

    def _submodules(self, git: Sequence[str], place: str) -> set[str]:
        found = (entry.partition("\t") for entry in _names(self._must(place, [*git, "ls-files", "-z", "--stage"])))
        return {path for facts, _, path in found if facts.startswith("160000 ")}

    def _ignored(self, git: Sequence[str], place: str, paths: Sequence[str]) -> set[str]:
        """Return which of these paths git ignores."""
        if not paths:
            return set()
        # `./` keeps git from reading a leading `:` as pathspec syntax. `-v` prints the patterns: with `-v`, older
        # versions of git also list paths that an exception includes again.
        done = self._run([*git, "check-ignore", "-z", "-v", "--stdin"], "\0".join(f"./{path}" for path in paths))
        if done.returncode not in (0, 1):
            raise _refused(place, done.stderr)
        words = done.stdout.split("\0")
        return {path[2:] for pattern, path in zip(words[2::4], words[3::4], strict=True) if pattern[:1] != "!"}

    def _must(self, place: str, command: Sequence[str]) -> str:
        done = self._run(command)
        if done.returncode:
            raise _refused(place, done.stderr)
        return done.stdout

    def _run(self, command: Sequence[str], given: str = "") -> _Done:
        return _run(command, os.fsencode(given), self._environment)


def _names(listed: str) -> set[str]:
    return {name for name in listed.split("\0") if name}


def _there(place: str, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Split the names that git lists into existing files and existing directories.

    git also lists entries that were deleted, or replaced by a link or a directory.
    """
    files: set[str] = set()
    nested: set[str] = set()
    folders = {"": True}

    def is_brought(folder: str) -> bool:
        if folder not in folders:
            parent, _, name = folder.rpartition("/")
            folders[folder] = name != _COMPILED and is_brought(parent) and stat.S_ISDIR(_mode(f"{place}/{folder}"))
        return folders[folder]

    for name in names:
        path = name.rstrip("/")
        if not is_brought(path.rpartition("/")[0]):
            continue
        mode = _mode(f"{place}/{path}")
        if not stat.S_ISDIR(mode):
            files.update([path] if mode else [])
        elif is_brought(path):
            nested.add(path)
    return files, nested


def _step(
    place: str, level: Sequence[str], listed: Collection[str], known: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the subdirectories that are known to be copied, and the paths about which git has to be asked."""
    below: list[str] = []
    others: list[str] = []
    for folder in level:
        for path, one in _scanned(place, folder):
            is_folder = one.is_dir(follow_symlinks=False)
            if path in listed or one.name == ".git" or (is_folder and one.name == _COMPILED):
                continue
            if is_folder:
                (below if path in known else others).append(path)
            elif not (one.is_file(follow_symlinks=False) or one.is_symlink()):
                others.append(path)
    return below, others


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _mode(path: str) -> int:
    """Return the mode of a path; 0 if it does not exist."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as exc:
        raise UsageError(f"cannot be read: {exc.strerror}", where=f"--sync {path}", fix=READABLE) from exc


class _Done(NamedTuple):
    """The result of a program: stdout decoded as file names, stderr as text."""

    returncode: int
    stdout: str
    stderr: str


def _run(command: Sequence[str], given: bytes = b"", environment: Mapping[str, str] | None = None) -> _Done:
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=LIMIT, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the directory could not be listed within {LIMIT:.0f} s",
            where="--sync",
            fix="name a smaller directory, on a local disk",
        ) from None
    return _Done(done.returncode, os.fsdecode(done.stdout), done.stderr.decode(errors="replace"))


def _refused(place: str, said: str) -> UsageError:
    """Return the error for a failure of git."""
    where = f"--sync {place}"
    if "safe.directory" in said:
        allow = next((line.strip() for line in said.splitlines() if "git config" in line), "")
        what = "git does not read a repository that belongs to somebody else"
        return UsageError(
            what, where=where, fix=f"if you trust the owner: {allow}" if allow else "run this as its owner"
        )
    return UsageError(
        f"git cannot list this directory: {said.strip()}", where=where, fix="see what `git status` says in it"
    )


# --- without git ------------------------------------------------------------------------------------------------


def _by_rsync(source: Path) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as empty:
        command = ["rsync", "-a", "--dry-run", "--out-format=%n", *_FILTERS, f"{source}/", f"{empty}/"]
        try:
            done = _run(command)
        except FileNotFoundError:
            raise OpsError("rsync is not installed", where="this machine", fix="apt-get install rsync git") from None
    if done.returncode:
        raise UsageError(f"cannot be read: {done.stderr.strip()}", where=f"--sync {source}", fix=READABLE)
    found = _printed(os.fsencode(done.stdout))
    for folder in ("", *(entry for entry in found if entry.endswith("/"))):
        _must_be_read_alike(source / folder / ".gitignore")
    return found


def _printed(output: bytes) -> tuple[str, ...]:
    """Return the paths in rsync's output, in which unprintable bytes are octal escapes."""
    lines = [line for line in output.split(b"\n") if line and line != b"./"]
    return tuple(sorted(os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), line)) for line in lines))


def _must_be_read_alike(file: Path) -> None:
    """Reject a .gitignore that rsync would interpret differently from git."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line.startswith(b"#") and _MISREAD.search(line):
                text = line.decode(errors="replace")
                raise UsageError(
                    f"{text!r} can only be read correctly by git, which is not installed on this machine",
                    where=f"{file}, line {number}",
                    fix="apt-get install git",
                )
