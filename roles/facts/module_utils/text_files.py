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
    """Replace a file's text atomically, keeping owner and mode; what is not UTF-8 is passed through as surrogates."""
    entry = os.stat(path)
    handle, new = tempfile.mkstemp(prefix=".tpu_ops-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            os.fchown(stream.fileno(), entry.st_uid, entry.st_gid)
            os.fchmod(stream.fileno(), entry.st_mode & 0o7777)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
