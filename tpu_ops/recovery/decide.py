"""Decides how the recovery of a run continues: functions from events to actions, without clock, sockets and files.

The rules are described for users in docs/runs-reference.md ("Recovery").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpu_ops.cloud import remaking
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import ExitCode, HostError, OpsError, RefusedError
from tpu_ops.protocol import watch
from tpu_ops.recovery.events import (
    Action,
    AwaitLoss,
    Back,
    Configured,
    Ended,
    EndingRanks,
    Event,
    Fail,
    Finish,
    Following,
    ForgetRequests,
    GiveUp,
    Interrupted,
    LookAtNodes,
    Looked,
    Next,
    Planned,
    Preparing,
    Renamed,
    Say,
    StartFailed,
    Starting,
    Stop,
    StopWanted,
    Superseded,
    Tell,
    TryFailed,
    Wait,
)
from tpu_ops.runs import control, endings, launch, preflight
from tpu_ops.runs.endings import FAILED, STOPPED, SUCCEEDED, TAKEN
from tpu_ops.runs.recovery import Recovery

#: Number of refused tries in a row after which the recovery ends. A worker can refuse at first: a new node gets its
#: accounts and chips some time after sshd has started.
REFUSALS = 5
#: Seconds between two checks of the nodes after a worker has announced a preemption, and the maximum time from the end
#: of the ranks on such a worker until the API reports the preemption: Compute Engine gives 30 s from the notice on.
SOON, GOING = 1.0, 120.0
#: The fix if the allowed number of preemptions or failures is used up.
MORE = "`tpu_ops train` with a higher limit and another --name continues from the last checkpoint"


@dataclass(frozen=True)
class State:
    """What this process knows of the recovery of a run.

    Attributes:
        kept: The part of the state that is stored on the disk.
        begun: Whether an attempt has started or might have started. If not, the stored part is removed when the command
            ends.
        begins: Whether this process has stored the recovery state in order to start the first attempt.
        followed: Whether this process has followed an attempt.
        made: Whether nodes of the run were recreated since this process began.
        ready: The nodes that the next attempt will use; set from the moment when they are READY until the attempt is
            followed.
        refusals: Number of refused tries in a row.
        pause: Seconds before the next try.
        announced: Kind of the event that a worker announced before the last attempt ended, see
            `protocol.watch.announced`; empty if none, and once the recovery has waited for it.
    """

    kept: Recovery
    begun: bool = False
    begins: bool = False
    followed: bool = False
    made: bool = False
    ready: Plan | None = None
    refusals: int = 0
    pause: float = remaking.FIRST_PAUSE
    announced: str = ""


Decision = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event) -> Decision:
    """Return the state after an event, and the actions to perform, in order."""
    return _RULES[type(event)](state, event)


def over_budget(kept: Recovery) -> str:
    """Return the option whose allowed number of preemptions or failures is used up, as text; else empty."""
    if kept.max_preemptions is not None and kept.preemptions > kept.max_preemptions:
        return f"--max-preemptions {kept.max_preemptions}"
    return f"--max-failures {kept.max_failures}" if kept.failures > kept.max_failures else ""


def next_look(announced: str, usual: float, *, silent: bool) -> float | None:
    """Return the seconds between two checks of a followed attempt's nodes; None if they need no check now.

    Args:
        announced: Kind of the event that a worker has announced, see `protocol.watch.announced`.
        usual: Seconds between two checks while a rank does not answer.
        silent: Whether a rank that has not ended does not answer.
    """
    if announced == watch.PREEMPTED:
        return min(SOON, usual)
    return usual if silent else None


def suspected(state: State, event: StartFailed | TryFailed) -> Plan | None:
    """Return the nodes whose loss might have caused an error. The caller checks these nodes before the decision."""
    if isinstance(event, StartFailed):
        hopeful = passes(event.error) or may_pass(event.error)
        return state.kept.plan if hopeful and _is_first_start(state) else None
    return None if over_budget(state.kept) else state.ready


def passes(exc: OpsError) -> bool:
    """Return whether a retry can succeed: a worker or the API did not answer, or Ansible is changing a worker."""
    waits = isinstance(exc, launch.NotStarted) and all(
        control.is_lost(reply) or _is_changing(reply.value.get("failed_checks", ())) for reply in exc.refused
    )
    changing = isinstance(exc, preflight.PreflightError) and _is_changing(fault.check for fault in exc.faults)
    return waits or changing or exc.exit_code == ExitCode.UNREACHABLE or remaking.passes(exc)


def _is_changing(checks: Iterable[str]) -> bool:
    """Return whether the only failed check of a worker is that Ansible is changing it."""
    return {*checks} == {"changing"}


def may_pass(exc: OpsError) -> bool:
    """Return whether a few retries are useful: the fault is on a worker, and might disappear by itself."""
    return isinstance(exc, (RefusedError, HostError, preflight.PreflightError, launch.NotStarted))


def _keeping(state: State, **changes: Any) -> State:
    """Return a copy of the state with some fields of its stored part changed."""
    return replace(state, kept=replace(state.kept, **changes))


def _counted(state: State, kind: str, *, anew: bool = False, early: bool = False) -> State:
    """Count the end of an attempt as a failure or a preemption. The loss of the same nodes counts only once.

    Args:
        state: The state.
        kind: The kind of the end, from `endings.ending`.
        anew: Whether the lost nodes had replaced nodes whose loss is already counted.
        early: Whether the API has not reported the loss yet. When the API reports it, the loss is not counted again.
    """
    kept = state.kept
    if kind == FAILED:
        state = _keeping(state, failures=kept.failures + 1)
    elif (anew and not kept.early) or not kept.counted:
        state = _keeping(state, preemptions=kept.preemptions + 1, counted=True)
    return _keeping(state, pending=True, early=early)


def _lost(state: State, lost: Mapping[str, str], *, anew: bool = False) -> Decision:
    """Count the loss of nodes, if nodes are lost, as a preemption; return the new state and the actions."""
    if not lost:
        return state, ()
    state, why = _counted(state, TAKEN, anew=anew), "; ".join(lost.values())
    if over := over_budget(state.kept):
        return state, (GiveUp(f"not started again: {why}, and {over} is used up"),)
    return state, (Tell(why, "bringing its nodes back"),)


def _gives_up(actions: Iterable[Action]) -> bool:
    return any(isinstance(action, GiveUp) for action in actions)


def _planned(state: State, event: Planned) -> Decision:
    return _keeping(replace(state, begins=True), plan=event.plan, environment=event.environment), ()


def _starting(state: State, _: Starting) -> Decision:
    return _keeping(state, attempt=state.kept.attempt + 1, pending=False), ()


def _interrupted(state: State, event: Interrupted) -> Decision:
    state = replace(state, begun=state.begun or event.may_be_on)
    return _keeping(state, pending=not event.may_be_on), ()


def _following(state: State, event: Following) -> Decision:
    # From now on, the loss of a node ends this attempt.
    state = replace(state, begun=True, followed=True, ready=None)
    if not event.started:
        return state, ()
    state = replace(state, refusals=0, pause=remaking.FIRST_PAUSE, announced="")
    return _keeping(state, counted=False, early=False), (ForgetRequests(),)


def _ending_ranks(state: State, _: EndingRanks) -> Decision:
    # Count the loss before the ranks are ended. A process that takes over the run later would not know why they ended.
    return _counted(state, TAKEN, anew=True), ()


def _ended(state: State, event: Ended) -> Decision:
    if actions := _end_of_run(state, event):
        return state, actions
    began = _began(state, event)
    if not began:
        state = _keeping(state, pending=True)
    if event.stop_wanted:
        return state, (_stop(state, event),)
    if not began:
        return state, (Tell("the attempt has not begun", "starting the next attempt"), Next())
    kind, why = endings.ending(event.outcomes, event.lost)
    if state.kept.pending:
        # The loss of a node was counted before. The ranks on the other nodes were ended because of this loss.
        kind, why = TAKEN, "; ".join(event.lost.values())
    state = _counted(state, kind, early=kind == TAKEN and not event.lost)
    state = replace(state, announced=event.announced or endings.announced(event.outcomes))
    if over := over_budget(state.kept):
        return state, (Tell(why, f"not started again: {over} is used up"), Say(f"  fix: {MORE}"), Finish())
    return state, (Tell(why, "bringing its nodes back" if kind == TAKEN else "starting the run again"), Next())


def _began(state: State, event: Ended) -> bool:
    return state.kept.pending or bool(event.lost) or endings.was_started(event.outcomes)


def _end_of_run(state: State, event: Ended) -> tuple[Action, ...]:
    """Return the actions if the end of an attempt is also the end of the run; otherwise nothing."""
    kind = endings.ending(event.outcomes, event.lost)[0]
    by = endings.stop_requested_by(event.outcomes)
    if kind != SUCCEEDED and by:
        if not any(outcome.record for outcome in event.outcomes):
            # The start of the attempt was refused because a user had stopped the run, so there is no outcome to report.
            return (_stop(state, event),)
        if any(outcome.intent != "stop" for outcome in event.outcomes):
            return Tell(f"stopped by {by}", "not started again"), Finish()
    if kind == FAILED and endings.stalled_for_good(event.outcomes):
        return Tell(
            endings.ending(event.outcomes, event.lost)[1], "not started again because of --on-stall stop"
        ), Finish()
    is_stopped = kind == STOPPED and _began(state, event) and not state.kept.pending
    return (Finish(),) if kind == SUCCEEDED or by or is_stopped else ()


def _stop_wanted(state: State, event: StopWanted) -> Decision:
    return state, (_stop(state, event),)


def _stop(state: State, event: Ended | StopWanted) -> Finish | Stop:
    """Return the action that ends a run which a user wants stopped. The run might have ended by itself."""
    kept, outcomes, kind = state.kept, event.outcomes, endings.ending(event.outcomes, event.lost)[0]
    # If the next attempt is being prepared, the recovery itself stopped the ranks whose state is "stopped".
    if any(outcome.record for outcome in outcomes) and (kind == SUCCEEDED or (kind == STOPPED and not kept.pending)):
        return Finish()
    return Stop(forget=bool(outcomes) or kept.pending or not kept.attempt or not state.begun)


def _preparing(state: State, _: Preparing) -> Decision:
    state = _keeping(state, pending=True)
    if not state.kept.counted:
        state = replace(state, ready=None)
    if state.announced == watch.PREEMPTED and (state.kept.early or not state.kept.counted):
        # The node is READY a little longer, and its workers might still answer: no attempt must start there.
        what = f"a preemption was announced; waiting for at most {GOING:g} s until the API reports it"
        return replace(state, announced=""), (Say(f"run {state.kept.run_id}: {what}"), AwaitLoss(GOING))
    # If no loss of nodes ended the last attempt, nodes might have been lost after it: check them.
    return state, (LookAtNodes(),) if state.kept.attempt and not state.kept.counted else ()


def _looked(state: State, event: Looked) -> Decision:
    return _lost(state, event.lost)


def _back(state: State, event: Back) -> Decision:
    plan, seen = state.kept.plan, event.seen
    actions: tuple[Action, ...] = ()
    if state.ready:
        state, actions = _lost(state, remaking.lost(state.ready, seen), anew=True)
    elif state.kept.attempt and not state.kept.counted:
        # Nodes, or a queued resource with its nodes, were lost after the last check.
        state, actions = _lost(state, remaking.lost(plan, seen))
    if _gives_up(actions):
        return state, actions
    fresh = bool(remaking.fresh(plan, seen))
    # `ready` has the current ids of the nodes, so that a later loss of these nodes counts as another preemption.
    ready = plan.now(seen, [made.name for made in plan.nodes])
    state = replace(state, made=state.made or fresh, ready=ready)
    early = state.kept.early and not fresh
    return _keeping(state, counted=state.kept.counted and (fresh or early), early=early), actions


def _configured(state: State, event: Configured) -> Decision:
    return _keeping(state, plan=event.plan, counted=state.kept.early), ()


def _superseded(state: State, event: Superseded) -> Decision:
    if event.attempt <= state.kept.attempt:
        return state, ()
    if event.plan is None:
        # The stored plan has the nodes of an earlier attempt: look up the current nodes first.
        return _keeping(state, pending=True), (Next(),)
    state = _keeping(state, attempt=event.attempt, plan=event.plan, pending=False, counted=False)
    return state, (Tell(f"attempt {event.attempt} was started by somebody else", "following that attempt"), Next())


def _renamed(state: State, event: Renamed) -> Decision:
    return state, (
        Say(f"run {state.kept.run_id}: {event.why}; looking for the run's workers by their new names"),
        Next(),
    )


def _is_first_start(state: State) -> bool:
    return state.begins and not state.followed and state.kept.attempt == 1


def _start_failed(state: State, event: StartFailed) -> Decision:
    if not (event.lost and suspected(state, event)):
        return state, (Fail(),)
    state, actions = _lost(state, event.lost)
    if _gives_up(actions):
        return state, actions
    # Continue as if the nodes had been lost right after a successful start.
    return replace(state, begun=True), (*actions, Next())


def _try_failed(state: State, event: TryFailed) -> Decision:
    if over_budget(state.kept):
        return state, (Fail(),)
    error = event.error
    # A shortage on this machine, for example of processes or open files, can be temporary too.
    of_machine = not isinstance(error, OpsError)
    refused = isinstance(error, RefusedError)
    silent = isinstance(error, OpsError) and passes(error) and not refused
    if event.lost:
        # The loss of a node can cause any error. For example, Ansible no longer knows the node's workers.
        state, actions = _lost(state, event.lost, anew=True)
        state = replace(state, ready=None, refusals=0)
        return state, actions if _gives_up(actions) else (*actions, Next())
    state = replace(state, refusals=0 if silent else state.refusals + 1)
    # On the first try the user is still at the terminal: fail at once.
    late = state.followed or state.made
    hopeful = refused or (late and (of_machine or (isinstance(error, OpsError) and may_pass(error))))
    if not (silent or hopeful) or state.refusals >= REFUSALS:
        return state, (Fail(),)
    # The pause is not reset at a refused start, although each start is a new attempt. A worker in announced maintenance
    # comes back by itself, so that longer pauses would only lose time.
    returns = silent and state.announced == watch.MAINTENANCE
    pause = remaking.FIRST_PAUSE if returns else state.pause
    state = state if returns else replace(state, pause=min(pause * 2, remaking.LONGEST_PAUSE))
    return state, (Tell(str(error), f"trying again in {pause:g} s; Ctrl-C gives up"), Wait(pause))


#: Class of the event -> the function that decides.
_RULES: dict[type, Callable[[State, Any], Decision]] = {
    Planned: _planned,
    Starting: _starting,
    Interrupted: _interrupted,
    Following: _following,
    EndingRanks: _ending_ranks,
    Ended: _ended,
    StopWanted: _stop_wanted,
    Preparing: _preparing,
    Looked: _looked,
    Back: _back,
    Configured: _configured,
    Superseded: _superseded,
    Renamed: _renamed,
    StartFailed: _start_failed,
    TryFailed: _try_failed,
}
