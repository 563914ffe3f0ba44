"""The forms that parts of a node have, wherever it is read from: the API, a published snapshot, a file of this machine.

They end up in ssh's arguments and configuration, so that whatever is read is held against these forms first.
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

#: The name of a Compute Engine instance; the domain that may follow is no part of it.
INSTANCE = re.compile(r"[a-z][a-z0-9-]{0,62}")

#: Most characters of a text that stands in one line, and of any other.
LINE, PROSE = 256, 65536

#: Whether a value has some form.
Form = Callable[[Any], bool]


def address(text: str) -> str:
    """Return an address in the one form that it has; empty where the text is none."""
    try:
        # The parser below takes forty times as long. No zero may lead a number here either: there is one form.
        socket.inet_pton(socket.AF_INET, text)
    except (OSError, ValueError):
        pass
    else:
        return text
    try:
        # Behind a % an IPv6 address names an interface: any text, and of no use on another machine.
        return "" if "%" in text else str(ipaddress.ip_address(text))
    except ValueError:
        return ""


#: A project, or a zone; the zone ``-`` stands for all of them.
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}|-")


def places(value: Any) -> bool:
    """Return whether a value is a list of projects with a zone of each."""
    return isinstance(value, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(text, str) and _PLACE.fullmatch(text) for text in pair)
        for pair in value
    )


def texts(form: re.Pattern[str]) -> Form:
    """Return whether a value is a list of texts of a form."""
    return lists(matches(form))


def matches(form: re.Pattern[str]) -> Form:
    """A text of a form."""
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


def empty_or(form: re.Pattern[str]) -> Form:
    """A text of a form, or an empty one."""
    return lambda value: value == "" or (isinstance(value, str) and form.fullmatch(value) is not None)


def lists(check: Form) -> Form:
    """A list whose entries have a form."""
    # A node's own dictionary has tuples.
    return lambda value: isinstance(value, (list, tuple)) and (not value or all(map(check, value)))


def line(value: Any) -> bool:
    """A text in one line, without characters that a terminal takes for orders."""
    return isinstance(value, str) and len(value) <= LINE and value.isprintable()


def prose(value: Any) -> bool:
    """Any text, as the API may have it."""
    if not isinstance(value, str) or len(value) > PROSE:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def mapping(value: Any) -> bool:
    """A mapping of texts to texts."""
    return isinstance(value, dict) and all(map(prose, value)) and all(map(prose, value.values()))


def record(*keys: str) -> Form:
    """A mapping of texts with exactly these keys."""
    return lambda value: mapping(value) and value.keys() == set(keys)


def name(value: Any) -> bool:
    """A text; names have their form only together (`tpu_ops.cloud.names.split_name`)."""
    return isinstance(value, str)


def count(value: Any) -> bool:
    """A whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**6


def flag(value: Any) -> bool:
    """True or False."""
    return isinstance(value, bool)


def addresses(value: Any) -> bool:
    """A list of addresses, each in the one form that it has, or empty."""
    if not isinstance(value, (list, tuple)):
        return False
    try:
        for entry in value:
            if entry != "":
                socket.inet_pton(socket.AF_INET, entry)
    except (OSError, ValueError, TypeError):
        return all(isinstance(entry, str) and address(entry) == entry for entry in value)
    return True
