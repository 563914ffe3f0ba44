"""Names as people are told them."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from ClusterShell.NodeSet import NodeSet

from tpu_ops import texts

STEMS = ("pod-w", "a", "n01-w", "n1-w", "x.y_z-", "-w", "w0a", "n10.", "_", "pod-w0", "POD-w")


@pytest.mark.parametrize("seed", range(20))
def test_names_of_one_node_are_folded_as_clustershell_folds_them(seed: int) -> None:
    drawn = random.Random(seed)  # noqa: S311 - names, no secrets
    for _ in range(100):
        most = drawn.choice((3, 12, 1200))
        stems = drawn.choices(STEMS, k=drawn.choice((1, 1, 2)))
        hosts = [f"{drawn.choice(stems)}{drawn.randrange(most)}" for _ in range(drawn.randint(2, 12))]
        assert texts.folded(hosts) == str(NodeSet.fromlist(hosts)), hosts


@pytest.mark.parametrize(
    "hosts", [["n01", "n02"], ["n8", "n08"], ["a", "b"], ["n1", "b"], ["a1b", "a2b"], ["n0", "n00"]]
)
def test_other_names_are_folded_by_clustershell(hosts: list[str]) -> None:
    assert texts.folded(hosts) == str(NodeSet.fromlist(hosts))


def test_names_with_numbers_are_sorted_by_their_value() -> None:
    names = ["tpu-2-w10", "tpu-10-w0", "tpu-2-w9", "b", "tpu-2", "9", "10", "tpu-1234567890123-w1"]
    assert sorted(names, key=texts.natural) == [
        "9", "10", "b", "tpu-2", "tpu-2-w9", "tpu-2-w10", "tpu-10-w0", "tpu-1234567890123-w1",
    ]  # fmt: skip
    for same in (["a01", "a1"], ["a1", "a01"]):
        assert sorted(same, key=texts.natural) == ["a01", "a1"]


def test_to_fold_names_of_one_node_nothing_is_imported_that_takes_long() -> None:
    script = "import sys; from tpu_ops import texts; print(texts.folded(['a1', 'a2']), 'ClusterShell' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "a[1-2] False\n"


@pytest.mark.parametrize(
    ("count", "word"), [(1, "pod-w0"), (3, "pod-w0,pod-w1,pod-w2"), (4, "'pod-w[0-3]'"), (64, "'pod-w[0-63]'")]
)
def test_many_workers_are_one_word_of_a_command_that_no_shell_changes(count: int, word: str) -> None:
    assert texts.target([f"pod-w{index}" for index in range(count)]) == word
