"""How each worker is reached: directly, through another host, or through Identity-Aware Proxy."""

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

#: Where workers listen.
SSH_PORT = 22
#: Nodes that a warning names.
_MOST_NODES = 8


#: Hexadecimal digits of a worker's own part of its control socket's name, and bytes of the whole name: ssh's %C is a
#: digest of 40, of this machine's name and the address, port and user that it connects to.
_ALIAS_DIGITS = 8
CONTROL_NAME = 40 + 1 + _ALIAS_DIGITS

#: Seconds that gcloud may take until ssh hears the worker: it starts slowly, and several of them still more so.
_IAP_PATIENCE = 20


class Way(NamedTuple):
    """How one worker is reached.

    Attributes:
        address: What ssh connects to; empty where there is no way.
        proxy: ssh's ProxyCommand, or empty.
        problem: Why there is no way, in words that follow the worker's name; empty where there is one.
        control: ssh's ControlPath. It is bound to the worker and the way, not to the address alone: behind proxies two
            workers may have the same one.
        patience: ssh's ConnectTimeout in seconds, where it differs from the others'.
    """

    address: str
    proxy: str = ""
    problem: str = ""
    control: str = ""
    patience: int = 0


class Ways:
    """Finds the way to each worker of a fleet.

    Args:
        settings: Of the fleet.
        files: Of the fleet.
        mux: The directory of the control sockets.
        workers: All workers of the projects and zones: filters narrow what is listed, and not what a jump may be.

    Attributes:
        jump: Worker of the fleet through which others are reached, or empty.
        jump_place: Address and port of that; the address is empty where there is no such worker, or it has none.
        jump_alias: Its alias in known_hosts, or empty.
        outside: Name, as ssh gets it, of a jump that is no worker of the fleet, or empty.
        outside_options: Options of ssh that go before that.
        lead: How ssh reaches the jump, a worker or not; None where there is none.
        jump_config: OpenSSH configuration for the jump, or empty where there is none or it is a worker of the fleet.
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
            # A node means its worker 0, as for `tpu_ops ssh`.
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
        """Given names and labels of nodes, return a warning where the jump seems to be of one and is no worker."""
        if not {self.outside, re.sub(r"-w[0-9]+$", "", self.outside)} & {*names}:
            return ""
        return (
            f"proxy_jump {self.outside}: no worker of the projects and zones is called that now, so ssh takes it for "
            "a machine outside the fleet, without the fleet's host key; "
            "`tpu_ops list` shows the workers"
        )

    @property
    def proxies(self) -> bool:
        """Whether any worker may be reached through a proxy."""
        return bool(self._proxy) or self._settings.iap

    def of(self, worker: Worker) -> Way:
        """Return the way to a worker: a proxy is taken only where its external address is not to be had."""
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
            return Way("", problem="publishes no instance name, which the way through IAP needs")
        return Way(found, proxy, control=control, patience=_IAP_PATIENCE)

    def master(self, worker: Worker) -> Master | None:
        """Return where ssh's master for a worker listens, if there is one; None where there is no way to the worker."""
        way = self.of(worker)
        if not way.control:
            return None
        path = openssh.control_socket(way.control, self._settings.user, way.address)
        return Master(path, self._settings.forward_agent)

    def control(self, worker: Worker, found: str) -> str:
        """Return ssh's ControlPath for a worker at an address.

        Another proxy or key makes another one, so that no connection is used which was opened another way.
        """
        return control_path(self._mux, worker, f" {self._settings.private_key} {self._proxy_to(worker, found)}")

    def _proxy_to(self, worker: Worker, found: str) -> str:
        """Return the ProxyCommand to a worker at an address; empty where there is none."""
        if found != worker.internal_ip:
            return ""
        if not self._settings.iap:
            return self._proxy
        return _iap_command(worker) if worker.instance_name else ""

    def _block_of(self, jump: Worker) -> str:
        """Return why no worker can be reached through a worker, or nothing."""
        why = "which has no external address" if self._address(jump)[1] else ""
        if jump.node.state not in SERVING_STATES:
            why = f"whose node is {jump.node.state}"
        return f"is to be reached through {jump.host} (proxy_jump), {why}" if why else ""

    def _address(self, worker: Worker) -> tuple[str, str]:
        """Return a worker's address, and why it has none to be reached by."""
        if worker.host == self.jump:
            lacking = "has no external address, and the others are to be reached through it"
            return worker.external_ip, "" if worker.external_ip else lacking
        kinds = self._settings.connect_with
        found = address(worker, kinds)
        return found, "" if found else f"has no {' or '.join(kinds)} address"


def control_path(mux: Path, worker: Worker, how: str = "") -> str:
    """Return ssh's ControlPath for a worker that is reached in some way, as its options take it."""
    own = hashlib.sha256(f"{worker.host_key_alias}{how}".encode()).hexdigest()[:_ALIAS_DIGITS]
    return _socket(mux, f"%C.{own}")


def _socket(mux: Path, name: str) -> str:
    """Return the path of a control socket as ssh's options take it; its name may hold tokens."""
    # The directory needs no more than quotes: `ssh_files.mux_dir` takes only plain ones.
    return f'"{mux}/{name}"' if " " in str(mux) else f"{mux}/{name}"


def host_name(worker: Worker, way: Way) -> str:
    """Return what ssh connects to: an address, or a name that cannot exist, so that no other machine answers."""
    return way.address or f"{worker.host}.has-no-address.invalid"


def problems(ways: Iterable[tuple[Worker, Way]]) -> list[str]:
    """Return one warning per reason for which workers have no way, however many there are; names the workers."""
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
    """Workers of one node, sorted by index, as a node set: ``pod-w[0-2,5]``."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and runs[-1][-1] == worker.index - 1:
            runs[-1].append(worker.index)
        else:
            runs.append([worker.index])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{label}-w{text}" if len(workers) == 1 else f"{label}-w[{text}]"


def address(worker: Worker, connect_with: Sequence[str]) -> str:
    """Return the address to reach a worker by, of the preferred kind it has; empty where it has none."""
    for kind in connect_with:
        if found := worker.external_ip if kind == "external" else worker.internal_ip:
            return found
    return ""


def _jump_words(jump: str) -> tuple[list[str], str]:
    """Given ``[user@]host[:port]``, return it as ssh's options and the host."""
    user, _, place = jump.rpartition("@")
    options = ["-l", user] if user else []
    host, colon, port = place.rpartition(":")
    if colon and not place.endswith("]"):
        options += ["-p", port]
        place = host
    return options, place.strip("[]")


def _jump_command(ssh_config: Path, options: Sequence[str], place: str) -> str:
    """Return the ProxyCommand of a jump.

    Nothing here keeps ssh from asking for a passphrase or a second factor: the commands and Ansible run it without a
    terminal, where it cannot ask, and a person's own ssh has one.
    """
    words = ["ssh", "-F", str(ssh_config).replace("%", "%%"), *options]
    return f"{shlex.join(words)} -W '[%h]:%p' {shlex.quote(place)}"


def _jump_config(mux: Path) -> str:
    """Return the text of the OpenSSH configuration for a jump: the person's own, and one connection for all.

    Without one connection that all share, many workers at once would be more than the jump's sshd lets in.
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
