"""The environment variables for Ansible: inventories, which must include the fleet's, and a UTF-8 locale."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import UsageError

#: Variable with Ansible's inventories, and the separator between them.
VARIABLE, _BETWEEN = "ANSIBLE_INVENTORY", ","
#: Path of the fleet's file in a fleet directory, and the endings of the file names that belong to a fleet.
_FLEET_FILE, _OF_A_FLEET = ("inventory", "tpu_vm.yml"), ("tpu_vm.yml", "tpu_vm.yaml")
#: Fails if Ansible would reject the locale: Ansible checks for UTF-8 with the same two calls.
_TRY_LOCALE = """
import locale
locale.setlocale(locale.LC_ALL, "")
raise SystemExit((locale.getlocale()[1] or "").lower() not in ("utf-8", "utf8"))
"""
#: Locales that replace a rejected one; not every system has the first one.
_LOCALES = ("C.UTF-8", "en_US.UTF-8")


def inventories(own: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the inventories in ANSIBLE_INVENTORY, which must include the fleet's file; empty if there are none.

    Args:
        own: The fleet's file.
        environ: The shell's environment. Relative paths start at the working directory, as for Ansible.

    Raises:
        UsageError: ANSIBLE_INVENTORY names other inventories only: `hosts: all` would mean machines outside the fleet.
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
    """Return whether an inventory is a fleet's file, its directory, or another file of this directory."""
    if path.resolve() in (own.resolve(), own.parent.resolve()):
        return True
    # Files beside the fleet's file add to the fleet only if the directory is a fleet's `inventory` directory.
    beside = own.parts[-2:] == _FLEET_FILE and path.parent.resolve() == own.parent.resolve()
    return beside and not path.name.endswith(_OF_A_FLEET)


def with_utf8(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a UTF-8 locale: unchanged if its own locale is UTF-8 and installed."""
    tried = [dict(environ), *({**environ, "LC_ALL": name} for name in _LOCALES)]
    return next(filter(_has_utf8, tried), tried[0])


def _has_utf8(environ: Mapping[str, str]) -> bool:
    # Tested in a new Python process: setting the locale here would change this process.
    command = [sys.executable, "-S", "-c", _TRY_LOCALE]
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0
