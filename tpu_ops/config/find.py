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

#: Bytes that a fleet's file may have.
_LARGEST = 10_000_000

_MEND = "mend it there; `ansible-doc -t inventory tpu_vm` has examples"


class _Loader(yaml.SafeLoader):
    """YAML without tags that run anything, and without a key that stands twice in a mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping.

        Raises:
            yaml.MarkedYAMLError: A key stands twice in it.
        """
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            other = first.setdefault((key.tag, key.value), key) if isinstance(key, yaml.ScalarNode) else key
            if other is not key:
                lines = " and ".join(str(found.start_mark.line + 1) for found in (other, key))
                problem = f"the key {shown(key.value)} stands twice, in lines {lines}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


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
    file = files.resolved(str(file.parent), "the fleet's file") / file.name
    return from_data(read_file(file), file, os.environ)


def find_fleet(fleet: str | None, environ: Mapping[str, str], start: Path) -> Path:
    """Given `--fleet`, the environment and the working directory, return the fleet directory.

    Raises:
        UsageError: There is none.
    """
    named = fleet or environ.get("TPU_OPS_FLEET", "")
    if named:
        said = "--fleet" if fleet else "TPU_OPS_FLEET"
        path = files.resolved(named, said)
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
    """Return the nearest directory upwards that is a fleet directory, or None.

    Raises:
        UsageError: The path of where it starts is no text.
    """
    start = files.resolved(str(start), "the working directory")
    folders = (start, *start.parents)
    return next((folder for folder in folders if (folder / FLEET_FILE).is_file()), None)


def read_file(file: Path) -> Mapping[str, Any]:
    """Return the mapping that a fleet's file holds.

    Raises:
        UsageError: The file cannot be read, is no YAML, or is no mapping.
    """
    try:
        data = yaml.load(files.read_regular(file, _LARGEST).decode(), _Loader)  # noqa: S506 - a safe one
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        fix = "make it a text file in UTF-8 that you may read"
        raise UsageError(f"cannot read the fleet's file: {reason}", where=str(file), fix=fix) from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
        raise UsageError(f"not valid YAML: {getattr(exc, 'problem', exc)}", where=place, fix=_MEND) from exc
    except RecursionError as exc:
        raise UsageError("not valid YAML for a fleet: nested too deeply", where=str(file), fix=_MEND) from exc
    except ValueError as exc:
        raise UsageError(f"not valid YAML: {shown(str(exc))}", where=str(file), fix=_MEND) from exc
    except (AttributeError, LookupError, TypeError) as exc:
        # How PyYAML fails where a tag's value is not of its form, as in `!!bool foo`.
        what = "not valid YAML: a value is not what the tag before it says"
        raise UsageError(what, where=str(file), fix="leave the tags out: what begins with !!") from exc
    if not isinstance(data, dict):
        raise UsageError("the file is no mapping of options", where=str(file), fix="begin it with `plugin: tpu_vm`")
    return data
