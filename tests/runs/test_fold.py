from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tpu_ops.runs.fold import WINDOW, Fold


def folded(ranks: Sequence[int]) -> tuple[Fold[str], list[tuple[tuple[int, ...], str]]]:
    said: list[tuple[tuple[int, ...], str]] = []
    return Fold(ranks, lambda ranks, text: said.append((tuple(ranks), text))), said


def test_equal_lines_of_all_ranks_are_one_at_once() -> None:
    fold, said = folded([0, 1, 2])
    for rank in (2, 0, 1):
        fold.add(rank, ["step 1"], 5.0)
    assert said == [((0, 1, 2), "step 1")]


def test_a_line_waits_for_the_others_and_no_longer_than_the_window() -> None:
    fold, said = folded([0, 1, 2])
    fold.add(0, ["step 1"], 5.0)
    fold.add(2, ["step 1"], 5.2)
    fold.tick(5.0 + WINDOW - 0.01)
    assert said == []
    fold.tick(5.0 + WINDOW)
    assert said == [((0, 2), "step 1")]
    fold.add(1, ["step 1"], 6.0)
    fold.finish()
    assert said[1:] == [((1,), "step 1")]


def test_the_lines_of_a_rank_keep_their_order() -> None:
    fold, said = folded([0, 1])
    for text in ("a", "b", "c"):
        fold.add(0, [text], 1.0)
    for text in ("b", "a", "c"):
        fold.add(1, [text], 1.1)
    fold.finish()
    assert [text for ranks, text in said if 0 in ranks] == ["a", "b", "c"]
    assert [text for ranks, text in said if 1 in ranks] == ["b", "a", "c"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("own", [1, 40])
def test_equal_lines_behind_lines_of_each_rank_s_own_are_one(order: Sequence[int], own: int) -> None:
    fold, said = folded([0, 1, 2])
    # Of each rank all lines come together, as from the log of a run that has ended.
    for place, rank in enumerate(order):
        named = [f"rank {rank}, line {number}" for number in range(own)]
        fold.add(rank, [*named, "epoch 1", "epoch 2", f"loss {rank}"], 5.0 + place * 0.01)
    fold.finish()
    together = [entry for entry in said if entry[1].startswith("epoch")]
    assert together == [((0, 1, 2), "epoch 1"), ((0, 1, 2), "epoch 2")]
    assert len(said) == 3 * own + 2 + 3


def test_lines_that_others_say_later_wait_no_longer_than_the_window() -> None:
    fold, said = folded([0, 1, 2])
    fold.add(0, ["epoch 1"], 5.0)
    fold.add(1, ["process 1", "epoch 1"], 5.3)
    fold.tick(5.0 + WINDOW)
    assert said == [((0,), "epoch 1")]


def test_a_silent_rank_holds_nothing_back() -> None:
    fold, said = folded([0, 1, 2])
    for number in range(1000):
        fold.add(0, [f"line {number}"], number * 0.001)
        fold.add(1, [f"line {number}"], number * 0.001)
    fold.tick(1.0 + WINDOW)
    assert said == [((0, 1), f"line {number}") for number in range(1000)]


def given(ranks: Sequence[int], lines: Sequence[tuple[float, int, str]]) -> list[tuple[tuple[int, ...], str]]:
    """What is given on of lines that all came within the window, by the rule alone.

    The oldest that no other rank says behind another line, or else the oldest, each with its equals.
    """
    waiting = {rank: [(now, text) for now, whose, text in lines if whose == rank] for rank in ranks}
    said = []
    while any(waiting.values()):
        by_age = [text for _, text in sorted(kept[0] for kept in waiting.values() if kept)]
        later = {
            text
            for text in by_age
            for kept in waiting.values()
            if kept and kept[0][1] != text and text in [other for _, other in kept[1:]]
        }
        first = next((text for text in by_age if text not in later), by_age[0])
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
            fold.add(rank, [text], now)
        fold.finish()
        assert said == given(ranks, lines)
