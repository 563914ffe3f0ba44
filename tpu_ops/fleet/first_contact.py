"""Reads host keys from the workers themselves: to trust workers that publish none, and to verify known keys."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, Worker, label_of, without_workers
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import origin, selection
from tpu_ops.fleet.state import Files
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import client_config, guest_attributes, host_keys, known_hosts, masters, openssh, processes
from tpu_ops.ssh.known_hosts import Keys
from tpu_ops.ssh.ways import Way

#: Maximum number of workers that are contacted at the same time.
WIDTH = 32
#: Key type -> signature algorithms by which ssh requests this key type, if the algorithms have other names.
_ALGORITHMS = {"ssh-rsa": "rsa-sha2-512,rsa-sha2-256"}


@dataclass(frozen=True)
class Answer:
    """The host key that a worker presented, or the reason why it presented none.

    Attributes:
        worker: The worker.
        key_type: The key's type, such as ``ssh-ed25519``; empty if there is no key.
        blob: The key in base64.
        problem: Why there is no key; empty if there is one.
        address: The address at which the worker answered.
    """

    worker: Worker
    key_type: str = ""
    blob: str = ""
    problem: str = ""
    address: str = ""

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint as ssh-keygen shows it."""
        return known_hosts.fingerprint(self.blob)


def workers_of(fleet: Fleet, names: Sequence[str]) -> list[Worker]:
    """Return the workers of the nodes with these names or labels; only the jump worker of a node outside the filters.

    Raises:
        UsageError: A name is unknown or belongs to several nodes, or the node is not READY, has no workers or no id.
    """
    workers = selection.reached(fleet.settings, fleet.listed)
    for node in fleet.nodes:
        if not node.worker_count and (label := fleet.labels[node.full_name]) in names:
            raise UsageError(f"node {label} {without_workers(node)}", where="--trust-first", fix=until_ready(node))
    return [worker for name in dict.fromkeys(names) for worker in _workers_of(workers, name)]


def _workers_of(workers: Sequence[Worker], name: str) -> list[Worker]:
    where = "--trust-first"
    found = [worker for worker in workers if name in (worker.label, worker.node.name)]
    labels = sorted({worker.label for worker in found})
    if name in labels:
        found, labels = [worker for worker in found if worker.label == name], [name]
    if len(labels) > 1:
        raise UsageError(f"several nodes are called {name!r}", where=where, fix=f"use {' or '.join(labels)}")
    if not found:
        node = next((worker.label for worker in workers if worker.host == name), "")
        known = texts.some(sorted({worker.label for worker in workers}, key=texts.natural)) or "none"
        fix = f"name its node: {node}" if node else f"nodes with workers: {known}"
        raise UsageError(f"no node is called {name!r}", where=where, fix=fix)
    if not found[0].node.node_id:
        raise UsageError(
            f"the API gives node {name} no id, and host keys are bound to the id",
            where=where,
            fix="`gcloud compute tpus tpu-vm describe` shows the node's id; delete and create the node again to get "
            "a new id",
        )
    if found[0].node.state not in SERVING_STATES:
        raise UsageError(
            f"node {name} is in state {found[0].node.state}: none of its workers answers",
            where=where,
            fix=until_ready(found[0].node),
        )
    return found


def not_to_contact(settings: Settings, workers: Sequence[Worker], *, ask_api: bool) -> dict[str, str]:
    """Return why workers must not be trusted on first contact: alias -> reason, a verb phrase about the worker.

    Args:
        settings: The fleet's settings.
        workers: The workers to check.
        ask_api: Whether to ask the API too which of the workers publish a host key; nothing is written.

    Raises:
        CloudError: There are no credentials for the API, or it did not say whether some workers publish a key.
    """
    keys, first = Files(settings.state_dir).host_keys()
    known = {
        alias: "was trusted on first contact before"
        if alias in first
        else "publishes its host key, and the key is known"
        for alias in keys
    }
    unknown = {worker.node.full_name: worker.node for worker in workers if worker.host_key_alias not in known}
    # A published snapshot already contains all keys that workers publish, so the API is not asked.
    if ask_api and unknown and not origin.source_of(settings):
        with origin.api(settings) as tpu:
            learned = guest_attributes.fetch(tpu, list(unknown.values()))
        lacking = [worker for worker in workers if worker.node.full_name in unknown]
        must_be_heard(lacking, {name: learned.reasons[name] for name in learned.unheard})
        known = dict.fromkeys(learned.keys, "publishes its host key; `tpu_ops refresh` learns the key") | known
    return known


def must_be_heard(workers: Sequence[Worker], unheard: Mapping[str, str]) -> None:
    """Reject workers that perhaps publish a host key: trusting them on first contact would accept any machine.

    Args:
        workers: Workers without a known host key.
        unheard: Node's full name -> why it is unknown whether the node publishes host keys.

    Raises:
        CloudError: For some workers it is unknown whether they publish a host key.
    """
    if found := [worker for worker in workers if worker.node.full_name in unheard]:
        raise CloudError(
            f"it is unknown whether these workers publish their host keys: {unheard[found[0].node.full_name]}",
            where=texts.folded([worker.host for worker in found]),
            fix="run this command again; workers that publish their host key are not trusted on first contact",
        )


