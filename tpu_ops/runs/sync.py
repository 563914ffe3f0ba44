"""Copies a directory to all workers: the files that git does not ignore, verified by content on each worker.

A sync replaces or removes only files that an earlier sync put on a worker. Checkpoints and logs beside the code are not
touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tpu_ops import texts
from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.protocol import marks as marks_of
from tpu_ops.runs import listing, rsync, synced
from tpu_ops.ssh import openssh, processes
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import SSH_FAILED, Result

if TYPE_CHECKING:
    from tpu_ops.runs.turns import Turn

#: Directory on every worker, below the user's home.
PARENT = "tpu_ops"
#: Seconds for one worker to receive the tree, in addition to the time for its bytes over a slow uplink. If no data
#: arrives, rsync itself ends the transfer much sooner.
LIMIT = 600.0
#: Seconds for one worker to read its files.
_STEP_LIMIT = 120.0
#: Bytes per second of a slow uplink, which all workers share. Then the maximum seconds that a slow uplink adds to two
#: timeouts: for sending the list of files (1 MB for 10,000 files, for each worker), and for sending the files.
_UPLINK, _TELLING, _BRINGING = 125_000, 600.0, 6 * 3600.0
#: Total size in bytes from which a message announces the copy, since it can take some time.
_MUCH = 50 * 10**6
#: Number of rsync processes at once: each costs the controller processor time for hashing and encryption.
WIDTH = 8
#: Characters that the name of a directory on workers does not have.
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")
#: Command that executes the first line of standard input as a program. The program reads the further lines.
RUN = ("/usr/bin/python3", "-IS", "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))")
_LISTS = ("differs", "taken", "stale")
#: Beginning of the error for a worker whose connection is too slow for the tree.
_SLOW = "the tree did not arrive"
#: Error messages for a full disk and for a used-up quota, and the command that shows the free space for the code.
_FULL, _QUOTA = b"No space left on device", b"Disk quota exceeded"
_SPACE = f"LC_ALL=C df -Pk {PARENT} 2>/dev/null || LC_ALL=C df -Pk ."
#: Maximum number of files that an error names. Further files are only counted.
_NAMED = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tree:
    """A directory that is copied to the workers.

    Attributes:
        source: The directory on this machine.
        name: Name of the directory below ~/tpu_ops on the workers.
        entries: Paths below the directory; directories end with a slash.
        marks: Path of each entry, without the slash -> its `marks.mark`.
        digest: Digest of the names, executable bits and contents of all files; 12 hexadecimal digits.
    """

    source: Path
    name: str
    entries: tuple[str, ...]
    marks: Mapping[bytes, str] = field(repr=False)
    digest: str

    @property
    def cwd(self) -> str:
        """Path of the tree's directory on the workers, relative to the user's home."""
        return f"{PARENT}/{self.name}"

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the tree that are not directories."""
        return tuple(entry for entry in self.entries if not entry.endswith("/"))


def transfer_command(tree: Tree, host: str, ssh_config: Path) -> list[str]:
    """Return the command that copies entries of a tree to one worker; it reads their list from standard input."""
    shell = openssh.rsync_shell(ssh_config)
    # `--ignore-times`, since all listed files differ in content, even if their sizes and times are equal.
    options = ["-a", "--no-owner", "--no-group", "--ignore-times", "--from0", "--files-from=-", "--timeout=60"]
    return ["rsync", *options, f"--rsh={shell}", f"{tree.source}/", f"{host}:{tree.cwd}/"]


def transfer_list(entries: Iterable[str]) -> bytes:
    """Return the list for `transfer_command`. The prefix `./` keeps rsync from reading a leading `#` as a comment."""
    return b"\0".join(b"./" + os.fsencode(entry) for entry in entries)


def read(source: Path) -> Tree:
    """Return a directory as a tree: list its files and compute their digest.

    Raises:
        UsageError: The path is not a directory, or a file in it or its name cannot be used.
    """
    source = source.expanduser().resolve()
    where = f"--sync {source}"
    if not source.is_dir():
        what = "this is a file" if source.exists() else "no such directory"
        raise UsageError(what, where=where, fix="name the directory that holds your code")
    return _tree(source, listing.entries(source))


