"""Reads from the result of a task what the task changed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

#: Arguments that name what a module changes, for modules whose result does not say it.
_SUBJECTS = ("name", "path", "dest")
#: What apt prints beside the packages that it installs, upgrades or removes.
_APT_ASIDE = re.compile(
    r"^(?:(?:The following packages were automatically installed|Suggested packages|Recommended packages)[^\n]*\n"
    r"(?: [^\n]*\n)*|Use '[^\n]*apt autoremove'[^\n]*\n)",
    re.MULTILINE,
)


def changes_of(result: Mapping[str, Any], *, whole: bool = False) -> list[str]:
    """Return what a task changed, given its result: the paths of files, and other changed lines with `+` or `-`.

    Args:
        result: The result.
        whole: Whether to return the changed lines of files too. They may be many, and may be secret.
    """
    given: Any = result.get("diff") or []
    found: list[str] = []
    for diff in given if isinstance(given, list) else [given]:
        headers = [str(diff.get(key) or "") for key in ("before_header", "after_header")]
        before, after = (str(diff.get(key) or "").splitlines() for key in ("before", "after"))
        path = headers[1] or headers[0]
        if path.startswith("/"):
            # For a template, Ansible's header is a temporary file of the controller.
            found.append(str(_arguments(result).get("dest") or path))
            # The first two lines repeat the path.
            found += [line.rstrip() for line in difflib.unified_diff(before, after, lineterm="")][2:] if whole else []
        else:
            found += [f"- {line}" for line in before if line not in after]
            found += [f"+ {line}" for line in after if line not in before]
            found += _APT_ASIDE.sub("", str(diff.get("prepared") or "")).splitlines()
    for entry in result.get("results") or ():
        found += changes_of(entry, whole=whole) if isinstance(entry, dict) and entry.get("changed") else []
    if not found:
        found = list(map(str, result.get("changed_paths") or _subject(result)))
    shown = found if whole else dict.fromkeys(found)
    return [line.rstrip() for line in shown if line.strip()]


def _subject(result: Mapping[str, Any]) -> list[str]:
    """Return what a module was asked to change, by its arguments: names, or a path."""
    given = _arguments(result)
    found: Any = next((given[key] for key in _SUBJECTS if given.get(key)), ())
    return [str(one) for one in found] if isinstance(found, list | tuple) else [str(found)]


def _arguments(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the task's module; empty if they are not known."""
    given: Mapping[str, Any] = (result.get("invocation") or {}).get("module_args") or {}
    return given
