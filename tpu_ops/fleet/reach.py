"""How each worker is reached: directly, through another host, or through Identity-Aware Proxy."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.config import Settings
from tpu_ops.fleet.model import Worker


@dataclass(frozen=True)
class Way:
    """How one worker is reached.

    Attributes:
        address: What ssh connects to; empty where there is no way.
        proxy: ssh's ProxyCommand, or empty.
        problem: Why there is no way, in words that follow the worker's name; empty where there is one.
    """

    address: str
    proxy: str = ""
    problem: str = ""


class Ways:
    """Finds the way to each worker of a fleet.

    Args:
        settings: Of the fleet.
        ssh_config: The fleet's OpenSSH configuration, for a jump through one of its workers.
        hosts: Inventory host names of all workers.
    """

    def __init__(self, settings: Settings, ssh_config: Path, hosts: Iterable[str]) -> None:
        self._settings = settings
        self._jump = settings.proxy_jump if settings.proxy_jump in set(hosts) else ""
        self._proxy = _jump_command(settings.proxy_jump, ssh_config if self._jump else None)

    def of(self, worker: Worker) -> Way:
        """Return the way to a worker: a proxy is taken only where its external address is not to be had."""
        settings = self._settings
        if worker.host == self._jump:
            lacking = "has no external address, and the others are to be reached through it"
            return Way(worker.external_ip, problem="" if worker.external_ip else lacking)
        found = address(worker, settings.connect_with)
        if not found:
            return Way("", problem=f"has no {' or '.join(settings.connect_with)} address")
        if found != worker.internal_ip or not (settings.iap or self._proxy):
            return Way(found)
        if not settings.iap:
            return Way(found, self._proxy)
        if not worker.instance_name:
            return Way("", problem="publishes no instance name, which the way through IAP needs")
        return Way(found, _iap_command(worker))


def address(worker: Worker, connect_with: Sequence[str]) -> str:
    """Return the address to reach a worker by, of the preferred kind it has; empty where it has none."""
    for kind in connect_with:
        if found := worker.external_ip if kind == "external" else worker.internal_ip:
            return found
    return ""


def _jump_command(jump: str, ssh_config: Path | None) -> str:
    """Return the ProxyCommand of a jump: a worker by the fleet's own configuration, any other host by the person's."""
    if not jump:
        return ""
    user, _, place = jump.rpartition("@")
    words = ["ssh", *(["-F", str(ssh_config).replace("%", "%%")] if ssh_config else []), "-o", "BatchMode=yes"]
    words += ["-l", user] if user else []
    host, colon, port = place.rpartition(":")
    if colon and not place.endswith("]"):
        words += ["-p", port]
        place = host
    return f"{shlex.join(words)} -W '[%h]:%p' {shlex.quote(place.strip('[]'))}"


def _iap_command(worker: Worker) -> str:
    words = ["gcloud", "compute", "start-iap-tunnel", worker.instance_name, "22", "--listen-on-stdin"]
    return shlex.join([*words, f"--project={worker.node.project}", f"--zone={worker.node.zone}", "--verbosity=warning"])
