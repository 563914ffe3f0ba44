"""The grant of a fleet: which TPUs the fleet may have, and until when. Nothing here asks the API or a clock.

Google's TPU Research Cloud grants TPUs with lines such as ``32 on-demand Cloud TPU v4 chips in zone us-central2-b``.
A line counts chips of a generation, or devices of one accelerator type. Anything that no line covers is billed.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.accelerators import accelerator_type, generations
from tpu_ops.cloud.node import tier
from tpu_ops.config import ZONE, entries
from tpu_ops.errors import UsageError
from tpu_ops.options import did_you_mean, shown

#: The grant's file in the fleet directory.
FILE = Path("grant.yml")
#: Days before the end from which commands that change nodes warn.
WARN_DAYS = 7
#: Names of generations in Google's e-mails that differ from those in accelerator types.
_SPELLED = {"v5e": "v5litepod", "v5lite": "v5litepod"}
#: Spellings of the same two in messages.
_IN_WORDS = {"v5litepod": "v5e"}

#: A line of Google's e-mail, perhaps after a bullet. Its form is the same in all public copies from 2022 to 2026.
_LINE = re.compile(
    r"[\W_]*(?<![-.,+])(?P<amount>\d{1,3}(?:,\d{3})+|\d+)\s+(?P<tier>on-demand|spot|preemptible)\s+(?:Google\s+)?Cloud\s+TPU\s+"
    r"(?P<kind>v\d+[a-z]*(?:-\d+)?)\s+(?P<unit>chips?|devices?|device\(s\))\s+in\s+zone(?:\(s\))?\s+"
    r"(?P<zone>[a-z]+(?:-[a-z0-9]+)+)[\s.,;]*",
    re.IGNORECASE,
)
#: An example of such a line.
EXAMPLE = "32 on-demand Cloud TPU v4 chips in zone us-central2-b"
_KEYS = ("chips", "count", "type", "zone", "spot")


@dataclass(frozen=True)
class Line:
    """One line of the grant.

    Attributes:
        amount: The granted number of chips, or of nodes.
        kind: A generation such as ``v4`` if chips are counted, else an accelerator type such as ``v2-8``.
        zone: The zone.
        spot: Whether the TPUs are spot (or preemptible) ones.
        number: Line in the file, from 1; not compared.
    """

    amount: int
    kind: str
    zone: str
    spot: bool
    number: int = 0

    @property
    def counts_chips(self) -> bool:
        """Whether the line counts chips, not nodes."""
        return "-" not in self.kind

    def covers(self, kind: str, zone: str, *, spot: bool) -> bool:
        """Return whether the line is for nodes of this accelerator type, zone and tier."""
        return self.zone == zone and self.spot == spot and self.fits(kind)

    def fits(self, kind: str) -> bool:
        """Return whether the line is for nodes of this accelerator type, in any zone."""
        return self.kind == (kind.rpartition("-")[0] if self.counts_chips else kind)

    def cost(self, kind: str) -> int:
        """Return how much of the line a node of this accelerator type uses: its chips, or 1."""
        return chips_of(kind) if self.counts_chips else 1

    @property
    def granted(self) -> str:
        """What is granted, as in ``32 v4 chips`` or ``5 v2-8``."""
        return f"{self.amount} {_IN_WORDS.get(self.kind, self.kind)}{' chips' if self.counts_chips else ''}"

    def __str__(self) -> str:
        kind = _IN_WORDS.get(self.kind, self.kind)
        unit = "chips" if self.counts_chips else "device(s)"
        return f"{self.amount} {tier(spot=self.spot)} Cloud TPU {kind} {unit} in zone {self.zone}"


@dataclass(frozen=True)
class Use:
    """A node, or a node of a queued resource, that uses quota.

    Attributes:
        name: Resource name of the node, or of the queued resource.
        kind: Accelerator type.
        zone: The zone.
        spot: Whether it is a spot node.
        state: State of the node or queued resource in the API.
        created: Creation time in RFC 3339, or empty.
        node: Short name of the node that a queued resource is to create; empty if the use is a node itself.
    """

    name: str
    kind: str
    zone: str
    spot: bool
    state: str = ""
    created: str = ""
    node: str = ""

    def __str__(self) -> str:
        short = self.name.rpartition("/")[2]
        return f"queued resource {short} ({self.state})" if self.node else f"node {short}"


@dataclass(frozen=True)
class Grant:
    """A fleet's grant.

    Attributes:
        file: The file that it was read from.
        ends: The first moment after the grant, in UTC.
        lines: Its lines, in the order of the file; lines for the same TPUs are added up.
    """

    file: Path
    ends: dt.datetime
    lines: tuple[Line, ...]

    def days_left(self, now: dt.datetime) -> float:
        """Return the days until the end; negative after the end."""
        return (self.ends - now) / dt.timedelta(days=1)

    def warning(self, now: dt.datetime) -> str:
        """Return the warning that the grant ends soon or has ended; empty more than `WARN_DAYS` days before the end."""
        left = self.days_left(now)
        if left > WARN_DAYS:
            return ""
        if left <= 0:
            return f"the grant ended on {_day(self.ends)}: nodes are billed (`tpu_ops grant` lists them)"
        return f"the grant ends in {self.time_left(now)}, on {_day(self.ends)}; nodes are billed after that"

    def time_left(self, now: dt.datetime) -> str:
        """Return the time until the end in words, as in ``7 days``, ``5 h`` or ``less than 1 h``."""
        left = self.days_left(now)
        if left >= 1:
            return texts.count(int(left), "day")
        return f"{left * 24:.0f} h" if left * 24 >= 1 else "less than 1 h"

    def allowed(self, use: Use) -> bool:
        """Return whether a node or queued resource was created before the end; False if this is unknown."""
        created = texts.moment(use.created)
        return created is not None and created < self.ends.timestamp()


def _day(moment: dt.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def chips_of(kind: str) -> int:
    """Return the chips of an accelerator type; 0 if the table does not contain it."""
    try:
        return accelerator_type(kind).chips
    except ValueError:
        return 0


def parse_line(text: str) -> Line | None:
    """Return the line of a grant that Google's e-mail states; None if the text has another form.

    Raises:
        ValueError: The text has the form, but its type is unknown or does not go with its unit.
    """
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    kind = _kind(found["kind"].lower(), chips=found["unit"].lower().startswith("chip"))
    amount = int(found["amount"].replace(",", ""))
    return Line(_amount(amount), kind, found["zone"].lower(), found["tier"].lower() != "on-demand")


def _amount(number: int) -> int:
    if not 0 < number < 1_000_000:
        raise ValueError(f"{number} is not a number of TPUs")
    return number


def _kind(text: str, *, chips: bool) -> str:
    """Return the generation or accelerator type of a line.

    Raises:
        ValueError: The type is unknown, or does not go with the unit.
    """
    generation, dash, size = text.partition("-")
    generation = _SPELLED.get(generation, generation)
    if generation not in generations():
        known = sorted({*generations(), "v5e"})
        raise ValueError(f"unknown TPU generation {generation!r}{did_you_mean(generation, known)}")
    if chips and dash:
        raise ValueError(f"chips are counted for a generation such as {generation}, not for the type {text}")
    if not chips and not dash:
        raise ValueError(f"devices are counted for an accelerator type such as {generation}-8, not for {text}")
    kind = f"{generation}-{size}" if dash else generation
    if dash:
        accelerator_type(kind)
    return kind


def read(file: Path) -> Grant | None:
    """Return the grant in a file; None if the file does not exist.

    Raises:
        UsageError: The file has faults; the error lists each with its line.
    """
    document = entries.read(file)
    if document is None:
        return None
    document.top().only(("ends", "lines"))
    ends = _ends(document)
    lines: dict[tuple[str, str, bool], Line] = {}
    values = document.entries("lines", "a line of the grant")
    for index, value in enumerate(document.data.get("lines") or ()) if values else ():
        path = ("lines", index)
        line = _line(document, path, value)
        if line is not None:
            key = (line.kind, line.zone, line.spot)
            before = lines.get(key)
            number = document.line(path)
            lines[key] = replace(line, amount=line.amount + (before.amount if before else 0), number=number)
    if not values and not document.is_faulty:
        document.fault((), "the grant has no lines: add `lines:` with the lines of Google's e-mail")
    document.check()
    return Grant(file, ends, tuple(lines.values()))


def _ends(document: entries.Document) -> dt.datetime:
    try:
        if (moment := _moment(document.data.get("ends"))) is not None:
            return moment
    except (ValueError, OverflowError):
        pass  # a text of another form, or a moment that does not exist in UTC
    what = f"found {shown(document.data['ends'])}" if document.data.get("ends") is not None else "it is missing"
    document.fault(("ends",), f"ends: expected the last day of the grant, as in 2027-01-31 (UTC), {what}")
    return dt.datetime.min.replace(tzinfo=dt.UTC)


def _moment(value: Any) -> dt.datetime | None:
    """Return the first moment after the grant; None if the value is neither a text nor a time.

    Raises:
        ValueError: The text is no date and no moment.
        OverflowError: The moment does not exist in UTC.
    """
    if isinstance(value, str):
        try:
            value = dt.date.fromisoformat(value)
        except ValueError:
            value = dt.datetime.fromisoformat(value)
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)
    return end_of(value) if isinstance(value, dt.date) else None


def end_of(day: dt.date) -> dt.datetime:
    """Return the first moment after a day, in UTC; the last moment of the calendar for its last day."""
    if day == dt.date.max:
        return dt.datetime.max.replace(tzinfo=dt.UTC)
    return dt.datetime.combine(day, dt.time(), dt.UTC) + dt.timedelta(days=1)


def _line(document: entries.Document, path: tuple[str | int, ...], value: Any) -> Line | None:
    """Return one line of the file; None after adding its faults."""
    try:
        if isinstance(value, str):
            line = parse_line(value)
            if line is None:
                document.fault(path, f"{shown(value)} has another form than Google's lines, such as {EXAMPLE!r}")
            return line
        if not isinstance(value, Mapping):
            return None
        entry = entries.Entry(document, path, value)
        entry.only(_KEYS)
        units = [key for key in ("chips", "count") if key in value]
        amount = entry.number(units[0]) if units else 0
        kind = entry.text("type", expected="a TPU type, as in v4 or v2-8")
        zone = entry.text("zone", form=ZONE, expected="a zone, as in us-central2-b")
        spot = entry.flag("spot")
        if len(units) != 1:
            document.fault(path, "a line needs either `chips` (of a generation) or `count` (of an accelerator type)")
        for key in ("type", "zone"):
            if value.get(key) is None:
                document.fault(path, f"the line has no {key}")
        if not (amount and kind and zone) or len(units) != 1:
            return None
        return Line(_amount(amount), _kind(kind.lower(), chips=units == ["chips"]), zone, spot)
    except ValueError as exc:
        document.fault(path, str(exc))
        return None


def shares(grant: Grant, uses: Iterable[Use]) -> tuple[list[list[Use]], list[Use]]:
    """Assign uses to the lines of a grant, the oldest first; uses whose creation time is unknown come last.

    Returns:
        The uses of each line, and the uses that no line has room for. A use in neither part does not exist: each use
        is in exactly one of them.
    """
    held: list[list[Use]] = [[] for _ in grant.lines]
    outside: list[Use] = []
    for use in sorted(uses, key=lambda use: (texts.moment(use.created) or math.inf, use.name)):
        place = _with_room(grant, held, use.kind, use.zone, spot=use.spot)
        (held[place] if place is not None else outside).append(use)
    return held, outside


def _with_room(grant: Grant, held: Sequence[Sequence[Use]], kind: str, zone: str, *, spot: bool) -> int | None:
    for index, line in enumerate(grant.lines):
        if line.covers(kind, zone, spot=spot) and line.cost(kind) <= free(line, held[index]):
            return index
    return None


def free(line: Line, held: Iterable[Use]) -> int:
    """Return what is left of a line, in the unit of the line; negative if more is used than granted."""
    return line.amount - sum(line.cost(use.kind) for use in held)


def with_room(
    grant: Grant, uses: Sequence[Use], kind: str, now: dt.datetime, *, zones: Collection[str] = (), spot: bool | None
) -> list[Line]:
    """Return the lines that have room for one more node, in the order of the grant; at least one.

    Args:
        grant: The grant.
        uses: What uses quota already.
        kind: Accelerator type of the new node.
        now: The present time.
        zones: Zones that the user accepts; empty accepts all.
        spot: Whether the node has to be a spot node; None leaves it to the grant.

    Raises:
        UsageError: No line covers the node or has room for it, or the grant has ended.
    """
    if now >= grant.ends:
        raise _refused(grant, f"the grant ended on {_day(grant.ends)}", "ask for an extension, and change `ends`")
    held, _ = shares(grant, uses)
    asked = [
        (line, members)
        for line, members in zip(grant.lines, held, strict=True)
        if line.fits(kind) and (not zones or line.zone in zones) and spot in (None, line.spot)
    ]
    if lines := [line for line, members in asked if line.cost(kind) <= free(line, members)]:
        return lines
    node = f"a {kind} {'' if spot is None else 'spot ' if spot else 'on-demand '}node"
    where = f" in zone {' or '.join(sorted(zones))}" if zones else ""
    if asked:
        line, members = max(asked, key=lambda pair: free(*pair))
        users = texts.some([str(use) for use in members])
        left = f"{max(0, free(line, members))} of {line.amount} {'chips' if line.counts_chips else 'nodes'} are free"
        what = f"the grant has no room for {node}{where}: {left}, {line.cost(kind)} are needed"
        fix = f"delete what is not needed ({users})" if users else "use a smaller accelerator type"
        raise _refused(grant, what, f"{fix}; the nearest line is {str(line)!r}", line)
    raise _uncovered(grant, f"no line of the grant covers {node}{where}", kind, zones, spot)


def _uncovered(grant: Grant, what: str, kind: str, zones: Collection[str], spot: bool | None) -> UsageError:
    def likeness(line: Line) -> tuple[bool, bool, bool, bool]:
        generation = kind.rpartition("-")[0] == line.kind.partition("-")[0]
        return (line.fits(kind), generation, not zones or line.zone in zones, spot in (None, line.spot))

    nearest = max(grant.lines, key=likeness)
    changes = []
    if not nearest.fits(kind):
        changes.append(f"--type {nearest.kind}" + ("-N" if nearest.counts_chips else ""))
    if zones and nearest.zone not in zones:
        changes.append(f"--zone {nearest.zone}")
    if spot is not None and nearest.spot != spot:
        changes.append("--spot" if nearest.spot else "no --spot")
    use = f", which needs {', '.join(changes)}" if changes else ""
    return _refused(grant, what, f"the nearest line is {str(nearest)!r}{use}", nearest)


def _refused(grant: Grant, what: str, fix: str, line: Line | None = None) -> UsageError:
    where = f"{grant.file}{f', line {line.number}' if line and line.number else ''}"
    return UsageError(what, where=where, fix=f"{fix}; --outside-grant creates it anyway, and it is billed")
