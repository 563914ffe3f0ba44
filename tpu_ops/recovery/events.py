"""The events of a run's recovery, and the actions that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.errors import OpsError
from tpu_ops.runs.outcomes import Outcome

# --- events ---------------------------------------------------------------------------------------------------
# `lost` in an event: the lost nodes, each with a description of its loss. In an error event, it covers only the nodes
# that `decide.suspected` names.


@dataclass(frozen=True)
class Planned:
    """The nodes of the first attempt and their environment are known. No worker has been asked yet to start it."""

    plan: Plan
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Starting:
    """The workers are about to be asked to start the next attempt."""


@dataclass(frozen=True)
class Interrupted:
    """The start of an attempt was interrupted."""

    may_be_on: bool


@dataclass(frozen=True)
class Following:
    """An attempt is followed from now on. Its ranks have started, or their start was refused."""

    started: bool


@dataclass(frozen=True)
class EndingRanks:
    """A node was lost, and the ranks on the other nodes are about to be ended."""


@dataclass(frozen=True)
class Ended:
    """An attempt has ended.

    Attributes:
        outcomes: The outcomes of the attempt's ranks.
        stop_wanted: Whether a user on this machine has asked to stop the run.
        announced: Kind of the event that a worker announced before, see `protocol.watch.announced`.
    """

    outcomes: Sequence[Outcome]
    lost: Mapping[str, str] = field(default_factory=dict)
    stop_wanted: bool = False
    announced: str = ""


@dataclass(frozen=True)
class StopWanted:
    """A user on this machine wants the run stopped while no attempt is followed. Unknown `outcomes` are empty."""

    outcomes: Sequence[Outcome] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparing:
    """The nodes of the run are about to be brought back."""


@dataclass(frozen=True)
class Looked:
    """The nodes of the run were checked for losses before the recovery brings them back."""

    lost: Mapping[str, str]


@dataclass(frozen=True)
class Back:
    """All nodes of the run are READY. `seen` maps the resource name of each node to its state."""

    seen: Mapping[str, Seen]


@dataclass(frozen=True)
class Configured:
    """The nodes of the next attempt, in the order of their ranks, are configured."""

    plan: Plan


@dataclass(frozen=True)
class Superseded:
    """Workers report a later attempt, started by a recovery on another machine. `plan` is None if unknown."""

    attempt: int
    plan: Plan | None = None


@dataclass(frozen=True)
class Renamed:
    """Workers of the attempt that this command followed first have new names."""

    why: str


@dataclass(frozen=True)
class StartFailed:
    """The command's first step failed: the start of the run, or following the run that the command takes over."""

    error: OpsError
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TryFailed:
    """The recovery failed to bring nodes back, or to start or follow the next attempt."""

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
    """Tell the user what happened to the attempt and the next step; both are also in the events of --json."""

    what: str
    then: str


@dataclass(frozen=True)
class Say:
    """Print a line to the user."""

    text: str


@dataclass(frozen=True)
class LookAtNodes:
    """Check the nodes before new ones are created: their loss might exceed the allowed number of preemptions."""


@dataclass(frozen=True)
class AwaitLoss:
    """Wait until the API reports the loss of a node, and at most for some seconds, before any worker is asked."""

    seconds: float


@dataclass(frozen=True)
class ForgetRequests:
    """Forget the recorded requests to the API: an attempt uses the requested nodes now."""


@dataclass(frozen=True)
class Next:
    """Continue: bring the nodes back and start the next attempt, or follow the attempt that might be active."""


@dataclass(frozen=True)
class Wait:
    """Wait for some seconds, then try again."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """Report the end of the run with the outcomes of the last attempt, and remove the recovery state."""


@dataclass(frozen=True)
class Stop:
    """End the command and report that the run is stopped.

    Attributes:
        forget: Whether to remove the recovery state. If not, an attempt might still be active, and `tpu_ops stop` ends
            it.
    """

    forget: bool


@dataclass(frozen=True)
class GiveUp:
    """Remove the recovery state and end with an error: the allowed number of preemptions is used up."""

    what: str


@dataclass(frozen=True)
class Fail:
    """End the command with the error of the event. Another command can still take over the run."""


Action = Tell | Say | LookAtNodes | AwaitLoss | ForgetRequests | Next | Wait | Finish | Stop | GiveUp | Fail
