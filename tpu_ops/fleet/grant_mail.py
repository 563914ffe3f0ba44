"""Writes a grant's file from the e-mail in which Google states the grant."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
from dataclasses import dataclass

from tpu_ops.fleet import grant
from tpu_ops.fleet.grant import Line

#: The length of the grant: "30 days", "the next 90 days", "6 months".
_TERM = re.compile(r"\b(\d{1,3})[\s-]+(day|month)s?\b", re.IGNORECASE)
#: The date of the e-mail, if its headers were pasted too.
_DATE = re.compile(r"^[\s>]*(?:Date|Sent):\s+(.+)$", re.IGNORECASE | re.MULTILINE)
#: Words of a line that seems to state TPUs.
_ABOUT_TPUS = re.compile(r"\bTPU\b.*\bzone|\bchips?\b|\bdevice(?:\(s\)|s)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Mail:
    """What an e-mail says of a grant.

    Attributes:
        taken: The lines of the grant.
        unknown: Lines of the e-mail that seem to state TPUs but were not understood, each with the reason.
        days: The length of the grant in days; None if the e-mail does not state it, or states several.
        sent: The date of the e-mail; None if its headers are missing.
    """

    taken: tuple[Line, ...]
    unknown: tuple[tuple[str, str], ...]
    days: int | None
    sent: dt.date | None

    def ends(self, today: dt.date) -> dt.date | None:
        """Return the last day of the grant; None if its length is unknown. Without a date, the e-mail came today."""
        return None if self.days is None else (self.sent or today) + dt.timedelta(days=self.days)


def read(text: str) -> Mail:
    """Return what an e-mail says, given its text; lines may be quoted with ``>`` or be a list."""
    taken: dict[Line, None] = {}
    unknown = []
    for row in text.splitlines():
        stripped = row.strip().lstrip(">").strip()
        try:
            line = grant.parse_line(stripped)
        except ValueError as exc:
            unknown.append((stripped, str(exc)))
            continue
        if line:
            taken[line] = None
        elif _ABOUT_TPUS.search(stripped) and re.search(r"\d", stripped):
            unknown.append((stripped, f"its form differs from `{grant.EXAMPLE}`"))
    terms = {int(number) * (30 if unit.lower() == "month" else 1) for number, unit in _TERM.findall(text)}
    return Mail(tuple(taken), tuple(unknown), terms.pop() if len(terms) == 1 else None, _sent(text))


def _sent(text: str) -> dt.date | None:
    for found in _DATE.findall(text):
        try:
            return email.utils.parsedate_to_datetime(found).date()
        except (ValueError, TypeError):
            continue
    return None


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
