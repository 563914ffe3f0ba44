"""The compiled copy of the launcher: the archive with the compiled code of one Python version beside each module.

Python does not cache the compiled code of modules in an archive, and compiling the launcher takes longer than most
requests. The copy's name contains the Python version: after a system upgrade, a new Python version does not use it.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import tempfile
import zipfile

#: Flags in compiled code that tell Python not to compare the code with its source (PEP 552); a hash follows.
_UNCHECKED = (1).to_bytes(4, "little")


def write(program: str, path: str) -> None:
    """Write the compiled copy if it does not exist. An existing copy is never replaced, since it may be in use.

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
    """Return the bytes of the compiled copy. The copy includes the sources, so that tracebacks show source lines."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(program) as archive, zipfile.ZipFile(buffer, "w") as copy:
        for info in archive.infolist():
            source = archive.read(info)
            code = compile(source, os.path.join(program, info.filename), "exec", dont_inherit=True)
            parts = (importlib.util.MAGIC_NUMBER, _UNCHECKED, importlib.util.source_hash(source), marshal.dumps(code))
            copy.writestr(info, source)
            copy.writestr(zipfile.ZipInfo(info.filename + "c", info.date_time), b"".join(parts))
    return buffer.getvalue()
