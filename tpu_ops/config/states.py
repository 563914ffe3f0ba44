"""Names of the directories for the state of each fleet."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from tpu_ops.config.settings import folder_of

#: Characters that a path in an ssh config must not contain.
NOT_FOR_SSH = re.compile(r"[\x00-\x1f\x7f]|\$\{")
#: Variables by which a shell can override the projects and zones of the file.
PLACES = ("TPU_OPS_PROJECT", "TPU_OPS_ZONES")


def state_name(file: Path, endpoint: str, own: Sequence[str]) -> str:
    """Return the name of a fleet's state directory. Each endpoint has its own, so that test and real data never mix.

    A shell that overrides projects or zones has its own state directory too. Otherwise its commands could change the
    names of workers while a command in another shell runs.

    Args:
        file: The fleet's file.
        endpoint: See `Settings`.
        own: The sorted projects, then the sorted zones, that the shell overrides; empty if it overrides none.
    """
    path = folder_of(file)
    digest = hashlib.sha256("\n".join([str(path), endpoint, *own]).encode()).hexdigest()[:8]
    return f"{NOT_FOR_SSH.sub('_', path.name)}-{digest}"


def shell_of(
    name: str, file: Path, endpoint: str, projects: Sequence[str], zones: Sequence[str]
) -> dict[str, str] | None:
    """Return the values of `PLACES` in a shell whose state directory has this name; None for another fleet's directory.

    Args:
        name: Name of the state directory.
        file: The fleet's file.
        endpoint: See `Settings`.
        projects: The projects that a shell with this directory could have set.
        zones: The zones that a shell with this directory could have set.
    """
    asked = dict(zip(PLACES, (sorted(projects), sorted(zones)), strict=True))
    for own in ((), PLACES[:1], PLACES[1:], PLACES):
        if state_name(file, endpoint, [word for variable in own for word in asked[variable]]) == name:
            return {variable: ",".join(asked[variable]) for variable in own}
    return None
