"""Installs the packages that a synced project lists, on all workers of a run, over the fleet's environment.

One worker resolves the list. All workers then install exactly these packages. Each file is downloaded once per slice:
the slice's first worker serves it to the others. `project_environment` is the program on the workers.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from tpu_ops import texts
from tpu_ops.ansible import playbook
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import HostError, UnreachableError, UsageError
from tpu_ops.protocol import installed_packages
from tpu_ops.runs import project_environment, sync
from tpu_ops.ssh.fanout import Fanout

#: Files that list a project's packages; the first one that exists is installed.
_LISTINGS = ("uv.lock", "requirements.txt", "pyproject.toml")
#: Prefixes of the names of other files that a listing can include.
_INCLUDED = ("requirements", "constraints")
#: Timeouts of a worker in seconds: for an answer without an installation, and for resolving or installing packages.
_LOOK_LIMIT, _INSTALL_LIMIT = 60.0, 1800.0


@dataclass(frozen=True)
class Listing:
    """The file that lists the packages of a project.

    Attributes:
        name: ``uv.lock``, ``requirements.txt`` or ``pyproject.toml``.
        digest: Digest of this file and of those that it can include.
        editable: Whether the project itself can be installed: its pyproject.toml has a build system.
    """

    name: str
    digest: str
    editable: bool


@dataclass(frozen=True)
class Installed:
    """The environment of a project, the same on all workers of a run.

    Attributes:
        path: Its path on the workers.
        base: The fleet's environment below it.
        pins: Its packages with versions and hashes, as pip reads them; those of the fleet's environment included.
        digest: Digest of all its packages, those of the fleet's environment included.
        packages: Number of packages installed in it, over those of the fleet's environment.
        anew: Whether this call made it; otherwise all workers had it already.
        missed: Worker -> why it did not take files from another worker of its slice.
    """

    path: str
    base: str
    pins: str
    digest: str
    packages: int
    anew: bool = False
    missed: Mapping[str, str] = field(default_factory=dict)


def listing(tree: sync.Tree) -> Listing | None:
    """Return the file that lists the packages of a tree; None if it has none.

    Raises:
        UsageError: pyproject.toml cannot be read.
    """
    project: Mapping[str, Any] = {}
    if "pyproject.toml" in tree.files:
        try:
            project = tomllib.loads((tree.source / "pyproject.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            where = str(tree.source / "pyproject.toml")
            raise UsageError(f"this file cannot be read: {exc}", where=where, fix="correct it") from exc
    lists = {"uv.lock": bool(project), "requirements.txt": True, "pyproject.toml": "project" in project}
    found = next((name for name in _LISTINGS if name in tree.files and lists[name]), None)
    if not found:
        return None
    read = [name for name in tree.files if name in _LISTINGS or PurePath(name).name.startswith(_INCLUDED)]
    marks = [f"{name} {tree.marks[os.fsencode(name)]}" for name in sorted(read)]
    return Listing(found, hashlib.sha256("\n".join(marks).encode()).hexdigest()[:12], "build-system" in project)


async def look(fanout: Fanout, hosts: Sequence[str], tree: sync.Tree, listed: Listing, base: str) -> _Seen:
    """See which workers have the project's environment."""
    request = {"action": "look", "project": tree.name, "inputs": listed.digest, "base": base}
    return _Seen(await _ask(fanout, dict.fromkeys(hosts, request), _LOOK_LIMIT))


@dataclass(frozen=True)
class _Seen:
    """What each worker has of a project's environment."""

    answers: Mapping[str, Mapping[str, Any]]

    @property
    def had(self) -> bool:
        """Whether a worker has any environment of this project."""
        return any(answer["had"] for answer in self.answers.values())

    @property
    def pins(self) -> str:
        """The packages that a worker has installed for the present files; empty if no worker has any."""
        return next((answer["pins"] for answer in self.answers.values() if "pins" in answer), "")

    @property
    def installed(self) -> Installed | None:
        """The environment, if all workers have the same one; else None."""
        first, *others = (answer if "pins" in answer else None for answer in self.answers.values())
        return _installed(first) if first and all(other == first for other in others) else None


