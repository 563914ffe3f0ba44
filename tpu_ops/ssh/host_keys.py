"""Guards the host keys of workers that are known, and says of which none is."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from tpu_ops import texts
from tpu_ops.cloud import aliases
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.ssh.fleet_files import FleetFiles
from tpu_ops.ssh.known_hosts import Keys


def keys_of(settings: Settings) -> dict[str, Keys]:
    """Return the host keys that are known of a fleet, by alias."""
    return FleetFiles(settings.state_dir).host_keys()[0]


def has_keys(settings: Settings, workers: Iterable[Worker]) -> bool:
    """Return whether host keys of all these workers are known."""
    known = keys_of(settings)
    return all(worker.host_key_alias in known for worker in workers)


#: How the reason ends for which this account is not shown what others may be.
DENIED = "(PERMISSION_DENIED)"


class HostKeyAlarm(OpsError):
    """A worker publishes another host key than the one known for the same node id."""


def merge(
    known: Mapping[str, Keys],
    learned: Mapping[str, Keys],
    workers: Iterable[Worker],
    file: Path,
    trusted_first: Container[str] = (),
    *,
    replaced: Container[str] = (),
) -> dict[str, Keys]:
    """Return the known keys and those that were learned of the nodes that are there.

    What is known of a node that is out of sight stays: it may come back, and then with the same keys only. It was
    perhaps not asked for, is stopped without addresses, or somebody who publishes snapshots left it out.

    Args:
        known: From known_hosts.
        learned: From guest attributes.
        workers: All workers of the fleet.
        file: The known_hosts file, for the error.
        trusted_first: Aliases whose known keys nothing but the first contact vouches for.
        replaced: Ids of nodes that cannot come back, as others were made under their names: their keys are dropped.

    Raises:
        HostKeyAlarm: A learned key differs from the known one of the same alias.
    """
    workers = list(workers)
    hosts = {worker.host_key_alias: worker.host for worker in workers}
    for alias, keys in learned.items():
        if differ(known.get(alias, keys), keys):
            raise alarm(alias, hosts.get(alias, alias), file, trusted_first=alias in trusted_first)
    present = {worker.node.node_id for worker in workers}
    kept = {alias: keys for alias, keys in known.items() if aliases.node_id(alias) not in replaced}
    return kept | {
        alias: kept.get(alias, {}) | keys for alias, keys in learned.items() if aliases.node_id(alias) in present
    }


def differ(known: Keys, found: Keys) -> bool:
    """Return whether keys cannot be those of the machine whose keys are known.

    A machine may have a further type of key; one that is known may not change, and one at least must be the same.
    """
    same = any(known.get(kind) == blob for kind, blob in found.items())
    return not same or any(known.get(kind, blob) != blob for kind, blob in found.items())


def alarm(alias: str, host: str, file: Path, *, trusted_first: bool) -> HostKeyAlarm:
    """Return the error for a worker whose host key is not the known one.

    Args:
        alias: Of the worker.
        host: Its name.
        file: The known_hosts file.
        trusted_first: Whether nothing but the first contact vouches for the known key.
    """
    what = (
        "it publishes ANOTHER host key than the one that was trusted on first contact; nothing was written. "
        "Another machine may have answered then"
        if trusted_first
        else "the host key CHANGED although the node is the same; nothing was written. Either the worker's disk was "
        "replaced, or another machine answers in its place"
    )
    return HostKeyAlarm(
        what,
        where=f"worker {host} (alias {alias})",
        fix=f"find out why first; then forget the old key with `ssh-keygen -R {alias} -f {shlex.quote(str(file))}` "
        "and refresh",
    )


def another_machine(places: Sequence[str], alias: str, file: Path, *, published: bool) -> HostKeyAlarm:
    """Return the error for workers at whose addresses machines answer with other host keys than the known ones.

    Args:
        places: The workers, with their addresses.
        alias: Of the first of them.
        file: The known_hosts file.
        published: Whether the known key is the one that the node publishes.
    """
    what = (
        "another machine answers at this address than the one whose host key is known. Either the address was given to "
        "another machine, or somebody intercepts connections to it, or the worker's host keys were replaced"
    )
    forget = f"forget the old key with `ssh-keygen -R {alias} -f {shlex.quote(str(file))}` and refresh"
    own = "reboot the worker, which then publishes it, and verify again" if published else forget
    return HostKeyAlarm(
        f"{what} without being published" if published else what,
        where=texts.some(places),
        fix="do not log in there; compare the fingerprint on the worker's serial console (docs/ssh.md). If it is the "
        f"worker's own, {own}; if it is not, tell who runs the project's network",
    )


def compared(
    workers: Iterable[Worker], known: Container[str], published: Container[str], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return the serving workers whose known host keys were to be compared: host -> why they could not be, or empty.

    Args:
        workers: Of the fleet.
        known: Aliases whose host keys were known before.
        published: Aliases whose host keys were learned.
        reasons: Node's full name -> why its host keys could not be learned.
    """
    return {
        worker.host: ""
        if worker.host_key_alias in published
        else reasons.get(worker.node.full_name) or "no host key is published for it"
        for worker in workers
        if worker.node.state in SERVING_STATES and worker.host_key_alias in known
    }


def is_denial(warning: str) -> bool:
    """Return whether a warning of `missing` is about a node whose host keys others may read."""
    return f"{DENIED}); " in warning


def about(label: str) -> str:
    """Return how a warning of `missing` about a node begins."""
    return f"node {label}:"


def missing(workers: Iterable[Worker], keys: Mapping[str, Keys], reasons: Mapping[str, str]) -> list[str]:
    """Return one warning per serving node of which workers have no known host key.

    Args:
        workers: Of the fleet.
        keys: That are known, by alias.
        reasons: Node's full name -> why its host keys are missing.
    """
    lacking: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.node.state in SERVING_STATES and worker.host_key_alias not in keys:
            lacking.setdefault(worker.label, []).append(worker)
    return [f"{about(label)} {_refused(label, few, reasons)}" for label, few in lacking.items()]


def to_trust(worker: Worker) -> str:
    """Return what to do about a serving worker of which no host key is known, in words that follow its problem."""
    if not worker.node.node_id:
        return f"the API gives node {worker.label} no id, to which host keys are bound"
    return (
        f"node {worker.label} publishes no host key: `tpu_ops refresh --trust-first {worker.label}` shows its workers' "
        "fingerprints and records the keys once you confirm"
    )


def _refused(label: str, workers: Sequence[Worker], reasons: Mapping[str, str]) -> str:
    """Return why ssh to these workers of a node is refused, and what to do."""
    names = texts.some([worker.host for worker in workers], 4, "others")
    node = workers[0].node
    if not node.node_id:
        return f"the API gives it no id, to which host keys are bound, so ssh to {names} is refused"
    reason = reasons.get(node.full_name) or "its guest agent may still be starting"
    if reason.endswith(DENIED):
        return (
            f"you may not see which host keys it publishes, so ssh to {names} is refused ({reason}); ask for a role"
            " that may read guest attributes, or for a published snapshot (docs/members.md);"
            f" `tpu_ops refresh --trust-first {label}` would believe whoever answers at these addresses"
        )
    return (
        f"no host key published for {names}, so ssh there is refused"
        f" ({reason});"
        f" run `tpu_ops refresh` to ask again; if it never publishes one, `tpu_ops refresh --trust-first {label}`"
    )
