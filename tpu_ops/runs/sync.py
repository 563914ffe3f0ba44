"""Brings a directory to all workers: what .gitignore leaves, the same tree everywhere.

Only what an earlier sync put on a worker is ever removed there: checkpoints and logs beside the code stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.remote import openssh, ssh
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.replies import SSH_FAILED, Result

#: Below the person's home on every worker.
PARENT = "tpu_ops"
#: Seconds for one worker to receive the tree.
LIMIT = 600.0
_STEP_LIMIT = 60.0
#: rsync processes at once: each costs the controller processor time for hashing and encryption.
WIDTH = 8
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_READABLE = "make it readable for you, or name it in .gitignore"
#: How rsync prints a byte of a name that is no printable character; a backslash before `#ooo` is printed so too.
_ESCAPE = re.compile(rb"\\#([0-3][0-7]{2})")
_FILTERS = ("--exclude=.git", "--exclude=__pycache__/", "--filter=:- .gitignore")
#: Makes the place and prints what an earlier sync put there. $1 is the directory's name.
_PREPARE = 'mkdir -p "tpu_ops/$1" tpu_ops/.synced && if [ -f "tpu_ops/.synced/$1" ]; then cat "tpu_ops/.synced/$1"; fi'
#: Removes files named on standard input.
_REMOVE = 'cd "tpu_ops/$1" && xargs -0 -r rm -f --'
#: Remembers what this sync has put there.
_REMEMBER = 'cat >"tpu_ops/.synced/$1.new" && mv "tpu_ops/.synced/$1.new" "tpu_ops/.synced/$1"'


@dataclass(frozen=True)
class Tree:
    """A directory as it is brought to the workers.

    Attributes:
        source: The directory on this machine.
        name: Its name below ~/tpu_ops on the workers.
        entries: Paths below it, directories with a slash at the end.
        digest: Of all files' names, executable bits and contents; 12 hexadecimal digits.
    """

    source: Path
    name: str
    entries: tuple[str, ...]
    digest: str

    @property
    def cwd(self) -> str:
        """Where it stands on the workers, below the person's home."""
        return f"{PARENT}/{self.name}"

    @property
    def files(self) -> tuple[str, ...]:
        """Its entries without directories."""
        return tuple(entry for entry in self.entries if not entry.endswith("/"))


def listing_command(source: Path, empty: Path) -> list[str]:
    """Return the command with which rsync itself lists what it would bring to an empty directory."""
    return ["rsync", "-a", "--dry-run", "--out-format=%n", *_FILTERS, f"{source}/", f"{empty}/"]


def transfer_command(tree: Tree, host: str, ssh_config: Path) -> list[str]:
    """Return the command that brings the listed entries to one worker; the list comes on standard input."""
    shell = openssh.rsync_shell(ssh_config)
    options = ["-a", "--no-owner", "--no-group", "--from0", "--files-from=-", "--timeout=60", f"--rsh={shell}"]
    return ["rsync", *options, f"{tree.source}/", f"{host}:{tree.cwd}/"]


def transfer_list(tree: Tree) -> bytes:
    """Return the list that goes with it; behind `./`, as rsync takes a name that begins with `#` for a comment."""
    return b"\0".join(b"./" + os.fsencode(entry) for entry in tree.entries)


def stale(before: bytes, tree: Tree) -> list[str]:
    """Given what an earlier sync put on a worker (NUL-separated), return the files that are no longer in the tree."""
    wanted = set(tree.files)
    found = [os.fsdecode(entry) for entry in before.split(b"\0") if entry]
    return [
        entry for entry in found if entry not in wanted and not entry.startswith("/") and ".." not in entry.split("/")
    ]


def read(source: Path) -> Tree:
    """List and digest a directory.

    Raises:
        UsageError: It is no directory, or its name or a file's name cannot be used.
    """
    source = source.expanduser().resolve()
    where = f"--sync {source}"
    if not source.is_dir():
        raise UsageError("no such directory", where=where, fix="name the directory that holds your code")
    if not _NAME.fullmatch(source.name):
        raise UsageError(
            "the directory's name becomes a directory on the workers and must be plain",
            where=where,
            fix="use letters, digits, dots, dashes and underscores",
        )
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                listing_command(source, Path(empty)),
                capture_output=True,
                timeout=LIMIT,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            raise OpsError("rsync is not installed", where="this machine", fix="apt-get install rsync") from None
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"could not be listed within {LIMIT:.0f} s",
                where=where,
                fix="name a smaller directory, on a local disk",
            ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise UsageError(f"cannot be read: {said}", where=where, fix=_READABLE)
    entries = listed(done.stdout)
    if not entries:
        raise UsageError("there is nothing to bring to the workers", where=where, fix="look at its .gitignore")
    return Tree(source, source.name, entries, _digest(source, entries))


