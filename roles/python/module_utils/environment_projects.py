"""Find packages for an environment that also meet the requirements of its editable projects; supports Python 3.8."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ansible.module_utils.environment_sets import (
    NO_SOLUTION,
    Project,
    below,
    editable_projects,
    required_name,
)
from ansible.module_utils.installed_packages import normalised
from ansible.module_utils.uv_program import NO_PACKAGE, Fault


def projects_word(path: str) -> str:
    """Return a digest of the requirements of an environment's projects; empty if there are none."""
    needs = sorted(line for project in editable_projects(path) for line in project.needs)
    return hashlib.sha256("\n".join(needs).encode()).hexdigest()[:12] if needs else ""


def as_far_as_known(attempt: Callable[[list[str]], Any], chosen: list[Project]) -> Any:
    """Run an attempt with the requirements of projects, except those for packages that the package index lacks.

    Raises:
        Fault: The attempt failed for another reason.
    """
    needs = [line for project in chosen for line in project.needs]
    while True:
        try:
            return attempt(needs)
        except Fault as exc:
            unknown = {normalised(name) for name in NO_PACKAGE.findall(str(exc))}
            known = [line for line in needs if required_name(line) not in unknown]
            if known == needs:
                raise
            needs = known


def honouring(path: str, moving: list[str], source: str, attempt: Callable[[list[str]], Any]) -> tuple[Any, list[str]]:
    """Run an attempt with the requirements of an environment's editable projects.

    Args:
        path: The environment.
        moving: Directories of projects that the role workspace is about to update or remove. Their requirements may
            change, so they are ignored if they conflict with the listed requirements.
        source: The variable and the environment's name, for messages.
        attempt: A function of the projects' requirements, which raises `Fault` if uv finds no set of packages.

    Returns:
        The result of the attempt, and the projects whose requirements were ignored.

    Raises:
        Fault: The listed requirements conflict with those of the other projects, or uv failed.
    """
    found = [project for project in editable_projects(path) if project.needs]
    bound = [project for project in found if not below(project.directory, moving)]
    try:
        return as_far_as_known(attempt, found), []
    except Fault as exc:
        if not found or NO_SOLUTION not in str(exc):
            raise
        fault = exc
    if bound != found:
        try:
            return as_far_as_known(attempt, bound), [str(project) for project in found if project not in bound]
        except Fault as exc:
            if not bound or NO_SOLUTION not in str(exc):
                raise
            fault = exc
    blamed = [project for project in bound if not possible(attempt, [project])] or bound
    raise Fault(
        "nothing was changed: the requirements of %s conflict with those of the installed %s; change one of"
        " them: %s" % (source, " and ".join(map(str, blamed)), fault)
    ) from fault


def possible(attempt: Callable[[list[str]], Any], chosen: list[Project]) -> bool:
    """Return whether uv finds a set of packages with which the attempt succeeds for these projects."""
    try:
        as_far_as_known(attempt, chosen)
    except Fault:
        return False
    return True
