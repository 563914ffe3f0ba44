"""The compiled copy of the launcher: the archive with the compiled code of one Python version beside each module.

Python does not cache the compiled code of modules in an archive, and compiling the launcher takes longer than most
requests. The copy's name contains the Python version; another version, as after a system upgrade, does not use it.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import tempfile
import zipfile

#: Header of compiled code that Python does not compare with its source (PEP 552); the source's hash follows.
_UNCHECKED = (1).to_bytes(4, "little")


def write(program: str, path: str) -> None:
    """Write the compiled copy if it does not exist; an existing one may be in use.

    Args:
        program: The archive.
        path: The copy.
    """
    if os.path.exists(path):
        return
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_copy(program))
            os.fchmod(file.fileno(), 0o644)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _copy(program: str) -> bytes:
    """Return the bytes of the copy. It includes the sources, so that a traceback shows their lines."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(program) as archive, zipfile.ZipFile(buffer, "w") as copy:
        for info in archive.infolist():
            source = archive.read(info)
            code = compile(source, os.path.join(program, info.filename), "exec", dont_inherit=True)
            parts = (importlib.util.MAGIC_NUMBER, _UNCHECKED, importlib.util.source_hash(source), marshal.dumps(code))
            copy.writestr(info, source)
            copy.writestr(zipfile.ZipInfo(info.filename + "c", info.date_time), b"".join(parts))
    return buffer.getvalue()
