"""Lists of a bucket's objects, with prefix, delimiter and pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """The parameters of a list.

    Attributes:
        prefix: Only names with this beginning.
        delimiter: Names with this text after the prefix are combined up to its end; empty for none.
        start: The first name.
        end: The name after the last; empty for no limit.
        after: The last entry of the previous page.
        limit: Maximum number of entries on the page.
    """

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    end: str = ""
    after: str = ""
    limit: int = 1000


@dataclass(frozen=True)
class Listing:
    """One page: object names, prefixes that stand for several names, and the last entry if there are more pages."""

    names: list[str]
    prefixes: list[str]
    last: str


def listing(names: Iterable[str], question: Question) -> Listing:
    """Return one page of a list, from the names of all objects."""
    # Sorting by code points equals sorting by UTF-8 bytes.
    entries = list(itertools.islice(_entries(sorted(names), question), question.limit + 1))
    page = entries[: question.limit]
    return Listing(
        [name for name, rolled in page if not rolled],
        [name for name, rolled in page if rolled],
        page[-1][0] if len(entries) > len(page) else "",
    )


def _entries(names: list[str], question: Question) -> Iterator[tuple[str, bool]]:
    """Yield the entries after the previous page in order, each with whether it is a prefix."""
    last = question.after
    for name in names:
        if not name.startswith(question.prefix) or name < question.start or (question.end and name >= question.end):
            continue
        cut = name.find(question.delimiter, len(question.prefix)) if question.delimiter else -1
        entry = name[: cut + len(question.delimiter)] if cut >= 0 else name
        if entry > last:
            last = entry
            yield entry, cut >= 0
