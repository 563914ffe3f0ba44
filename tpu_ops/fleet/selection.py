"""Applies a fleet's settings to its nodes: which nodes pass the filters, and how their workers are reached."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, Node, Worker, node_labels, workers_of
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.fleet.state import Files
from tpu_ops.ssh import client_config, openssh, ways
from tpu_ops.ssh.ways import Ways


def of(settings: Settings, nodes: Sequence[Node]) -> tuple[tuple[Node, ...], list[Worker], dict[str, str]]:
    """Return the nodes that pass the filters, their workers and the labels of all nodes of the projects and zones."""
    labels = node_labels(nodes)
    chosen = tuple(
        node
        for node in nodes
        if settings.filters.match(node.name, labels[node.full_name], node.accelerator_type, node.labels)
    )
    return chosen, workers_of(chosen, labels), labels


def mux_dir() -> Path:
    """Return the directory for the control sockets of ssh."""
    return client_config.mux_dir(os.environ, os.getuid())


def ssh_options(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the ssh options that all workers of the fleet share, except for the user name and the first key."""
    more = [("IdentityFile", openssh.quoted(path)) for path in settings.more_keys]
    if settings.only_key:
        # sshd rejects a login after a few wrong keys, and ssh would offer the agent's keys first.
        more.append(("IdentitiesOnly", "yes"))
    return (*more, *client_config.common_options(Files(settings.state_dir).known_hosts))


def ansible_arguments(settings: Settings) -> str:
    """Return the ssh arguments that Ansible gets for all workers of the fleet.

    With these arguments ssh reads no configuration file. Only IdentityAgent and IdentityFile are copied from the user's
    own configuration: some users need them to log in, since they have no SSH_AUTH_SOCK.
    """
    from tpu_ops.ssh import identities

    named: tuple[tuple[str, str], ...] = ()
    with contextlib.suppress(OpsError):
        named = identities.named(openssh.home() / ".ssh" / "config")
    kept = [option for option in named if option[0] == "IdentityAgent" or not settings.only_key]
    return f"-F none {client_config.arguments((*ssh_options(settings), *kept))}"


def reached(settings: Settings, listed: Sequence[Node]) -> list[Worker]:
    """Return the workers of the fleet, and also the worker that is the jump host if the filters exclude it."""
    _, workers, labels = of(settings, listed)
    jump = ways_of(settings, listed).jump
    if not jump or any(worker.host == jump for worker in workers):
        return workers
    return [*workers, *(worker for worker in workers_of(listed, labels) if worker.host == jump)]


def ssh_config(settings: Settings) -> Path:
    """Return the path of the fleet's ssh_config for the login name in these settings."""
    return Files(settings.state_dir).ssh_config(settings.login)


def ssh_configs(settings: Settings, listed: Sequence[Node]) -> list[tuple[Path, str]]:
    """Return paths and texts of the fleet's ssh_config files: one for each login, and one for the jump host."""
    found, files = ways_of(settings, listed), Files(settings.state_dir)
    own = client_config.ssh_config(
        [(worker, found.of(worker)) for worker in reached(settings, listed)],
        user=settings.user,
        private_key=settings.private_key,
        options=ssh_options(settings),
        mux=mux_dir(),
        forward_agent=settings.forward_agent,
    )
    written = [(ssh_config(settings), own), *([(files.jump_config, found.jump_config)] if found.jump_config else [])]
    # Update the files of all logins together: they contain the same addresses.
    return list(dict([*(ssh_configs(settings.shared, listed) if settings.shared else ()), *written]).items())


def ways_of(settings: Settings, listed: Sequence[Node]) -> Ways:
    """Return the ways to the workers of a fleet, given all nodes of the projects and zones."""
    return Ways(settings, Files(settings.state_dir), mux_dir(), workers_of(listed) if settings.proxy_jump else ())


def unreachable(settings: Settings, listed: Sequence[Node], *, asked: bool = True) -> list[str]:
    """Return warnings about workers of READY nodes that cannot be reached, and about READY nodes without workers.

    Args:
        settings: The fleet's settings.
        listed: All nodes of the projects and zones.
        asked: Whether the workers' instance names were requested. If not, a missing name causes no warning about IAP.
    """
    found = ways_of(settings, listed)
    problems = ways.problems(
        (worker, found.of(worker))
        for worker in reached(settings, listed)
        if worker.node.state in SERVING_STATES and (asked or not settings.iap or worker.node.instance_names)
    )
    return [*problems, *without_endpoints(settings, listed)]


def without_endpoints(settings: Settings, listed: Sequence[Node]) -> list[str]:
    """Return a warning that names the READY nodes of the fleet without workers, if there are any."""
    nodes, _, labels = of(settings, listed)
    lacking = [labels[node.full_name] for node in nodes if node.state in SERVING_STATES and not node.worker_count]
    if not lacking:
        return []
    names = texts.some(sorted(lacking, key=texts.natural))
    again = "`tpu_ops refresh` asks the API again; if workers are still missing, delete the nodes and create them again"
    return [f"READY, but without workers, since the API lists no network endpoints: {names}; {again}"]


def doubts(settings: Settings, listed: Sequence[Node], before: Sequence[Node] = ()) -> tuple[str, ...]:
    """Return warnings about filters or a jump host in the settings that match no node, perhaps by mistake.

    Args:
        settings: The fleet's settings.
        listed: All nodes of the projects and zones.
        before: The nodes of the last listing.
    """
    found = []
    if listed and not of(settings, listed)[0]:
        filters = settings.filters
        named = {
            "names": filters.names,
            "labels": ["=".join((key, "|".join(values))) if values else key for key, values in filters.labels],
            "accelerator_types": filters.accelerator_types,
        }
        words = "; ".join(f"{name}: {', '.join(values)}" for name, values in named.items() if values)
        found.append(f"the filters match none of {texts.count(len(listed), 'node')} ({words}), see {settings.file}")
    if settings.proxy_jump:
        nodes = (*listed, *before)
        names = {node.name for node in nodes}.union(node_labels(listed).values(), node_labels(before).values())
        if lost := ways_of(settings, listed).lost_jump(names):
            found.append(lost)
    return tuple(found)
