"""Folds the rows of chips into lines for a screen, sorts and filters them, and puts them into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpu_ops import texts
from tpu_ops.runs import usage
from tpu_ops.runs.usage import Row, Use

#: Columns of a table of lines.
COLUMNS = ("worker", "chips", "hbm", "duty", "bandwidth", "run", "person", "since", "output", "state", "holder")
#: Workers of a run fold into one line unless their duty cycles, bandwidths or shares of used memory leave a gap of this
#: size, in percentage points.
GAP = 20.0
#: A core that uses less of the memory bandwidth, in percent, waits.
_WAITS = 1.0
#: State -> its words.
_WORDS = {
    usage.OK: "ok",
    usage.WARMING: "warming up",
    usage.NONE: "no metrics",
    usage.SILENT: "metrics silent",
    usage.BROKEN: "metrics broken",
    usage.OLD: "old launcher",
    usage.FREE: "free",
    usage.LOST: "no answer",
}
_GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One line of the screen: a group of similar workers, one worker, or one core.

    Attributes:
        key: Identifies the line from one refresh to the next.
        depth: 0 for a group of workers, 1 for a worker in a group, 2 for a core.
        rows: The rows that are folded into the line, at least one.
        opens: Whether the line can be unfolded.
        is_open: Whether the line is unfolded, so that the next lines are its parts.
    """

    key: tuple[str, ...]
    depth: int
    rows: tuple[Row, ...]
    opens: bool = False
    is_open: bool = False

    @property
    def workers(self) -> list[str]:
        """The workers, in their natural order."""
        return sorted({row.worker for row in self.rows}, key=texts.natural)

    @property
    def run(self) -> str:
        """The run; empty if there is none."""
        return self.rows[0].run

    @property
    def is_faulty(self) -> bool:
        """Whether libtpu reports an error of a core."""
        return any(row.error for row in self.rows)

    @property
    def state(self) -> str:
        """The state that needs most attention."""
        return min({row.state for row in self.rows}, key=usage.STATES.index)


# --- folding ------------------------------------------------------------------------------------------------


def lines(
    uses: Iterable[Use],
    *,
    words: str = "",
    by: str = "worker",
    backwards: bool = False,
    depth: int = 0,
    toggled: Collection[tuple[str, ...]] = (),
) -> list[Line]:
    """Return the lines of a screen.

    Args:
        uses: The uses of all workers.
        words: Only rows that match are shown, see `matches`.
        by: The column to sort by.
        backwards: Whether the order is reversed.
        depth: Lines of a smaller depth are unfolded.
        toggled: Keys of the lines that are unfolded although `depth` folds them, or the other way round.
    """
    rows = [row for use in uses for row in use.rows if matches(row, words)]
    found: list[Line] = []

    def add(line: Line) -> None:
        is_open = line.opens and (line.depth < depth) != (line.key in toggled)
        found.append(replace(line, is_open=is_open))
        if is_open:
            for part in in_order(_parts(line), by, backwards=backwards):
                add(part)

    for group in in_order(groups(rows), by, backwards=backwards):
        add(group)
    return found


def groups(rows: Iterable[Row]) -> list[Line]:
    """Return one line for all workers with the same run or process, the same state and similar values."""
    parts: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    owned: dict[tuple[tuple[str, ...], str], list[Row]] = {}
    for row in rows:
        owned.setdefault((row.owner, row.worker), []).append(row)
    for (_, worker), own in owned.items():
        parts.setdefault(_base(own), {}).setdefault(worker, []).extend(own)
    found = []
    for base, by_worker in parts.items():
        for number, similar in enumerate(_similar(list(by_worker.values()))):
            # Rows keep the natural order of their workers.
            ordered = sorted(similar, key=lambda own: texts.natural(own[0].worker))
            together = tuple(row for own in ordered for row in own)
            found.append(Line((*base, str(number)), 0, together, opens=len(together) > 1))
    return found


def _base(own: Sequence[Row]) -> tuple[str, ...]:
    """Return what workers of one line have in common."""
    first, state = own[0], Line((), 0, tuple(own)).state
    # Texts of ssh differ in addresses only.
    why = re.sub(r"[0-9]+", "0", first.why.replace(first.worker, "")) if state == usage.LOST else ""
    stalled = "stalled" if any(row.stall for row in own) else ""
    faulty = "error" if any(row.error for row in own) else ""
    return (state, *first.owner, stalled, faulty, why)


def _similar(parts: list[list[Row]]) -> list[list[list[Row]]]:
    """Split the workers of a line where sorted values leave a gap: a single idle worker must not hide in a range."""
    found = [parts]
    for value in (_duty, _bandwidth, _share):
        found = [piece for group in found for piece in _split(group, value)]
    return found


def _split(parts: list[list[Row]], value: Callable[[Sequence[Row]], float | None]) -> list[list[list[Row]]]:
    known = sorted(((size, own) for own in parts if (size := value(own)) is not None), key=lambda pair: pair[0])
    unknown = [own for own in parts if value(own) is None]
    found = [[own for _, own in known[:1]]] if known else []
    for (below, _), (above, own) in pairwise(known):
        if above - below > GAP:
            found.append([])
        found[-1].append(own)
    return found + ([unknown] if unknown else [])


