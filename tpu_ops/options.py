"""Options of a file and the environment, read with their types; every error names where the value stands."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError


def shown(value: object) -> str:
    """Return a value as an error shows it: short, whatever was written."""
    form = reprlib.Repr()
    form.maxlevel = form.maxlist = form.maxdict = form.maxtuple = form.maxset = 3
    form.maxstring = form.maxother = form.maxlong = 80
    try:
        return form.repr(value)
    except ValueError:  # a number with more digits than Python writes
        return "a very large number"


def check_name(text: str, where: str, form: re.Pattern[str], expected: str) -> str:
    """Return a name that has the expected form.

    Raises:
        UsageError: It has another one.
    """
    if not form.fullmatch(text):
        raise UsageError(f"{shown(text)} is not {expected}", where=where)
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the known word nearest to this one; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Value:
    """A text and where it stands, for the error that it may cause."""

    value: str
    where: str


@dataclass(frozen=True)
class Options:
    """Reads options of the right type from the file and the environment."""

    data: Mapping[str, Any]
    file: Path
    environ: Mapping[str, str]

    def at(self, key: str) -> str:
        """Return the place of a key, for an error."""
        return f"{self.file}, key {key!r}"

    def wrong(self, key: str, expected: str) -> UsageError:
        """Return the error for a value of the wrong type."""
        value = self.data[key]
        return UsageError(f"expected {expected}, found {shown(value)} ({type(value).__name__})", where=self.at(key))

    def text(self, key: str, variable: str) -> Value:
        """Return a text option; empty where it is not set."""
        if value := self.environ.get(variable, ""):
            return Value(value, f"environment variable {variable}")
        entry = self.data.get(key)
        if entry is None:
            return Value("", self.at(key))
        if not isinstance(entry, str):
            raise self.wrong(key, "a text")
        return Value(entry, self.at(key))

    def names(self, key: str, variable: str, form: re.Pattern[str], expected: str) -> tuple[str, ...]:
        """Return a list of names; the file may hold a list or one name, the variable a comma list."""
        if text := self.environ.get(variable, ""):
            where, values = f"environment variable {variable}", [part.strip() for part in text.split(",")]
            values = [part for part in values if part]
        else:
            where, values = self.at(key), self._list(key)
        for value in values:
            check_name(value, where, form, expected)
        return tuple(dict.fromkeys(values))

    def choices(self, key: str, known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
        """Return a list of words out of those known; the default where it is not set."""
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
        """Return a yes or no."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def seconds(self, key: str, default: float) -> float:
        """Return a positive number of seconds."""
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
            raise self.wrong(key, "a positive number of seconds")
        return float(value)

    def _list(self, key: str) -> list[str]:
        value = self.data.get(key)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of texts")
        return value
