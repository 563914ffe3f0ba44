"""The two address pools of workers."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from tpu_ops.lab.api.errors import ApiError, Code

#: Number of addresses at the beginning of each network that are reserved for gateways and the lab itself.
RESERVED = 8


class Pool:
    """The addresses of one network.

    Args:
        network: The network; its first eight addresses and its broadcast address are not used.
        used: Addresses in use.
        cursor: Offset in the network from which the next free address is searched.
        rotate: Whether the search only goes forward (and wraps), so that a freed address is used again as late as
            possible; otherwise the lowest free address is taken.
    """

    def __init__(self, network: IPv4Network, used: Iterable[str], cursor: int = RESERVED, *, rotate: bool) -> None:
        self._base = int(network.network_address)
        self._end = network.num_addresses - 1
        self._network = network
        self._used = {int(IPv4Address(address)) - self._base for address in used}
        self._rotate = rotate
        self.cursor = min(max(cursor, RESERVED), self._end)

    def take(self, count: int) -> list[str]:
        """Mark this many free addresses as in use and return them.

        Raises:
            ApiError: RESOURCE_EXHAUSTED; there are not enough.
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
        """Free addresses; empty strings are ignored."""
        for address in filter(None, addresses):
            offset = int(IPv4Address(address)) - self._base
            self._used.discard(offset)
            if not self._rotate and RESERVED <= offset < self.cursor:
                self.cursor = offset
