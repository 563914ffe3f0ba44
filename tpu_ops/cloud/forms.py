"""The forms of a node's fields, wherever the node is read from: the API, a published snapshot, or a local file.

The fields are used in ssh's arguments and configuration, so every value is checked against its form first.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Any

#: A node's id.
ID = re.compile(r"[0-9]{1,20}")

#: The name or number of an enum's value.
WORD = re.compile(r"[A-Z0-9_]{1,64}")

#: The name of a Compute Engine instance, without a domain.
INSTANCE = re.compile(r"[a-z][a-z0-9-]{0,62}")

#: Maximum number of characters in a single-line text, and in any other text.
LINE, PROSE = 256, 65536

#: A form is a function that returns whether a value is valid.
Form = Callable[[Any], bool]


def address(text: str) -> str:
    """Return an address in its canonical form; empty if the text is not an address."""
    try:
        # inet_pton rejects leading zeros, so each IPv4 address has exactly one form. `ipaddress` below takes forty
        # times as long.
        socket.inet_pton(socket.AF_INET, text)
    except (OSError, ValueError):
        pass
    else:
        return text
    try:
        # An IPv6 address with % is rejected: the network interface after % can be any text, and is useless on another
        # machine.
        return "" if "%" in text else str(ipaddress.ip_address(text))
    except ValueError:
        return ""


#: A project or a zone; the zone ``-`` means all zones.
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}|-")


def places(value: Any) -> bool:
    """Return whether a value is a list of pairs (project, zone)."""
    return isinstance(value, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(text, str) and _PLACE.fullmatch(text) for text in pair)
        for pair in value
    )


def texts(form: re.Pattern[str]) -> Form:
    """Return the form of a list of texts that match a pattern."""
    return lists(matches(form))


def matches(form: re.Pattern[str]) -> Form:
    """Return the form of a text that matches a pattern."""
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


def empty_or(form: re.Pattern[str]) -> Form:
    """Return the form of a text that is empty or matches a pattern."""
    return lambda value: value == "" or (isinstance(value, str) and form.fullmatch(value) is not None)


def lists(check: Form) -> Form:
    """Return the form of a list in which every value has the given form."""
    # Tuples are accepted too: `Node.to_json` returns tuples.
    return lambda value: isinstance(value, (list, tuple)) and (not value or all(map(check, value)))


def line(value: Any) -> bool:
    """Return whether a value is a single-line text without control characters."""
    return isinstance(value, str) and len(value) <= LINE and value.isprintable()


def prose(value: Any) -> bool:
    """Return whether a value is a valid text that is not longer than the API allows."""
    if not isinstance(value, str) or len(value) > PROSE:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def mapping(value: Any) -> bool:
    """Return whether a value is a mapping of texts to texts."""
    return isinstance(value, dict) and all(map(prose, value)) and all(map(prose, value.values()))


def record(*keys: str) -> Form:
    """Return the form of a mapping of texts with exactly these keys."""
    return lambda value: mapping(value) and value.keys() == set(keys)


def name(value: Any) -> bool:
    """Return whether a value is a text. `names.split_name` checks the name, project and zone of a node together."""
    return isinstance(value, str)


def count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to 1,000,000."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**6


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def addresses(value: Any) -> bool:
    """Return whether a value is a list of addresses in canonical form, or empty texts."""
    if not isinstance(value, (list, tuple)):
        return False
    try:
        for entry in value:
            if entry != "":
                socket.inet_pton(socket.AF_INET, entry)
    except (OSError, ValueError, TypeError):
        return all(isinstance(entry, str) and address(entry) == entry for entry in value)
    return True
