"""Reads libtpu's metrics service of the processes that hold chips; only sockets of these processes or of root are used.

libtpu serves its metrics on a port of the process that has initialized it. Any user can listen on the usual port, so
the port is found by the socket that a process has open. If it has none, a socket of root on a usual port is used: it
belongs to the container engine, which publishes a port of a container.
"""

from __future__ import annotations

import os
import re
import time

from . import TYPE_CHECKING, listeners, proc, runtime_metrics
from .grpc_call import NOT_FOUND, UNAVAILABLE, UNIMPLEMENTED, CallError, Connection

if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Optional, Set, Tuple

    from .listeners import Listener

#: The port of libtpu's service, if no variable or option says otherwise.
KNOWN_PORTS = (8431,)
#: Maximum number of bytes that are read from one service.
MAX_BYTES = 1024 * 1024
#: Number of other ports of one process that are tried.
_OTHER_PORTS = 8
_PORT_OPTION = re.compile(r"--runtime_metric_service_port=([0-9]{1,5})\b")
#: All processes that use a chip by vfio have this file open.
_VFIO = "/dev/vfio/vfio"


def read(
    holders: list[Dict[str, Any]], host_chips: int, limit: float = 2.0, known: Iterable[int] = KNOWN_PORTS
) -> list[Dict[str, Any]]:
    """Return the services of processes that hold chips.

    Args:
        holders: The processes as `proc.holders` returns them.
        host_chips: The number of chips of this host.
        limit: Maximum number of seconds in all.
        known: The ports to try first, and on which a socket of root is used.

    Returns:
        For each process that serves metrics, or should: ``pid``, ``port`` (0 if there is none), ``state``, ``why`` and
        ``cores``. ``state`` is ``ok``, ``warming``, ``none``, ``silent`` or ``broken``. Processes that share the chips
        or the socket of another process are left out, as are children that a process has forked.
    """
    return [service for service, _ in _read(holders, host_chips, time.monotonic() + limit, known)]


def read_with_states(
    holders: list[Dict[str, Any]], host_chips: int, limit: float = 2.0, known: Iterable[int] = KNOWN_PORTS
) -> list[Dict[str, Any]]:
    """Return the services like `read`, each also with ``core_states``.

    These are the states of its cores (see `runtime_metrics.core_states`), or None if the service does not tell them.
    They are read in the time that all metrics have left.
    """
    deadline = time.monotonic() + limit
    found = _read(holders, host_chips, deadline, known)
    for number, (service, listener) in enumerate(found):
        now = time.monotonic()
        share = now + (deadline - now) / (len(found) - number)
        tells = service["state"] in ("ok", "warming")
        service["core_states"] = _core_states(listener, share) if listener is not None and tells else None
    return [service for service, _ in found]


def _read(
    holders: list[Dict[str, Any]], host_chips: int, deadline: float, known: Iterable[int]
) -> list[Tuple[Dict[str, Any], Optional[Listener]]]:
    """Return the services and the socket of each."""
    holders = [holder for holder in holders if _chips(holder)]
    tables = listeners.Tables()
    owned = listeners.of_processes([holder["pid"] for holder in holders], tables, (time.monotonic() + deadline) / 2)
    taken = {each.inode for own in owned.values() for each in own}
    of_root = [each for each in tables.of(os.getpid()) if each.uid == 0 and each.inode not in taken] if holders else []
    used: list[Listener] = []
    services: list[Tuple[Dict[str, Any], Optional[Listener]]] = []
    served: Set[str] = set()
    for holder in holders:
        own = owned.get(holder["pid"], [])
        if {each.inode for each in own} & {each.inode for each in used}:
            continue  # it has the socket from the process that forked it
        # Not an equal share for each: most holders are children, such as data loaders, and have nothing to ask.
        now = time.monotonic()
        share = now + (deadline - now) / 2
        unused = [each for each in of_root if each not in used]
        usual, counts = _named_ports(holder["pid"]) | set(known), {len(_chips(holder)), host_chips}
        service, listener = _of(holder, own, unused, usual, counts=counts, deadline=share)
        if listener is not None:
            if any(listener.same_port(each) for each in used):
                # Several processes can share a port by SO_REUSEPORT; the kernel chooses which of them answers.
                service = dict(_none(holder), why="it shares port {} with another process".format(listener.port))
            used.append(listener)
        if service["state"] != "none":
            served |= _chips(holder)
        services.append((service, listener))
    chips = {holder["pid"]: _chips(holder) for holder in holders}
    return [each for each in services if each[0]["state"] != "none" or not chips[each[0]["pid"]] <= served]


