"""Requirements of a virtual environment: those that the role python lists, and those of its editable projects.

The role python installs the packages that a variable lists for an environment, and the role workspace installs projects
into the same environment. This module tells each role the requirements of the other. It supports Python 3.8.
"""

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any, List, NamedTuple
from urllib.parse import unquote, urlsplit

from ansible.module_utils.installed_packages import normalised
from ansible.module_utils.text_files import put

#: A file in each environment with the requirements that are listed for the environment.
LISTED = ".tpu_ops-listed.json"
#: A file in each environment: directory of an editable project -> the extras with which it was installed.
EXTRAS = ".tpu_ops-extras.json"

#: A part of uv's message if no set of packages meets all requirements.
NO_SOLUTION = "No solution found"

#: The condition `extra == "NAME"` in a requirement (PEP 508), and the package name and extras at its beginning.
OF_EXTRA = re.compile(r"""\bextra\s*==\s*(?P<quote>['"])(?P<extra>[A-Za-z0-9._-]+)(?P=quote)""")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[(?P<extras>[^]]*)\])?")
#: A condition on Python that is always true.
ALWAYS = 'python_version >= "3"'


def shortened(report: str) -> str:
    """Shorten uv's output to its beginning, which names the failure, and its end, which names the reason."""
    report = report.strip()
    return report if len(report) <= 2000 else "%s ... %s" % (report[:500], report[-1500:])


class Listed(NamedTuple):
    """The requirements that are listed for an environment; if a lock file is listed, its pins are the constraints."""

    #: The variable and the environment's name, for messages.
    source: str
    requirements: List[str]
    constraints: List[str]
    find_links: List[str]


class Project(NamedTuple):
    """An editable project in an environment: name, directory, and the requirements that come from the package index."""

    name: str
    directory: str
    needs: List[str]

    def __str__(self) -> str:
        """Return the project's name and directory for messages."""
        return "%s (%s)" % (self.name, self.directory)


class Package(NamedTuple):
    """An installed package: requirements, whether it is from the package index, and the directory if it is editable."""

    requires: List[str]
    from_index: bool
    directory: str


def read_listed(environment: str) -> Listed:
    """Read the recorded requirements that are listed for an environment; empty if none are recorded."""
    found = _read(environment, LISTED)
    return Listed(found.get("source", ""), *(found.get(key, []) for key in Listed._fields[1:]))


def write_listed(environment: str, listed: Listed) -> None:
    """Record the requirements that are listed for an environment.

    Raises:
        OSError: The environment cannot be written.
    """
    _write(environment, LISTED, listed._asdict())


def write_extras(environment: str, installed: list[str]) -> None:
    """Record the extras with which editable projects were installed.

    Args:
        environment: The environment.
        installed: The projects' directories, optionally with extras as in C(/code/lib[train]).

    Raises:
        OSError: The environment cannot be written.
    """
    before = _read(environment, EXTRAS)
    after = dict(before)
    for project in installed:
        directory, _, extras = project.partition("[")
        after[directory] = [extra for extra in extras.rstrip("]").split(",") if extra]
    after = {directory: extras for directory, extras in after.items() if extras}
    if after != before:
        _write(environment, EXTRAS, after)


