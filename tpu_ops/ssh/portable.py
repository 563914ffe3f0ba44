"""A fleet's ssh configuration for a person who does not have tpu_ops: only options that every OpenSSH knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_ops.cloud.node import Worker
from tpu_ops.config import Settings
from tpu_ops.ssh import client_config, known_hosts
from tpu_ops.ssh.known_hosts import Keys
from tpu_ops.ssh.ways import SSH_PORT, Ways

#: What a person needs for connections through Identity-Aware Proxy.
_IAP = (
    "ssh connects through gcloud: install it, and log in with `gcloud auth login`. "
    "You need the role IAP-secured Tunnel User."
)


class Portable(NamedTuple):
    """Texts for the files of a person's own ssh.

    Attributes:
        config: For the top of ``~/.ssh/config``. It ends with ``Host *``, so that the options below it still apply to
            all hosts.
        known_hosts: For ``~/.ssh/known_hosts``.
        left_out: Worker -> why it is in neither text, as a verb phrase.
        needs: What else the person needs, as a sentence; empty if nothing.
    """

    config: str
    known_hosts: str
    left_out: dict[str, str]
    needs: str = ""


def portable(
    ways: Ways,
    settings: Settings,
    workers: Sequence[Worker],
    *,
    user: str,
    keys: Mapping[str, Keys],
) -> Portable:
    """Return the configuration with which a person reaches workers.

    Args:
        ways: How the workers are reached from here.
        settings: The fleet's settings.
        workers: The workers where the person has an account; the jump host is one of them if it is a worker.
        user: The person's login name.
        keys: The known host keys by alias.
    """
    left_out, blocks, aliases, proxied, needs = {}, [], [], False, ""
    names = client_config.names(workers)
    for worker in workers:
        way = ways.of(worker)
        if way.problem or worker.host_key_alias not in keys:
            left_out[worker.host] = way.problem or "has no known host key"
            continue
        proxy = f"ProxyCommand {way.proxy}" if settings.iap else f"ProxyJump {_jump(ways, settings)}"
        proxied = proxied or bool(way.proxy)
        blocks.append(_block(names[worker.host], worker, way.address, user, [proxy] if way.proxy else []))
        aliases.append(worker.host_key_alias)
    if proxied and (settings.iap or ways.outside):
        needs = _IAP if settings.iap else f"You also need an account on {ways.outside}, through which ssh connects."
    config = "\n".join([*("\n".join(block) + "\n" for block in blocks), "Host *\n"])
    return Portable(config, known_hosts.text_of({alias: keys[alias] for alias in aliases}), left_out, needs)


def _jump(ways: Ways, settings: Settings) -> str:
    """Return the jump host for ssh's ProxyJump: a worker by its name in the configuration, else as in the settings."""
    port = ways.jump_place[1]
    return f"{ways.jump}{'' if port == SSH_PORT else f':{port}'}" if ways.jump else settings.proxy_jump


def _block(names: list[str], worker: Worker, address: str, user: str, more: list[str]) -> list[str]:
    options = [
        f"HostName {address}",
        f"User {user}",
        f"HostKeyAlias {worker.host_key_alias}",
        "StrictHostKeyChecking yes",
        "ServerAliveInterval 15",
        *more,
    ]
    return [f"Host {' '.join(names)}", *(f"    {option}" for option in options)]
