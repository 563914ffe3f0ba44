"""Copies files and directories from workers to this machine, with rsync over the open connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_ops import files, texts
from tpu_ops.errors import HostError, OpsError, UnreachableError
from tpu_ops.runs import control, rsync
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.sync import WIDTH
from tpu_ops.ssh import openssh, processes
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import SSH_FAILED, Result

#: Seconds to look for the path on a worker, including the connection.
_LIMIT = 30.0
#: Prints the directory from which a path ($2) starts, if the path exists: a directory ($1), else the home.
_LOOK = 'cd && cd -- "${1:-.}" && ls -d -- "$2" >/dev/null && pwd -P'


@dataclass(frozen=True)
class Source:
    """Where a path is on one worker, and where it goes.

    Attributes:
        host: The worker.
        into: The directory on this machine; created if it does not exist.
        user: The account that reads it; empty for the login user.
        folder: The directory from which the path starts, relative to the account's home; empty for the home.
    """

    host: str
    into: Path
    user: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Fetched:
    """What was copied from one worker.

    Attributes:
        source: The source.
        count: Number of files that were copied.
        size: Their size in bytes.
        problem: Why not everything was copied; empty if it was.
        reached: Whether the worker answered.
    """

    source: Source
    count: int = 0
    size: int = 0
    problem: str = ""
    reached: bool = True

    def words(self, path: str) -> str:
        """Return what was copied of this path, for users."""
        what = f"{texts.count(self.count, 'file')}, {texts.size(self.size)}" if self.count else "nothing new"
        return f"{self.source.host}: {path} is in {self.source.into}: {what}"

    def error(self, path: str) -> OpsError:
        """Return the problem as the error of a command that copies this path."""
        kind = HostError if self.reached else UnreachableError
        begins = "the directory of the run" if self.source.folder else "the home"
        fix = "run the same command again: it continues"
        if self.reached:
            fix = f"check PATH, which begins in {begins}, and who may read it"
            fix += "" if self.source.folder else "; for the directory of a run, name the run: `tpu_ops runs`"
        return kind(self.problem, where=f"{path} on {self.source.host}", fix=fix)


async def fetch(
    fanout: Fanout, sources: Sequence[Source], path: str, moved: rsync.Moved | None = None
) -> list[Fetched]:
    """Copy a path from workers, several at a time. What an earlier call has copied is not copied again.

    Args:
        fanout: Reaches the workers.
        sources: Where the path is.
        path: A file or directory; absolute, or relative to the folder of each source.
        moved: Called with the progress of each worker.

    Raises:
        OpsError: A directory on this machine cannot be created.
    """
    for source in sources:
        try:
            source.into.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise files.unwritable(source.into, exc) from exc
    slots = asyncio.Semaphore(WIDTH)

    async def one(source: Source) -> Fetched:
        async with slots:
            found = await _look(fanout, source, path)
            if isinstance(found, str):
                found = await _copy(source, command(source, found, fanout.ssh_config), moved)
        if moved:
            moved(source.host, found.size, 0, True)
        return found

    for source in sources:
        if moved:
            moved(source.host, 0, 0, False)
    return await asyncio.gather(*map(one, sources))


async def of_run(
    fanout: Fanout,
    run: RunRef,
    path: str,
    chosen: Sequence[int],
    into: Path,
    *,
    login: str,
    moved: rsync.Moved | None = None,
) -> list[Fetched]:
    """Copy a path from ranks of a run, as `fetch` does, from the directories in which their commands were started.

    Args:
        fanout: Reaches the workers.
        run: The run.
        path: A file or directory; absolute, or relative to the directory of the run.
        chosen: The ranks to copy from.
        into: The directory on this machine; several ranks get a directory each in it.
        login: The account that this machine logs in as.
        moved: As for `fetch`.

    Raises:
        UnreachableError: The worker of a rank does not tell where its files are.
        OpsError: A directory on this machine cannot be created.
    """
    outcomes, sources = await control.outcomes(fanout, run), []
    for rank in chosen:
        one = outcomes[rank]
        if not one.record:
            raise UnreachableError(
                one.reason or "the worker does not know the run",
                where=f"rank {rank} ({one.host}) of {run.run_id}",
                fix=f"name other ranks with --rank; `tpu_ops status {run.run_id}` shows all",
            )
        user = str(one.record["person"]["name"])
        place = into / f"rank-{rank}" if len(chosen) > 1 else into
        sources.append(Source(one.host, place, "" if user == login else user, str(one.record["cwd"])))
    return await fetch(fanout, sources, path, moved)


async def _look(fanout: Fanout, source: Source, path: str) -> str | Fetched:
    """Return the absolute path on the worker; if it cannot be copied, why."""
    argv = [*as_user(source.user), "/bin/sh", "-c", _LOOK, "sh", source.folder, path]
    result: Result = (await fanout.run([source.host], argv, limit=_LIMIT))[source.host]
    if result.ok:
        place = result.stdout.decode(errors="surrogateescape").removesuffix("\n")
        return path if path.startswith("/") else f"{place}/{path}"
    said = result.stderr.decode(errors="replace").strip().splitlines()
    return Fetched(
        source, problem=result.problem or (said[-1] if said else "the path was not found"), reached=result.reached
    )


def command(source: Source, path: str, ssh_config: Path) -> list[str]:
    """Return the command that copies an absolute path of a worker.

    It continues a file that an earlier one has begun, and prints size and name of each thing that it
    copies. With `-s`, no shell on the worker reads the path.
    """
    options = ["-a", "--no-owner", "--no-group", "--partial", "-s", "--timeout=60", "--out-format=%l %n"]
    if source.user:
        options.append(f"--rsync-path={' '.join(as_user(source.user))} rsync")
    shell = openssh.rsync_shell(ssh_config)
    return ["rsync", *options, f"--rsh={shell}", f"{source.host}:{path}", f"{source.into}/"]


def as_user(user: str) -> list[str]:
    """Return the words before a command that runs it as a user; none if the user is empty, the login user."""
    return ["sudo", "-n", "-H", "-u", user] if user else []


async def _copy(source: Source, argv: Sequence[str], moved: rsync.Moved | None) -> Fetched:
    def told(size: int) -> None:
        if moved:
            moved(source.host, size, 0, False)

    try:
        async with processes.started([argv[0], *(rsync.options() if moved else ()), *argv[1:]]) as process:
            out, said = await (rsync.communicate(process, b"", told) if moved else process.communicate())
    except FileNotFoundError as exc:
        raise OpsError("rsync is not installed", where="this machine", fix="apt-get install rsync") from exc
    rows = [line.partition(b" ") for line in out.splitlines()]
    sizes = [int(size) for size, _, name in rows if size.isdigit() and name and not name.endswith(b"/")]
    text = said.decode(errors="replace")
    problem = openssh.reason(text, process.returncode) if process.returncode else ""
    return Fetched(source, len(sizes), sum(sizes), problem, process.returncode != SSH_FAILED)