def _duty(own: Sequence[Row]) -> float | None:
    known = [row.duty for row in own if row.duty is not None]
    return sum(known) / len(known) if known else None


def _bandwidth(own: Sequence[Row]) -> float | None:
    """Return the bandwidth in use, with a gap above almost none: a chip that waits for others has a full duty cycle."""
    known = [row.bandwidth for row in own if row.bandwidth is not None]
    mean = sum(known) / len(known) if known else None
    return mean if mean is None or mean < _WAITS else mean + 2 * GAP


def _share(own: Sequence[Row]) -> float | None:
    known = [100 * row.hbm_used / row.hbm_total for row in own if row.hbm_used is not None and row.hbm_total]
    return sum(known) / len(known) if known else None


def _parts(line: Line) -> list[Line]:
    """Return the lines of a group's workers, or of a single worker's cores."""
    workers = line.workers
    if len(workers) == 1:
        return [Line((*line.key, row.worker, str(row.pid), str(row.core)), 2, (row,)) for row in line.rows]
    found = []
    for worker in workers:
        own = tuple(row for row in line.rows if row.worker == worker)
        found.append(Line((*line.key, worker), 1, own, opens=len(own) > 1))
    return found


# --- sorting and filtering ----------------------------------------------------------------------------------


def matches(row: Row, words: str) -> bool:
    """Return whether a row contains each of the words, in any case: in its worker, run, person, command or state."""
    state = f"{_WORDS[row.state]} {row.why} {row.notice} {row.error}" + (f" stalled {row.stall}" if row.stall else "")
    text = f"{row.node} {row.worker} {row.run} {row.person} {row.pid or ''} {row.command} {state}".casefold()
    return all(word in text for word in words.casefold().split())


def in_order(found: Iterable[Line], by: str, *, backwards: bool = False) -> list[Line]:
    """Return lines in the order of a column: names ascending, numbers and states that need attention first.

    Lines without a value come last in both directions. Equal lines are in the order of their workers.
    """
    ordered = sorted(found, key=lambda line: texts.natural(line.workers[0]))
    rank = {line.key: _rank(line, by) for line in ordered}
    known = [line for line in ordered if rank[line.key] is not None]
    known.sort(key=lambda line: rank[line.key], reverse=backwards)  # type: ignore[arg-type, return-value]
    return known + [line for line in ordered if rank[line.key] is None]


def _rank(line: Line, by: str) -> object:
    """Return the value by which a line is sorted; None if it has no value. All values of a column are comparable."""
    rows = line.rows
    if by in ("run", "person", "holder"):
        text = {"run": rows[0].run, "person": rows[0].person, "holder": rows[0].command}[by]
        return texts.natural(text) if text else None
    if by == "worker":
        return texts.natural(line.workers[0])
    if by == "state":
        return (not any(row.stall for row in rows), not line.is_faulty, usage.STATES.index(line.state))
    if by == "chips":
        return -_chips(line)
    values: dict[str, Callable[[Row], float | None]] = {
        "hbm": lambda row: row.hbm_used,
        "duty": lambda row: row.duty,
        "bandwidth": lambda row: row.bandwidth,
        "since": lambda row: row.since,
        "output": lambda row: row.last_output,
    }
    known = [value for row in rows if (value := values[by](row)) is not None]
    # Runs with the oldest start or output come first.
    return None if not known else min(known) if by in ("since", "output") else -max(known)


# --- words --------------------------------------------------------------------------------------------------


def cells(line: Line, now: float) -> dict[str, str]:
    """Return the cells of a line, by column. ``now`` is the present time, for ages."""
    rows = line.rows
    outputs = [row.last_output for row in rows if row.last_output is not None]
    starts = [row.since for row in rows if row.since is not None]
    return {
        "worker": texts.folded(line.workers),
        "chips": _chips_words(line),
        "hbm": hbm(rows),
        "duty": percent(row.duty for row in rows),
        "bandwidth": percent(row.bandwidth for row in rows),
        "run": line.run,
        "person": rows[0].person,
        "since": texts.age(now - min(starts)) if starts else "",
        # The rank that has been silent longest tells most.
        "output": texts.age(now - min(outputs)) if outputs else "",
        "state": state_words(line, now),
        "holder": _holder(rows),
    }


def use_words(rows: Sequence[Row]) -> str:
    """Return the use of chips as words, as in ``HBM 12/32 GiB, duty 96 %``; a state if there are no values."""
    used, duty = hbm(rows), percent(row.duty for row in rows)
    shown = [f"HBM {used}" if used else "", f"duty {duty}" if duty else ""]
    line = Line((), 0, tuple(rows))
    return ", ".join(filter(None, shown)) or (_WORDS[line.state] if rows and line.state != usage.OLD else "")


