"""Archives of Ansible and of the playbooks, for workers that run a playbook on themselves."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import tpu_ops
from tpu_ops import files
from tpu_ops.ansible.playbook import Project

#: The packages of this Python that a worker needs, besides their own requirements.
_WANTED = ("ansible-core", "ansible-runner", "ClusterShell")
#: Packages that a worker does not need: its variables arrive decrypted.
_WITHOUT = {"cryptography"}
#: Parts of packages that no playbook uses.
_UNUSED = re.compile(r"__pycache__|^\.\.|^(ansible_test|ansible/(galaxy|_internal/ansible_collections/.*/tests))/")
#: The parts of the project's directory and of this package that a worker needs.
_PARTS, _PACKAGES = ("site.yml", "ansible.cfg", "playbooks", "roles"), ("ansible", "host", "protocol")
#: Length of an archive's digest.
_DIGITS = 16
#: Permissions of a file that can be executed, and of any other.
_PROGRAM, _FILE = 0o755, 0o644


class Archive(NamedTuple):
    """A compressed tar archive, whose digest is its name on workers."""

    digest: str
    data: bytes


def of_ansible(cache: Path | None = None) -> Archive:
    """Return the archive of the Ansible that this process uses, with what it needs: the same versions everywhere.

    Compiled parts are for this machine's Python. The packages work without them where Python differs.

    Args:
        cache: Directory for the archive, which takes a second to make; default: `tpu_ops` in the user's cache.
    """
    packages = {one.name: one for one in _needed(_WANTED, set(_WITHOUT))}
    versions = "\n".join(
        f"{name} {packages[name].version} {packages[name].locate_file('')}" for name in sorted(packages)
    )
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu_ops"
    kept = cache / f"ansible-{hashlib.sha256(versions.encode()).hexdigest()[:_DIGITS]}.tar.gz"
    if kept.is_file():
        return _named(kept.read_bytes())
    members = {
        str(file): Path(str(file.locate()))
        for package in packages.values()
        for file in package.files or ()
        if not _UNUSED.search(str(file))
    }
    data = _packed(members, 6)
    # Without the file, the next command takes a second longer.
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        files.replace(kept, data, _FILE)
    return _named(data)


def of_project(project: Project) -> Archive:
    """Return the archive of a project's playbooks and roles, and of the parts of tpu_ops that they use."""
    package = Path(tpu_ops.__file__).resolve().parent
    members = {f"tpu_ops/{path.name}": path for path in package.glob("*.py")}
    for directory, names, base in ((project.root, _PARTS, ""), (package, _PACKAGES, "tpu_ops/")):
        for name in names:
            for path in _below(directory / name):
                members[base + str(path.relative_to(directory))] = path
    return _named(_packed(members, 1))


def oldest_python() -> str:
    """Return the oldest version of Python that this process's Ansible supports on a worker, such as 3.11."""
    match = re.search(r">=\s*(\d+\.\d+)", metadata.metadata("ansible-core")["Requires-Python"])
    return match[1] if match else "3.11"


def _needed(names: Iterable[str], seen: set[str]) -> Iterator[metadata.Distribution]:
    """Return packages and all that they need, without those that were seen."""
    from packaging.requirements import Requirement

    for name in names:
        if name.lower() not in seen:
            seen.add(name.lower())
            package = metadata.distribution(name)
            yield package
            required = map(Requirement, package.requires or ())
            yield from _needed(
                [one.name for one in required if not one.marker or one.marker.evaluate({"extra": ""})], seen
            )


def _below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _packed(members: dict[str, Path], level: int) -> bytes:
    """Return a tar archive with the same bytes for the same files."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=level, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        for name, path in sorted(members.items()):
            data = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = _PROGRAM if os.access(path, os.X_OK) else _FILE
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _named(data: bytes) -> Archive:
    return Archive(hashlib.sha256(data).hexdigest()[:_DIGITS], data)
