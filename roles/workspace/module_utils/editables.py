"""Editable installations in a virtual environment, seen in its own records; runs on Python 3.8."""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ansible.module_utils.programs import program

#: uv's report of a package that it would add or remove.
PLAN = re.compile(r"^ ([+~-]) ([A-Za-z0-9._-]+)(.*)$", re.MULTILINE)

#: Where a project declares what it is and needs; an installation older than one of these is repeated.
METADATA = ("pyproject.toml", "setup.py", "setup.cfg")


class Installed(NamedTuple):
    """One installed package: its name, version, directory when it is editable, and when it was installed."""

    name: str
    version: str
    directory: str
    time: float


def normal(name: str) -> str:
    """Return a package's name in the one form that all of its spellings share (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: str) -> list[Installed]:
    """Return what an environment holds (the records are those of PEP 376 and PEP 610)."""
    found = []
    pattern = os.path.join(glob.escape(environment), "lib", "python3*", "site-packages", "*.dist-info")
    for record in sorted(glob.glob(pattern)):
        name, _, version = os.path.basename(record)[: -len(".dist-info")].partition("-")
        directory, time = "", 0.0
        try:
            with open(os.path.join(record, "direct_url.json"), encoding="utf-8") as stream:
                origin = json.load(stream)
                time = os.fstat(stream.fileno()).st_mtime
            if origin.get("dir_info", {}).get("editable"):
                directory = unquote(urlsplit(origin["url"]).path)
        except (OSError, ValueError, KeyError):
            pass
        found.append(Installed(normal(name), version, directory, time))
    return found


def stale(package: Installed) -> bool:
    """Return whether an editable package's project has changed its metadata since it was installed."""
    times = []
    for name in METADATA:
        try:
            times.append(os.stat(os.path.join(package.directory, name)).st_mtime)
        except OSError:
            continue
    return bool(times) and max(times) > package.time


class Environment:
    """A virtual environment, and uv to work on it."""

    def __init__(self, path: str, uv: str, pinned: list[str], timeout: int) -> None:
        self.path = path
        self.uv = uv
        self.pinned = {normal(name) for name in pinned}
        self.timeout = timeout

    def install(self, projects: list[str], constraints: list[str], *, dry: bool) -> list[str]:
        """Install projects editable; return what changes, or would change, except the projects themselves.

        Args:
            projects: Directories, perhaps with extras.
            constraints: Files of constraints.
            dry: Whether to ask only.

        Raises:
            PersonFault: uv fails, for instance because the constraints allow no solution.
        """
        own = {package.name for package in installed(self.path) if package.directory}
        lines = [
            "%s==%s\n" % (found.name, found.version) for found in installed(self.path) if found.name in self.pinned
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.writelines(lines)
            pins.flush()
            command = [self.uv, "pip", "install", "--python", os.path.join(self.path, "bin", "python")]
            command += ["--dry-run"] if dry else []
            for path in [*constraints, pins.name]:
                command += ["--constraints", path]
            for project in projects:
                command += ["--editable", project]
            report = program(command, self.timeout, errors_too=True)
        return ["%s %s%s" % match for match in PLAN.findall(report) if normal(match[1]) not in own]

    def missing(self, projects: list[str], constraints: list[str]) -> list[str]:
        """Return what an installation would do; nothing if the environment is as the projects want it.

        Raises:
            PersonFault: uv fails.
        """
        found = {package.directory: package for package in installed(self.path)}
        directories = [project.partition("[")[0] for project in projects]
        absent = [path for path in directories if path not in found or stale(found[path])]
        return ["+ %s" % path for path in absent] or self.install(projects, constraints, dry=True)

    def below(self, directory: str) -> list[str]:
        """Return the names of what is installed editable from a directory or below it."""
        found = installed(self.path)
        return [each.name for each in found if (each.directory + "/").startswith(directory + "/")]

    def remove(self, names: list[str]) -> None:
        """Uninstall packages.

        Raises:
            PersonFault: uv fails.
        """
        python = os.path.join(self.path, "bin", "python")
        program([self.uv, "pip", "uninstall", "--python", python, *names], self.timeout)