def _name(source: Path) -> str:
    """Return the name of a directory's copies: other characters than those of plain names become dashes.

    Raises:
        UsageError: The directory's name has no letter or digit.
    """
    name = _UNUSUAL.sub("-", source.name).lstrip(".-")
    if not name:
        what = "the directory's name becomes a directory on the workers, and has no letter or digit"
        raise UsageError(what, where=f"--sync {source}", fix="give it another name")
    return name


def read_copy(source: Path) -> Tree:
    """Return the copy of a tree as a tree that contains every file in it, also files that git ignores.

    Raises:
        UsageError: The copy does not exist or cannot be read.
    """
    if not source.is_dir():
        raise UsageError("no such directory", where=str(source), fix="start a new run with another --name")
    return _tree(source, listing.everything(source))


def _tree(source: Path, entries: tuple[str, ...]) -> Tree:
    where = f"--sync {source}"
    if not shutil.which("rsync"):
        raise OpsError("rsync is not installed", where="this machine", fix="apt-get install rsync")
    if not entries:
        raise UsageError("there is nothing to copy to the workers", where=where, fix="check its .gitignore")
    marks = {os.fsencode(entry.rstrip("/")): _mark(source, entry.rstrip("/")) for entry in entries}
    return Tree(source, _name(source), entries, marks, marks_of.digest(marks))


def _mark(source: Path, entry: str) -> str:
    path = source / entry
    try:
        found = marks_of.mark(os.fsencode(path))
        if found == marks_of.OTHER:
            raise UsageError(
                f"{str(path)!r} is a {_kind(path.lstat().st_mode)}: only files, links and directories are copied to "
                "the workers",
                where=f"--sync {source}",
                fix="remove it, or name it in .gitignore",
            )
    except OSError as exc:
        raise UsageError(f"cannot be read: {exc.strerror}", where=f"--sync {path}", fix=listing.READABLE) from exc
    if not found:
        what, fix = f"{str(path)!r} disappeared while the directory was being read", "run the same command again"
        raise UsageError(what, where=f"--sync {source}", fix=fix)
    return found


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device file"


@dataclass(frozen=True)
class Seen:
    """The state of a tree on one worker.

    Attributes:
        differs: Entries that are missing or different on the worker.
        taken: Different entries that exist on the worker and that no sync has put there.
        stale: Files that an earlier sync put on the worker and that are no longer in the tree.
        listed: Whether the worker's list of synced files is equal to the tree's list.
    """

    differs: tuple[str, ...]
    taken: tuple[str, ...]
    stale: tuple[str, ...]
    listed: bool


async def look(fanout: Fanout, hosts: Sequence[str], tree: Tree) -> dict[str, Seen]:
    """Compare a tree by content with its copies on workers, without changing the copies.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A worker has, in the place of an entry, a file that no sync has put there; or the check failed.
    """
    seen = {host: _seen(answer) for host, answer in (await _ask(fanout, hosts, "look", tree)).items()}
    if taken := {host: one.taken for host, one in seen.items() if one.taken}:
        named = sorted({entry for entries in taken.values() for entry in entries})
        raise HostError(
            f"{texts.some(named, _NAMED)} in ~/{tree.cwd} differs from yours, and no sync has put it there: it will "
            "not be overwritten",
            where=texts.folded(list(taken)),
            fix=f"move the file away on the workers, or name it in {tree.name}/.gitignore",
        )
    return seen


async def push(
    fanout: Fanout, hosts: Sequence[str], tree: Tree, turn: Turn, moved: rsync.Moved | None = None
) -> dict[str, Seen]:
    """Copy a tree to workers; return the state of the tree on each worker before the copy.

    Args:
        fanout: Reaches the workers.
        hosts: The workers.
        tree: The tree.
        turn: The lock that excludes other syncs.
        moved: Called with the progress of each worker that is copied to.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A run uses a file that differs, a worker could not store the tree, or its copy differs after the
            transfer.
    """
    seen = await look(fanout, hosts, tree)
    if any(one.differs or one.stale or not one.listed for one in seen.values()):
        async with turn.claimed():
            await _bring(fanout, hosts, tree, seen, turn.held, moved=moved)
    return seen


