"""The lines of sshd's configuration that set the files of keys; runs on Python 3.8."""

from __future__ import annotations

import fnmatch
import glob
import os
from typing import NamedTuple

CONFIG = "/etc/ssh/sshd_config"
#: The deepest nesting of Include that sshd allows (servconf.c).
DEPTH = 16


class Line(NamedTuple):
    """One AuthorizedKeysFile line; without a number, the position of the role's file."""

    file: str
    number: int
    paths: list[str]
    #: Whether the line applies to some logins only.
    matched: bool

    def __str__(self) -> str:
        """Return the line with its file and number."""
        return "%s:%d: AuthorizedKeysFile %s" % (self.file, self.number, " ".join(self.paths))


def keys_lines(file: str, own: str, *, matched: bool = False, depth: int = 0) -> list[Line]:
    """Return the AuthorizedKeysFile lines in the order in which sshd reads them; the first one counts.

    Args:
        file: The file to begin with.
        own: The role's file; its position is returned even if it does not exist.
        matched: Whether the file is included for some logins only.
        depth: The nesting depth of this file's Include.
    """
    found = [Line(file, 0, [], matched)] if file == own else []
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return found
    for number, line in enumerate(lines, 1):
        words = [word.strip('"') for word in line.replace("=", " ", 1).split()]
        keyword = words[0].lower() if words else ""
        if keyword == "match":
            matched = True
        elif keyword == "authorizedkeysfile":
            found.append(Line(file, number, words[1:], matched))
        elif keyword == "include" and depth < DEPTH:
            for pattern in (os.path.join(os.path.dirname(CONFIG), word) for word in words[1:]):
                names = {*glob.glob(pattern), *([own] if fnmatch.fnmatch(own, pattern) else [])}
                for name in sorted(names):
                    found += keys_lines(name, own, matched=matched, depth=depth + 1)
    return found


def keys_fault(own: str, wanted: str) -> str:
    """Return why sshd would not use the role's file, and the fix; empty if it would.

    Args:
        own: The role's file.
        wanted: What stands for the role's files of keys in a line AuthorizedKeysFile.
    """
    lines = keys_lines(CONFIG, own)
    position = next((at for at, line in enumerate(lines) if line.file == own and not line.matched), None)
    if position is None:
        return "%s does not read %s; begin it with the line: Include %s/*.conf" % (CONFIG, own, os.path.dirname(own))
    first = next((line for line in lines[:position] if not line.matched), None)
    if first is None or wanted in first.paths:
        return ""
    return (
        "%s: sshd uses the first such line, would not read %s and would let nobody in with the role's keys; remove the"
        " line, place it after the Include of %s, or add %s to it" % (first, wanted, own, wanted)
    )


def proof_fault(own: str, wanted: str, listed: list[str]) -> str:
    """Return why sshd does not find the role's keys, with every line that may be the cause; empty if it does.

    Args:
        own: The role's file.
        wanted: What stands for the role's files of keys in a line AuthorizedKeysFile.
        listed: The files in which sshd says it looks for keys.
    """
    if wanted in listed:
        return ""
    if not listed:
        return "sshd rejects its configuration; run this on the worker to see why: sudo /usr/sbin/sshd -T"
    lines = [str(line) for line in keys_lines(CONFIG, own) if line.number]
    return keys_fault(own, wanted) or "sshd looks for keys in %s and not in %s; change the lines that say so: %s" % (
        " ".join(listed),
        wanted,
        "; ".join(lines) or "no AuthorizedKeysFile line was found",
    )
