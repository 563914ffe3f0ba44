"""Decides how each worker is reached: directly, through a jump host, or through Identity-Aware Proxy (IAP)."""

import contextlib
import hashlib
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.ssh import openssh
from tpu_ops.ssh.fleet_files import FleetFiles
from tpu_ops.ssh.mux import Master

#: Port of the workers' sshd.
SSH_PORT = 22
#: Maximum number of nodes that a warning lists.
_MOST_NODES = 8


#: Number of hexadecimal digits of the worker's part of a control socket's name, and length of the whole name in bytes.
#: ssh's %C is a digest of 40 digits, made of this machine's name and the address, port and user of the connection.
_ALIAS_DIGITS = 8
CONTROL_NAME = 40 + 1 + _ALIAS_DIGITS

#: Seconds to connect through gcloud, which starts slowly, especially if several gcloud processes start at once.
_IAP_PATIENCE = 20


class Way(NamedTuple):
    """How one worker is reached.

    Attributes:
        address: The address for ssh; empty if there is no way.
        proxy: ssh's ProxyCommand, or empty.
        problem: Why the worker cannot be reached, as a verb phrase that follows its name; empty if there is a way.
        control: ssh's ControlPath. The path depends on the worker and the way, not only on the address, since two
            workers behind proxies can have the same address.
        patience: ssh's ConnectTimeout in seconds; 0 means the default.
    """

    address: str
    proxy: str = ""
    problem: str = ""
    control: str = ""
    patience: int = 0


class Ways:
    """Finds the way to each worker of a fleet.

    Args:
        settings: The fleet's settings.
        files: The fleet's files.
        mux: The directory of the control sockets.
        workers: All workers of the projects and zones, since the filters may exclude the jump host.

    Attributes:
        jump: Name of the jump host if it is a worker of the projects and zones; else empty.
        jump_place: Address and port of the worker ``jump``; the address is empty if there is no such worker.
        jump_alias: Alias of the worker ``jump`` in known_hosts, or empty.
        outside: Name, for ssh, of the jump host if it is not a worker; else empty.
        outside_options: ssh options that precede the name ``outside``.
        lead: How ssh reaches the jump host; None if there is no jump host.
        jump_config: Text of the OpenSSH configuration for a jump host that is not a worker; else empty.
    """

    def __init__(self, settings: Settings, files: FleetFiles, mux: Path, workers: Iterable[Worker]) -> None:
        self._settings, self._mux = settings, mux
        self.jump, self.outside, self._proxy, self.jump_config, self._blocked = "", "", "", "", ""
        self.jump_place, self.jump_alias = ("", SSH_PORT), ""
        self.outside_options: tuple[str, ...] = ()
        self.lead: openssh.Jump | None = None
        if settings.proxy_jump:
            options, place = _jump_words(settings.proxy_jump)
            known = {worker.host: worker for worker in workers}
            # If proxy_jump is the name of a node, the jump host is the node's worker 0, as for `tpu_ops ssh`.
            place = next((host for host in (place, f"{place}-w0") if host in known), place)
            own = place in known
            self.jump = place if own else ""
            config = files.ssh_config(settings.login) if own else files.jump_config
            self._proxy, self.lead = _jump_command(config, options, place), openssh.Jump(config, tuple(options), place)
            self.jump_config = "" if own else _jump_config(mux)
            self.outside, self.outside_options = ("", ()) if own else (place, tuple(options))
            if own:
                self._blocked = self._block_of(known[place])
                port = int(options[-1]) if "-p" in options else SSH_PORT
                self.jump_place, self.jump_alias = (self._address(known[place])[0], port), known[place].host_key_alias

    def lost_jump(self, names: Collection[str]) -> str:
        """Return a warning if the jump host is no worker but has the name of one of these nodes or of its worker."""
        if not {self.outside, re.sub(r"-w[0-9]+$", "", self.outside)} & {*names}:
            return ""
        return (
            f"proxy_jump {self.outside}: no worker of the projects and zones has this name now, so ssh uses a "
            "machine outside the fleet, without the fleet's host key; "
            "`tpu_ops list` shows the workers"
        )

    @property
    def proxies(self) -> bool:
        """Whether any worker is perhaps reached through a proxy."""
        return bool(self._proxy) or self._settings.iap

    def of(self, worker: Worker) -> Way:
        """Return the way to a worker; a proxy is used only if the worker has no usable external address."""
        found, problem = self._address(worker)
        if problem:
            return Way("", problem=problem)
        control = self.control(worker, found)
        if found != worker.internal_ip or not (self._settings.iap or self._proxy):
            return Way(found, control=control)
        if self._blocked:
            return Way("", problem=self._blocked)
        proxy = self._proxy_to(worker, found)
        if not self._settings.iap:
            return Way(found, proxy, control=control)
        if not proxy:
            return Way("", problem="publishes no instance name, which connections through IAP need")
        return Way(found, proxy, control=control, patience=_IAP_PATIENCE)

    def master(self, worker: Worker) -> Master | None:
        """Return where the ssh master of a worker listens, if it runs; None if there is no way to the worker."""
        way = self.of(worker)
        if not way.control:
            return None
        path = openssh.control_socket(way.control, self._settings.user, way.address)
        return Master(path, self._settings.forward_agent)

    def control(self, worker: Worker, found: str) -> str:
        """Return ssh's ControlPath for a worker at an address.

        The path depends on the proxy and the key, so that a connection by another proxy or key is never used.
        """
        return control_path(self._mux, worker, f" {self._settings.private_key} {self._proxy_to(worker, found)}")

    def _proxy_to(self, worker: Worker, found: str) -> str:
        """Return the ProxyCommand to a worker at an address, or ""."""
        if found != worker.internal_ip:
            return ""
        if not self._settings.iap:
            return self._proxy
        return _iap_command(worker) if worker.instance_name else ""

    def _block_of(self, jump: Worker) -> str:
        """Return why no worker can be reached through this worker as jump host, or ""."""
        why = "which has no external address" if self._address(jump)[1] else ""
        if jump.node.state not in SERVING_STATES:
            why = f"whose node is {jump.node.state}"
        return f"is to be reached through {jump.host} (proxy_jump), {why}" if why else ""

    def _address(self, worker: Worker) -> tuple[str, str]:
        """Return a worker's address for ssh, and why there is no usable address: one of the two is empty."""
        if worker.host == self.jump:
            lacking = "has no external address, and the other workers are to be reached through it"
            return worker.external_ip, "" if worker.external_ip else lacking
        kinds = self._settings.connect_with
        found = address(worker, kinds)
        return found, "" if found else f"has no {' or '.join(kinds)} address"


