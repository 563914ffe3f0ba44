"""Lists of a bucket's objects: prefix, delimiter, pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """What a list is to hold.

    Attributes:
        prefix: Beginning of the names.
        delimiter: Names that have it behind the prefix are rolled up to what ends with it; empty for none.
        start: First name.
        end: Name after the last; empty for no such.
        after: Last entry of the page before.
        limit: Most entries on the page.
    """

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    end: str = ""
    after: str = ""
    limit: int = 1000


@dataclass(frozen=True)
class Listing:
    """One page: names of objects, prefixes that stand for several, and its last entry where there are more."""

    names: list[str]
    prefixes: list[str]
    last: str


def listing(names: Iterable[str], question: Question) -> Listing:
    """Return one page of what a bucket holds, given the names of all objects."""
    # The order of code points is that of UTF-8.
    entries = list(itertools.islice(_entries(sorted(names), question), question.limit + 1))
    page = entries[: question.limit]
    return Listing(
        [name for name, rolled in page if not rolled],
        [name for name, rolled in page if rolled],
        page[-1][0] if len(entries) > len(page) else "",
    )


def _entries(names: list[str], question: Question) -> Iterator[tuple[str, bool]]:
    """Yield the entries after the last page's in order, each with whether it stands for several."""
    last = question.after
    for name in names:
        if not name.startswith(question.prefix) or name < question.start or (question.end and name >= question.end):
            continue
        cut = name.find(question.delimiter, len(question.prefix)) if question.delimiter else -1
        entry = name[: cut + len(question.delimiter)] if cut >= 0 else name
        if entry > last:
            last = entry
            yield entry, cut >= 0
