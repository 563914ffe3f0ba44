"""Writes a grant's file from the e-mail in which Google states the grant."""

from __future__ import annotations

import contextlib
import datetime as dt
import html
import quopri
import re
from collections import deque
from dataclasses import dataclass

from tpu_ops.fleet import grant
from tpu_ops.fleet.grant import Line

#: The length of the grant: "30 days", "the next 90 days", "6 months".
_TERM = re.compile(r"\b(\d{1,3})[\s-]+(day|month)s?\b", re.IGNORECASE)
#: The date of an e-mail, as in "Mon, 5 Oct 2026", "October 5, 2026" or "2026-10-05": in its headers, above a quoted
#: e-mail, or in a line of its own with or without the time.
_SENT = re.compile(
    r"^[^\S\n]*(?:(?P<header>(?:date|sent):\s*)|(?P<reply>on\s+))?(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*,?\s+)?"
    r"(?P<date>20\d\d-\d\d-\d\d|[a-z]{3,9}\.?\s+\d{1,2},?\s+20\d\d|\d{1,2}\s+[a-z]{3,9}\.?,?\s+20\d\d)(?!\d)"
    r"(?(header)|(?(reply)(?=[^\n]*(?:\n[^\n]*)?\bwrote:)|(?:(?:,|T|\s+at)?\s*\d{1,2}:\d\d[^\n]*)?[ \t]*$))",
    re.IGNORECASE | re.MULTILINE,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: Quoted-printable text: a row that ends with "=" within a sentence, or a common code.
_QUOTED_PRINTABLE = re.compile(r"(?<=[^=\n])=$|=(?:3D|20|E2)", re.MULTILINE)
#: Tags that begin or end a row, and other tags and links.
_ROW_TAG = re.compile(r"<(?:br|/?(?:li|ul|ol|p|div|tr|h\d))\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)
#: Characters that have no width, hyphens that do not break or stand for a dash, and the asterisks of bold text.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_HYPHEN = re.compile("[\u2010-\u2013\u2212]")
_BOLD = re.compile(r"\*+(?=\S)|(?<=\S)\*+")
#: A line that seems to state TPUs: a number that is a word of its own, and a word for TPUs or a tier after the number.
_ABOUT_TPUS = re.compile(
    r"(?=.*(?<![\w.,-])-?\d[\d,]*(?![\w.-]))(?:.*(?:\bTPU\b.*\bzone|\b(?:chip|device|core)(?:\(s\)|s)?\b|\bv\d+[a-z]*\b)"
    r"|.*\d\s+(?:\w+\s+)?(?:on-demand|spot|preemptible|reserved|TPUs?)\b)",
    re.IGNORECASE,
)
#: Hyphens in the name of a zone; the name of a region has one.
_HYPHENS = 2
#: A mail program may have broken a line into this many rows.
_ROWS = 3


@dataclass(frozen=True)
class Mail:
    """What an e-mail says of a grant.

    Attributes:
        taken: The lines of the grant.
        unknown: Lines of the e-mail that seem to state TPUs but were not understood, each with the reason.
        days: The length of the grant in days; None if the e-mail does not state it, or states several.
        sent: The date of the original e-mail; None if the text has no date.
    """

    taken: tuple[Line, ...]
    unknown: tuple[tuple[str, str], ...]
    days: int | None
    sent: dt.date | None

    def ends(self, today: dt.date) -> dt.date | None:
        """Return the last day of the grant; None if its length is unknown. Without a date, the e-mail came today."""
        return None if self.days is None else (self.sent or today) + dt.timedelta(days=self.days)


def read(text: str) -> Mail:
    """Return what an e-mail says, given its text; it can be quoted with ``>``, forwarded, HTML or quoted-printable."""
    text = _plain(text)
    rows = deque(row.strip() for row in text.splitlines() if row.strip())
    taken: dict[Line, None] = {}
    unknown = []
    while rows:
        row = rows.popleft()
        try:
            line = _joined(row, rows)
        except ValueError as exc:
            unknown.append((row, str(exc)))
            continue
        if line:
            taken[line] = None
        elif _ABOUT_TPUS.match(row):
            unknown.append((row, f"its form differs from `{grant.EXAMPLE}`"))
    terms = {int(number) * (30 if unit.lower() == "month" else 1) for number, unit in _TERM.findall(text)}
    return Mail(tuple(taken), tuple(unknown), terms.pop() if len(terms) == 1 else None, _sent(text))


def _joined(row: str, rows: deque[str]) -> Line | None:
    """Return the line that begins with a row, and remove its further rows; None if the row begins no line.

    Raises:
        ValueError: The line has the form of a grant's line, but states TPUs that do not exist.
    """
    for more in range(min(_ROWS, len(rows) + 1)):
        line = grant.parse_line(" ".join([row, *list(rows)[:more]]))
        if line and line.zone.count("-") < _HYPHENS:
            raise ValueError(f"{line.zone} is not a whole zone, as in us-central2-b")
        if line:
            for _ in range(more):
                rows.popleft()
            return line
    return None


def _plain(text: str) -> str:
    """Return the text without quoting, tags, links, character codes and emphasis."""
    if _QUOTED_PRINTABLE.search(text):
        text = quopri.decodestring(text.encode()).decode(errors="replace")
    text = re.sub(r"^[ \t]*(?:>[ \t]*)+", "", text, flags=re.MULTILINE)
    text = html.unescape(_TAG.sub("", _ROW_TAG.sub("\n", text)))
    return _BOLD.sub("", _HYPHEN.sub("-", _INVISIBLE.sub("", text)))


def _sent(text: str) -> dt.date | None:
    """Return the last date of an e-mail in the text: after those of replies, the original one; None without a date."""
    sent = None
    for found in _SENT.finditer(text):
        with contextlib.suppress(ValueError):
            sent = _date(found["date"])
    return sent


def _date(text: str) -> dt.date:
    """Return the day that a date of an e-mail names.

    Raises:
        ValueError: There is no such month or day.
    """
    if text[:4].isdecimal():
        return dt.date.fromisoformat(text)
    *words, year = re.findall(r"\w+", text.lower())
    day, month = sorted(words)  # digits come before letters
    return dt.date(int(year), _MONTHS.index(month[:3]) + 1, int(day))


def document(lines: tuple[Line, ...], ends: dt.date) -> str:
    """Return the text of the grant's file."""
    rows = "\n".join(f"  - {line}" for line in lines)
    return (
        "# What this fleet may have without being billed: the lines of Google's e-mail, word for word.\n"
        "# tpu_ops refuses to create anything else, unless --outside-grant is given. `tpu_ops grant` shows the rest.\n"
        "# The last day, in UTC:\n"
        f"ends: {ends.isoformat()}\n"
        "lines:\n"
        f"{rows}\n"
    )
