"""The packages of a virtual environment and their digest, read from its files; and the packages that a lock pins.

The launcher's action `probe` and the role python use this digest to compare environments. Ansible sends this file alone
to workers (`roles/facts/module_utils/` links to it), so the file imports no other module of this package.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re

_DIST_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.dist-info")
_SITE = "lib/python3*/site-packages"
#: A package that a lock pins, at the beginning of a line: name and version.
PIN = r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)"
#: A file in a person's or project's environment, which adds the packages of the fleet's environment to Python's path.
#: Its first line is `# ` and the directory of these packages. roles/python/templates/command.sh.j2 and
#: `runs/project_environment.py` write it.
BASE = "_tpu_ops_base.pth"


def normalised(name: str) -> str:
    """Return a package's name in the normal form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_packages(lock: str) -> dict[str, str]:
    """Return the packages that a lock pins, given its text: normalised name -> version."""
    return {normalised(name): version for name, version in re.findall(PIN, lock, re.MULTILINE)}


def dist_infos(path: str) -> dict[str, tuple[str, str]]:
    """Return the packages of an environment: normalised name -> version, and directory with the package's metadata."""
    return _dist_infos(os.path.join(glob.escape(path), _SITE))


def _dist_infos(pattern: str) -> dict[str, tuple[str, str]]:
    """Return the packages in all directories that match a pattern, as `dist_infos` does."""
    found = {}
    for entry in sorted(glob.glob(os.path.join(pattern, "*.dist-info"))):
        match = _DIST_INFO.fullmatch(os.path.basename(entry))
        if match:
            found[normalised(match.group("name"))] = (match.group("version"), entry)
    return found


def packages(path: str) -> dict[str, str]:
    """Return the packages of an environment: normalised name -> version.

    For a person's or project's environment, they include the fleet's packages that it does not replace.
    """
    found = {}
    for base in glob.glob(os.path.join(glob.escape(path), _SITE, BASE)):
        with open(base, encoding="utf-8", errors="replace") as stream:
            found.update(_dist_infos(glob.escape(stream.readline(4096)[2:].strip())))
    found.update(dist_infos(path))
    return {name: version for name, (version, _) in found.items()}


def python_version(path: str) -> str:
    """Return the version of Python in an environment's pyvenv.cfg; empty if the file or the version is missing."""
    found = ""
    try:
        with open(os.path.join(path, "pyvenv.cfg"), encoding="utf-8", errors="replace") as stream:
            for line in stream:
                key, _, value = line.partition("=")
                if key.strip() in ("version", "version_info"):
                    found = value.strip()
    except OSError:
        return ""
    return found


def minor(version: str) -> str:
    """Return a version of Python as major.minor: the patch version depends on the day of the installation."""
    return ".".join(version.split(".")[:2])


def digest(version: str, found: dict[str, str]) -> str:
    """Return the digest of Python's major.minor version and the packages' names and versions: 12 hex digits."""
    listed = ["python=" + minor(version)] + ["%s=%s" % item for item in sorted(found.items())]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:12]
