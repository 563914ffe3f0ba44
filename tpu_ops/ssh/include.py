"""The one line in a person's own ssh config that includes a fleet's; everything else there stays, byte for byte.

Where OpenSSH's reader matters, this follows its readconf.c: an `Include` behind a `Host` or `Match` line holds only
for what that line matches, and its arguments are patterns of file names.
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

#: Names that a warning lists before it only says that there are more, and seconds to wait for another command.
_SHOWN, _PATIENCE = 4, 10.0

#: Bytes that an ssh config may have.
_LARGEST = 1_000_000

_WORD = re.compile(rb"[^ \t\r\n\f=]+")


@dataclass(frozen=True)
class Include:
    """An `Include` line.

    Attributes:
        number: Of the line, from 1.
        files: The files that exist and that it includes, in order.
        conditional: Whether it stands behind a Host or Match line, and so holds only for what that one matches.
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
        content: Of the file.
        home: The person's home directory, for paths that begin with ``~/`` and for relative ones.
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
    """Split the arguments of a line of an ssh config as OpenSSH does; none where it would refuse them."""
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
    """Return the files that an argument of Include means."""
    if word.startswith("~/"):
        word = f"{home}/{word[2:]}"
    elif not word.startswith(("/", "~")):
        word = f"{home}/.ssh/{word}"
    return (Path(path) for path in sorted(glob.glob(word)))  # noqa: PTH207 - a pattern with its directory


def with_line(content: bytes, fragment: Path) -> bytes:
    """Return an ssh config with the line that includes a fleet's on top."""
    first, newline, _ = content.partition(b"\n")
    end = b"\r\n" if newline and first.endswith(b"\r") else b"\n"
    return line_of(fragment) + end + content


def without_line(content: bytes, fragment: Path) -> bytes:
    """Return an ssh config without the lines that `with_line` puts there; a person's other ways to include it stay."""
    ours = line_of(fragment)
    return b"".join(line for line in re.split(rb"(?<=\n)", content) if line.strip() != ours)


def hosts(text: str) -> set[str]:
    """Return the hosts of a fleet's ssh config; none where the text is another's."""
    if not text.startswith(HEADER):
        return set()
    return {name for line in text.splitlines() if line.startswith("Host ") for name in line.split()[1:]}


@dataclass(frozen=True)
class Outcome:
    """What was done to a person's ssh config, or would be.

    Attributes:
        word: ``installed``, ``already there``, ``removed`` or ``not there``.
        warnings: What the person should know besides.
    """

    word: str
    warnings: tuple[str, ...] = ()


def install(file: Path, fragment: Path, *, dry_run: bool = False) -> Outcome:
    """Include a fleet's ssh config from a person's own, unless it is included there already, whatever the host.

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
        f"{file}, line {include.number} includes it too, but after a Host or Match line, where it applies to those only"
        for include in ours
        if include.conditional
    ]
    warnings += _shadows(found, fragment, there.number if there else 0)
    return Outcome("already there" if there else "installed", tuple(warnings))


def installed(fragment: Path) -> bool:
    """Return whether a person's own ssh config includes a fleet's, whatever the host."""
    try:
        home = openssh.home()
        found = includes(_read(home / ".ssh" / "config"), home)
    except (OSError, OpsError):
        return False
    return any(_holds(include, fragment) for include in found if not include.conditional)


def uninstall(file: Path, fragment: Path, *, dry_run: bool = False) -> Outcome:
    """Take out what `install` put into a person's ssh config.

    Raises:
        OpsError: The file cannot be read or written.
    """
    with _held(file):
        content = _read(file)
        after = without_line(content, fragment)
        if after != content and not dry_run:
            files.rewrite(file, after)
    left = [
        f"{file}, line {include.number} still includes it, and was not written by `tpu_ops ssh-config --install`"
        for include in includes(after, openssh.home())
        if _holds(include, fragment)
    ]
    return Outcome("removed" if after != content else "not there", tuple(left))


def unseen(file: Path, workers: Sequence[Worker]) -> str:
    """Return why OpenSSH does not find one of these workers by a person's ssh config; empty where it finds all."""
    try:
        found = includes(_read(file), openssh.home())
    except OSError as exc:
        return f"{file} cannot be read: {exc.strerror or exc}"
    for path in (path for include in found for path in include.files):
        # ssh would wait for a pipe for ever, or read a device without end.
        if path.exists() and not path.is_file() and str(path) != os.devnull:
            return f"ssh cannot be asked whether it finds the workers: {path}, which is included, is not a regular file"
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
            return f"ssh cannot be asked whether it finds {worker.host}: {exc}"
        if f"hostkeyalias {worker.host_key_alias}" not in done.stdout.splitlines():
            said = done.stderr.strip() or "something before it in the file, or another fleet, names the same host"
            return f"ssh does not find {worker.host} as this fleet's: {said}"
    return ""


def _holds(include: Include, fragment: Path) -> bool:
    return any(_same(file, fragment) for file in include.files)


def _same(file: Path, other: Path) -> bool:
    # Unlike Path.resolve it bears a link that leads back to itself.
    return os.path.realpath(file) == os.path.realpath(other)


def _shadows(found: Sequence[Include], fragment: Path, number: int) -> Iterator[str]:
    """Yield one warning per other fleet that has hosts of the same names, given on which line this one is included."""
    own = hosts(_text(fragment))
    for include in found:
        for file in include.files:
            if include.conditional or _same(file, fragment):
                continue
            if shared := own & hosts(_text(file)):
                names = ", ".join(sorted(shared)[:_SHOWN]) + (" and others" if len(shared) > _SHOWN else "")
                first, second = (
                    ("another fleet's", "this one's") if include.number < number else ("this fleet's", "that one's")
                )
                yield f"{file} is included as well: {names} means {first}, and {second} of that name is out of reach"


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
    """Keep other commands of this kind out of a person's ssh config, and say in words what the disk refuses."""
    try:
        root = files.state_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(root / "ssh-config.lock", _PATIENCE):
            yield
    except OSError as exc:  # TimeoutError is one
        raise OpsError(
            f"your ssh config cannot be changed: {exc.strerror or exc}",
            where=str(exc.filename or file),
            fix="put the line there yourself: `tpu_ops ssh-config` shows it",
        ) from exc
