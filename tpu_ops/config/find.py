"""Finds the fleet directory and reads its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tpu_ops import files
from tpu_ops.config.read import from_data
from tpu_ops.config.settings import FLEET_FILE, Settings
from tpu_ops.errors import UsageError
from tpu_ops.options import shown

#: How the names of fleets' files end, here and for the inventory plugin.
ENDINGS = ("tpu_vm.yml", "tpu_vm.yaml")

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
        fleet: The fleet directory, or a file of another name than its `inventory/tpu_vm.yml` (`--fleet`); else
            TPU_OPS_FLEET, else the nearest parent directory that has an `inventory/tpu_vm.yml`.

    Raises:
        UsageError: No fleet is found, or its settings are wrong; names file and key.
    """
    return replace(load_file(find_file(fleet, os.environ, Path.cwd())), named=bool(fleet))


def load_file(file: Path) -> Settings:
    """Return the settings that a fleet's file and the environment give.

    Raises:
        UsageError: The file cannot be read or its settings are wrong; names file and key.
    """
    file = files.resolved(str(file.parent), "the fleet's file") / file.name
    return from_data(read_file(file), file, os.environ)


def find_file(fleet: str | None, environ: Mapping[str, str], start: Path) -> Path:
    """Given `--fleet`, the environment and the working directory, return the fleet's file.

    Raises:
        UsageError: There is none.
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
        fix=f"name the file by --fleet or TPU_OPS_FLEET: {others}"
        if others
        else "change to the fleet directory, or name it by --fleet or TPU_OPS_FLEET",
    )


def _named_file(named: str, said: str) -> Path:
    """Return the file of a fleet directory, or the file that is named itself.

    Raises:
        UsageError: There is none, or Ansible would not read it.
    """
    path, folder = files.expanded(named, said), files.resolved(named, said)
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise UsageError(
                "no fleet's file is called that: Ansible would not read it",
                where=f"{path} (from {said})",
                fix=f"name a file that ends in {' or '.join(ENDINGS)}, or a fleet directory",
            )
        # As for Ansible, a file that is a link is a fleet of its own.
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
    """Return the fleets' files of other names that a directory has, the first few, as a sentence holds them."""
    found = (path for place in (folder, folder / FLEET_FILE.parent) for path in place.glob("*tpu_vm.y*ml"))
    names = sorted(str(path) for path in found if path.name.endswith(ENDINGS) and path.is_file())
    return " or ".join(names[:3])


def nearest_file(start: Path) -> Path | None:
    """Return the file of the nearest directory upwards that is a fleet directory, or None.

    Raises:
        UsageError: The path of where it starts is no text.
    """
    start = files.resolved(str(start), "the working directory")
    found = (folder / FLEET_FILE for folder in (start, *start.parents))
    return next((file for file in found if file.is_file()), None)


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
