"""The stacks that workers keep of a run, folded for its report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_ops.runs import stacks
from tpu_ops.runs.stacks import RankStacks
from tpu_ops.ssh.replies import Reply

#: Maximum number of different stacks in a report, of lines on where processes are, and of frames of a stack.
GROUPS, PLACES, FRAMES = 30, 20, 60


class Stack(NamedTuple):
    """A stack of some threads: a title that names their ranks, and the frames as text, the innermost first."""

    title: str
    text: str


def of_ranks(found: Mapping[int, object]) -> list[RankStacks]:
    """Return the stacks of each rank, given what its worker keeps; those that are missing or damaged are left out."""
    known = []
    for rank, data in found.items():
        if not isinstance(data, Mapping):
            continue
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            one = stacks.of_reply(rank, Reply("", {"stacks": data, "state": "", "kept": True}))
            # Damaged data can show only when it is used.
            stacks.short([one]), stacks.full([one])
            known.append(one)
    return known


def places(found: Sequence[RankStacks]) -> tuple[str, ...]:
    """Return where the processes are, one line for each place, and why stacks are missing."""
    every = [*stacks.short(found), *stacks.problems(found)]
    left = [f"({len(every) - PLACES} more lines)"] if len(every) > PLACES else []
    return (*every[:PLACES], *left)


def folded(found: Sequence[RankStacks]) -> tuple[Stack, ...]:
    """Return all stacks, the equal ones of all ranks as one."""
    groups = stacks.full(found)
    shown = [Stack(group.title, "\n".join(map(str, group.frames[:FRAMES]))) for group in groups[:GROUPS]]
    left = len(groups) - len(shown)
    return (*shown, Stack(f"{left} more", "(left out, to keep this short)")) if left else tuple(shown)