def _read(environment: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(environment, name), encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(environment: str, name: str, content: dict[str, Any]) -> None:
    put(os.path.join(environment, name), json.dumps(content, indent=1), 0o644)


def _packages(environment: str) -> dict[str, Package]:
    """Read the packages of an environment from their metadata (PEP 376, PEP 610): name -> package."""
    found = {}
    for record in sorted(glob.glob(os.path.join(glob.escape(environment), "lib/python3*/site-packages/*.dist-info"))):
        name = normalised(os.path.basename(record).partition("-")[0])
        origin, directory = os.path.join(record, "direct_url.json"), ""
        try:
            with open(origin, encoding="utf-8") as stream:
                url = json.load(stream)
            if url.get("dir_info", {}).get("editable"):
                directory = unquote(urlsplit(url["url"]).path)
        except (OSError, ValueError, KeyError, AttributeError):
            pass
        found[name] = Package(_requires(record), not os.path.exists(origin), directory)
    return found


def _requires(record: str) -> list[str]:
    """Given a package's metadata directory, return the package's requirements."""
    try:
        with open(os.path.join(record, "METADATA"), encoding="utf-8", errors="replace") as stream:
            head = stream.read().partition("\n\n")[0]
    except OSError:
        return []
    return re.findall(r"^Requires-Dist:[ \t]*(.+?)\s*$", head, re.MULTILINE)


def editable_projects(environment: str) -> list[Project]:
    """Return the projects that are installed as editable in an environment.

    Their requirements are in a form that uv can read. Requirements for packages that are installed from a directory or
    URL are left out: the package index may not have these packages.
    """
    there = _packages(environment)
    extras = _read(environment, EXTRAS)
    local = {name for name, package in there.items() if not package.from_index}
    found = []
    for name, package in there.items():
        if package.directory:
            lines = _of_extras(name, package.requires, extras.get(package.directory, []))
            found.append(Project(name, package.directory, [line for line in lines if required_name(line) not in local]))
    return found


def required_name(requirement: str) -> str:
    """Return the normalized name (PEP 503) of the package that a requirement names."""
    match = REQUIREMENT.match(requirement)
    return normalised(match["name"]) if match else ""


def _of_extras(name: str, requires: list[str], extras: list[str]) -> list[str]:
    """Return a project's requirements for the chosen extras, without the requirements of its other extras."""
    chosen = {normalised(extra) for extra in extras}
    while True:
        lines = [
            line for line in requires if all(normalised(each["extra"]) in chosen for each in OF_EXTRA.finditer(line))
        ]
        # An extra may include other extras of the same project: all = ["vision[train,test]"].
        own = [match for match in map(REQUIREMENT.match, lines) if match and normalised(match["name"]) == name]
        more = {normalised(extra.strip()) for match in own if match["extras"] for extra in match["extras"].split(",")}
        more -= chosen
        if not more:
            return [OF_EXTRA.sub(ALWAYS, line) for line in lines]
        chosen |= more


def required(environment: str, lines: list[str], python: str) -> set[str]:
    """Return the names of the installed packages that requirements need, directly or through other packages.

    Packages from a URL or a directory, and all that they may need, are included, since they need not be listed.

    Args:
        environment: The environment.
        lines: The requirements, as pip reads them.
        python: The full version of the environment's Python.
    """
    there = _packages(environment)
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        # The role python installs `packaging`, but not in check mode: keep all packages.
        return set(there)
    version = ".".join(python.split(".")[:2])
    # uv resolves a lock for the first patch version of Python.
    places = [{"python_version": version, "python_full_version": full} for full in (python, version + ".0")]
    waiting: list[tuple[str, set[str]]] = [(line, set()) for line in lines]
    found: dict[str, set[str]] = {}

    def visit(name: str, extras: set[str]) -> None:
        """Add a package, and its requirements for these extras, unless both are known."""
        if name in there and (name not in found or extras - found[name]):
            found[name] = found.get(name, set()) | extras
            waiting.extend((line, found[name]) for line in there[name].requires)

    for name, package in there.items():
        if not package.from_index and not package.directory:
            visit(name, {match["extra"] for line in package.requires for match in OF_EXTRA.finditer(line)})
    waiting += [(line, set()) for project in editable_projects(environment) for line in project.needs]
    while waiting:
        line, extras = waiting.pop()
        if required_name(line) not in there:
            continue
        try:
            wanted = Requirement(re.split(r" #|\s--hash\b", line, maxsplit=1)[0])
        except InvalidRequirement:
            visit(required_name(line), set())
            continue
        marker = wanted.marker
        if not marker or any(marker.evaluate({**place, "extra": extra}) for place in places for extra in {"", *extras}):
            visit(normalised(wanted.name), {*wanted.extras, *map(normalised, wanted.extras)})
    return set(found)


def needed(environment: str) -> set[str]:
    """Return the names of all packages that the editable projects require, directly or through other packages."""
    there = _packages(environment)
    found: set[str] = set()
    names = {required_name(line) for project in editable_projects(environment) for line in project.needs}
    while names:
        found |= names
        names = {required_name(line) for name in names if name in there for line in there[name].requires} - found
    return found


def below(directory: str, paths: list[str]) -> bool:
    """Return whether a directory is one of these paths or below one of these paths."""
    return any((directory + "/").startswith(path.rstrip("/") + "/") for path in paths)
