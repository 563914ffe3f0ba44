"""Checks the keys for groups and variables that Ansible itself does not check: compose, groups, keyed_groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_ops.config.templates import is_template
from tpu_ops.errors import UsageError
from tpu_ops.options import Options, did_you_mean, shown

#: Allowed keys in each mapping of the list `keyed_groups`.
_KEYED = ("key", "prefix", "separator", "parent_group", "default_value", "trailing_separator")


def check(options: Options) -> None:
    """Check `compose`, `groups` and `keyed_groups`; Ansible checks the expressions in them.

    Raises:
        UsageError: One of the three keys has the wrong form; the message names file and key.
    """
    for key in ("compose", "groups"):
        found = options.data.get(key)
        if found is not None and not is_template(found):
            _check_mapping(options, key, found)
    keyed = options.data.get("keyed_groups")
    if keyed is None or is_template(keyed):
        return
    if not isinstance(keyed, list):
        raise options.wrong("keyed_groups", "a list, as in [{key: tpu_zone, prefix: place}]")
    for number, entry in enumerate(keyed, 1):
        _check_keyed(entry, f"{options.at('keyed_groups')}, entry {number}")


def _check_mapping(options: Options, key: str, found: Any) -> None:
    names, kinds = ("variables", str) if key == "compose" else ("groups", str | bool)
    if not isinstance(found, dict):
        raise options.wrong(key, f"a mapping of {names} to expressions")
    for name, expression in found.items():
        where = f"{options.at(key)}, {shown(name)}"
        if not isinstance(name, str) or not name or (key == "compose" and not name.isidentifier()):
            fix = "use letters, digits and underscores, and no digit first"
            raise UsageError(f"{shown(name)} is not valid as a name of {names}", where=where, fix=fix)
        if not isinstance(expression, kinds) or expression == "":
            what = f"expected an expression, found {shown(expression)} ({type(expression).__name__})"
            raise UsageError(what, where=where, fix="write a string: put it in quotes")


def _check_keyed(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        what = f"expected a mapping, found {shown(entry)} ({type(entry).__name__})"
        raise UsageError(what, where=where, fix="write a mapping, as in {key: tpu_zone, prefix: place}")
    for word, value in entry.items():
        if word not in _KEYED:
            what = f"unknown key {shown(word)}{did_you_mean(str(word), _KEYED)}"
            raise UsageError(what, where=where, fix=f"use {', '.join(_KEYED)}")
        if word == "trailing_separator":
            expected, fits = "true or false", isinstance(value, bool)
        else:
            optional = value is None and word in ("parent_group", "default_value")
            expected, fits = "a string", optional or isinstance(value, str)
        if not fits:
            what = f"expected {expected}, found {shown(value)} ({type(value).__name__})"
            fix = "put it in quotes" if expected == "a string" else "write it without quotes"
            raise UsageError(what, where=f"{where}, {word!r}", fix=fix)
    if not entry.get("key"):
        fix = "write an expression, as in {key: tpu_zone, prefix: place}"
        raise UsageError("the mapping has no 'key', whose value names the groups", where=where, fix=fix)
    if entry.get("default_value") is not None and "trailing_separator" in entry:
        what = "default_value and trailing_separator exclude each other"
        raise UsageError(what, where=where, fix="remove one of them")
