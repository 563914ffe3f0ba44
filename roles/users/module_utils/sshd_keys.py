"""Find the lines of sshd's configuration that say in which files sshd looks for keys; supports Python 3.8."""

from __future__ import annotations

import fnmatch
import glob
import os
from typing import NamedTuple

CONFIG = "/etc/ssh/sshd_config"
#: The maximum nesting of Include in sshd's configuration (servconf.c).
DEPTH = 16


class Line(NamedTuple):
    """An AuthorizedKeysFile line of sshd's configuration, or, with number 0, the position of the role's file."""

    file: str
    number: int
    paths: list[str]
    #: Whether the line is in a Match block, and so applies to some logins only.
    matched: bool

    def __str__(self) -> str:
        """Return the line with its file and number."""
        return "%s:%d: AuthorizedKeysFile %s" % (self.file, self.number, " ".join(self.paths))


def keys_lines(file: str, own: str, *, matched: bool = False, depth: int = 0) -> list[Line]:
    """Return the AuthorizedKeysFile lines in the order in which sshd reads them; sshd uses the first line.

    Args:
        file: The file of sshd's configuration to read, with the files that it includes.
        own: The role's file for sshd, whose position is returned even if the file does not exist.
        matched: Whether the file is included in a Match block.
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
    """Return why sshd would not use the role's file for sshd, with the fix; empty if sshd would use it.

    Args:
        own: The role's file for sshd.
        wanted: The pattern of the role's files of keys, DIRECTORY/%u.
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
    """Return why sshd does not look for the role's keys, with the lines that can be the cause; empty if it does.

    Args:
        own: The role's file for sshd.
        wanted: The pattern of the role's files of keys, DIRECTORY/%u.
        listed: The files in which sshd says it looks for keys.
    """
    if wanted in listed:
        return ""
    if not listed:
        return "sshd rejects its configuration; to see the reason, run on the worker: sudo /usr/sbin/sshd -T"
    lines = [str(line) for line in keys_lines(CONFIG, own) if line.number]
    return keys_fault(own, wanted) or "sshd looks for keys in %s and not in %s; change these lines: %s" % (
        " ".join(listed),
        wanted,
        "; ".join(lines) or "no AuthorizedKeysFile line was found",
    )