async def _bring(
    fanout: Fanout,
    hosts: Sequence[str],
    tree: Tree,
    seen: Mapping[str, Seen],
    held: Sequence[int],
    *,
    moved: rsync.Moved | None,
) -> None:
    if behind := [host for host in hosts if seen[host].stale or not seen[host].listed]:
        await _ask(fanout, behind, "prepare", tree)
    slots, at_once = asyncio.Semaphore(WIDTH), min(WIDTH, len(hosts))
    changing = [host for host in hosts if seen[host].differs]
    sizes = {host: _bytes(tree, seen[host].differs) for host in changing}

    def told(host: str, size: int, *, done: bool = False) -> None:
        if moved:
            moved(host, size, sizes[host], done)

    async def one(host: str) -> Result:
        async with slots:
            limit = LIMIT + min(sizes[host] * at_once / _UPLINK, _BRINGING)
            says = functools.partial(told, host) if moved else None
            result = await _transfer(fanout, host, tree, seen[host].differs, limit, held=held, told=says)
        told(host, sizes[host], done=True)
        return result

    if changing:
        for host in changing:
            told(host, 0)
        _say_much(tree, {host: seen[host].differs for host in changing})
        results = await asyncio.gather(*(one(host) for host in changing))
        await _require_space(fanout, tree, results, sizes)
        require({result.host: result for result in results})
        after = await _ask(fanout, changing, "look", tree)
        wrong = {host: _seen(answer).differs for host, answer in after.items() if answer["differs"]}
        if wrong:
            named = sorted({entry for entries in wrong.values() for entry in entries})
            raise HostError(
                f"{texts.some(named, _NAMED)} in ~/{tree.cwd} differs from what was read here: the file has changed",
                where=texts.folded(list(wrong)),
                fix="run the same command again once nothing writes to the directory, on this machine or there",
            )


def _seen(answer: Mapping[str, Any]) -> Seen:
    lists = {key: tuple(os.fsdecode(entry.encode("latin-1")) for entry in answer[key]) for key in _LISTS}
    return Seen(**lists, listed=answer["listed"])


async def _ask(fanout: Fanout, hosts: Sequence[str], action: str, tree: Tree) -> dict[str, Any]:
    """Execute an action of the module `synced` on workers; return their answers."""
    marks = {entry.decode("latin-1"): mark for entry, mark in tree.marks.items()}
    request = request_of({"action": action, "name": tree.name, "marks": marks})
    limit = _STEP_LIMIT + min(len(hosts) * len(request) / _UPLINK, _TELLING)
    results = await fanout.run(hosts, RUN, limit=limit, stdin=request)
    await _require_space(fanout, tree, results.values())
    require(results)
    answers = {host: answer(result.stdout) for host, result in results.items()}
    if mute := [host for host, found in answers.items() if found is None]:
        raise unanswered(mute)
    return answers


def request_of(values: Mapping[str, Any], rule: ModuleType = marks_of, program: ModuleType = synced) -> bytes:
    """Return the standard input for `RUN` on a worker: a program and its request.

    Args:
        values: The request.
        rule: The only module of this package that the program imports.
        program: The program.
    """
    source, name = inspect.getsource(rule), rule.__name__
    text = (
        f"import sys, types\nrule = sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        f"exec({source!r}, rule.__dict__)\nexec({inspect.getsource(program)!r})\n"
    )
    return f"{json.dumps(text)}\n{json.dumps(values)}\n".encode()


def unanswered(hosts: Sequence[str]) -> HostError:
    """Return the error for workers whose program printed no answer."""
    return HostError(
        "no answer came from the program that checks the files on these workers",
        where=texts.folded(hosts),
        fix="have the login shell's start-up files print nothing, and run the same command again",
    )


