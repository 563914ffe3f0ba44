"""Copy a directory to all workers: the files that git does not ignore, verified by content on each worker.

A sync replaces or removes only files that an earlier sync put on a worker: checkpoints and logs beside the code stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_ops import texts
from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.protocol import marks as marks_of
from tpu_ops.runs import listing, synced
from tpu_ops.ssh import openssh, processes
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import SSH_FAILED, Result

if TYPE_CHECKING:
    from tpu_ops.runs.turns import Turn

#: Directory on every worker, below the user's home.
PARENT = "tpu_ops"
#: Seconds for one worker to receive the tree, in addition to the time for its bytes over a slow uplink. rsync itself
#: ends a transfer that stands still much sooner.
LIMIT = 600.0
#: Seconds for one worker to read its files.
_STEP_LIMIT = 120.0
#: Bytes per second of a slow uplink, which all workers share. Then the maximum seconds that it may add to sending the
#: list of files (1 MB for 10,000 files, for each worker), and to sending the files.
_UPLINK, _TELLING, _BRINGING = 125_000, 600.0, 6 * 3600.0
#: Total size in bytes from which a message announces the copy, since it may take a while.
_MUCH = 50 * 10**6
#: Number of rsync processes at once: each costs the controller processor time for hashing and encryption.
WIDTH = 8
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: Executes the first line of standard input as a program, which reads the rest.
RUN = ("/usr/bin/python3", "-IS", "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))")
_LISTS = ("differs", "taken", "stale")
#: Beginning of the problem of a worker whose connection is too slow for the tree.
_SLOW = "the tree did not arrive"
#: Error messages for a full disk, and the command that shows the free space where code is copied to.
_FULL, _QUOTA = b"No space left on device", b"Disk quota exceeded"
_SPACE = f"LC_ALL=C df -Pk {PARENT} 2>/dev/null || LC_ALL=C df -Pk ."
#: Number of files that an error names; the rest are counted.
_NAMED = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tree:
    """A directory that is copied to the workers.

    Attributes:
        source: The directory on this machine.
        name: Its name below ~/tpu_ops on the workers.
        entries: Paths below it, directories with a slash at the end.
        marks: The `marks.mark` of each entry, without the slash.
        digest: Digest of the names, executable bits and contents of all files; 12 hexadecimal digits.
    """

    source: Path
    name: str
    entries: tuple[str, ...]
    marks: Mapping[bytes, str] = field(repr=False)
    digest: str

    @property
    def cwd(self) -> str:
        """Its directory on the workers, below the user's home."""
        return f"{PARENT}/{self.name}"

    @property
    def files(self) -> tuple[str, ...]:
        """The entries without directories."""
        return tuple(entry for entry in self.entries if not entry.endswith("/"))


def transfer_command(tree: Tree, host: str, ssh_config: Path) -> list[str]:
    """Return the command that copies entries to one worker; it reads their list from standard input."""
    shell = openssh.rsync_shell(ssh_config)
    # All listed files differ, even if their size and time are equal.
    options = ["-a", "--no-owner", "--no-group", "--ignore-times", "--from0", "--files-from=-", "--timeout=60"]
    return ["rsync", *options, f"--rsh={shell}", f"{tree.source}/", f"{host}:{tree.cwd}/"]


def transfer_list(entries: Iterable[str]) -> bytes:
    """Return the list for `transfer_command`; `./` keeps rsync from reading a leading `#` as a comment."""
    return b"\0".join(b"./" + os.fsencode(entry) for entry in entries)


def read(source: Path) -> Tree:
    """List and digest a directory.

    Raises:
        UsageError: The path is not a directory, or its name or that of a file cannot be used.
    """
    source = source.expanduser().resolve()
    where = f"--sync {source}"
    if not source.is_dir():
        what = "this is a file" if source.exists() else "no such directory"
        raise UsageError(what, where=where, fix="name the directory that holds your code")
    if not _NAME.fullmatch(source.name):
        raise UsageError(
            "the directory's name becomes a directory on the workers and must be plain",
            where=where,
            fix="use letters, digits, dots, dashes and underscores",
        )
    return _tree(source, listing.entries(source))


