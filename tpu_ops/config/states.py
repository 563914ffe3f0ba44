"""Names of the directories in which what is known of a fleet is kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from tpu_ops.config.settings import folder_of

#: What a path that stands in an ssh config may not have.
NOT_FOR_SSH = re.compile(r"[\x00-\x1f\x7f]|\$\{")
#: By which variables a shell may ask for other places than the file.
PLACES = ("TPU_OPS_PROJECT", "TPU_OPS_ZONES")


def state_name(file: Path, endpoint: str, own: Sequence[str]) -> str:
    """Name of a fleet's state: its own for each endpoint, so that a test service and the real one never mix.

    Projects and zones that a shell asks for, and the file does not, have their own too: what a command in another shell
    calls a worker is not to become another one, or none, while it is on.

    Args:
        file: The fleet's file.
        endpoint: As of `Settings`.
        own: These projects and zones, each sorted.
    """
    path = folder_of(file)
    digest = hashlib.sha256("\n".join([str(path), endpoint, *own]).encode()).hexdigest()[:8]
    return f"{NOT_FOR_SSH.sub('_', path.name)}-{digest}"


def shell_of(
    name: str, file: Path, endpoint: str, projects: Sequence[str], zones: Sequence[str]
) -> dict[str, str] | None:
    """Return which of `PLACES` a shell sets whose state has this name, and to what; None where it is another fleet's.

    Args:
        name: Of the directory.
        file: As of `state_name`.
        endpoint: The same.
        projects: What was asked for from there.
        zones: The same.
    """
    asked = dict(zip(PLACES, (sorted(projects), sorted(zones)), strict=True))
    for own in ((), PLACES[:1], PLACES[1:], PLACES):
        if state_name(file, endpoint, [word for variable in own for word in asked[variable]]) == name:
            return {variable: ",".join(asked[variable]) for variable in own}
    return None
