"""Reading and atomic replacement of text files; supports Python 3.8."""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter

#: The maximum length of a file that `read` returns.
LARGEST = 1 << 20


def read(path: str) -> str:
    """Return the text of a file; empty if it does not exist. Bytes that are not UTF-8 are returned as surrogates.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `LARGEST`.
    """
    try:
        # O_NONBLOCK, since opening a named pipe would otherwise block.
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
    """Return the diff of a file's old and new text without unchanged lines, which may contain secrets."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return {
        "before_header": path,
        "after_header": path,
        "before": "".join(line + "\n" for line in (old - new).elements()),
        "after": "".join(line + "\n" for line in (new - old).elements()),
    }


def replace(path: str, text: str) -> None:
    """Atomically replace the text of an existing file, and keep its owner and mode; see `put`."""
    entry = os.stat(path)
    put(path, text, stat.S_IMODE(entry.st_mode), (entry.st_uid, entry.st_gid))


def put(path: str, text: str, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Atomically create or replace a file; surrogates in the text become the bytes that they stand for.

    Args:
        path: The file, in a directory that exists.
        text: The file's text.
        mode: The file's mode.
        owner: The file's uid and gid; None means those of this process.

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
            # The mode is set after the owner, since a change of owner clears bits of the mode.
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
