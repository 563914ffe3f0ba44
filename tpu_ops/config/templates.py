"""Templates in the fleet's file, evaluated by Ansible itself, for the inventory plugin and the command line alike.

Ansible is imported only where a value holds a template: that costs half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError

_MARKS = ("{{", "{%")


def evaluated(data: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> dict[str, Any]:
    """Return a file's mapping with the templates of these keys evaluated; lookups work, variables do not exist.

    Raises:
        UsageError: A template fails; names file and key.
    """
    return {
        key: _evaluated(value, key, file) if key in keys and _holds_template(value) else value
        for key, value in data.items()
    }


def _holds_template(value: Any) -> bool:
    """Whether a text, or one of a list or of a mapping's values, is a template: no option nests deeper."""
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return any(_is_template(entry) for entry in entries)


def _is_template(value: Any) -> bool:
    return isinstance(value, str) and any(mark in value for mark in _MARKS)


def _evaluated(value: Any, key: str, file: Path) -> Any:
    from ansible.errors import AnsibleError
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    loader = DataLoader()
    loader.set_basedir(str(file.parent))
    templar = Templar(loader=loader)

    def plain(entry: Any) -> Any:
        if not _is_template(entry):
            return entry
        found = templar.template(trust_as_template(entry))
        return str(found) if isinstance(found, str) else found

    try:
        if isinstance(value, Mapping):
            return {name: plain(entry) for name, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list) else plain(value)
    except AnsibleError as exc:
        raise UsageError(f"the template fails: {exc}", where=f"{file}, key {key!r}") from exc