def answer(said: bytes) -> Any:
    """Return the answer in a program's output; a shell's start-up files can print lines before and after it."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None


def _bytes(tree: Tree, entries: Iterable[str]) -> int:
    """Return the total size of some entries in bytes; entries that have disappeared count as 0."""
    total = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            total += (tree.source / entry).lstat().st_size
    return total


def _say_much(tree: Tree, differs: Mapping[str, Sequence[str]]) -> None:
    """If a copy is large, log a message with its size."""
    sizes = {entries: _bytes(tree, entries) for entries in set(map(tuple, differs.values()))}
    if (total := sum(sizes[tuple(entries)] for entries in differs.values())) >= _MUCH:
        each = max(sizes.values()) / 10**6
        _log.info(
            "copying up to %.0f MB to each of %s, %.0f MB in all; data belongs in .gitignore and in a bucket",
            each,
            texts.count(len(differs), "worker"),
            total / 10**6,
        )


async def _transfer(
    fanout: Fanout,
    host: str,
    tree: Tree,
    entries: Iterable[str],
    limit: float,
    *,
    held: Sequence[int],
    told: Callable[[int], None] | None = None,
) -> Result:
    program, *words = transfer_command(tree, host, fanout.ssh_config)
    command = [program, *(rsync.options() if told else ()), *words]
    output = asyncio.subprocess.PIPE if told else asyncio.subprocess.DEVNULL
    async with processes.started(command, stdout=output, held=held) as process:
        try:
            async with asyncio.timeout(limit):
                entered = transfer_list(entries)
                talk = rsync.communicate(process, entered, told) if told else process.communicate(entered)
                _, said = await talk
        except TimeoutError:
            return Result(host, None, problem=f"{_SLOW} within {limit:.0f} s")
    text = said.decode(errors="replace")
    if process.returncode == SSH_FAILED:
        return Result(host, None, problem=openssh.reason(text, process.returncode), reached=False)
    problem = openssh.reason(text, process.returncode) if process.returncode else ""
    return Result(host, process.returncode, stderr=said, problem=problem)


async def _require_space(
    fanout: Fanout, tree: Tree, results: Iterable[Result], needed: Mapping[str, int] | None = None
) -> None:
    """Raise an error if a worker's disk is full.

    Args:
        fanout: Reaches the workers.
        tree: The tree that is copied.
        results: The results of commands on the workers.
        needed: Bytes that each worker was to receive.

    Raises:
        HostError: A disk is full; the message names the file system and its free space.
    """
    failed = [result for result in results if result.reached and not result.ok]
    refused = [result for result in failed if _FULL in result.stderr or _QUOTA in result.stderr]
    full = [result.host for result in refused]
    if not full:
        return
    looks = await fanout.run(full, ["/bin/sh", "-c", _SPACE], limit=_STEP_LIMIT)
    # The fields of df's last line: device, sizes in KiB, use in per cent, mount point.
    found = {host: look.stdout.decode(errors="replace").split()[-6:] for host, look in looks.items() if look.ok}
    free = [
        f"{host} has {int(words[3]) * 1024 / 10**6:.1f} MB free on {words[5]}"
        for host, words in found.items()
        if len(words) == len(("device", "size", "used", "free", "use", "mount")) and words[3].isdecimal()
    ]
    most = max((needed or {}).get(host, 0) for host in full)
    much = f"; up to {most / 10**6:.1f} MB were to be copied to each worker" if most else ""
    by_quota = all(_FULL not in result.stderr for result in refused)
    why = "your quota is used up on the disk" if by_quota else "the disk is full"
    what = f"{why} that ~/{tree.cwd} is on: {texts.some(free, _NAMED) or 'its free space is unknown'}{much}"
    asked = f"df -h ~/{PARENT}; df -i ~/{PARENT}; du -sh ~/* ~/{PARENT}/*"
    look = f"`tpu_ops run {texts.target(full)} --shell -- '{asked}'` shows what uses the space"
    fix = f"{look}; remove what is not needed, or name data in {tree.name}/.gitignore, and run this again"
    raise HostError(what, where=texts.folded(full), fix=fix)


def require(results: Mapping[str, Result]) -> None:
    """If a command failed on workers, raise an error that names these workers and the first failure."""
    bad = [result for result in results.values() if not result.ok]
    if not bad:
        return
    first, where = bad[0], texts.folded([result.host for result in bad])
    said = first.stderr.decode(errors="replace")
    what = first.problem or openssh.reason(said, first.code)
    error = UnreachableError if not first.reached else HostError
    if "is your shell clean" in said:
        raise HostError(
            "the code could not be copied to the workers: your login shell there prints text before any command",
            where=where,
            fix="have the shell's start-up files (.zshenv, .bashrc) print only in interactive shells",
        )
    fix = "log in (`tpu_ops ssh`) and find the cause: other users' files, or a full disk (df)" if first.reached else ""
    if first.problem.startswith(_SLOW):
        fix = "name data in .gitignore, and run the same command again: files that have arrived are not sent again"
    raise error(f"the code could not be copied to the workers: {what}", where=where, fix=fix)
