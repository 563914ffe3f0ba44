"""The fleet's locks: the exact packages and versions for each environment's list, resolved once with uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import files, texts
from tpu_ops.ansible import playbook
from tpu_ops.ansible.playbook import Outcome, Said, Step
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.files import unwritable
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.installed_packages import pinned_packages

#: Directory of the locks beside the fleet's file. The role jax looks for them there.
DIRECTORY = "locks"
#: Platform tag of the oldest image of TPU VMs, Ubuntu 20.04, whose C library is 2.31. Wheels have to work there.
_PLATFORM = "manylinux_2_31"
#: Beginning of each lock that `tpu_ops lock` writes; other files in the directory belong to users.
_MARK = "# Lock of "


@dataclass(frozen=True)
class Wanted:
    """The packages that an environment lists, as roles/python/filter_plugins/fleet_locks.py describes them.

    Attributes:
        header: The first lines of the lock. Only equal lists have equal headers.
        name: The environment's name.
        python_version: Python as major.minor.
        machine: The processor architecture.
        requirements: The requirements.
        constraints: The constraints.
        find_links: Pages to search for packages in addition to the index.
        index: URL of the package index; empty means uv's default.
    """

    header: str
    name: str
    python_version: str
    machine: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    find_links: tuple[str, ...]
    index: str


@dataclass(frozen=True)
class Lock:
    """A lock of the fleet.

    Attributes:
        path: Its file.
        wanted: The list that it is resolved from.
        workers: The workers with this list.
        before: The text of the file before this command; empty if there was no file.
        text: The new text of the file.
    """

    path: Path
    wanted: Wanted
    workers: tuple[str, ...]
    before: str = ""
    text: str = ""

    @property
    def packages(self) -> dict[str, str]:
        """The locked packages: name -> version."""
        return pinned_packages(self.text)

    @property
    def changes(self) -> list[str]:
        """Differences between the new lock and the old file, one line for each package."""
        was, now = pinned_packages(self.before), self.packages
        changed = [f"~ {name} {was[name]} -> {now[name]}" for name in now if was.get(name, now[name]) != now[name]]
        added = [f"+ {name} {now[name]}" for name in now if name not in was]
        return changed + added + [f"- {name}" for name in was if name not in now]


def away(fleet: Fleet) -> list[Worker]:
    """Return the workers whose lists cannot be read, since their nodes do not run."""
    return [worker for worker in fleet.workers if worker.node.state not in SERVING_STATES]


def listed(settings: Settings, told: Callable[[Step | Said], None], without: Sequence[Worker] = ()) -> Outcome:
    """Ask all workers but some which packages their environments list; `lists_of` reads the outcome."""
    project = playbook.project_of(settings.path, settings.file)
    # The inventory lists the states in the settings; Ansible warns of a host that is excluded and not listed.
    excluded = [f"!{worker.host}" for worker in without if worker.node.state in settings.states]
    hosts = ["all", *excluded] if excluded else []
    # Use the playbook of tpu_ops: a fleet with playbooks of its own may lack this one, which only reads.
    return playbook.run(project, replace(project, root=playbook.tool_root()).playbook("lock"), hosts=hosts, told=told)


def lists_of(outcome: Outcome) -> dict[Wanted, tuple[str, ...]]:
    """Return each list with its workers."""
    found: dict[Wanted, list[str]] = {}
    told: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] = outcome.data.get("lists") or {}
    for host in sorted(told, key=texts.natural):
        for entry in [each for role in sorted(told[host]) for each in told[host][role]]:
            several = {key: tuple(entry[key]) for key in ("requirements", "constraints", "find_links")}
            found.setdefault(Wanted(**{**entry, **several}), []).append(host)
    return {each: tuple(hosts) for each, hosts in found.items()}


def planned(directory: Path, lists: Mapping[Wanted, tuple[str, ...]], *, whole: bool = True) -> list[Lock]:
    """Return the lock of each list, with the file that it has or gets, before it is resolved.

    A changed list has no file with its header. It gets the first file name that no other list has, usually that of the
    old list.

    Args:
        directory: The directory of the locks.
        lists: Each list, with its workers.
        whole: Whether these are the lists of all workers. If not, other locks keep their files, since they may
            belong to the other workers.

    Raises:
        OpsError: A lock cannot be read.
    """
    there = _there(directory)
    own = {each: next((path for path, text in there.items() if text.startswith(each.header)), None) for each in lists}
    taken = {path for path in own.values() if path}
    foreign = {path for path, text in there.items() if not text.startswith(_MARK)}
    locks = []
    for each, workers in lists.items():
        before = own[each] or _free(directory, each, {*taken, *foreign})
        path = own[each] or _free(directory, each, {*taken, *(foreign if whole else there)})
        taken.add(path)
        locks.append(Lock(path, each, workers, there.get(before, "")))
    return locks


def others(directory: Path, locks: Iterable[Lock]) -> list[Path]:
    """Return the files of the locks in a directory that are none of these locks.

    Raises:
        OpsError: A lock cannot be read.
    """
    own = {lock.path for lock in locks}
    return [path for path, text in _there(directory).items() if text.startswith(_MARK) and path not in own]


def _there(directory: Path) -> dict[Path, str]:
    """Return the files in the directory of the locks, with their texts."""
    paths = sorted(directory.glob("*.txt"), key=lambda path: texts.natural(path.name))
    try:
        return {path: path.read_text(encoding="utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as exc:
        raise OpsError(f"a lock cannot be read: {exc}", where=str(directory), fix="delete it, or correct it") from exc


def _free(directory: Path, wanted: Wanted, taken: Iterable[Path]) -> Path:
    name, number = f"{wanted.name}-{wanted.python_version}-{wanted.machine}", 1
    while (path := directory / f"{name}{f'-{number}' if number > 1 else ''}.txt") in taken:
        number += 1
    return path


def resolved(lock: Lock, uv: str, *, upgrade: bool) -> Lock:
    """Return a lock with its new text. It keeps the versions in the old file where the list allows them.

    Args:
        lock: The lock.
        uv: The program uv.
        upgrade: Whether to use the newest versions instead.

    Raises:
        OpsError: uv found no set of packages, or did not reach the index.
    """
    wanted = lock.wanted
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = _written(folder / "lock.txt", [lock.before])
        arguments = [uv, "pip", "compile", "--quiet", "--no-header", "--generate-hashes", "--python", sys.executable]
        arguments += ["--python-version", wanted.python_version]
        arguments += ["--python-platform", f"{wanted.machine}-{_PLATFORM}", "--output-file", output]
        arguments += ["--constraints", _written(folder / "constraints.txt", wanted.constraints)]
        arguments += [word for link in wanted.find_links for word in ("--find-links", link)]
        arguments += ["--upgrade"] if upgrade else []
        environ = {**os.environ, "NO_COLOR": "1"} | ({"UV_DEFAULT_INDEX": wanted.index} if wanted.index else {})
        command = [*arguments, "--", _written(folder / "list.txt", wanted.requirements)]
        # In an empty directory, so that uv reads no settings of a project.
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            where = f"{', '.join(wanted.requirements)}, Python {wanted.python_version} on {wanted.machine}"
            fix = "correct the list in group_vars, or the way to the package index; no lock was changed"
            raise OpsError(f"uv could not resolve the list: {done.stderr.strip()}", where=where, fix=fix)
        return replace(lock, text=wanted.header + Path(output).read_text(encoding="utf-8"))


def _written(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def write(locks: Sequence[Lock]) -> None:
    """Write the locks to their files.

    Raises:
        OpsError: A file cannot be written.
    """
    for lock in locks:
        try:
            lock.path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(lock.path, lock.text, 0o644)
        except OSError as exc:
            raise unwritable(lock.path, exc) from exc


def find_uv() -> str:
    """Return the path of uv: on PATH, beside this Python, or where `make env` installs it.

    Raises:
        UsageError: uv is not installed.
    """
    places = [Path(sys.executable).parent / "uv", playbook.tool_root() / ".build/uv/bin/uv"]
    found = shutil.which("uv") or next((str(path) for path in places if os.access(path, os.X_OK)), "")
    if not found:
        fix = "install it, for example with `pipx install uv`"
        raise UsageError("uv, which resolves the packages, is not installed on this machine", where="PATH", fix=fix)
    return found
