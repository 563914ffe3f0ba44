"""Editable installations in a virtual environment, read from its metadata; runs on Python 3.8."""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.environment_sets import (
    NO_SOLUTION,
    Project,
    below,
    editable_projects,
    read_listed,
)
from ansible.module_utils.programs import program

#: uv's report of a package that it would add or remove.
PLAN = re.compile(r"^ ([+~-]) ([A-Za-z0-9._-]+)(.*)$", re.MULTILINE)

#: Files with a project's metadata; if one is newer than the installation, the project is installed again.
METADATA = ("pyproject.toml", "setup.py", "setup.cfg")


class Installed(NamedTuple):
    """One installed package: its name, version, directory when it is editable, and when it was installed."""

    name: str
    version: str
    directory: str
    time: float


def normal(name: str) -> str:
    """Return a package's name in its normalized form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: str) -> list[Installed]:
    """Return the packages in an environment, from the records of PEP 376 and PEP 610."""
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


def written(directory: str, name: str, lines: list[str]) -> str:
    """Write lines to a file and return its path."""
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in lines)
    return path


class Environment:
    """A virtual environment that is changed with uv."""

    def __init__(self, path: str, uv: str, pinned: list[str], timeout: int, later: list[str] | None = None) -> None:
        """Describe an environment.

        Args:
            path: The environment.
            uv: The program uv.
            pinned: Packages whose version must not change.
            timeout: Seconds that uv may take.
            later: Clones that this run updates later; their present requirements do not count.
        """
        self.path = path
        self.uv = uv
        self.pinned = {normal(name) for name in pinned}
        self.timeout = timeout
        self.later = later or []

    def install(self, projects: list[str], constraints: list[str], *, dry: bool) -> list[str]:
        """Install projects editable, together with the environment's list and the requirements of its other projects.

        Args:
            projects: Directories, optionally with extras.
            constraints: Files of constraints.
            dry: Whether to change nothing.

        Returns:
            The changes, made or planned, except those of the projects themselves.

        Raises:
            PersonFault: uv fails, for example because the requirements conflict. Nothing was changed then.
        """
        others = self.others(projects)
        try:
            report = self.run(projects, constraints, others, with_list=True, dry=dry)
        except PersonFault as exc:
            blamed = self.blamed(projects, constraints, others) if NO_SOLUTION in str(exc) else ""
            if not blamed:
                raise
            raise PersonFault(
                "nothing was changed in %s: the project's requirements conflict with %s; change one of them: %s"
                % (self.path, blamed, exc)
            ) from exc
        return self.plan(report)

    def plan(self, report: str) -> list[str]:
        """Given uv's report, return the changes without editable projects, which uv always installs again."""
        own = {package.name for package in installed(self.path) if package.directory}
        return ["%s %s%s" % match for match in PLAN.findall(report) if normal(match[1]) not in own]

    def others(self, projects: list[str]) -> list[Project]:
        """Return the other projects in the environment that have requirements."""
        own = [project.partition("[")[0] for project in projects]
        found = [each for each in editable_projects(self.path) if each.directory not in own and each.needs]
        return [each for each in found if not below(each.directory, self.later)]

    def blamed(self, projects: list[str], constraints: list[str], others: list[Project]) -> str:
        """Return the requirements without which the projects could be installed; empty if there are none."""
        needs = "what %s needs" % " and ".join(map(str, others))
        lists = "what %s lists" % read_listed(self.path).source
        none: list[Project] = []
        for kept, with_list, blamed in (
            (none, True, needs),
            (others, False, lists),
            (none, False, "%s, and %s" % (lists, needs)),
        ):
            try:
                self.run(projects, constraints, kept, with_list=with_list, dry=True)
            except PersonFault:
                continue
            return blamed
        return ""

    def run(
        self, projects: list[str], constraints: list[str], others: list[Project], *, with_list: bool, dry: bool
    ) -> str:
        """Install projects with uv, and return its report.

        Raises:
            PersonFault: uv fails.
        """
        listed = read_listed(self.path)
        needs = [line for project in others for line in project.needs]
        pins = ["%s==%s" % (found.name, found.version) for found in installed(self.path) if found.name in self.pinned]
        with tempfile.TemporaryDirectory() as directory:
            command = [self.uv, "pip", "install", "--python", os.path.join(self.path, "bin", "python")]
            command += ["--dry-run"] if dry else []
            command += [word for link in listed.find_links for word in ("--find-links", link)]
            more = written(directory, "constraints.txt", pins + (listed.constraints if with_list else []))
            for path in [*constraints, more]:
                command += ["--constraints", path]
            requirements = needs + (listed.requirements if with_list else [])
            if requirements:
                command += ["--requirements", written(directory, "requirements.txt", requirements)]
            for project in projects:
                command += ["--editable", project]
            report: str = program(command, self.timeout, errors_too=True)
        return report

    def missing(self, projects: list[str], constraints: list[str]) -> list[str]:
        """Return the changes that an installation would make; empty if the environment meets all requirements.

        Raises:
            PersonFault: uv fails.
        """
        found = {package.directory: package for package in installed(self.path)}
        directories = [project.partition("[")[0] for project in projects]
        absent = [path for path in directories if path not in found or stale(found[path])]
        if absent:
            return ["+ %s" % path for path in absent]
        # Usually nothing is missing, and a check of the projects alone is faster than one of the environment's whole
        # list.
        if not self.plan(self.run(projects, constraints, [], with_list=False, dry=True)):
            return []
        return self.install(projects, constraints, dry=True)

    def below(self, directory: str) -> list[str]:
        """Return the names of packages that are installed editable from a directory or below it."""
        found = installed(self.path)
        return [each.name for each in found if (each.directory + "/").startswith(directory + "/")]

    def remove(self, names: list[str]) -> None:
        """Uninstall packages.

        Raises:
            PersonFault: uv fails.
        """
        python = os.path.join(self.path, "bin", "python")
        program([self.uv, "pip", "uninstall", "--python", python, *names], self.timeout)
