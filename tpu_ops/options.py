"""Typed options from a file and the environment. Every error names the key or variable that has the invalid value."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops.errors import UsageError


def shown(value: object) -> str:
    """Return a value as text for an error message; a long value is shortened."""
    form = reprlib.Repr()
    form.maxlevel = form.maxlist = form.maxdict = form.maxtuple = form.maxset = 3
    form.maxstring = form.maxother = form.maxlong = 80
    try:
        return form.repr(value)
    except ValueError:  # the number has more digits than Python converts
        return "a very large number"


def check_name(text: str, where: str, form: re.Pattern[str], expected: str) -> str:
    """Return a name after checking its form.

    Raises:
        UsageError: The name has another form.
    """
    if not form.fullmatch(text):
        what = f"{shown(text)} is not {expected.partition(', as in')[0]}"
        raise UsageError(what, where=where, fix=f"use {expected}")
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: suggest the known word most similar to a wrong one, or empty if none is similar."""
    spelled = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(word.lower(), list(spelled), n=1, cutoff=0.6)
    return f", did you mean {spelled[close[0]]!r}?" if close else ""


def duration(text: str) -> float:
    """Return a duration such as ``90m``, ``12h`` or ``7d`` in seconds; a bare number is in seconds.

    Raises:
        ValueError: The text has another form, or the duration is out of range.
    """
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        raise ValueError(f"{text!r} is not a duration: write it as in 90s, 30m, 12h or 7d") from None
    if not 0 < value <= 366 * 86400:
        raise ValueError(f"{text} is not a duration above 0 and up to 366d")
    return value


class Value(NamedTuple):
    """The text value of an option, and its place (file and key, or variable) for error messages."""

    value: str
    where: str
    from_environment: bool = False


class Options:
    """Reads typed options from the file and the environment. A variable of the environment overrides the file.

    Attributes:
        data: The mapping in the file. This mapping and the environment can contain secrets, so neither is ever printed.
        file: The file.
        environ: The environment.
    """

    __slots__ = ("data", "environ", "file")

    def __init__(self, data: Mapping[str, Any], file: Path, environ: Mapping[str, str]) -> None:
        self.data, self.file, self.environ = data, file, environ

    def at(self, key: str) -> str:
        """Return words that name the file and a key of it, for an error message."""
        return f"{self.file}, key {key!r}"

    def wrong(self, key: str, expected: str, *, secret: bool = False) -> UsageError:
        """Return the error for a value of the wrong type; a secret value is not shown."""
        value = self.data[key]
        kind = type(value).__name__
        found = f"a value of type {kind}" if secret else f"{shown(value)} ({kind})"
        plain = expected == "a string" and isinstance(value, int | float)
        fix = "put it in quotes" if plain and not secret else f"write {expected}, or leave the key out"
        return UsageError(f"expected {expected}, found {found}", where=self.at(key), fix=fix)

    def text(self, key: str, variable: str = "", *, secret: bool = False) -> Value:
        """Return a text option; empty if it is not set.

        Args:
            key: The option's key in the file.
            variable: The option's environment variable, if there is one.
            secret: Whether errors must not show the value.

        Raises:
            UsageError: The value is not a text.
        """
        if value := self._variable(variable):
            return value
        entry = self.data.get(key)
        if entry is not None and not isinstance(entry, str):
            raise self.wrong(key, "a string", secret=secret)
        return Value(entry or "", self.at(key))

    def choice(self, key: str, known: tuple[str, ...], variable: str = "") -> Value:
        """Return the value of an option that must be one of the known words; the first known word if it is not set.

        Raises:
            UsageError: The value is another word.
        """
        found = self.text(key, variable)
        if not found.value:
            return Value(known[0], found.where)
        if found.value not in known:
            raise UsageError(
                f"unknown value {shown(found.value)}{did_you_mean(found.value, known)}",
                where=found.where,
                fix=f"use one of {', '.join(known)}",
            )
        return found

    def names(self, key: str, form: re.Pattern[str], expected: str, variable: str = "") -> tuple[str, ...]:
        """Return an option's list of names. The file can contain a list or one name, the variable names with commas.

        Raises:
            UsageError: The value is not a list of texts, or a name has the wrong form.
        """
        if value := self._variable(variable):
            where, values = value.where, [part.strip() for part in value.value.split(",") if part.strip()]
        else:
            where, values = self.at(key), self._list(key)
        for entry in values:
            if "," in entry and all(form.fullmatch(part.strip()) for part in entry.split(",")):
                parts = ", ".join(part.strip() for part in entry.split(","))
                raise UsageError(f"{shown(entry)} is one string", where=where, fix=f"write it as a list: [{parts}]")
            check_name(entry, where, form, expected)
        return tuple(dict.fromkeys(values))

    def choices(self, key: str, known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the value of an option that must be a list of known words; the default if it is not set.

        Raises:
            UsageError: The value is not a list of texts, contains an unknown word, or is empty.
        """
        if self.data.get(key) is None:
            return default
        values = self._list(key)
        for value in values:
            if value not in known:
                raise UsageError(
                    f"unknown value {shown(value)}{did_you_mean(value, known)}",
                    where=self.at(key),
                    fix=f"use one or more of {', '.join(known)}",
                )
        if not values:
            raise UsageError("the list is empty", where=self.at(key), fix=f"use {', '.join(default)}")
        return tuple(dict.fromkeys(values))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the value of a boolean option; the default if it is not set.

        Raises:
            UsageError: The value is not a boolean.
        """
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def seconds(self, key: str, default: float) -> float:
        """Return the value of an option that must be a positive number of seconds; the default if it is not set.

        Raises:
            UsageError: The value is not such a number.
        """
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
            raise self.wrong(key, "a number of seconds above 0 and below 86400")
        return float(value)

    def _variable(self, name: str) -> Value | None:
        """Return the value of an environment variable; None if it is unset or empty."""
        value = self.environ.get(name, "") if name else ""
        return Value(value, f"environment variable {name}", from_environment=True) if value else None

    def _list(self, key: str) -> list[str]:
        value = self.data.get(key)
        if value is None:
            return []
        if isinstance(value, str):
            return [value] if value else []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of strings")
        return value
