"""Words the failures of a run that its output names by a known text, such as a full HBM, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_ops.protocol import known_failures
from tpu_ops.runs.outcomes import Outcome, first_failure, raised_before


class Known(NamedTuple):
    """A failure that is known by its text.

    Attributes:
        kind: A key of `known_failures.TEXTS`.
        short: The failure in two or three words.
        rank: The rank whose output or end names the failure.
        host: The worker of the rank.
        line: The line of the output; empty if the kernel reported the failure.
        fix: What to do.
    """

    kind: str
    short: str
    rank: int
    host: str
    line: str
    fix: str

    def what(self) -> str:
        """Return the failure as a sentence with its evidence."""
        who = f"rank {self.rank} ({self.host})"
        source = f"in the last lines of {who}: {self.line}" if self.line else f"the kernel ended a process of {who}"
        return f"{_SENTENCES[self.kind]}, {source}"


_SENTENCES = {
    known_failures.HBM: "the chips' memory (HBM) was full",
    known_failures.HOST_MEMORY: "the worker's memory was full",
    known_failures.IN_USE: "another process held the chips",
    known_failures.TOPOLOGY: "not all workers of the slice took part",
}
_SHORT = {
    known_failures.HBM: "HBM full",
    known_failures.HOST_MEMORY: "host memory full",
    known_failures.IN_USE: "chips in use",
    known_failures.TOPOLOGY: "slice incomplete",
}
#: What to do, with the worker as ``{host}``.
_FIXES = {
    known_failures.HBM: "use a smaller batch or shorter sequences, shard the model over more chips, or recompute "
    "activations (jax.checkpoint)",
    known_failures.HOST_MEMORY: "load less at once: fewer loader processes, smaller buffers, shards in place of whole "
    "arrays; `tpu_ops run {host} -- free -h` shows the memory",
    known_failures.IN_USE: "`tpu_ops who {host}` shows the process, `tpu_ops unlock {host}` ends your own processes "
    "and removes lockfiles; only one process of a rank may open the chips",
    known_failures.TOPOLOGY: "every rank has to open the chips at the same time: start the run on all workers of the "
    "node, and set no TPU_* variables in the program",
}


def of_run(outcomes: Sequence[Outcome]) -> Known | None:
    """Return the known failure of a run that failed; None if no rank's output or end names one.

    The rank with the first traceback is searched first, then the rank that failed first, then all others: a rank that
    waits at its exit ends after ranks whose output only says that a connection was lost.
    """
    first = first_failure(outcomes)
    if first is None:
        return None
    if by_kernel := known_failures.of_cause(first.cause):
        return _known(first.rank, first.host, by_kernel)
    raised = raised_before(outcomes, first)
    before = [raised.rank if raised else first.rank, first.rank]
    for outcome in sorted(outcomes, key=lambda one: before.index(one.rank) if one.rank in before else len(before)):
        if outcome.state in ("failed", "stopped") and (found := _named_by(outcome)):
            return _known(outcome.rank, outcome.host, found)
    return None


def _named_by(outcome: Outcome) -> Mapping[str, str] | None:
    stored = ((outcome.record or {}).get("log") or {}).get("known")
    # Another version of the launcher may know further kinds, or none.
    if stored and stored["kind"] in _SENTENCES:
        found: Mapping[str, str] = stored
        return found
    return known_failures.find((outcome.traceback or {}).get("text", "") or outcome.tail)


def _known(rank: int, host: str, found: Mapping[str, str]) -> Known:
    kind = found["kind"]
    return Known(kind, _SHORT[kind], rank, host, found["line"], _FIXES[kind].format(host=host))
