"""The TCP sockets on which processes listen, by the kernel's tables, and connections to them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Tuple

#: The state LISTEN in /proc/net/tcp, and the flag of setns(2) for a network namespace.
_LISTEN = "0A"
_CLONE_NEWNET = 0x40000000
#: Errors of a host whose loopback interface has no IPv6 address.
_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class Listener:
    """A socket that listens.

    Attributes:
        pid: A process of the network namespace that the socket is in; the same one for all sockets in it.
        host: The address, which can be that of all interfaces.
        uid: The user id of the socket's owner.
        inode: The number by which open files name the socket.
    """

    def __init__(self, pid: int, host: str, port: int, uid: int, inode: int) -> None:
        self.pid = pid
        self.host = host
        self.port = port
        self.uid = uid
        self.inode = inode

    def same_port(self, other: Listener) -> bool:
        """Return whether a connection to this socket can reach another socket instead."""
        return (self.pid, self.host, self.port) == (other.pid, other.host, other.port)


def parse(lines: Iterable[str], pid: int = 0) -> list[Listener]:
    """Return the listening sockets in the lines of /proc/net/tcp or tcp6, which lists these sockets first."""
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) < 10 or fields[0] == "sl":
            continue
        if fields[3] != _LISTEN:
            break  # connections follow, which can be many thousand
        address, _, port = fields[1].partition(":")
        found.append(Listener(pid, _host(address), int(port, 16), int(fields[7]), int(fields[9])))
    return found


def _host(text: str) -> str:
    """Return an address that the kernel shows as words of four bytes in the host's byte order, which is x86-64's."""
    raw = bytes.fromhex(text)
    raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def of_namespace(pid: int) -> list[Listener]:
    """Return all listening sockets in the network namespace of a process."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open("/proc/{}/net/{}".format(pid, name), encoding="ascii") as file:
            found += parse(file, pid)
    return found


def namespace(pid: int) -> str:
    """Return the name of a process's network namespace; empty if the process has ended."""
    try:
        return os.readlink("/proc/{}/ns/net".format(pid))
    except OSError:
        return ""


class Tables:
    """The listening sockets of network namespaces, each read once: the kernel walks all connections for it."""

    def __init__(self) -> None:
        self._read: Dict[str, list[Listener]] = {}

    def of(self, pid: int) -> list[Listener]:
        """Return all listening sockets in the network namespace of a process."""
        name = namespace(pid)
        if name not in self._read:
            self._read[name] = of_namespace(pid)
        return self._read[name]


def of_processes(pids: Iterable[int], tables: Tables, deadline: float) -> Dict[int, list[Listener]]:
    """Return the listening sockets that each process has open, ordered by port.

    Args:
        pids: The processes.
        tables: The sockets that were read.
        deadline: When to end the search, in seconds of the monotonic clock: any user can have millions of files open.
    """

    def in_time() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError  # an OSError, with which this process counts as ended

    groups: Dict[str, list[int]] = {}
    for pid in pids:
        groups.setdefault(namespace(pid), []).append(pid)
    found: Dict[int, list[Listener]] = {}
    for group in groups.values():
        known = {"socket:[{}]".format(each.inode): each for each in tables.of(group[0])}
        opened = proc.holders(only=group, paths=list(known), beat=in_time) if known else []
        for entry in opened:
            found[entry["pid"]] = sorted((known[name] for name in entry["devices"]), key=lambda each: each.port)
    return found


def by_ipv4(listener: Listener, known: Iterable[Listener]) -> str:
    """Return the IPv4 address by which its host reaches a socket; empty if there is none, or another socket is there.

    Args:
        listener: The socket.
        known: All sockets of its network namespace.
    """
    if not _ipv4(listener.host):
        shared = any(_ipv4(each.host) and each.port == listener.port for each in known)
        return "" if shared or listener.host != "::" else "127.0.0.1"
    return "127.0.0.1" if _ipv4(listener.host) == "0.0.0.0" else _ipv4(listener.host)  # noqa: S104 - compared only


def _ipv4(host: str) -> str:
    """Return an IPv4 address, which can be written as IPv6; empty for other addresses of IPv6."""
    address = host.rpartition(":")[2]
    return address if "." in address else ""


def socket_to(listener: Listener) -> Tuple[socket.socket, Tuple[Any, ...]]:
    """Return a new socket in the network namespace of a listener, and the address to connect it to.

    Raises:
        OSError: There is no such socket.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listener.host, listener.host)  # noqa: S104 - compared only
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = _made_in(listener.pid, family)
    if listener.host == "::":
        # Without IPv6 on the loopback interface, reach the socket by IPv4, unless another one listens there.
        with contextlib.closing(_made_in(listener.pid, socket.AF_INET6)) as trial:
            try:
                trial.bind((host, 0))
            except OSError as exc:
                made.close()
                address = by_ipv4(listener, of_namespace(listener.pid))
                if exc.errno not in _NO_IPV6 or not address:
                    raise
                return _made_in(listener.pid, socket.AF_INET), (address, listener.port)
    return made, (host, listener.port)


def _made_in(pid: int, family: int) -> socket.socket:
    """Return a new TCP socket in the network namespace of a process."""
    if namespace(pid) == namespace(os.getpid()):
        return socket.socket(family, socket.SOCK_STREAM)
    made: list[socket.socket] = []
    errors: list[OSError] = []

    def make() -> None:
        try:
            _enter(pid)
            made.append(socket.socket(family, socket.SOCK_STREAM))
        except OSError as exc:
            errors.append(exc)

    # A namespace belongs to a thread: the change ends with it.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join()
    if not made:
        raise errors[0] if errors else OSError(errno.EIO, "no socket in the network namespace of pid {}".format(pid))
    return made[0]


def _enter(pid: int) -> None:
    """Have this thread enter the network namespace of a process."""
    import ctypes  # imported late: it takes as long as all other imports

    with open("/proc/{}/ns/net".format(pid), "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace of pid {}".format(pid))
