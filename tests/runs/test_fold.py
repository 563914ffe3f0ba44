from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpu_ops.runs.fold import WINDOW, Fold


def folded(ranks: Sequence[int]) -> tuple[Fold, list[tuple[tuple[int, ...], str]]]:
    said: list[tuple[tuple[int, ...], str]] = []
    return Fold(ranks, lambda ranks, text: said.append((tuple(ranks), text))), said


def test_equal_lines_of_all_ranks_are_one_at_once() -> None:
    fold, said = folded([0, 1, 2])
    for rank in (2, 0, 1):
        fold.add(rank, "step 1", 5.0)
    assert said == [((0, 1, 2), "step 1")]


def test_a_line_waits_for_the_others_and_no_longer_than_the_window() -> None:
    fold, said = folded([0, 1, 2])
    fold.add(0, "step 1", 5.0)
    fold.add(2, "step 1", 5.2)
    fold.tick(5.0 + WINDOW - 0.01)
    assert said == []
    fold.tick(5.0 + WINDOW)
    assert said == [((0, 2), "step 1")]
    fold.add(1, "step 1", 6.0)
    fold.finish()
    assert said[1:] == [((1,), "step 1")]


def test_the_lines_of_a_rank_keep_their_order() -> None:
    fold, said = folded([0, 1])
    for text in ("a", "b", "c"):
        fold.add(0, text, 1.0)
    for text in ("b", "a", "c"):
        fold.add(1, text, 1.1)
    fold.finish()
    assert [text for ranks, text in said if 0 in ranks] == ["a", "b", "c"]
    assert [text for ranks, text in said if 1 in ranks] == ["b", "a", "c"]


def test_a_silent_rank_holds_nothing_back() -> None:
    fold, said = folded([0, 1, 2])
    for number in range(1000):
        fold.add(0, f"line {number}", number * 0.001)
        fold.add(1, f"line {number}", number * 0.001)
    fold.tick(1.0 + WINDOW)
    assert said == [((0, 1), f"line {number}") for number in range(1000)]


def given(ranks: Sequence[int], lines: Sequence[tuple[float, int, str]]) -> list[tuple[tuple[int, ...], str]]:
    """What is given on of lines that all came within the window, by the rule alone: the oldest, with its equals."""
    waiting = {rank: [(now, text) for now, whose, text in lines if whose == rank] for rank in ranks}
    said = []
    while any(waiting.values()):
        first = min((kept[0], rank) for rank, kept in waiting.items() if kept)[0][1]
        same = tuple(rank for rank in ranks if waiting[rank] and waiting[rank][0][1] == first)
        for rank in same:
            del waiting[rank][0]
        said.append((same, first))
    return said


def test_any_lines_are_given_on_by_the_rule() -> None:
    ranks = [3, 0, 7]
    # Each line is of one of two ranks and has one of three texts.
    for said_by in itertools.product(itertools.product((3, 0), "abc"), repeat=4):
        lines = [(0.001 * number, rank, text) for number, (rank, text) in enumerate(said_by)]
        # The last one says something at the end only: all others wait until then.
        lines.append((0.1, 7, "a"))
        fold, said = folded(ranks)
        for now, rank, text in lines:
            fold.add(rank, text, now)
        fold.finish()
        assert said == given(ranks, lines)
