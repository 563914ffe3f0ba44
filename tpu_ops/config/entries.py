"""Reads the entries of a YAML file in which users declare things; all faults of the file are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tpu_ops import files, texts
from tpu_ops.errors import UsageError
from tpu_ops.options import did_you_mean, shown

#: Maximum size of such a file, in bytes.
_LARGEST = 1_000_000

Path_ = tuple[str | int, ...]


class Document:
    """A YAML file whose top level is a mapping, with the faults found so far.

    Args:
        file: The file.
        text: Its text.

    Raises:
        UsageError: The text is not YAML, or not a mapping.
    """

    def __init__(self, file: Path, text: str) -> None:
        from tpu_ops.config import document  # imported only here, since the import of yaml takes time

        self.file = file
        empty = not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())
        self.data: Mapping[str, Any] = (
            {} if empty else document.parsed(text, file, "begin it with a key", "correct the file there")
        )
        self._lines = {} if empty else document.lines(text)
        self._faults: list[tuple[int, str]] = []

    def line(self, path: Path_) -> int:
        """Return the line of a value; the line of the nearest value around it if it has none of its own."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def fault(self, path: Path_, text: str) -> None:
        """Add a fault of the value at a path."""
        self.fault_at(self.line(path), text)

    def fault_at(self, line: int, text: str) -> None:
        """Add a fault of a line."""
        self._faults.append((line, text))

    @property
    def is_faulty(self) -> bool:
        """Whether a fault was found."""
        return bool(self._faults)

    def check(self) -> None:
        """End the reading of the file.

        Raises:
            UsageError: The file has faults. The error lists each with its line.
        """
        if self._faults:
            rows = [f"line {line}: {text}" for line, text in sorted(dict.fromkeys(self._faults))]
            what = f"the file has {texts.count(len(rows), 'fault')}"
            raise UsageError(what, where=str(self.file), fix="correct these lines", details=rows)

    def top(self) -> Entry:
        """Return the top level as an entry."""
        return Entry(self, (), self.data)

    def entries(self, key: str, words: str) -> list[Entry | str]:
        """Return the entries of a list: mappings as `Entry`, texts as they are; others are faults.

        Args:
            key: The key of the list, which is the plural noun for its entries.
            words: What an entry is, for messages.
        """
        found = self.data.get(key)
        if found is None:
            return []
        if not isinstance(found, list):
            self.fault((key,), f"{key}: expected a list of {key}, found {shown(found)}")
            return []
        entries: list[Entry | str] = []
        for index, value in enumerate(found):
            if isinstance(value, Mapping):
                entries.append(Entry(self, (key, index), value))
            elif isinstance(value, str):
                entries.append(value)
            else:
                self.fault((key, index), f"expected {words}, found {shown(value)}")
        return entries


class Entry:
    """One mapping of a file. A missing or faulty value is read as the default, and the fault is added to the file.

    Args:
        document_: The file.
        path: The keys and indexes that lead to the mapping.
        data: The mapping.
    """

    def __init__(self, document_: Document, path: Path_, data: Mapping[str, Any]) -> None:
        self.document, self.path, self.data = document_, path, data

    @property
    def line(self) -> int:
        """The line at which the mapping begins."""
        return self.document.line(self.path)

    def fault(self, key: str, text: str) -> None:
        """Add a fault of the value of a key."""
        self.document.fault((*self.path, key), text)

    def only(self, known: Iterable[str]) -> None:
        """Add a fault for each key that is not known."""
        known = tuple(known)
        for key in self.data:
            if key not in known:
                self.fault(str(key), f"unknown key {shown(key)}{did_you_mean(str(key), known)}")

    def text(
        self, key: str, default: str = "", *, form: re.Pattern[str] | None = None, expected: str = "a string"
    ) -> str:
        """Return a text.

        Args:
            key: The key.
            default: The value if the key is missing.
            form: The form of the whole text; None accepts any text that is not empty.
            expected: The expected value in words, for the fault.
        """

        def fits(value: Any) -> bool:
            return isinstance(value, str) and bool(form.fullmatch(value) if form else value)

        return str(self._value(key, default, fits, expected))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        return bool(self._value(key, default, lambda value: isinstance(value, bool), "true or false"))

    def number(self, key: str, default: int = 0) -> int:
        """Return a whole number above 0."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value > 0

        return int(self._value(key, default, fits, "a whole number above 0"))

    def names(self, key: str, *, form: re.Pattern[str] | None = None, expected: str = "strings") -> tuple[str, ...]:
        """Return a list of texts; a single text is a list of one."""

        def fits(value: Any) -> bool:
            values = [value] if isinstance(value, str) else value
            if not isinstance(values, list):
                return False
            return all(isinstance(one, str) and (form.fullmatch(one) if form else one) for one in values)

        found = self._value(key, [], fits, f"a list of {expected}")
        return (found,) if isinstance(found, str) else tuple(found)

    def mapping(self, key: str) -> dict[str, str]:
        """Return a mapping of texts to texts; numbers and booleans in it are written as YAML writes them."""

        def fits(value: Any) -> bool:
            return isinstance(value, Mapping) and all(
                isinstance(name, str) and isinstance(one, str | int | float) for name, one in value.items()
            )

        found = self._value(key, {}, fits, "a mapping of names to strings")
        return {name: str(one).lower() if isinstance(one, bool) else str(one) for name, one in found.items()}

    def _value(self, key: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self.data.get(key)
        if value is None:
            return default
        if not fits(value):
            self.fault(key, f"{key}: expected {expected}, found {shown(value)}")
            return default
        return value


def read(file: Path) -> Document | None:
    """Return the file's content; None if the file does not exist.

    Raises:
        UsageError: The file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        text = files.read_regular(file, _LARGEST).decode()
    except FileNotFoundError:
        other = file.with_suffix(".yaml")
        if other.exists():
            fix = f"rename it to {file.name}"
            raise UsageError(f"only {file.name} is read", where=str(other), fix=fix) from None
        return None
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        fix = "make the file a text file in UTF-8 that you can read"
        raise UsageError(f"the file cannot be read: {reason}", where=str(file), fix=fix) from exc
    return Document(file, text)
