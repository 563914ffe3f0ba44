"""Build the launcher: one file, with the same bytes from the same sources on every machine.

`python -m tpu_ops.host.build` prints ``{"path", "digest"}`` as one line of JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

_SHEBANG = b"#!/usr/bin/python3 -IS\n"
#: The program's main module. It imports from the compiled copy (compiled.py) if there is one for this Python version.
_ENTRY = b"""\
import os
import sys

compiled = "{}.{}.zip".format(os.path.realpath(sys.argv[0]), sys.implementation.cache_tag)
if os.path.exists(compiled):
    sys.path.insert(0, compiled)

from tpu_ops.host.main import program

program(compiled)
"""
#: Time stamp of all files in the archive: the oldest time that a zip archive can hold.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PACKAGES = ("host", "protocol")


def archive() -> bytes:
    """Return the program's bytes: the interpreter line and a zip archive of this package and `tpu_ops/protocol/`."""
    here = Path(__file__).resolve()
    members = {"__main__.py": _ENTRY, "tpu_ops/__init__.py": b""}
    for package in _PACKAGES:
        for path in (here.parents[1] / package).glob("*.py"):
            if path != here:
                members[f"tpu_ops/{package}/{path.name}"] = path.read_bytes()
    buffer = io.BytesIO()
    # Do not compress: different versions of zlib write different bytes.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3
            info.external_attr = 0o644 << 16
            file.writestr(info, members[name])
    return _SHEBANG + buffer.getvalue()


def build(cache: Path | None = None) -> tuple[Path, str]:
    """Build the program if it is not in the cache.

    Args:
        cache: Directory of built programs; default: ``${XDG_CACHE_HOME:-~/.cache}/tpu_ops/host``.

    Returns:
        The program's path and its digest (12 hexadecimal digits of SHA-256).
    """
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu_ops" / "host"
    data = archive()
    digest = hashlib.sha256(data).hexdigest()[:12]
    path = cache / digest / "tpu-host"
    if not (path.is_file() and path.read_bytes() == data):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o755)
        Path(temporary).replace(path)
    return path, digest


def main() -> None:
    """Build the program and print its path and digest."""
    path, digest = build()
    print(json.dumps({"path": str(path), "digest": digest}))


if __name__ == "__main__":
    main()
