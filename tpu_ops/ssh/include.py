"""Adds and removes the line in the user's ssh config that includes a fleet's ssh config; changes nothing else.

The rules follow OpenSSH's readconf.c: an `Include` after a `Host` or `Match` line applies only to the hosts that this
line matches, and its arguments are patterns of file names.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpu_ops import files
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import OpsError
from tpu_ops.ssh import openssh
from tpu_ops.ssh.client_config import HEADER

#: Maximum number of host names in a warning, and seconds to wait for another command that changes the file.
_SHOWN, _PATIENCE = 4, 10.0

#: Maximum size of an ssh config that is read, in bytes.
_LARGEST = 1_000_000

_WORD = re.compile(rb"[^ \t\r\n\f=]+")


@dataclass(frozen=True)
class Include:
    """An `Include` line of an ssh config.

    Attributes:
        number: Line number, from 1.
        files: The existing files that the line includes, in order.
        conditional: Whether a Host or Match line precedes it, so that it applies only to the hosts that match.
    """

    number: int
    files: tuple[Path, ...]
    conditional: bool


def line_of(fragment: Path) -> bytes:
    """Return the line, without its end, that includes a fleet's ssh config."""
    return os.fsencode(openssh.include(fragment))


def includes(content: bytes, home: Path) -> list[Include]:
    """Return the Include lines of an ssh config, in order.

    Args:
        content: The file's content.
        home: The user's home directory, for paths that begin with ``~/`` and for relative paths.
    """
    found, conditional = [], False
    for number, line in enumerate(content.split(b"\n"), 1):
        keyword = _WORD.search(line)
        if keyword is None:
            continue
        match keyword.group().lower():
            case b"host" | b"match":
                conditional = True
            case b"include":
                files = tuple(file for word in words(line[keyword.end() :]) for file in _files(word, home))
                found.append(Include(number, files, conditional))
    return found


def words(text: bytes) -> list[str]:
    """Split the arguments of a line of an ssh config as OpenSSH does; empty if OpenSSH would reject the line."""
    found: list[str] = []
    word, quote, rest = "", "", iter(os.fsdecode(text.lstrip(b" \t=").rstrip()))
    within = False
    for char in rest:
        if char == "\\":
            after = next(rest, "")
            word += after if after in ("'", '"', "\\") or (after == " " and not quote) else f"\\{after}"
            within = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "'\"":
            quote, within = char, True
        elif char in " \t":
            found += [word] if within else []
            word, within = "", False
        elif char == "#" and not within:
            return found
        else:
            word, within = word + char, True
    if quote:
        return []
    return [*found, word] if within else found


def _files(word: str, home: Path) -> Iterator[Path]:
    """Return the files that match an argument of Include."""
    if word.startswith("~/"):
        word = f"{home}/{word[2:]}"
    elif not word.startswith(("/", "~")):
        word = f"{home}/.ssh/{word}"
    return (Path(path) for path in sorted(glob.glob(word)))  # noqa: PTH207 - a pattern with its directory


def with_line(content: bytes, fragment: Path) -> bytes:
    """Return an ssh config with the Include line of a fleet as its first line."""
    first, newline, _ = content.partition(b"\n")
    end = b"\r\n" if newline and first.endswith(b"\r") else b"\n"
    return line_of(fragment) + end + content


def without_line(content: bytes, fragment: Path) -> bytes:
    """Return an ssh config without the lines that `with_line` adds; lines that the user wrote are kept."""
    ours = line_of(fragment)
    return b"".join(line for line in re.split(rb"(?<=\n)", content) if line.strip() != ours)


def hosts(text: str) -> set[str]:
    """Return the hosts in the text of a fleet's ssh config; empty if tpu_ops did not write the text."""
    if not text.startswith(HEADER):
        return set()
    return {name for line in text.splitlines() if line.startswith("Host ") for name in line.split()[1:]}


@dataclass(frozen=True)
class Outcome:
    """The change that a command made, or would make, to the user's ssh config.

    Attributes:
        word: ``installed``, ``already there``, ``removed`` or ``not there``.
        warnings: Warnings for the user.
    """

    word: str
    warnings: tuple[str, ...] = ()


