"""Names of people and things in messages."""

from __future__ import annotations

import pytest

from tpu_ops import texts


def test_names_with_numbers_are_sorted_by_their_value() -> None:
    names = ["tpu-2-w10", "tpu-10-w0", "tpu-2-w9", "b", "tpu-2", "9", "10", "tpu-1234567890123-w1"]
    assert sorted(names, key=texts.natural) == [
        "9", "10", "b", "tpu-2", "tpu-2-w9", "tpu-2-w10", "tpu-10-w0", "tpu-1234567890123-w1",
    ]  # fmt: skip
    for same in (["a01", "a1"], ["a1", "a01"]):
        assert sorted(same, key=texts.natural) == ["a01", "a1"]


@pytest.mark.parametrize(
    ("count", "word"), [(1, "pod-w0"), (3, "pod-w0,pod-w1,pod-w2"), (4, "'pod-w[0-3]'"), (64, "'pod-w[0-63]'")]
)
def test_many_workers_are_one_word_of_a_command_that_no_shell_changes(count: int, word: str) -> None:
    assert texts.target([f"pod-w{index}" for index in range(count)]) == word


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (25e6, "25 MB"),
        (3.3e12, "3.3 TB"),
    ],
)
def test_bytes_have_three_digits(number: float, text: str) -> None:
    assert texts.size(number) == text