def ask(
    settings: Settings,
    fleet: Fleet,
    workers: Sequence[Worker],
    known: Mapping[str, Keys] = MappingProxyType({}),
) -> list[Answer]:
    """Connect to each of these workers as ssh would, and return the host keys that the workers present.

    No login takes place, and nothing is written.

    Args:
        settings: The fleet's settings.
        fleet: The fleet.
        workers: The workers.
        known: Alias -> known host keys; ssh asks a worker first for a key of the same type.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_ops-") as folder:
        return asyncio.run(_Round(settings, fleet, Path(folder), known).answers(workers))


class Verdicts(NamedTuple):
    """The result of comparing the host keys that workers present with the known host keys.

    Attributes:
        same: Workers that present a known key.
        others: Workers that present another key.
        silent: Workers that present no key.
    """

    same: tuple[Answer, ...]
    others: tuple[Answer, ...]
    silent: tuple[Answer, ...]


def verify(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> Verdicts:
    """Connect to each of these workers, and compare the host key that it presents with its known host keys."""
    known = host_keys.keys_of(settings)
    answers = ask(settings, fleet, workers, known)
    heard = [answer for answer in answers if not answer.problem]
    others = [
        answer
        for answer in heard
        if host_keys.differ(known.get(answer.worker.host_key_alias, {}), {answer.key_type: answer.blob})
    ]
    same = tuple(answer for answer in heard if answer not in others)
    return Verdicts(same, tuple(others), tuple(answer for answer in answers if answer.problem))


class _Round:
    """Reads the host keys of workers of one fleet. ssh writes the keys into files of a temporary folder."""

    def __init__(self, settings: Settings, fleet: Fleet, folder: Path, known: Mapping[str, Keys]) -> None:
        self._known = known
        self._ways = selection.ways_of(settings, fleet.listed)
        self._options, self._user, self._folder = selection.ssh_options(settings), settings.user, folder

    async def answers(self, workers: Sequence[Worker]) -> list[Answer]:
        """Ask all workers at once; behind a proxy first one alone, then a few at a time, like `tpu_ops.ssh.masters`."""
        proxied = any(self._ways.of(worker).proxy for worker in workers)
        gate = asyncio.Semaphore(masters.PROXIES if proxied else WIDTH)

        async def one(worker: Worker) -> Answer:
            async with gate:
                return await self._ask(worker, self._ways.of(worker))

        first = [await one(worker) for worker in workers[:1]] if proxied else []
        return [*first, *await asyncio.gather(*map(one, workers[len(first) :]))]

    async def _ask(self, worker: Worker, way: Way) -> Answer:
        if way.problem:
            return Answer(worker, problem=f"it {way.problem}")
        file = self._folder / worker.host_key_alias
        options = (*_preferred(self._known.get(worker.host_key_alias, {})), *client_config.own_options(worker, way))
        options = (*options, *self._options)
        code, said = await processes.quiet(openssh.contact(options, file, self._user, way.address), masters.OPEN_LIMIT)
        for key_type, blob in _written(file, worker).items():
            return Answer(worker, key_type, blob, address=way.address)
        if code is None:
            return Answer(worker, problem=f"the worker did not answer within {masters.OPEN_LIMIT:.0f} s")
        jump = self._ways.jump
        if way.proxy and jump and "Host key verification failed" in said:
            before = f"use --trust-first {label_of(jump)} first"
            return Answer(worker, problem=f"no host key is known for the jump host {jump}: {before}")
        return Answer(worker, problem=openssh.reason(said, code))


def _preferred(known: Keys) -> tuple[tuple[str, str], ...]:
    """Return the ssh option that makes a machine present, if possible, a host key of a type that is already known."""
    algorithms = [_ALGORITHMS.get(kind, kind) for kind in known]
    return (("HostKeyAlgorithms", f"^{','.join(algorithms)}"),) if algorithms else ()


def _written(file: Path, worker: Worker) -> Keys:
    """Return the host keys of a worker in the file that ssh wrote; empty if ssh saw no key and wrote no file."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return known_hosts.parse(text).get(worker.host_key_alias, {})


def record(settings: Settings, answers: Sequence[Answer]) -> None:
    """Write the keys of these answers into known_hosts.

    Raises:
        HostKeyAlarm: Another key of one of these workers became known in the meantime; nothing was written.
        OpsError: The fleet's state cannot be written.
    """
    files = Files(settings.state_dir)
    with files.lock():
        known, first = files.host_keys()
        for answer in answers:
            if not answer.blob:
                continue
            alias, keys = answer.worker.host_key_alias, {answer.key_type: answer.blob}
            if alias not in known:
                known[alias] = keys
                first.add(alias)
            elif host_keys.differ(known[alias], keys):
                raise host_keys.alarm(alias, answer.worker.host, files.known_hosts, trusted_first=alias in first)
        files.write_host_keys(known, first)
