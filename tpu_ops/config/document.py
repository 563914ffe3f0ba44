"""Parses the YAML of a fleet's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_ops.errors import UsageError
from tpu_ops.options import shown


class _Loader(yaml.SafeLoader):
    """YAML loader that executes no tags and rejects duplicate keys in a mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping.

        Raises:
            yaml.MarkedYAMLError: A key occurs twice.
        """
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            other = first.setdefault((key.tag, key.value), key) if isinstance(key, yaml.ScalarNode) else key
            if other is not key:
                lines = " and ".join(str(found.start_mark.line + 1) for found in (other, key))
                problem = f"the key {shown(key.value)} occurs twice, in lines {lines}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


def parsed(text: str, file: Path, begin: str, mend: str) -> Mapping[str, Any]:
    """Return the mapping in the text of a fleet's file.

    Args:
        text: The text.
        file: Its path, for errors.
        begin: The fix for a text that is not a mapping.
        mend: The fix for a text that is not YAML.

    Raises:
        UsageError: The text is not YAML, or not a mapping.
    """
    try:
        data = yaml.load(text, _Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
        raise UsageError(f"not valid YAML: {getattr(exc, 'problem', exc)}", where=place, fix=mend) from exc
    except RecursionError as exc:
        raise UsageError("not valid YAML for a fleet: nested too deeply", where=str(file), fix=mend) from exc
    except ValueError as exc:
        raise UsageError(f"not valid YAML: {shown(str(exc))}", where=str(file), fix=mend) from exc
    except (AttributeError, LookupError, TypeError) as exc:
        # PyYAML raises this if a value does not fit its tag, as in `!!bool foo`.
        what = "not valid YAML: a value does not fit the tag before it"
        raise UsageError(what, where=str(file), fix="remove the tags, which begin with !!") from exc
    if not isinstance(data, dict):
        raise UsageError("the file is not a mapping of options", where=str(file), fix=begin)
    return data


def lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the line of each value in a YAML text that `parsed` accepts: path of keys and indexes -> line, from 1.

    Values within an alias have no line of their own.
    """
    found: dict[tuple[str | int, ...], int] = {}
    seen: set[yaml.Node] = set()

    def walk(node: yaml.Node, path: tuple[str | int, ...], line: int) -> None:
        found[path] = line + 1
        # An alias is the same node again, and can be within itself.
        if node in seen:
            return
        seen.add(node)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                walk(value, (*path, str(key.value)), key.start_mark.line)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*path, index), value.start_mark.line)

    root = yaml.compose(text, _Loader)
    if root is not None:
        walk(root, (), root.start_mark.line)
    return found