def read_copy(source: Path) -> Tree:
    """Digest a copy of a tree: every file in it, also those that git ignores.

    Raises:
        UsageError: The copy does not exist or cannot be read.
    """
    if not source.is_dir():
        raise UsageError("no such directory", where=str(source), fix="start a new run, under another --name")
    return _tree(source, listing.everything(source))


def _tree(source: Path, entries: tuple[str, ...]) -> Tree:
    where = f"--sync {source}"
    if not shutil.which("rsync"):
        raise OpsError("rsync is not installed", where="this machine", fix="apt-get install rsync")
    if not entries:
        raise UsageError("there is nothing to copy to the workers", where=where, fix="check its .gitignore")
    marks = {os.fsencode(entry.rstrip("/")): _mark(source, entry.rstrip("/")) for entry in entries}
    return Tree(source, source.name, entries, marks, marks_of.digest(marks))


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
        what, fix = f"{str(path)!r} disappeared while the tree was being read", "run the same command again"
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
        differs: Entries that are missing or different there.
        taken: Different entries that exist there and were not put there by a sync.
        stale: Files that an earlier sync put there and that are no longer in the tree.
        listed: Whether the worker's list of synced files is that of the tree.
    """

    differs: tuple[str, ...]
    taken: tuple[str, ...]
    stale: tuple[str, ...]
    listed: bool


async def look(fanout: Fanout, hosts: Sequence[str], tree: Tree) -> dict[str, Seen]:
    """Compare a tree by content with what these workers have of it, without changes.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A worker has another file in the place of an entry, not put there by a sync, or the check failed.
    """
    seen = {host: _seen(answer) for host, answer in (await _ask(fanout, hosts, "look", tree)).items()}
    if taken := {host: one.taken for host, one in seen.items() if one.taken}:
        named = sorted({entry for entries in taken.values() for entry in entries})
        raise HostError(
            f"{texts.some(named, _NAMED)} in ~/{tree.cwd} differs from yours, and no sync has put it there: it will "
            "not be overwritten",
            where=texts.folded(list(taken)),
            fix=f"move it away on the workers, or name it in {tree.name}/.gitignore",
        )
    return seen


async def push(fanout: Fanout, hosts: Sequence[str], tree: Tree, turn: Turn) -> dict[str, Seen]:
    """Copy a tree to all these workers; return what each had of it before.

    Args:
        fanout: Reaches the workers.
        hosts: The workers.
        tree: The tree.
        turn: The lock that excludes other syncs.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A run uses a file that differs, a worker could not store the tree, or its copy differs afterwards.
    """
    seen = await look(fanout, hosts, tree)
    if any(one.differs or one.stale or not one.listed for one in seen.values()):
        async with turn.claimed():
            await _bring(fanout, hosts, tree, seen, turn.held)
    return seen


async def _bring(
    fanout: Fanout, hosts: Sequence[str], tree: Tree, seen: Mapping[str, Seen], held: Sequence[int]
) -> None:
    if behind := [host for host in hosts if seen[host].stale or not seen[host].listed]:
        await _ask(fanout, behind, "prepare", tree)
    slots, at_once = asyncio.Semaphore(WIDTH), min(WIDTH, len(hosts))

    async def one(host: str) -> Result:
        entries = seen[host].differs
        async with slots:
            limit = LIMIT + min(_bytes(tree, entries) * at_once / _UPLINK, _BRINGING)
            return await _transfer(fanout, host, tree, entries, limit, held=held)

    if changing := [host for host in hosts if seen[host].differs]:
        _say_much(tree, {host: seen[host].differs for host in changing})
        results = await asyncio.gather(*(one(host) for host in changing))
        needed = {host: _bytes(tree, seen[host].differs) for host in changing}
        await _require_space(fanout, tree, results, needed)
        require({result.host: result for result in results})
        after = await _ask(fanout, changing, "look", tree)
        wrong = {host: _seen(answer).differs for host, answer in after.items() if answer["differs"]}
        if wrong:
            named = sorted({entry for entries in wrong.values() for entry in entries})
            raise HostError(
                f"{texts.some(named, _NAMED)} in ~/{tree.cwd} differs from what was read here: it has changed",
                where=texts.folded(list(wrong)),
                fix="run the same command again once nothing writes there or here",
            )


def _seen(answer: Mapping[str, Any]) -> Seen:
    lists = {key: tuple(os.fsdecode(entry.encode("latin-1")) for entry in answer[key]) for key in _LISTS}
    return Seen(**lists, listed=answer["listed"])


async def _ask(fanout: Fanout, hosts: Sequence[str], action: str, tree: Tree) -> dict[str, Any]:
    """Run an action of `synced` on the workers; return their answers."""
    marks = {entry.decode("latin-1"): mark for entry, mark in tree.marks.items()}
    request = request_of({"action": action, "name": tree.name, "marks": marks})
    limit = _STEP_LIMIT + min(len(hosts) * len(request) / _UPLINK, _TELLING)
    results = await fanout.run(hosts, RUN, limit=limit, stdin=request)
    await _require_space(fanout, tree, results.values())
    require(results)
    answers = {host: _answer(result.stdout) for host, result in results.items()}
    if mute := [host for host, answer in answers.items() if answer is None]:
        raise unanswered(mute)
    return answers


def request_of(values: Mapping[str, Any]) -> bytes:
    """Return the input for `RUN` on a worker: the program and its request."""
    rule, name = inspect.getsource(marks_of), marks_of.__name__
    program = (
        f"import sys, types\nrule = sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        f"exec({rule!r}, rule.__dict__)\nexec({inspect.getsource(synced)!r})\n"
    )
    return f"{json.dumps(program)}\n{json.dumps(values)}\n".encode()


def unanswered(hosts: Sequence[str]) -> HostError:
    """Return the error for workers that gave no answer."""
    return HostError(
        "no answer came from the program that checks the files there",
        where=texts.folded(hosts),
        fix="have the login shell's start-up files print nothing, and run the same command again",
    )


def _answer(said: bytes) -> Any:
    """Return the answer in a program's output; a shell's start-up files may print lines before and after it."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None