async def install(
    fanout: Fanout,
    workers: Sequence[Worker],
    tree: sync.Tree,
    listed: Listing,
    *,
    base: str,
    pins: str = "",
) -> Installed:
    """Make the project's environment on all workers.

    Args:
        fanout: Reaches the workers.
        workers: The workers.
        tree: The project, which is on the workers.
        listed: The file that lists its packages.
        base: The fleet's environment.
        pins: The packages with versions and hashes; empty means that a worker resolves the file.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: The packages could not be installed, or are not the same on all workers.
    """
    hosts = [worker.host for worker in workers]
    if not pins:
        resolve = {"action": "resolve", "project": tree.name, "listing": listed.name, "base": base}
        pins = (await _ask(fanout, {hosts[0]: resolve}, _INSTALL_LIMIT, listed.name))[hosts[0]]["pins"]
    indexes = await _serve(fanout, workers)
    build = {"action": "build", "project": tree.name, "inputs": listed.digest, "base": base, "pins": pins}
    requests = {
        worker.host: {**build, "editable": listed.editable, "index": indexes.get(worker.node.full_name, "")}
        for worker in workers
    }
    answers = await _ask(fanout, requests, _INSTALL_LIMIT, listed.name)
    missed = {host: answer.pop("missed") for host, answer in answers.items()}
    different = {host: answer for host, answer in answers.items() if answer != answers[hosts[0]]}
    if different:
        raise HostError(
            f"the environment of ~/{tree.cwd} differs from the one on {hosts[0]}",
            where=texts.folded([*different]),
            fix=f"make the fleet's environment the same on them: `tpu_ops configure {texts.target(hosts)}`",
        )
    return _installed({**answers[hosts[0]], "pins": pins}, {host: why for host, why in missed.items() if why})


def text(made: Installed, listed: Listing, hosts: Sequence[str], seconds: float) -> str:
    """Return the message about a project's environment on these workers, after this many seconds."""
    where = f"{made.path} on {texts.count(len(hosts), 'worker')}"
    took = f"made in {seconds:.1f} s" if made.anew else "already there"
    downloads = "".join(f"; {host} downloaded its files itself: {why}" for host, why in made.missed.items())
    own = f"{texts.count(made.packages, 'package')} over the fleet's, digest {made.digest} of all"
    return f"{listed.name}: {own}, in {where}, {took}{downloads}"


def _installed(answer: Mapping[str, Any], missed: Mapping[str, str] | None = None) -> Installed:
    """Return an environment, given a worker's answer, and ``missed`` if the environment was made now."""
    made = {key: answer[key] for key in ("path", "base", "pins", "digest", "packages")}
    return Installed(**made, anew=missed is not None, missed=missed or {})


async def _serve(fanout: Fanout, workers: Sequence[Worker]) -> dict[str, str]:
    """Have the first worker of each slice serve packages to its other workers; return node -> URL of this index."""
    serving = {
        worker.node.full_name: worker
        for worker in workers
        if worker.index == 0 and worker.internal_ip and len(worker.node.internal_ips) > 1
    }
    if not serving:
        return {}
    program = (playbook.tool_root() / "roles/python/files/slice_index.py").read_text(encoding="utf-8")
    requests = {
        worker.host: {
            "action": "serve",
            "address": worker.internal_ip,
            "readers": [address for address in worker.node.internal_ips if address],
            "program": program,
        }
        for worker in serving.values()
    }
    ports = await _ask(fanout, requests, _LOOK_LIMIT)
    return {
        name: f"http://{worker.internal_ip}:{port}/simple/"
        for name, worker in serving.items()
        if (port := ports[worker.host]["port"])
    }


async def _ask(
    fanout: Fanout, requests: Mapping[str, Mapping[str, Any]], limit: float, listing_name: str = ""
) -> dict[str, dict[str, Any]]:
    """Execute an action of `project_environment` on workers, and return their answers.

    Args:
        fanout: Reaches the workers.
        requests: Worker -> its request.
        limit: Seconds for each worker.
        listing_name: The file that lists the packages, for messages.
    """
    stdin = {host: _input(request) for host, request in requests.items()}
    results = await fanout.run([*requests], sync.RUN, limit=limit, stdin=stdin)
    failed = [result for result in results.values() if not result.ok]
    if failed:
        error = HostError if failed[0].reached else UnreachableError
        said = failed[0].stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise error(
            f"the packages could not be installed: {failed[0].problem or ''.join(said)}",
            where=texts.folded([result.host for result in failed]),
            fix="run the same command again, which continues; or start without it: --no-install",
        )
    answers = {host: sync.answer(result.stdout) for host, result in results.items()}
    if unanswered := [host for host, answer in answers.items() if answer is None]:
        raise sync.unanswered(unanswered)
    if reasons := {host: answer["failed"] for host, answer in answers.items() if "failed" in answer}:
        first = next(iter(reasons.values()))
        raise HostError(
            f"the packages could not be installed: {first}",
            where=texts.folded([host for host, reason in reasons.items() if reason == first]),
            fix=f"correct {listing_name or 'this'}, or start without it: --no-install",
        )
    return answers


def _input(request: Mapping[str, Any]) -> bytes:
    """Return the standard input for `sync.RUN`: the program with the module that it imports, and the request."""
    return sync.request_of(request, installed_packages, project_environment)
