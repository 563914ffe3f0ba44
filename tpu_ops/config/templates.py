"""Templates in the fleet's file, evaluated by Ansible itself, for the inventory plugin and the command line alike.

Ansible is imported only where a value holds a template: that costs half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError

_MARKS = ("{{", "{%")

#: How deep an option nests: `labels` is a mapping of lists. What is deeper is no option's value, and may be endless.
_DEPTH = 2


def evaluated(data: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> dict[str, Any]:
    """Return a file's mapping with the templates in the values of these keys evaluated.

    Lookups, filters and tests work, those of collections, too; there are no variables. Text that a lookup returns is
    data: it is not evaluated again.

    Raises:
        UsageError: A template fails; names file and key.
    """
    templates = _Templates(file)
    return {key: templates.evaluate(value, key) if key in keys else value for key, value in data.items()}


def is_template(value: Any) -> bool:
    """Return whether a value is a text with a template in it."""
    return isinstance(value, str) and any(mark in value for mark in _MARKS)


class _Templates:
    """Evaluates what one file holds."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def evaluate(self, value: Any, key: str, depth: int = _DEPTH) -> Any:
        """Return a value with its templates evaluated."""
        if isinstance(value, str):
            return self._text(value, key) if is_template(value) else value
        if depth and isinstance(value, list):
            return [self.evaluate(entry, key, depth - 1) for entry in value]
        if depth and isinstance(value, dict):
            return {name: self.evaluate(entry, key, depth - 1) for name, entry in value.items()}
        return value

    def _text(self, text: str, key: str) -> Any:
        from ansible.errors import AnsibleError
        from ansible.template import trust_as_template

        try:
            return _plain(self._templar.template(trust_as_template(text)))
        except AnsibleError as exc:
            raise UsageError(
                f"the template fails: {exc}",
                where=f"{self._file}, key {key!r}",
                fix="there are no variables here; lookups work, as in {{ lookup('env', 'NAME') }}",
            ) from exc

    @cached_property
    def _templar(self) -> Any:
        from ansible.parsing.dataloader import DataLoader
        from ansible.plugins.loader import init_plugin_loader
        from ansible.template import Templar
        from ansible.utils.collection_loader import AnsibleCollectionConfig

        if AnsibleCollectionConfig.collection_finder is None:
            # Ansible's own commands have done so; without it no plugin is found under its full name.
            init_plugin_loader()
        loader = DataLoader()
        loader.set_basedir(str(self._file.parent))
        return Templar(loader=loader)


def _plain(value: Any) -> Any:
    """Return what a template gave without Ansible's marks on its texts."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    return value
