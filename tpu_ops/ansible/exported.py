"""The shell variables that Ansible gets: the inventories, which must include the fleet's, and a locale."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import UsageError

#: Variable by which Ansible takes its inventories from a shell, and what stands between two of them.
VARIABLE, _BETWEEN = "ANSIBLE_INVENTORY", ","
#: How the file of a fleet directory is called, and how names of the files of other fleets end.
_FLEET_FILE, _OF_A_FLEET = ("inventory", "tpu_vm.yml"), ("tpu_vm.yml", "tpu_vm.yaml")
#: Fails where Ansible itself would refuse the locale of its environment: it asks for UTF-8 by these two calls.
_TRY_LOCALE = """
import locale
locale.setlocale(locale.LC_ALL, "")
raise SystemExit((locale.getlocale()[1] or "").lower() not in ("utf-8", "utf8"))
"""
#: What Ansible gets in place of a locale that it would refuse; not every system has the first one.
_LOCALES = ("C.UTF-8", "en_US.UTF-8")


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


def with_utf8(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a locale that Ansible takes: its own one where that is of UTF-8 and installed here."""
    tried = [dict(environ), *({**environ, "LC_ALL": name} for name in _LOCALES)]
    return next(filter(_has_utf8, tried), tried[0])


def _has_utf8(environ: Mapping[str, str]) -> bool:
    # A process of its own: this one keeps its locale, and Python replaces some locales as it starts.
    command = [sys.executable, "-S", "-c", _TRY_LOCALE]
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0
