"""Folds equal lines of several ranks into one line, without delaying any line for long."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

#: Seconds that a line waits for the same line from the other ranks.
WINDOW = 0.5
#: Number of oldest waiting lines among which `_chosen` looks for a line that no other rank prints later.
_LOOKED_AT = 16

Line = TypeVar("Line", bound=Hashable)


class Fold(Generic[Line]):
    """Passes on the lines of ranks, equal lines of several ranks together, in the order of each rank's lines.

    Args:
        ranks: The ranks that are shown.
        line: Called with the ranks that printed a line, and the line.
    """

    def __init__(self, ranks: Sequence[int], line: Callable[[Sequence[int], Line], None]) -> None:
        self._waiting: dict[int, deque[tuple[float, Line]]] = {rank: deque() for rank in ranks}
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._line = line
        # The next line of each rank with waiting lines, by arrival time and by text. A line that was passed on together
        # with the line of another rank stays in `_by_time` until it reaches the top.
        self._by_time: list[tuple[float, int]] = []
        self._by_text: dict[Line, set[int]] = {}
        # `_behind`: for each rank, how often each text waits after the rank's next line. `_later`: for each text, how
        # many ranks have it waiting after their next line.
        self._behind: dict[int, dict[Line, int]] = {rank: {} for rank in ranks}
        self._later: dict[Line, int] = {}
        self._speaking = 0

    def add(self, rank: int, texts: Sequence[Line], now: float) -> None:
        """Receive lines of a rank that arrived at the same time, `now`, in seconds of a monotonic clock."""
        lines = self._waiting[rank]
        if len(self._waiting) == 1:
            for text in texts:
                self._line([rank], text)
            return
        for text in texts:
            lines.append((now, text))
            if len(lines) == 1:
                self._is_next(rank)
            else:
                self._comes_later(rank, text)
        # If every rank has a waiting line, the line to pass on cannot become equal to the next line of one more rank.
        while self._speaking == len(self._waiting):
            self._give(self._chosen())

    def tick(self, now: float) -> None:
        """Pass on the lines that have waited for WINDOW seconds."""
        while self._speaking and self._waiting[self._first()][0][0] <= now - WINDOW:
            self._give(self._chosen(now - WINDOW))

    def finish(self) -> None:
        """Pass on all remaining lines."""
        while self._speaking:
            self._give(self._chosen())

    def _comes_later(self, rank: int, text: Line) -> None:
        behind = self._behind[rank]
        if text not in behind:
            self._later[text] = self._later.get(text, 0) + 1
        behind[text] = behind.get(text, 0) + 1

    def _comes_now(self, rank: int, text: Line) -> None:
        behind = self._behind[rank]
        behind[text] -= 1
        if not behind[text]:
            del behind[text]
            self._later[text] -= 1
            if not self._later[text]:
                del self._later[text]

    def _is_next(self, rank: int, before: float | None = None) -> None:
        at, text = self._waiting[rank][0]
        # `_by_time` has one entry for all successive lines of a rank that arrived at the same time.
        if at != before:
            heapq.heappush(self._by_time, (at, rank))
        self._by_text.setdefault(text, set()).add(rank)
        self._speaking += 1

    def _first(self) -> int:
        """Return the rank whose next line has waited longest. At least one rank must have a waiting line."""
        while True:
            at, rank = self._by_time[0]
            if (lines := self._waiting[rank]) and lines[0][0] == at:
                return rank
            heapq.heappop(self._by_time)

    def _chosen(self, until: float = float("inf")) -> int:
        """Return the rank whose next line to pass on: the oldest line, unless another rank prints the same line later.

        Args:
            until: Only lines that arrived until this time can be chosen instead of the oldest line.
        """
        first = self._first()
        if not self._is_said_later(first):
            return first
        by_age = ((lines[0][0], rank) for rank, lines in self._waiting.items() if lines)
        for at, rank in heapq.nsmallest(_LOOKED_AT, by_age):
            if at <= until and not self._is_said_later(rank):
                return rank
        return first

    def _is_said_later(self, rank: int) -> bool:
        """Return whether the text of a rank's next line also waits in another rank, after that rank's next line."""
        text = self._waiting[rank][0][1]
        later = self._later.get(text, 0)
        return later > 0 and later > sum(text in self._behind[other] for other in self._by_text[text])

    def _give(self, rank: int) -> None:
        """Pass on a rank's next line, for all ranks whose next line has the same text."""
        text = self._waiting[rank][0][1]
        same = sorted(self._by_text.pop(text), key=self._place.__getitem__)
        self._speaking -= len(same)
        for other in same:
            lines = self._waiting[other]
            before, _ = lines.popleft()
            if lines:
                self._comes_now(other, lines[0][1])
                self._is_next(other, before)
        self._line(same, text)
