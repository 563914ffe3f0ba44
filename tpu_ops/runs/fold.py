"""Folds equal lines of several ranks into one, without holding any back for long."""

from __future__ import annotations

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
        self._line = line

    def add(self, rank: int, text: str, now: float) -> None:
        """Take one line that came at a time (seconds, of a clock that only grows)."""
        self._waiting[rank].append((now, text))
        # Where every rank has said something, no other rank can join in what comes first.
        while all(self._waiting.values()):
            self._give(self._first())

    def tick(self, now: float) -> None:
        """Give on what has waited long enough."""
        while any(self._waiting.values()) and self._waiting[rank := self._first()][0][0] <= now - WINDOW:
            self._give(rank)

    def finish(self) -> None:
        """Give on all that is left."""
        while any(self._waiting.values()):
            self._give(self._first())

    def _first(self) -> int:
        """Return the rank whose next line has waited longest."""
        return min((lines[0][0], rank) for rank, lines in self._waiting.items() if lines)[1]

    def _give(self, rank: int) -> None:
        """Give on a rank's next line, with all ranks whose next line is the same."""
        text = self._waiting[rank][0][1]
        same = [other for other, lines in self._waiting.items() if lines and lines[0][1] == text]
        for other in same:
            self._waiting[other].popleft()
        self._line(same, text)
