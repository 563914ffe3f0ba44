"""The pools of internal and external addresses for workers."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from tpu_ops.lab.api.errors import ApiError, Code

#: Number of addresses at the beginning of each network that are reserved for gateways and the lab itself.
RESERVED = 8


class Pool:
    """Assigns and releases the IPv4 addresses of one network.

    Args:
        network: The network; its first eight addresses and its broadcast address are not used.
        used: Addresses in use.
        cursor: Offset in the network at which the search for a free address begins.
        rotate: If true, each search begins after the last assigned address and wraps at the end of the network, so that
            a released address is reused as late as possible. If false, the lowest free address is assigned.
    """

    def __init__(self, network: IPv4Network, used: Iterable[str], cursor: int = RESERVED, *, rotate: bool) -> None:
        self._base = int(network.network_address)
        self._end = network.num_addresses - 1
        self._network = network
        self._used = {int(IPv4Address(address)) - self._base for address in used}
        self._rotate = rotate
        self.cursor = min(max(cursor, RESERVED), self._end)

    def take(self, count: int) -> list[str]:
        """Assign this many free addresses and return them.

        Raises:
            ApiError: RESOURCE_EXHAUSTED; the network has too few free addresses.
        """
        taken: list[int] = []
        offset = self.cursor
        for _ in range(RESERVED, self._end):
            if len(taken) == count:
                break
            if offset >= self._end:
                offset = RESERVED
            if offset not in self._used:
                taken.append(offset)
            offset += 1
        if len(taken) < count:
            raise ApiError(
                Code.RESOURCE_EXHAUSTED, f"network {self._network} has only {len(taken)} of {count} addresses free"
            )
        self.cursor = offset
        self._used.update(taken)
        return [str(IPv4Address(self._base + offset)) for offset in taken]

    def release(self, addresses: Iterable[str]) -> None:
        """Make these addresses free again; empty strings are ignored."""
        for address in filter(None, addresses):
            offset = int(IPv4Address(address)) - self._base
            self._used.discard(offset)
            if not self._rotate and RESERVED <= offset < self.cursor:
                self.cursor = offset
