"""What happens to a run that is recovered (events), and what is done then (actions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.errors import OpsError
from tpu_ops.runs.outcomes import Outcome

# --- events ---------------------------------------------------------------------------------------------------
# `lost` in an event: nodes that are not what they were -> what became of them, in words. For an error it has the nodes
# that `decide.suspected` names.


@dataclass(frozen=True)
class Planned:
    """The nodes of the first attempt are known; no worker was asked for it yet."""

    plan: Plan


@dataclass(frozen=True)
class Starting:
    """The workers are about to be asked for the next attempt."""


@dataclass(frozen=True)
class Interrupted:
    """The start of an attempt was cut short."""

    may_be_on: bool


@dataclass(frozen=True)
class Following:
    """An attempt is followed from now on; its ranks have started, or may have been refused."""

    started: bool


@dataclass(frozen=True)
class EndingRanks:
    """A node was lost, and the ranks on the other nodes are about to be ended because of that."""


@dataclass(frozen=True)
class Ended:
    """An attempt has ended.

    Attributes:
        outcomes: How its ranks are.
        stop_wanted: Whether a user of this machine wants the run stopped.
    """

    outcomes: Sequence[Outcome]
    lost: Mapping[str, str] = field(default_factory=dict)
    stop_wanted: bool = False


@dataclass(frozen=True)
class StopWanted:
    """A user of this machine wants the run stopped, while no attempt is followed; the outcomes may not be known."""

    outcomes: Sequence[Outcome] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparing:
    """The nodes are about to be brought back."""


@dataclass(frozen=True)
class Looked:
    """The nodes were looked at before they are brought back."""

    lost: Mapping[str, str]


@dataclass(frozen=True)
class Back:
    """All nodes are READY, each as it was seen, by its resource name."""

    seen: Mapping[str, Seen]


@dataclass(frozen=True)
class Configured:
    """The nodes of the next attempt, in the order of their ranks, are configured."""

    plan: Plan


@dataclass(frozen=True)
class Superseded:
    """Workers have a later attempt of a recovery on another machine; its nodes may not be known yet."""

    attempt: int
    plan: Plan | None = None


@dataclass(frozen=True)
class Renamed:
    """Workers of the attempt that the command follows first have other names now."""

    why: str


@dataclass(frozen=True)
class StartFailed:
    """The first thing that the command did failed: to start a run, or to follow one that it takes over."""

    error: OpsError
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TryFailed:
    """A try to bring nodes back, or to start or follow the next attempt, failed."""

    error: OpsError | OSError
    lost: Mapping[str, str] = field(default_factory=dict)


Event = (
    Planned
    | Starting
    | Interrupted
    | Following
    | EndingRanks
    | Ended
    | StopWanted
    | Preparing
    | Looked
    | Back
    | Configured
    | Superseded
    | Renamed
    | StartFailed
    | TryFailed
)


# --- actions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """Tell the user what happened to the attempt, and what follows; --json lists it as an event."""

    what: str
    then: str


@dataclass(frozen=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True)
class LookAtNodes:
    """Look at the nodes before anything is made: the loss may be more than the budget allows."""


@dataclass(frozen=True)
class ForgetRequests:
    """Forget what was requested from the API: an attempt uses it now."""


@dataclass(frozen=True)
class Next:
    """Continue: bring the nodes back and start the next attempt, or follow the one that may be active."""


@dataclass(frozen=True)
class Wait:
    """Wait for some seconds, then try again."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """Report the end of the run with the outcomes of its last attempt; forget what starts it again."""


@dataclass(frozen=True)
class Stop:
    """End the command as of a run that was stopped.

    Attributes:
        forget: Whether what starts it again is forgotten; else an attempt may be active, which whoever stops it ends.
    """

    forget: bool


@dataclass(frozen=True)
class GiveUp:
    """Forget what starts the run again, and end with an error: a budget is used up."""

    what: str


@dataclass(frozen=True)
class Fail:
    """End with the error of the event; the run can be taken over."""


Action = Tell | Say | LookAtNodes | ForgetRequests | Next | Wait | Finish | Stop | GiveUp | Fail
