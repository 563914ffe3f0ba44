"""Compares learned host keys with known host keys, and reports workers without a known host key."""

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
    """Return the known host keys of a fleet, by alias."""
    return FleetFiles(settings.state_dir).host_keys()[0]


def has_keys(settings: Settings, workers: Iterable[Worker]) -> bool:
    """Return whether a host key is known for each of these workers."""
    known = keys_of(settings)
    return all(worker.host_key_alias in known for worker in workers)


#: End of a reason if this account has no permission to read a node's guest attributes. Other accounts can have it.
DENIED = "(PERMISSION_DENIED)"


class HostKeyAlarm(OpsError):
    """A worker publishes a host key that differs from the known host key of the same node id."""


def merge(
    known: Mapping[str, Keys],
    learned: Mapping[str, Keys],
    workers: Iterable[Worker],
    file: Path,
    trusted_first: Container[str] = (),
    *,
    replaced: Container[str] = (),
) -> dict[str, Keys]:
    """Return the known host keys and the keys that were learned from existing nodes.

    The keys of a node that is not listed stay known, since the node can come back with the same keys: perhaps it could
    not be listed, is stopped and has no addresses, or is missing from a published snapshot.

    Args:
        known: The keys in known_hosts.
        learned: The keys in the guest attributes.
        workers: All workers of the fleet.
        file: The known_hosts file, for the error.
        trusted_first: Aliases whose known keys were trusted on first contact only.
        replaced: Ids of nodes that were recreated, so that a node with this id cannot come back: its keys are dropped.

    Raises:
        HostKeyAlarm: A learned key differs from the known key of the same alias.
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
    """Return whether two sets of host keys cannot be of the same machine.

    A machine is allowed to add a type of key. It must not change a known key, and must still have at least one known
    key.
    """
    same = any(known.get(kind) == blob for kind, blob in found.items())
    return not same or any(known.get(kind, blob) != blob for kind, blob in found.items())


def alarm(alias: str, host: str, file: Path, *, trusted_first: bool) -> HostKeyAlarm:
    """Return the error for a worker that publishes a changed host key.

    Args:
        alias: The worker's alias.
        host: The worker's name.
        file: The known_hosts file.
        trusted_first: Whether the known key was trusted on first contact only.
    """
    what = (
        "the worker publishes a host key that DIFFERS from the key trusted on first contact; nothing was written. "
        "Another machine may have answered at first contact"
        if trusted_first
        else "the host key CHANGED although the node is the same; nothing was written. Either the worker's disk was "
        "replaced, or another machine answers at the worker's address"
    )
    return HostKeyAlarm(
        what,
        where=f"worker {host} (alias {alias})",
        fix=f"find out the reason first; then forget the old key with `ssh-keygen -R {alias} -f "
        f"{shlex.quote(str(file))}` "
        "and refresh",
    )


def another_machine(places: Sequence[str], alias: str, file: Path, *, published: bool) -> HostKeyAlarm:
    """Return the error for workers at whose addresses machines answer with other host keys than the known keys.

    Args:
        places: The workers with their addresses, as text.
        alias: The first worker's alias.
        file: The known_hosts file.
        published: Whether the node publishes the known key.
    """
    what = (
        "the machine that answers at this address does not have the known host key. Either the address was given to "
        "another machine, or somebody intercepts connections to this address, or the worker's host keys were replaced"
    )
    forget = f"forget the old key with `ssh-keygen -R {alias} -f {shlex.quote(str(file))}` and refresh"
    own = "reboot the worker, which then publishes the new key, and verify again" if published else forget
    return HostKeyAlarm(
        f"{what} without being published" if published else what,
        where=texts.some(places),
        fix="do not log in there; compare the fingerprint of the key with that on the worker's serial console "
        "(docs/ssh.md). If the key is "
        f"the worker's own, {own}; if not, report this to the administrator of the project's network",
    )


def compared(
    workers: Iterable[Worker], known: Container[str], published: Container[str], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return host -> why the known host key could not be compared with a published key, or "" if it was.

    Args:
        workers: The workers of the fleet.
        known: Aliases whose host keys were known before.
        published: Aliases whose host keys were learned.
        reasons: Node's full name -> why its host keys could not be learned.
    """
    return {
        worker.host: ""
        if worker.host_key_alias in published
        else reasons.get(worker.node.full_name) or "no host key is published for this worker"
        for worker in workers
        if worker.node.state in SERVING_STATES and worker.host_key_alias in known
    }


def is_denial(warning: str) -> bool:
    """Return whether a warning of `missing` says that this account has no permission to read the node's host keys."""
    return f"{DENIED}); " in warning


def about(label: str) -> str:
    """Return the beginning of every warning of `missing` about this node."""
    return f"node {label}:"


def missing(workers: Iterable[Worker], keys: Mapping[str, Keys], reasons: Mapping[str, str]) -> list[str]:
    """Return one warning for each READY node that has workers without a known host key.

    Args:
        workers: The workers of the fleet.
        keys: The known host keys, by alias.
        reasons: Node's full name -> why its host keys are missing.
    """
    lacking: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.node.state in SERVING_STATES and worker.host_key_alias not in keys:
            lacking.setdefault(worker.label, []).append(worker)
    return [f"{about(label)} {_refused(label, few, reasons)}" for label, few in lacking.items()]


def to_trust(worker: Worker) -> str:
    """Return the fix for a worker of a READY node without a known host key, as text that is appended to the problem."""
    if not worker.node.node_id:
        return f"the API gives node {worker.label} no id, and host keys are bound to the id"
    return (
        f"node {worker.label} publishes no host key: `tpu_ops refresh --trust-first {worker.label}` shows its workers' "
        "fingerprints and records the keys once you confirm"
    )


def _refused(label: str, workers: Sequence[Worker], reasons: Mapping[str, str]) -> str:
    """Return why ssh refuses to connect to these workers of a node, and the fix."""
    names = texts.some([worker.host for worker in workers], 4, "others")
    node = workers[0].node
    if not node.node_id:
        return f"the API gives the node no id, and host keys are bound to the id, so ssh to {names} is refused"
    reason = reasons.get(node.full_name) or "the node's guest agent may still be starting"
    if reason.endswith(DENIED):
        return (
            f"you have no permission to read the host keys that it publishes, so ssh to {names} is refused "
            f"({reason}); ask for a role"
            " that may read guest attributes, or for a published snapshot (docs/members.md);"
            f" `tpu_ops refresh --trust-first {label}` would trust any machine that answers at these addresses"
        )
    return (
        f"no host key published for {names}, so ssh there is refused"
        f" ({reason});"
        " run `tpu_ops refresh` to ask again; if the node never publishes a host key, `tpu_ops refresh "
        f"--trust-first {label}`"
    )
