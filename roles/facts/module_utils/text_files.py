"""Files that belong to others and whose text a module changes; runs on Python 3.8."""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter

#: Size in bytes above which a configuration file is not read.
LARGEST = 1 << 20


def read(path: str) -> str:
    """Return the text of a file; empty if there is none. What is not UTF-8 is returned as surrogates.

    Raises:
        OSError: It cannot be read, is not a regular file, or is larger than `LARGEST`.
    """
    try:
        # Opening a named pipe would block.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    with os.fdopen(handle, encoding="utf-8", errors="surrogateescape", newline="") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("%s is not a regular file" % path)
        text = stream.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise OSError("%s is larger than %d bytes" % (path, LARGEST))
        return text


def changed_lines(path: str, before: str, after: str) -> dict[str, str]:
    """Return the diff of a file's two texts with only the lines that differ: those around them may contain secrets."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return {
        "before_header": path,
        "after_header": path,
        "before": "".join(line + "\n" for line in (old - new).elements()),
        "after": "".join(line + "\n" for line in (new - old).elements()),
    }


def replace(path: str, text: str) -> None:
    """Replace the text of a file that exists atomically, keeping owner and mode; see `put`."""
    entry = os.stat(path)
    put(path, text, stat.S_IMODE(entry.st_mode), (entry.st_uid, entry.st_gid))


def put(path: str, text: str, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Write a file atomically, or replace it; what is not UTF-8 is passed through as surrogates.

    Args:
        path: The file, in a directory that exists.
        text: Its text.
        mode: Its mode.
        owner: Its uid and gid; None means those of this process.

    Raises:
        OSError: The file cannot be written. The existing file is untouched.
    """
    handle, new = tempfile.mkstemp(prefix=".tpu_ops-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            if owner is not None:
                os.fchown(stream.fileno(), *owner)
            # After the owner: a change of owner clears bits of the mode.
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
