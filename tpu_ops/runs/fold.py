"""Folds equal lines of several ranks into one, without holding any back for long."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

#: Seconds that a line waits for the same line of the other ranks.
WINDOW = 0.5


class Fold:
    """Takes lines of ranks and gives them on, equal ones together; each rank's lines keep their order.

    Args:
        ranks: The ranks that are shown.
        line: Called with the ranks that said a line, and the line.
    """

    def __init__(self, ranks: Sequence[int], line: Callable[[Sequence[int], str], None]) -> None:
        self._waiting: dict[int, deque[tuple[float, str]]] = {rank: deque() for rank in ranks}
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._line = line
        # Of each rank that has something to say the next line, by time and by text; what was given on together with
        # another's stays in the first until it is on top.
        self._by_time: list[tuple[float, int]] = []
        self._by_text: dict[str, set[int]] = {}
        self._speaking = 0

    def add(self, rank: int, text: str, now: float) -> None:
        """Take one line that came at a time (seconds, of a clock that only grows)."""
        lines = self._waiting[rank]
        lines.append((now, text))
        if len(lines) == 1:
            self._is_next(rank)
        # Where every rank has said something, no other rank can join in what comes first.
        while self._speaking == len(self._waiting):
            self._give(self._first())

    def tick(self, now: float) -> None:
        """Give on what has waited long enough."""
        while self._speaking and self._waiting[rank := self._first()][0][0] <= now - WINDOW:
            self._give(rank)

    def finish(self) -> None:
        """Give on all that is left."""
        while self._speaking:
            self._give(self._first())

    def _is_next(self, rank: int) -> None:
        at, text = self._waiting[rank][0]
        heapq.heappush(self._by_time, (at, rank))
        self._by_text.setdefault(text, set()).add(rank)
        self._speaking += 1

    def _first(self) -> int:
        """Return the rank whose next line has waited longest; there is one."""
        while True:
            at, rank = self._by_time[0]
            if (lines := self._waiting[rank]) and lines[0][0] == at:
                return rank
            heapq.heappop(self._by_time)

    def _give(self, rank: int) -> None:
        """Give on a rank's next line, with all ranks whose next line is the same."""
        text = self._waiting[rank][0][1]
        same = sorted(self._by_text.pop(text), key=self._place.__getitem__)
        self._speaking -= len(same)
        for other in same:
            lines = self._waiting[other]
            lines.popleft()
            if lines:
                self._is_next(other)
        self._line(same, text)
