"""The syntax of login names and hosts in the settings."""

from __future__ import annotations

import ipaddress

#: Regular expression of a login name.
USER = r"[A-Za-z0-9_.][A-Za-z0-9_.-]*"

#: Regular expression of ``[user@]host``; an IPv6 address is in brackets.
USER_AT_HOST = rf"(?:{USER}@)?(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\])"


def is_loopback(host: str) -> bool:
    """Return whether a host is the loopback of this machine, given its name or address, with or without brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