def control_path(mux: Path, worker: Worker, how: str = "") -> str:
    """Return ssh's ControlPath for a worker, in the syntax of ssh options; ``how`` identifies the way."""
    own = hashlib.sha256(f"{worker.host_key_alias}{how}".encode()).hexdigest()[:_ALIAS_DIGITS]
    return _socket(mux, f"%C.{own}")


def _socket(mux: Path, name: str) -> str:
    """Return the path of a control socket in the syntax of ssh options; ``name`` can contain tokens such as %C."""
    # Quotes are enough for the directory: `client_config.mux_dir` accepts only plain paths.
    return f'"{mux}/{name}"' if " " in str(mux) else f"{mux}/{name}"


def host_name(worker: Worker, way: Way) -> str:
    """Return the address of a worker for ssh. Without an address, return a name that cannot be resolved."""
    return way.address or f"{worker.host}.has-no-address.invalid"


def problems(ways: Iterable[tuple[Worker, Way]]) -> list[str]:
    """Return one warning for each reason why workers cannot be reached, with the names of these workers."""
    lacking: dict[str, dict[str, list[Worker]]] = {}
    for worker, way in ways:
        if way.problem:
            lacking.setdefault(way.problem, {}).setdefault(worker.label, []).append(worker)
    found = []
    for problem, nodes in lacking.items():
        count = sum(map(len, nodes.values()))
        names = ", ".join(_folded(label, workers) for label, workers in list(nodes.items())[:_MOST_NODES])
        more = f" and those of {len(nodes) - _MOST_NODES} more nodes" if len(nodes) > _MOST_NODES else ""
        if count == 1:
            found.append(f"worker {names} cannot be reached: it {problem}")
        else:
            found.append(f"{count} workers cannot be reached, each {problem}: {names}{more}")
    return found


def _folded(label: str, workers: Sequence[Worker]) -> str:
    """Return workers of one node, which are sorted by index, as a node set such as ``pod-w[0-2,5]``."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and runs[-1][-1] == worker.index - 1:
            runs[-1].append(worker.index)
        else:
            runs.append([worker.index])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{label}-w{text}" if len(workers) == 1 else f"{label}-w[{text}]"


def address(worker: Worker, connect_with: Sequence[str]) -> str:
    """Return a worker's address of the first kind in ``connect_with`` that the worker has; else empty."""
    for kind in connect_with:
        if found := worker.external_ip if kind == "external" else worker.internal_ip:
            return found
    return ""


def _jump_words(jump: str) -> tuple[list[str], str]:
    """Split ``[user@]host[:port]`` into ssh options and the host."""
    user, _, place = jump.rpartition("@")
    options = ["-l", user] if user else []
    host, colon, port = place.rpartition(":")
    if colon and not place.endswith("]"):
        options += ["-p", port]
        place = host
    return options, place.strip("[]")


def _jump_command(ssh_config: Path, options: Sequence[str], place: str) -> str:
    """Return the ProxyCommand that leads through a jump host.

    BatchMode is not set: in the user's own ssh, which has a terminal, the jump host's ssh can ask for a passphrase or a
    second factor. Under the commands and Ansible there is no terminal, so it cannot ask.
    """
    words = ["ssh", "-F", str(ssh_config).replace("%", "%%"), *options]
    return f"{shlex.join(words)} -W '[%h]:%p' {shlex.quote(place)}"


def _jump_config(mux: Path) -> str:
    """Return the OpenSSH configuration for a jump host: the user's own, and one shared connection for all workers.

    Without the shared connection, many workers at once would exceed the number of logins that the jump host's sshd
    accepts.
    """
    lines = ["# Written by tpu_ops: your own configuration, and one connection to the jump for all workers behind it."]
    with contextlib.suppress(OpsError):
        lines.append(openssh.include(openssh.home() / ".ssh" / "config"))
    lines += [openssh.include(Path("/etc/ssh/ssh_config")), *openssh.guard(mux), "Host *"]
    lines += [
        "    ControlMaster auto",
        f"    ControlPath {_socket(mux, '%C')}",
        "    ControlPersist 10m",
        "    ServerAliveInterval 5",
        "    ServerAliveCountMax 3",
    ]
    return "\n".join(lines) + "\n"


def _iap_command(worker: Worker) -> str:
    words = ["gcloud", "compute", "start-iap-tunnel", worker.instance_name, "%p", "--listen-on-stdin"]
    return shlex.join([*words, f"--project={worker.node.project}", f"--zone={worker.node.zone}", "--verbosity=error"])
