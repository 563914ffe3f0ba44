"""Evaluates templates in the fleet's file by Ansible, for the inventory plugin and the command line alike.

Ansible is imported only if a value contains a template: the import takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError

_MARKS = ("{{", "{%")

#: Maximum nesting depth of an option's value: `labels` is a mapping of lists. Deeper values are invalid or recursive.
_DEPTH = 2


def evaluated(data: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> dict[str, Any]:
    """Return the mapping of a fleet's file, with all templates in the values of some keys evaluated.

    Templates can use lookups, filters and tests, including those of collections, but no variables. Templates in the
    result of a lookup are not evaluated.

    Raises:
        UsageError: A template fails; the message names file and key.
    """
    templates = _Templates(file)
    return {key: templates.evaluate(value, key) if key in keys else value for key, value in data.items()}


def is_template(value: Any) -> bool:
    """Return whether a value is a text that contains a template."""
    return isinstance(value, str) and any(mark in value for mark in _MARKS)


class _Templates:
    """Evaluates the Jinja templates in the values of one fleet's file."""

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
                fix="templates cannot use variables here; lookups work, as in {{ lookup('env', 'NAME') }}",
            ) from exc

    @cached_property
    def _templar(self) -> Any:
        from ansible.parsing.dataloader import DataLoader
        from ansible.plugins.loader import init_plugin_loader
        from ansible.template import Templar
        from ansible.utils.collection_loader import AnsibleCollectionConfig

        if AnsibleCollectionConfig.collection_finder is None:
            # Ansible's own commands call this function too. Without the call, plugins are not found by their full
            # names.
            init_plugin_loader()
        loader = DataLoader()
        loader.set_basedir(str(self._file.parent))
        return Templar(loader=loader)


def _plain(value: Any) -> Any:
    """Return the result of a template without Ansible's tags on its texts."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    return value
