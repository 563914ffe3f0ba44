"""Install projects as editable in a virtual environment, with uv; supports Python 3.8."""

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
from ansible.module_utils.installed_packages import normalised
from ansible.module_utils.programs import program

#: A line of uv's report: a package that uv adds, removes or reinstalls.
PLAN = re.compile(r"^ ([+~-]) ([A-Za-z0-9._-]+)(.*)$", re.MULTILINE)

#: Files with a project's metadata. If one of them is newer than the editable installation, the project is installed
#: again.
METADATA = ("pyproject.toml", "setup.py", "setup.cfg")


class Installed(NamedTuple):
    """An installed package: name, version, directory if it is editable, and the time of its installation."""

    name: str
    version: str
    directory: str
    time: float


def installed(environment: str) -> list[Installed]:
    """Return the packages in an environment, read from their metadata (PEP 376, PEP 610)."""
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
        found.append(Installed(normalised(name), version, directory, time))
    return found


def stale(package: Installed) -> bool:
    """Return whether the metadata of an editable package's project has changed since the installation."""
    times = []
    for name in METADATA:
        try:
            times.append(os.stat(os.path.join(package.directory, name)).st_mtime)
        except OSError:
            continue
    return bool(times) and max(times) > package.time


def written(directory: str, name: str, lines: list[str]) -> str:
    """Write lines to a file and return the file's path."""
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in lines)
    return path


class Environment:
    """A virtual environment into which uv installs projects."""

    def __init__(self, path: str, uv: str, pinned: list[str], timeout: int, later: list[str] | None = None) -> None:
        """Set the environment and the options for uv.

        Args:
            path: The path of the environment.
            uv: The path of uv.
            pinned: Packages whose version must not change.
            timeout: The time limit for uv in seconds.
            later: Clones that this run updates later; their present requirements are ignored.
        """
        self.path = path
        self.uv = uv
        self.pinned = {normalised(name) for name in pinned}
        self.timeout = timeout
        self.later = later or []

    def install(self, projects: list[str], constraints: list[str], *, dry: bool) -> list[str]:
        """Install projects as editable; the environment's listed requirements and other projects' are still met.

        Args:
            projects: The projects' directories, optionally with extras.
            constraints: Paths of files with constraints.
            dry: Whether to return the changes without making them.

        Returns:
            The changes, made or planned, except those of the projects themselves.

        Raises:
            PersonFault: uv fails, for example because the requirements conflict. The environment is unchanged.
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
        """Given uv's report, return the changes, except those of editable projects, which uv always installs again."""
        own = {package.name for package in installed(self.path) if package.directory}
        return ["%s %s%s" % match for match in PLAN.findall(report) if normalised(match[1]) not in own]

    def others(self, projects: list[str]) -> list[Project]:
        """Return the environment's editable projects with requirements, except these projects and those in `later`."""
        own = [project.partition("[")[0] for project in projects]
        found = [each for each in editable_projects(self.path) if each.directory not in own and each.needs]
        return [each for each in found if not below(each.directory, self.later)]

    def blamed(self, projects: list[str], constraints: list[str], others: list[Project]) -> str:
        """Return, for a message, whose requirements prevent the installation of the projects; empty if unknown."""
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
        """Return the changes that `install` would make; empty if the environment meets all requirements.

        Raises:
            PersonFault: uv fails.
        """
        found = {package.directory: package for package in installed(self.path)}
        directories = [project.partition("[")[0] for project in projects]
        absent = [path for path in directories if path not in found or stale(found[path])]
        if absent:
            return ["+ %s" % path for path in absent]
        # A check of the projects alone comes first, since it is faster than one with all listed requirements, and
        # usually finds no change.
        if not self.plan(self.run(projects, constraints, [], with_list=False, dry=True)):
            return []
        return self.install(projects, constraints, dry=True)

    def below(self, directory: str) -> list[str]:
        """Return the names of editable packages whose project is in a directory or below it."""
        found = installed(self.path)
        return [each.name for each in found if (each.directory + "/").startswith(directory + "/")]

    def remove(self, names: list[str]) -> None:
        """Uninstall packages.

        Raises:
            PersonFault: uv fails.
        """
        python = os.path.join(self.path, "bin", "python")
        program([self.uv, "pip", "uninstall", "--python", python, *names], self.timeout)