def hbm(rows: Iterable[Row]) -> str:
    """Return the memory in use of each core, as in ``11.2..12/31.7 GiB``; empty if it is unknown."""
    known = [row for row in rows if row.hbm_used is not None]
    used = _span([(row.hbm_used or 0) / _GIB for row in known])
    total = _span([row.hbm_total / _GIB for row in known if row.hbm_total])
    return f"{used}{f'/{total}' if total else ''} GiB" if used else ""


def percent(values: Iterable[float | None]) -> str:
    """Return percentages, as in ``90..97 %``; empty if there are none."""
    known = [value for value in values if value is not None]
    found = _span(known, digits=0)
    return f"{found} %" if found else ""


def _span(values: Sequence[float], digits: int = 1) -> str:
    """Return the smallest and the largest value as text, or one value if both look the same."""
    if not values:
        return ""
    low, high = (f"{value:.{digits}f}".removesuffix(".0") for value in (min(values), max(values)))
    return low if low == high else f"{low}..{high}"


def _chips(line: Line) -> int:
    """Return the number of cores of a line, or of chips if the cores are unknown."""
    cores = sum(row.core is not None for row in line.rows)
    bare = {row.worker: row.chips for row in line.rows if row.core is None}
    return cores + sum(bare.values())


def _chips_words(line: Line) -> str:
    rows = line.rows
    if len(rows) == 1 and rows[0].core is not None:
        return f"id {rows[0].core}" + ("" if rows[0].chip is None else f", chip {rows[0].chip}")
    count = _chips(line)
    return "" if not count else f"{count} cores" if any(row.chip is not None for row in rows) else str(count)


def _holder(rows: Sequence[Row]) -> str:
    """Return the first process and the number of further ones, and the command, as in ``4711 +3 python train.py``."""
    pids = list(dict.fromkeys((row.worker, row.pid) for row in rows if row.pid))
    more = f" +{len(pids) - 1}" if len(pids) > 1 else ""
    command = next((row.command for row in rows if row.command), "")
    return f"{pids[0][1]}{more} {command}".strip() if pids else command


def state_words(line: Line, now: float) -> str:
    """Return the state of a line in words, with the reason, errors of cores and the signs of a stall."""
    state = line.state
    worst = [row for row in line.rows if row.state == state]
    if state == usage.LOST:
        return _lost(worst, now)
    errors, stalls, notices = (
        _first(text for row in line.rows if (text := getattr(row, name))) for name in ("error", "stall", "notice")
    )
    why = _first(row.why for row in worst if row.why)
    said = [errors, f"stalled: {stalls}" if stalls else "", _out_of_step(line.rows) if stalls else ""]
    if state != usage.OK or not (errors or stalls):
        said.append(_WORDS[state] + (f": {why}" if why else ""))
    return "; ".join(filter(None, [*said, notices]))


def _out_of_step(rows: Iterable[Row]) -> str:
    """Return which workers have another program on their chips, or another launch of it, than most; empty if none."""
    programs: dict[str, set[tuple[str | None, int | None]]] = {}
    for row in rows:
        if row.program is not None:
            programs.setdefault(row.worker, set()).add((row.program, row.launch))
    alike: dict[frozenset[tuple[str | None, int | None]], list[str]] = {}
    for worker, seen in programs.items():
        alike.setdefault(frozenset(seen), []).append(worker)
    groups = sorted(alike.values(), key=len)
    if len(groups) < 2:
        return ""
    if len(groups[-1]) > len(groups[-2]):
        groups.pop()
    return f"out of step: {texts.folded([worker for workers in groups for worker in workers])}"


def _lost(rows: Sequence[Row], now: float) -> str:
    """Return since when workers have not answered, and why."""
    answered = [row.answered for row in rows if row.answered is not None]
    since = f"for {texts.age(now - min(answered))}" if answered else "yet"
    return f"{_WORDS[usage.LOST]} {since}: {_first(row.why for row in rows)}"


def _first(found: Iterable[str]) -> str:
    """Return the first of some texts, and the number of different ones after it; empty without texts."""
    different = list(dict.fromkeys(found))
    more = f" (and {texts.count(len(different) - 1, 'other')})" if len(different) > 1 else ""
    return different[0] + more if different else ""


def summary(uses: Iterable[Use]) -> str:
    """Return how many workers are in use, free and silent, as in ``32 workers: 28 in use, 3 free, 1 no answer``."""
    counts = {"in use": 0, "free": 0, "no answer": 0}
    stalled: set[str] = set()
    for use in uses:
        states = {row.state for row in use.rows}
        counts["no answer" if usage.LOST in states else "free" if states == {usage.FREE} else "in use"] += 1
        stalled |= {row.run for row in use.rows if row.stall}
    found = [f"{number} {word}" for word, number in counts.items() if number]
    if stalled:
        found.append(f"{texts.count(len(stalled), 'run')} stalled")
    return f"{texts.count(sum(counts.values()), 'worker')}: {', '.join(found)}" if found else "no workers"
