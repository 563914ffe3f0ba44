"""Finds the fleet directory and reads its file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.config.read import from_data
from tpu_ops.config.settings import FLEET_FILE, Settings, folder_of
from tpu_ops.errors import OpsError, UsageError

#: Endings that the name of a fleet's file can have. The inventory plugin accepts the same endings.
ENDINGS = ("tpu_vm.yml", "tpu_vm.yaml")

#: Maximum size of a fleet's file, in bytes.
_LARGEST = 10_000_000


def load(fleet: str | None = None) -> Settings:
    """Return the settings of a fleet.

    Args:
        fleet: The value of `--fleet`: the fleet directory, or a fleet's file with another name than
            `inventory/tpu_vm.yml`. Default: the variable TPU_OPS_FLEET, else the nearest parent directory with an
            `inventory/tpu_vm.yml`.

    Raises:
        UsageError: No fleet is found, or the settings are wrong; the message names file and key.
    """
    return load_file(find_file(fleet, os.environ, here()))


def load_file(file: Path) -> Settings:
    """Return the settings from a fleet's file and the environment.

    Raises:
        UsageError: The file cannot be read, or the settings are wrong; the message names file and key.
    """
    file = files.resolved(str(file.parent), "the fleet's file") / file.name
    return from_data(read_file(file), file, os.environ)


def here() -> Path:
    """Return the working directory; the root directory if the working directory was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def fleet_option(file: Path) -> str:
    """Return ``--fleet DIR`` for the fleet of a file; empty if this fleet is the default in the working directory."""
    option = f"--fleet {shlex.quote(str(folder_of(file)))}"
    try:
        return "" if find_file(None, os.environ, here()) == file else option
    except (OpsError, OSError):
        return option


def find_file(fleet: str | None, environ: Mapping[str, str], start: Path) -> Path:
    """Return the fleet's file, given `--fleet`, the environment and the working directory.

    Raises:
        UsageError: There is no fleet's file.
    """
    named = fleet or environ.get("TPU_OPS_FLEET", "")
    if named:
        return _named_file(named, "--fleet" if fleet else "TPU_OPS_FLEET")
    if found := nearest_file(start):
        return found
    others = next(filter(None, map(_others, (start, *start.parents))), "")
    raise UsageError(
        f"no fleet: neither this directory nor one above it has {FLEET_FILE}",
        where=str(start),
        fix=f"name the file with --fleet or TPU_OPS_FLEET: {others}"
        if others
        else "change to the fleet directory, or name it with --fleet or TPU_OPS_FLEET",
    )


def _named_file(named: str, said: str) -> Path:
    """Return the fleet's file, given the value of `--fleet`: a fleet directory, or the file itself.

    Raises:
        UsageError: The file does not exist, or Ansible would not read it.
    """
    path, folder = files.expanded(named, said), files.resolved(named, said)
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise UsageError(
                "this is not the name of a fleet's file: Ansible would not read it",
                where=f"{path} (from {said})",
                fix=f"name a file that ends in {' or '.join(ENDINGS)}, or a fleet directory",
            )
        # A symbolic link to a fleet's file is a separate fleet, as it is a separate inventory for Ansible.
        return files.resolved(str(path.parent), said) / path.name
    if not (folder / FLEET_FILE).is_file():
        others = _others(folder)
        raise UsageError(
            f"the fleet directory has no {FLEET_FILE}",
            where=f"{folder} (from {said})",
            fix=f"name the file: {others}" if others else f"name a directory that holds {FLEET_FILE}",
        )
    return folder / FLEET_FILE


def _others(folder: Path) -> str:
    """Return some fleets' files in a directory whose name is not the default one, as words for a message."""
    found = (path for place in (folder, folder / FLEET_FILE.parent) for path in place.glob("*tpu_vm.y*ml"))
    names = sorted(str(path) for path in found if path.name.endswith(ENDINGS) and path.is_file())
    return " or ".join(names[:3])


def nearest_file(start: Path) -> Path | None:
    """Return the fleet's file in the nearest parent directory that is a fleet directory; None if there is none.

    Raises:
        UsageError: The path of the start directory is not valid text.
    """
    start = files.resolved(str(start), "the working directory")
    found = (folder / FLEET_FILE for folder in (start, *start.parents))
    return next((file for file in found if file.is_file()), None)


def read_file(file: Path) -> Mapping[str, Any]:
    """Return the mapping in a fleet's file.

    Raises:
        UsageError: The file cannot be read, or is not YAML or not a mapping.
    """
    from tpu_ops.config import document  # imported only here, since the import of yaml takes time

    mend = "correct the file there; `ansible-doc -t inventory tpu_vm` has examples"
    return document.parsed(_text(file), file, "begin it with `plugin: tpu_vm`", mend)


def _text(file: Path) -> str:
    try:
        return files.read_regular(file, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        fix = "make the file a text file in UTF-8 that you can read"
        raise UsageError(f"cannot read the fleet's file: {reason}", where=str(file), fix=fix) from exc