def _chips(holder: Dict[str, Any]) -> Set[str]:
    """Return the device files of chips that a process has open."""
    return set(holder["devices"]) - {_VFIO}


def _none(holder: Dict[str, Any]) -> Dict[str, Any]:
    why = "it listens on no port of libtpu's metrics service"
    return {"pid": holder["pid"], "port": 0, "state": "none", "why": why, "cores": []}


def _of(
    holder: Dict[str, Any],
    own: list[Listener],
    of_root: list[Listener],
    usual: Set[int],
    *,
    counts: Set[int],
    deadline: float,
) -> Tuple[Dict[str, Any], Optional[Listener]]:
    """Return the service of a process, and its socket: on a usual port, or on another port of its own."""
    pid = holder["pid"]
    for each in (*own, *of_root):
        if each.port in usual:
            return dict(_ask(each, counts, deadline), pid=pid), each
    others = own[:_OTHER_PORTS]
    for number, each in enumerate(others):
        now = time.monotonic()
        found = _ask(each, counts, now + (deadline - now) / (len(others) - number))
        if found["state"] in ("ok", "warming"):
            return dict(found, pid=pid), each
    return _none(holder), None


def _named_ports(pid: int) -> Set[int]:
    """Return the ports that the environment of a process names for the service."""
    found: Set[int] = set()
    for entry in proc.read_text("/proc/{}/environ".format(pid)).split("\0"):
        name, _, value = entry.partition("=")
        if name == "TPU_RUNTIME_METRICS_PORTS":
            found.update(int(word) for word in value.split(",") if re.fullmatch("[0-9]{1,5}", word))
        elif name == "LIBTPU_INIT_ARGS":
            found.update(map(int, _PORT_OPTION.findall(value)))
    return found


def _ask(listener: Listener, counts: Set[int], deadline: float) -> Dict[str, Any]:
    """Return the metrics of the service on a socket, without the process."""
    service = {"port": listener.port, "why": "", "cores": []}
    try:
        values = _values(listener, deadline)
        state, why, cores = runtime_metrics.described(values, counts)
    except runtime_metrics.Nonsense as exc:
        return dict(service, state="broken", why="it answers nonsense: {}".format(exc))
    except CallError as exc:
        if exc.kind == "refused":
            return dict(service, port=0, state="none", why="the port is closed: {}".format(exc))
        if exc.status == UNIMPLEMENTED:
            return dict(service, state="broken", why="it is another service: it has no metrics of libtpu")
        return dict(service, state="silent" if exc.kind == "silent" else "broken", why=str(exc))
    except OSError as exc:
        return dict(service, state="broken", why=exc.strerror or str(exc))
    return dict(service, state=state, why=why, cores=cores)


def _values(listener: Listener, deadline: float) -> Dict[str, Dict[int, Any]]:
    """Return the gauges by their key in results, without the metrics that the service does not have.

    Raises:
        CallError: The service does not answer, or answers an error.
        Nonsense: An answer is not valid.
        OSError: There is no socket to connect.
    """
    found = {}
    made, address = listeners.socket_to(listener)
    with made, Connection(made, address, deadline, MAX_BYTES) as connection:
        for key, name in {**runtime_metrics.BASIC, **runtime_metrics.OPTIONAL}.items():
            try:
                found[key] = runtime_metrics.gauges(
                    connection.call(runtime_metrics.PATH, runtime_metrics.request(name))
                )
            except CallError as exc:
                if exc.status not in (NOT_FOUND, UNAVAILABLE):
                    raise
    return found


def _core_states(listener: Listener, deadline: float) -> Optional[list[Dict[str, Any]]]:
    """Return the states of the cores of a service; None if it does not have them or fails to tell them."""
    try:
        made, address = listeners.socket_to(listener)
        with made, Connection(made, address, deadline, MAX_BYTES) as connection:
            answer = connection.call(runtime_metrics.STATES_PATH, runtime_metrics.STATES_REQUEST)
        return runtime_metrics.core_states(answer)
    except (CallError, runtime_metrics.Nonsense, OSError):
        return None
