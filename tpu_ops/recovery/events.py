"""The events of a run's recovery, and the actions that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.errors import OpsError
from tpu_ops.runs.outcomes import Outcome

# --- events ---------------------------------------------------------------------------------------------------
# `lost` in an event: the lost nodes, each with a description of its loss. In an error event, it covers only the nodes
# that `decide.suspected` names.


@dataclass(frozen=True)
class Planned:
    """The nodes of the first attempt are known; no worker was asked to start it yet."""

    plan: Plan


@dataclass(frozen=True)
class Starting:
    """The workers are about to be asked to start the next attempt."""


@dataclass(frozen=True)
class Interrupted:
    """The start of an attempt was interrupted."""

    may_be_on: bool


@dataclass(frozen=True)
class Following:
    """An attempt is followed from now on. Its ranks have started, or were refused."""

    started: bool


@dataclass(frozen=True)
class EndingRanks:
    """A node was lost, and the ranks on the other nodes are about to be ended."""


@dataclass(frozen=True)
class Ended:
    """An attempt has ended.

    Attributes:
        outcomes: The outcomes of its ranks.
        stop_wanted: Whether a user on this machine has asked to stop the run.
    """

    outcomes: Sequence[Outcome]
    lost: Mapping[str, str] = field(default_factory=dict)
    stop_wanted: bool = False


@dataclass(frozen=True)
class StopWanted:
    """A user on this machine wants the run stopped while no attempt is followed. Outcomes may be unknown."""

    outcomes: Sequence[Outcome] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparing:
    """The nodes are about to be brought back."""


@dataclass(frozen=True)
class Looked:
    """The nodes were checked before they are brought back."""

    lost: Mapping[str, str]


@dataclass(frozen=True)
class Back:
    """All nodes are READY. `seen` has each node under its resource name."""

    seen: Mapping[str, Seen]


@dataclass(frozen=True)
class Configured:
    """The nodes of the next attempt, in the order of their ranks, are configured."""

    plan: Plan


@dataclass(frozen=True)
class Superseded:
    """Workers report a later attempt, started by a recovery on another machine. Its nodes may be unknown."""

    attempt: int
    plan: Plan | None = None


@dataclass(frozen=True)
class Renamed:
    """Workers of the first followed attempt have other names now."""

    why: str


@dataclass(frozen=True)
class StartFailed:
    """The command's first step failed: to start a run, or to follow one that it takes over."""

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
    """Report an event of the attempt and the next step to the user, also in the events of --json."""

    what: str
    then: str


@dataclass(frozen=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True)
class LookAtNodes:
    """Check the nodes before anything is created: their loss may exceed the budget."""


@dataclass(frozen=True)
class ForgetRequests:
    """Drop the requests to the API: an attempt uses their nodes now."""


@dataclass(frozen=True)
class Next:
    """Continue: bring the nodes back and start the next attempt, or follow the one that may be active."""


@dataclass(frozen=True)
class Wait:
    """Wait, then try again."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """Report the end of the run with the outcomes of its last attempt; remove the recovery state."""


@dataclass(frozen=True)
class Stop:
    """End the command as for a stopped run.

    Attributes:
        forget: Whether to remove the recovery state; if not, an attempt may be active, which `tpu_ops stop` ends.
    """

    forget: bool


@dataclass(frozen=True)
class GiveUp:
    """Remove the recovery state, and end with an error: a budget is used up."""

    what: str


@dataclass(frozen=True)
class Fail:
    """End with the event's error. The run can still be taken over."""


Action = Tell | Say | LookAtNodes | ForgetRequests | Next | Wait | Finish | Stop | GiveUp | Fail