def _bytes(tree: Tree, entries: Iterable[str]) -> int:
    """Return the total size of these entries in bytes. Entries that have disappeared are found by the transfer."""
    total = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            total += (tree.source / entry).lstat().st_size
    return total


def _say_much(tree: Tree, differs: Mapping[str, Sequence[str]]) -> None:
    """Log a message with the size of a large copy."""
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
    fanout: Fanout, host: str, tree: Tree, entries: Iterable[str], limit: float, *, held: Sequence[int]
) -> Result:
    command = transfer_command(tree, host, fanout.ssh_config)
    async with processes.started(command, stdout=asyncio.subprocess.DEVNULL, held=held) as process:
        try:
            async with asyncio.timeout(limit):
                _, said = await process.communicate(transfer_list(entries))
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
        results: The result of each worker.
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
    much = f"; up to {most / 10**6:.1f} MB were to be copied there" if most else ""
    by_quota = all(_FULL not in result.stderr for result in refused)
    why = "your quota is used up on the disk" if by_quota else "the disk is full"
    what = f"{why} that ~/{tree.cwd} is on: {texts.some(free, _NAMED) or 'its free space is unknown'}{much}"
    asked = f"df -h ~/{PARENT}; df -i ~/{PARENT}; du -sh ~/* ~/{PARENT}/*"
    look = f"`tpu_ops run {texts.target(full)} --shell -- '{asked}'` shows what uses it"
    fix = f"{look}; remove what is not needed there, or name data in {tree.name}/.gitignore, and run this again"
    raise HostError(what, where=texts.folded(full), fix=fix)


def require(results: Mapping[str, Result]) -> None:
    """Raise an error for the first worker that failed, if any."""
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
            fix="have its start-up files (.zshenv, .bashrc) print only in interactive shells",
        )
    fix = "log in (`tpu_ops ssh`) and find the cause: other users' files, or a full disk (df)" if first.reached else ""
    if first.problem.startswith(_SLOW):
        fix = "name data in .gitignore, and run the same command again: files that have arrived are not sent again"
    raise error(f"the code could not be copied to the workers: {what}", where=where, fix=fix)
