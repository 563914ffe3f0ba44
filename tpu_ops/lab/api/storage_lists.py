"""Lists of a bucket's objects, with prefix, delimiter and pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """The parameters of a request that lists a bucket's objects.

    Attributes:
        prefix: Only names that begin with this text are listed.
        delimiter: Names that contain this text after the prefix are combined into one entry, which ends with this text;
            if empty, names are not combined.
        start: Names before this name are not listed.
        end: This name and all names after it are not listed; empty for no limit.
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
    """One page of a list of objects.

    Attributes:
        names: Names of objects.
        prefixes: Entries that each stand for all names with this beginning.
        last: The last entry of the page; empty if there is no further page.
    """

    names: list[str]
    prefixes: list[str]
    last: str


def listing(names: Iterable[str], question: Question) -> Listing:
    """Return one page of a list of objects, given the names of all objects in the bucket."""
    # Google sorts names by their UTF-8 bytes. sorted() compares code points, which gives the same order.
    entries = list(itertools.islice(_entries(sorted(names), question), question.limit + 1))
    page = entries[: question.limit]
    return Listing(
        [name for name, rolled in page if not rolled],
        [name for name, rolled in page if rolled],
        page[-1][0] if len(entries) > len(page) else "",
    )


def _entries(names: list[str], question: Question) -> Iterator[tuple[str, bool]]:
    """Yield all entries after the previous page in order, each with a flag: whether the entry is a prefix."""
    last = question.after
    for name in names:
        if not name.startswith(question.prefix) or name < question.start or (question.end and name >= question.end):
            continue
        cut = name.find(question.delimiter, len(question.prefix)) if question.delimiter else -1
        entry = name[: cut + len(question.delimiter)] if cut >= 0 else name
        if entry > last:
            last = entry
            yield entry, cut >= 0
