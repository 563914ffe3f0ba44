"""Finds the fleet directory and reads its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_ops import files
from tpu_ops.config.read import FLEET_FILE, from_data
from tpu_ops.config.settings import Settings
from tpu_ops.errors import UsageError
from tpu_ops.options import shown


def load(fleet: str | None = None) -> Settings:
    """Return the settings of a fleet.

    Args:
        fleet: The fleet directory (`--fleet`); else TPU_OPS_FLEET, else the nearest parent directory that has
            `inventory/tpu_vm.yml`.

    Raises:
        UsageError: No fleet is found, or its settings are wrong; names file and key.
    """
    return load_file(find_fleet(fleet, os.environ, Path.cwd()) / FLEET_FILE)


def load_file(file: Path) -> Settings:
    """Return the settings that a fleet's file and the environment give.

    Raises:
        UsageError: The file cannot be read or its settings are wrong; names file and key.
    """
    file = file.parent.resolve() / file.name
    return from_data(read_file(file), file, os.environ)


def find_fleet(fleet: str | None, environ: Mapping[str, str], start: Path) -> Path:
    """Given `--fleet`, the environment and the working directory, return the fleet directory.

    Raises:
        UsageError: There is none.
    """
    named = fleet or environ.get("TPU_OPS_FLEET", "")
    if named:
        said = "--fleet" if fleet else "TPU_OPS_FLEET"
        path = files.expanded(named, said).resolve()
        if not (path / FLEET_FILE).is_file():
            raise UsageError(
                f"the fleet directory has no {FLEET_FILE}",
                where=f"{path} (from {said})",
                fix=f"name a directory that holds {FLEET_FILE}",
            )
        return path
    if found := nearest_fleet(start):
        return found
    raise UsageError(
        f"no fleet: neither this directory nor one above it has {FLEET_FILE}",
        where=str(start),
        fix="change to the fleet directory, or name it by --fleet or TPU_OPS_FLEET",
    )


def nearest_fleet(start: Path) -> Path | None:
    """Return the nearest directory upwards that is a fleet directory, or None."""
    folders = (start.resolve(), *start.resolve().parents)
    return next((folder for folder in folders if (folder / FLEET_FILE).is_file()), None)


def read_file(file: Path) -> Mapping[str, Any]:
    """Return the mapping that a fleet's file holds.

    Raises:
        UsageError: The file cannot be read, is no YAML, or is no mapping.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the fleet's file: {reason}", where=str(file)) from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
        raise UsageError(f"not valid YAML: {getattr(exc, 'problem', exc)}", where=place) from exc
    except RecursionError as exc:
        raise UsageError("not valid YAML for a fleet: nested too deeply", where=str(file)) from exc
    except ValueError as exc:
        raise UsageError(f"not valid YAML: {shown(str(exc))}", where=str(file)) from exc
    if not isinstance(data, dict):
        raise UsageError("the file is no mapping of options", where=str(file), fix="begin it with `plugin: tpu_vm`")
    return data
