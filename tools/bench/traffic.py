"""Count the bytes between this machine and workers: what the sockets of its ssh connections have carried."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import NamedTuple

from tpu_ops.errors import OpsError

#: ss prints one line for each established connection to a port 22, with what the kernel has counted.
_SS = ("ss", "--tcp", "--info", "--numeric", "--no-header", "--oneline", "dport", "=", ":22")
_COUNT = re.compile(r" bytes_(sent|received):(\d+)")
#: Seconds between two readings during a run: connections that close in between lose at most what they carried then.
PERIOD = 0.5


class Bytes(NamedTuple):
    """Numbers of bytes, as this machine sees them: of the TCP streams, encrypted and maybe compressed."""

    sent: int = 0
    received: int = 0


#: A connection: the addresses and ports of this machine and of the other one.
Socket = tuple[str, str]


def sockets(text: str, addresses: Collection[str]) -> dict[Socket, Bytes]:
    """Return what each connection to these addresses has carried, from the output of ss.

    A connection that has carried nothing yet is missing.
    """
    found = {}
    for line in text.splitlines():
        _, _, _, own, other, *_ = line.split()
        counts = {name: int(number) for name, number in _COUNT.findall(line)}
        if counts and other.rpartition(":")[0].strip("[]") in addresses:
            found[own, other] = Bytes(**counts)
    return found


def read(addresses: Collection[str]) -> dict[Socket, Bytes]:
    """Return what each open connection to these addresses has carried.

    Raises:
        OpsError: ss is not installed, or failed.
    """
    try:
        done = subprocess.run(_SS, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise OpsError(f"the sockets cannot be read: {exc}", fix="install iproute2") from exc
    return sockets(done.stdout, addresses)


def carried(readings: Iterable[Mapping[Socket, Bytes]]) -> Bytes:
    """Return the bytes between the first reading and the last one, of connections that were open in any of them."""
    first, *later = readings
    last: dict[Socket, Bytes] = {}
    for reading in later:
        last |= reading
    sent, received = (
        sum(total[which] - first.get(socket, Bytes())[which] for socket, total in last.items()) for which in (0, 1)
    )
    return Bytes(sent, received)


class Counter:
    """Counts the bytes during a `with` block.

    Args:
        reading: Returns what each open connection has carried.
        period: Seconds between two readings.

    Attributes:
        total: The bytes, after the block.
    """

    def __init__(self, reading: Callable[[], Mapping[Socket, Bytes]], period: float = PERIOD) -> None:
        self._reading, self._period = reading, period
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._readings: list[Mapping[Socket, Bytes]] = []
        self.total = Bytes()

    def __enter__(self) -> Counter:
        """Begin to count."""
        self._readings.append(self._reading())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        """End the count."""
        self._ended.set()
        self._thread.join()
        if kind is None:
            self.total = carried([*self._readings, self._reading()])

    def _read(self) -> None:
        while not self._ended.wait(self._period):
            self._readings.append(self._reading())
