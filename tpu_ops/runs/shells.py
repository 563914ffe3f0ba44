"""Finds runs that were started on this machine from a shell with other projects or zones."""

from __future__ import annotations

import glob
import os
import shlex

from tpu_ops.config import Settings
from tpu_ops.config.states import PLACES, shell_of
from tpu_ops.fleet.state import Files


def shown_by(settings: Settings, run_id: str) -> str:
    """Return words with the commands that show a run which is recorded only in other state directories of this fleet.

    Args:
        settings: The fleet's settings in this shell.
        run_id: The run.
    """
    here, (base, _, _) = settings.state_dir, settings.state_dir.name.rpartition("-")
    if not base:
        return ""
    commands = []
    for path in sorted(here.parent.glob(f"{glob.escape(base)}-*/runs/{glob.escape(run_id)}.json")):
        place = path.parents[1]
        if place == here or not (stored := Files(place).read()):
            continue
        projects, zones = (stored.question.get(key) or () for key in ("projects", "zones"))
        shell = shell_of(place.name, settings.file, settings.endpoint, projects, zones)
        if shell is not None:
            commands.append(f"`{_env(shell)}tpu_ops status {run_id}`")
    what = "a run of this name was started in a shell with other projects or zones"
    return f"{what}: {' or '.join(commands)}" if commands else ""


def _env(shell: dict[str, str]) -> str:
    """Return the beginning of a command line that sets some variables of `PLACES` and unsets all others of them."""
    unset = [f"-u {variable} " for variable in PLACES if os.environ.get(variable) and variable not in shell]
    put = [f"{variable}={shlex.quote(value)} " for variable, value in shell.items()]
    return "".join([*(["env "] if unset else []), *unset, *put])
