"""Which inventories a person's shell names for Ansible, and whether the fleet's own is among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import UsageError

#: Variable by which Ansible takes its inventories from a shell, and what stands between two of them.
VARIABLE, _BETWEEN = "ANSIBLE_INVENTORY", ","
#: How the file of a fleet directory is called, and how names of the files of other fleets end.
_FLEET_FILE, _OF_A_FLEET = ("inventory", "tpu_vm.yml"), ("tpu_vm.yml", "tpu_vm.yaml")


def inventories(own: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the inventories that a shell names for Ansible, of which the fleet's is a part; empty where it names none.

    Args:
        own: The fleet's file.
        environ: Of the shell. Relative paths start where it is, as they do for Ansible itself.

    Raises:
        UsageError: The shell names the inventories of other machines: `hosts: all` would mean these.
    """
    given = environ.get(VARIABLE, "")
    entries = [entry.strip() for entry in given.split(_BETWEEN) if entry.strip()]
    found = [files.expanded(os.path.expandvars(entry), VARIABLE).absolute() for entry in entries]
    if found and not any(_is_of(path, own.absolute()) for path in found):
        raise UsageError(
            f"{VARIABLE} names machines other than this fleet's, and Ansible would run on them",
            where=f"{given}, and the fleet's file is {own}",
            fix=f"`unset {VARIABLE}`, or name the fleet that you mean with --fleet",
        )
    return [str(path) for path in found]


def _is_of(path: Path, own: Path) -> bool:
    """Return whether an inventory is a fleet's file, the directory that it stands in, or another part of that."""
    if path.resolve() in (own.resolve(), own.parent.resolve()):
        return True
    # In any other directory files stand side by side that have nothing to do with each other.
    beside = own.parts[-2:] == _FLEET_FILE and path.parent.resolve() == own.parent.resolve()
    return beside and not path.name.endswith(_OF_A_FLEET)
