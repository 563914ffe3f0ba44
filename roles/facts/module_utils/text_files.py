"""Files of others, whose text a module changes; runs on Python 3.8."""

from __future__ import annotations

import os
import tempfile


def replace(path: str, text: str) -> None:
    """Replace a file's text at once, keeping owner and mode; what is no UTF-8 goes through as surrogates."""
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