def install(file: Path, fragment: Path, *, dry_run: bool = False) -> Outcome:
    """Include a fleet's ssh config in the user's ssh config, unless it already is included for all hosts.

    Raises:
        OpsError: The file cannot be read or written.
    """
    with _held(file):
        content = _read(file)
        found = includes(content, openssh.home())
        ours = [include for include in found if _holds(include, fragment)]
        there = next((include for include in ours if not include.conditional), None)
        if there is None and not dry_run:
            files.rewrite(file, with_line(content, fragment))
    warnings = [
        f"{file}, line {include.number} includes this fleet too, but after a Host or Match line, so only for the "
        "hosts that match"
        for include in ours
        if include.conditional
    ]
    warnings += _shadows(found, fragment, there.number if there else 0)
    return Outcome("already there" if there else "installed", tuple(warnings))


def installed(fragment: Path) -> bool:
    """Return whether the user's ssh config includes a fleet's ssh config for all hosts."""
    try:
        home = openssh.home()
        found = includes(_read(home / ".ssh" / "config"), home)
    except (OSError, OpsError):
        return False
    return any(_holds(include, fragment) for include in found if not include.conditional)


def uninstall(file: Path, fragment: Path, *, dry_run: bool = False) -> Outcome:
    """Remove the line that `install` added to the user's ssh config.

    Raises:
        OpsError: The file cannot be read or written.
    """
    with _held(file):
        content = _read(file)
        after = without_line(content, fragment)
        if after != content and not dry_run:
            files.rewrite(file, after)
    left = [
        f"{file}, line {include.number} still includes this fleet, and was not written by `tpu_ops ssh-config "
        "--install`"
        for include in includes(after, openssh.home())
        if _holds(include, fragment)
    ]
    return Outcome("removed" if after != content else "not there", tuple(left))


def unseen(file: Path, workers: Sequence[Worker]) -> str:
    """Return why OpenSSH, with the user's ssh config, does not find all these workers; empty if it does."""
    try:
        found = includes(_read(file), openssh.home())
    except OSError as exc:
        return f"{file} cannot be read: {exc.strerror or exc}"
    for path in (path for include in found for path in include.files):
        # Do not call ssh: it would wait forever for a pipe, or read a device without end.
        if path.exists() and not path.is_file() and str(path) != os.devnull:
            return f"cannot test whether ssh finds the workers: {path}, which is included, is not a regular file"
    for worker in workers:
        try:
            done = subprocess.run(
                openssh.effective(file, worker.host),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"cannot test whether ssh finds {worker.host}: {exc}"
        if f"hostkeyalias {worker.host_key_alias}" not in done.stdout.splitlines():
            said = done.stderr.strip() or "another part of the file, or another fleet, names the same host"
            return f"ssh does not find {worker.host} as this fleet's: {said}"
    return ""


def _holds(include: Include, fragment: Path) -> bool:
    return any(_same(file, fragment) for file in include.files)


def _same(file: Path, other: Path) -> bool:
    # Unlike Path.resolve, realpath accepts a symbolic link that leads back to itself.
    return os.path.realpath(file) == os.path.realpath(other)


def _shadows(found: Sequence[Include], fragment: Path, number: int) -> Iterator[str]:
    """Yield one warning for each other included fleet that has hosts with the same names as this fleet.

    ``number`` is the number of the line that includes this fleet.
    """
    own = hosts(_text(fragment))
    for include in found:
        for file in include.files:
            if include.conditional or _same(file, fragment):
                continue
            if shared := own & hosts(_text(file)):
                names = ", ".join(sorted(shared)[:_SHOWN]) + (" and others" if len(shared) > _SHOWN else "")
                first, second = (
                    ("another fleet's", "this fleet's") if include.number < number else ("this fleet's", "the other's")
                )
                yield (
                    f"{file} is included as well: {names} means {first} host, and {second} host of the same name "
                    "cannot be reached"
                )


def _text(file: Path) -> str:
    try:
        return files.read_regular(file, _LARGEST).decode(errors="replace")
    except OSError:
        return ""


def _read(file: Path) -> bytes:
    try:
        return files.read_regular(file, _LARGEST)
    except FileNotFoundError:
        return b""


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """Lock the user's ssh config against other tpu_ops commands; convert OSError to OpsError."""
    try:
        root = files.state_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(root / "ssh-config.lock", _PATIENCE):
            yield
    except OSError as exc:  # TimeoutError is a subclass of OSError
        raise OpsError(
            f"your ssh config cannot be changed: {exc.strerror or exc}",
            where=str(exc.filename or file),
            fix="add the Include line to the file yourself: `tpu_ops ssh-config` shows the line",
        ) from exc
