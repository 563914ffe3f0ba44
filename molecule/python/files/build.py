"""Makes, on a worker, a build of Python as uv downloads them, from the worker's own: build.py DIRECTORY

DIRECTORY/good.json is a list in the form that uv reads, bad.json one with a digest that the archive does not have.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
import tarfile
from pathlib import Path


def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what is not needed to make environments."""
    spare = any(part in entry.name for part in ("__pycache__", "/test/", "/config-"))
    # uv does not unpack links that lead out of the archive.
    return None if spare or (entry.issym() and entry.linkname.startswith(("/", ".."))) else entry


def main(directory: Path) -> None:
    """Make the archive and its lists."""
    directory.mkdir(parents=True, exist_ok=True)
    major, minor, patch = sys.version_info[:3]
    name = f"python{major}.{minor}"
    archive = directory / "cpython.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as stream:
        stream.add(f"/usr/bin/{name}", f"python/bin/{name}")
        stream.add(sysconfig.get_path("stdlib"), f"python/lib/{name}", filter=kept)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    for kind, said in (("good", digest), ("bad", "0" * 64)):
        build = {
            "name": "cpython",
            "arch": {"family": platform.machine(), "variant": None},
            "os": "linux",
            "libc": "gnu",
            "major": major,
            "minor": minor,
            "patch": patch,
            "prerelease": "",
            "url": archive.as_uri(),
            "sha256": said,
            "variant": None,
            "build": None,
        }
        listed = {f"cpython-{major}.{minor}.{patch}-linux-{platform.machine()}-gnu": build}
        (directory / f"{kind}.json").write_text(json.dumps(listed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