def listed(output: bytes) -> tuple[str, ...]:
    """Given rsync's listing, return the entries; it writes bytes that it cannot print as octal numbers."""
    lines = [line for line in output.split(b"\n") if line and line != b"./"]
    return tuple(sorted(os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), line)) for line in lines))


def _digest(source: Path, entries: Sequence[str]) -> str:
    total = hashlib.sha256()
    for entry in entries:
        if entry.endswith("/"):
            continue
        path = source / entry
        try:
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                kind, content = b"l", os.fsencode(path.readlink())
            elif stat.S_ISREG(mode):
                with path.open("rb") as file:
                    kind = b"x" if mode & stat.S_IXUSR else b"f"
                    content = hashlib.file_digest(file, "sha256").digest()
            else:
                raise UsageError(
                    f"{str(path)!r} is a {_kind(mode)}: only files, links and directories are brought to the workers",
                    where=f"--sync {source}",
                    fix="remove it, or name it in .gitignore",
                )
        except OSError as exc:
            raise UsageError(f"cannot be read: {exc.strerror}", where=f"--sync {path}", fix=_READABLE) from exc
        total.update(b"\0".join((kind, os.fsencode(entry), content)) + b"\n")
    return total.hexdigest()[:12]


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device file"


async def push(fanout: Fanout, hosts: Sequence[str], tree: Tree) -> None:
    """Bring a tree to all these workers.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A worker could not take the tree; names it and says why.
    """
    before = await _step(fanout, hosts, _PREPARE, tree, {})
    slots = asyncio.Semaphore(WIDTH)

    async def one(host: str) -> Result:
        async with slots:
            return await _transfer(fanout, host, tree)

    results = await asyncio.gather(*(one(host) for host in hosts))
    _require({result.host: result for result in results})
    removed = {host: b"\0".join(map(os.fsencode, stale(result.stdout, tree))) for host, result in before.items()}
    outdated = [host for host in hosts if removed[host]]
    if outdated:
        await _step(fanout, outdated, _REMOVE, tree, removed)
    manifest = b"\0".join(map(os.fsencode, tree.files))
    await _step(fanout, hosts, _REMEMBER, tree, dict.fromkeys(hosts, manifest))


async def _step(
    fanout: Fanout, hosts: Sequence[str], script: str, tree: Tree, stdin: dict[str, bytes]
) -> dict[str, Result]:
    results = await fanout.run(hosts, ["/bin/sh", "-c", script, "sh", tree.name], limit=_STEP_LIMIT, stdin=stdin)
    _require(results)
    return results


async def _transfer(fanout: Fanout, host: str, tree: Tree) -> Result:
    command = transfer_command(tree, host, fanout.ssh_config)
    async with ssh.started(command, stdout=asyncio.subprocess.DEVNULL) as process:
        try:
            async with asyncio.timeout(LIMIT):
                _, said = await process.communicate(transfer_list(tree))
        except TimeoutError:
            return Result(host, None, problem=f"the tree did not arrive within {LIMIT:.0f} s")
    text = said.decode(errors="replace")
    if process.returncode == SSH_FAILED:
        return Result(host, None, problem=openssh.reason(text, process.returncode), reached=False)
    problem = openssh.reason(text, process.returncode) if process.returncode else ""
    return Result(host, process.returncode, stderr=said, problem=problem)


def _require(results: dict[str, Result]) -> None:
    bad = [result for result in results.values() if not result.ok]
    if not bad:
        return
    first = bad[0]
    said = first.stderr.decode(errors="replace")
    what = first.problem or openssh.reason(said, first.code)
    error = UnreachableError if not first.reached else HostError
    if "is your shell clean" in said:
        raise HostError(
            "the code could not be brought to the workers: your login shell there prints text before any command",
            where=", ".join(result.host for result in bad),
            fix="have its start-up files (.zshenv, .bashrc) print only in interactive shells",
        )
    raise error(f"the code could not be brought to the workers: {what}", where=", ".join(result.host for result in bad))
