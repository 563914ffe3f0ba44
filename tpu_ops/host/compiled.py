"""The compiled program: a copy of the archive that holds, beside each module, what one Python has made of it.

Python keeps nothing of what it compiles out of an archive, and to compile this program takes longer than most requests.
The copy's name says for which Python it is; another one, as after an upgrade of the system, does without.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import tempfile
import zipfile

#: Header of compiled code that is not compared with its source (PEP 552): the source's hash follows.
_UNCHECKED = (1).to_bytes(4, "little")


def write(program: str, path: str) -> None:
    """Write the compiled copy where there is none; one that is there may be in use.

    Args:
        program: The archive.
        path: The copy.

    Raises:
        OSError: It cannot be written.
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
    """Return the copy. It holds the sources as well: a traceback shows their lines."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(program) as archive, zipfile.ZipFile(buffer, "w") as copy:
        for info in archive.infolist():
            source = archive.read(info)
            code = compile(source, os.path.join(program, info.filename), "exec", dont_inherit=True)
            parts = (importlib.util.MAGIC_NUMBER, _UNCHECKED, importlib.util.source_hash(source), marshal.dumps(code))
            copy.writestr(info, source)
            copy.writestr(zipfile.ZipInfo(info.filename + "c", info.date_time), b"".join(parts))
    return buffer.getvalue()
