"""Hosts as people write them."""

from __future__ import annotations

import ipaddress

#: A login name, as a regular expression.
USER = r"[A-Za-z0-9_.][A-Za-z0-9_.-]*"

#: ``[user@]host``, likewise; an IPv6 address stands in brackets.
USER_AT_HOST = rf"(?:{USER}@)?(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\])"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, in brackets or not, is this machine's own and no other's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
