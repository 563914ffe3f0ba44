"""Host keys of workers that publish none: taken from the workers themselves, once, when a person says so."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_ops import texts
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import guest_attributes, hostkeys, keyfile, origin, selection, ssh_files
from tpu_ops.fleet.model import SERVING_STATES, Worker, label_of
from tpu_ops.fleet.reach import Way
from tpu_ops.fleet.state import Files
from tpu_ops.fleet.view import Fleet
from tpu_ops.remote import openssh, ssh

#: Workers that are contacted at once.
WIDTH = 32


@dataclass(frozen=True)
class Answer:
    """The host key with which a worker answered, or why it did not.

    Attributes:
        worker: The worker.
        key_type: For example ``ssh-ed25519``; empty where it did not answer.
        blob: The key in base64.
        problem: Why there is no key; empty where there is one.
    """

    worker: Worker
    key_type: str = ""
    blob: str = ""
    problem: str = ""

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint as ssh-keygen shows it."""
        return keyfile.fingerprint(self.blob)


def workers_of(fleet: Fleet, names: Sequence[str]) -> list[Worker]:
    """Return the workers of the nodes with these names or labels; of a jump that the filters hide, the jump.

    Raises:
        UsageError: A name is none or that of several nodes, or its node does not serve or has no id.
    """
    workers = selection.reached(fleet.settings, fleet.listed)
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
            f"the API gives node {name} no id, to which host keys are bound",
            where=where,
            fix="see its id with `gcloud compute tpus tpu-vm describe`; a recreated one gets its own",
        )
    if found[0].node.state not in SERVING_STATES:
        raise UsageError(
            f"node {name} is in state {found[0].node.state}: none of its workers answers",
            where=where,
            fix="run this again when it is READY",
        )
    return found


def not_to_contact(settings: Settings, workers: Sequence[Worker], *, ask_api: bool) -> dict[str, str]:
    """Return why workers are not to be trusted on first contact: alias -> words that follow the worker's name.

    Args:
        settings: Of the fleet.
        workers: Those that are to be looked at.
        ask_api: Whether to ask the API, too, which of them publish a key; nothing is written.

    Raises:
        CloudError: There are no credentials for the API, or it does not say of some whether they publish a key.
    """
    keys, first = Files(settings.state_dir).host_keys()
    known = {
        alias: "was trusted on first contact before" if alias in first else "publishes its host key, and it is known"
        for alias in keys
    }
    unknown = {worker.node.full_name: worker.node for worker in workers if worker.host_key_alias not in known}
    # A published snapshot was read as a whole: what it does not hold is not published.
    if ask_api and unknown and not origin.source_of(settings):
        with origin.api(settings) as tpu:
            learned = guest_attributes.fetch(tpu, list(unknown.values()))
        lacking = [worker for worker in workers if worker.node.full_name in unknown]
        must_be_heard(lacking, {name: learned.reasons[name] for name in learned.unheard})
        known = dict.fromkeys(learned.keys, "publishes its host key, and `tpu_ops refresh` learns it") | known
    return known


def must_be_heard(workers: Sequence[Worker], unheard: Mapping[str, str]) -> None:
    """Refuse to trust workers that may publish a host key: whoever answers at their address is believed otherwise.

    Args:
        workers: Of which no host key is known.
        unheard: Node's full name -> why it is not known whether it publishes any.

    Raises:
        CloudError: There are some.
    """
    if found := [worker for worker in workers if worker.node.full_name in unheard]:
        raise CloudError(
            f"it is not known whether they publish their host keys: {unheard[found[0].node.full_name]}",
            where=texts.folded([worker.host for worker in found]),
            fix="run this again; a worker whose key is published is not trusted on first contact",
        )


def ask(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> list[Answer]:
    """Connect to each of these workers by its own way, and return the host keys they answer with.

    Nobody logs in, and what they answer is written nowhere.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_ops-") as folder:
        return asyncio.run(_Round(settings, fleet, Path(folder)).answers(workers))


class _Round:
    """Asks workers of one fleet; what ssh notes goes into a folder of its own."""

    def __init__(self, settings: Settings, fleet: Fleet, folder: Path) -> None:
        self._ways = selection.ways_of(settings, fleet.listed)
        self._options, self._user, self._folder = selection.ssh_options(settings), settings.user, folder

    async def answers(self, workers: Sequence[Worker]) -> list[Answer]:
        """Ask all at once; behind a proxy as `tpu_ops.remote.ssh` opens connections, the first alone, then a few."""
        proxied = any(self._ways.of(worker).proxy for worker in workers)
        gate = asyncio.Semaphore(ssh.PROXIES if proxied else WIDTH)

        async def one(worker: Worker) -> Answer:
            async with gate:
                return await self._ask(worker, self._ways.of(worker))

        first = [await one(worker) for worker in workers[:1]] if proxied else []
        return [*first, *await asyncio.gather(*map(one, workers[len(first) :]))]

    async def _ask(self, worker: Worker, way: Way) -> Answer:
        if way.problem:
            return Answer(worker, problem=f"it {way.problem}")
        file = self._folder / worker.host_key_alias
        options = (*ssh_files.own_options(worker, way), *self._options)
        code, said = await ssh.quiet(openssh.contact(options, file, self._user, way.address), ssh.OPEN_LIMIT)
        for key_type, blob in _written(file, worker).items():
            return Answer(worker, key_type, blob)
        if code is None:
            return Answer(worker, problem=f"it did not answer within {ssh.OPEN_LIMIT:.0f} s")
        jump = self._ways.jump
        if way.proxy and jump and "Host key verification failed" in said:
            before = f"use --trust-first {label_of(jump)} first"
            return Answer(worker, problem=f"no host key is known for {jump}, its jump: {before}")
        return Answer(worker, problem=openssh.reason(said, code))


def _written(file: Path, worker: Worker) -> keyfile.Keys:
    """Return the keys of a worker that ssh wrote into a file; it makes none where it saw no key."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return keyfile.parse(text).get(worker.host_key_alias, {})


def record(settings: Settings, answers: Sequence[Answer]) -> None:
    """Write the keys of these answers into known_hosts.

    Raises:
        HostKeyAlarm: Another key of one of these workers has become known in the meantime; nothing was written.
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
            elif hostkeys.differ(known[alias], keys):
                raise hostkeys.alarm(alias, answer.worker.host, files.known_hosts, trusted_first=alias in first)
        files.write_host_keys(known, first)
