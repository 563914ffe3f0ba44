"""Every rule of the recovery as a row: state, event -> state, actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.remaking import FIRST_PAUSE, LONGEST_PAUSE, Made, Plan, Seen
from tpu_ops.errors import HostError, OpsError, RefusedError, UnreachableError, UsageError
from tpu_ops.protocol.watch import MAINTENANCE, PREEMPTED
from tpu_ops.recovery import decide
from tpu_ops.recovery.decide import MORE, REFUSALS, State
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
from tpu_ops.runs import launch, preflight
from tpu_ops.runs.outcomes import Outcome, outcome_of, without_record
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.replies import Reply

NODE = "projects/lab/locations/us-central2-b/nodes/pod"
PLAN, NEW, NEWER = (Plan((Made(NODE, node_id, {}),)) for node_id in ("1", "2", "3"))
LOST = {NODE: "node pod is PREEMPTED"}
#: An attempt is followed; its state before anything is counted.
ON = State(Recovery("r1", 1, PLAN, {}), begun=True, followed=True)


def with_kept(state: State, **changes: Any) -> State:
    return replace(state, kept=replace(state.kept, **changes))


def record(state: str, *, first: str = "", intent: str = "", reason: str = "", by: str = "") -> dict[str, Any]:
    """Return the record of a rank that has ended; `first` is the cause of the first failure, of rank 0."""
    return {
        "state": state,
        "exit": {"code": 0} if state == "succeeded" else None,
        "reason": reason,
        "first": {"rank": 0, "worker": "pod-w0", "cause": first} if first else None,
        "intent": {"kind": intent} if intent else None,
        "attempt": 1,
        **({"stop_requested_by": by} if by else {}),
    }


def ranks(*records: Mapping[str, Any] | Reply | None) -> tuple[Outcome, ...]:
    return tuple(
        without_record(rank, found) if isinstance(found, Reply) else outcome_of(rank, f"pod-w{rank}", found)
        for rank, found in enumerate(records)
    )


DONE, FAILED = record("succeeded"), record("failed", first="exit code 3")
STILL = "stalled: no output for 16 min, chips idle for 15 min"
STALLED = record("stopped", intent="failed", reason=STILL, first=STILL)
STOPPED = record("stopped", intent="stop", reason="stopped by ada", by="ada")
SHUT_DOWN = record("stopped", intent="shutdown", reason="host shuts down")
REFUSED, GIVEN_UP = record("refused", reason="no chips"), record("stopped", reason="not started: no answer")
#: The ranks on the nodes that are left were ended because a node was lost.
CUT = record("stopped", intent="stop", reason="node pod is PREEMPTED")
NO_ANSWER = Reply("pod-w0", {}, "unreachable", "no route to host")
BACK, AGAIN = Tell("node pod is PREEMPTED", "bringing its nodes back"), Next()
FIX = Say(f"  fix: {MORE}")

#: How an attempt ends -> what is counted (failures, preemptions, pending, counted, early), and what is done.
ENDS: dict[str, tuple[State, Ended, tuple[int, int, bool, bool, bool], tuple[Action, ...]]] = {
    "all ranks ended with 0": (ON, Ended(ranks(DONE, DONE)), (0, 0, False, False, False), (Finish(),)),
    "one worker reports that all ended with 0, and a node is lost": (
        ON,
        Ended(ranks(None, DONE), LOST),
        (0, 0, False, False, False),
        (Finish(),),
    ),
    "all ended with 0 once the loss of a node was counted": (
        with_kept(ON, preemptions=1, counted=True, pending=True),
        Ended(ranks(None, DONE), LOST),
        (0, 1, True, True, False),
        (Finish(),),
    ),
    "a user stopped the run": (ON, Ended(ranks(STOPPED, STOPPED)), (0, 0, False, False, False), (Finish(),)),
    "a worker was stopped, and nobody is named": (
        ON,
        Ended(ranks(record("stopped", intent="stop", reason="stopped"), DONE | {"first": FAILED["first"]})),
        (1, 0, True, False, False),
        (Tell("rank 0 (pod-w0): exit code 3", "not started again: --max-failures 0 is used up"), FIX, Finish()),
    ),
    "all were stopped, and nobody is named": (
        ON,
        Ended(ranks(CUT, CUT)),
        (0, 0, False, False, False),
        (Finish(),),
    ),
    "a user wanted it stopped, and ranks failed as well": (
        with_kept(ON, max_failures=5),
        Ended(ranks(FAILED | {"stop_requested_by": "ada"}, FAILED)),
        (0, 0, False, False, False),
        (Tell("stopped by ada", "not started again"), Finish()),
    ),
    "a user wanted it stopped, and its nodes are lost": (
        ON,
        Ended(ranks(FAILED | {"stop_requested_by": "ada"}, None), LOST),
        (0, 0, False, False, False),
        (Tell("stopped by ada", "not started again"), Finish()),
    ),
    "a user wanted it stopped, and it was refused": (
        ON,
        Ended(ranks(REFUSED | {"stop_requested_by": "ada"}, REFUSED)),
        (0, 0, False, False, False),
        (Tell("stopped by ada", "not started again"), Finish()),
    ),
    "a user wanted it stopped, and a host failed": (
        ON,
        Ended(ranks(record("lost", first="lost contact", by="ada"), None)),
        (0, 0, False, False, False),
        (Tell("stopped by ada", "not started again"), Finish()),
    ),
    "the attempt was refused because of a stop that an older one knows": (
        ON,
        Ended((Outcome(0, "pod-w0", "gone", stop_requested_by="ada"),)),
        (0, 0, False, False, False),
        (Stop(forget=True),),
    ),
    "a node is lost": (ON, Ended(ranks(NO_ANSWER, NO_ANSWER), LOST), (0, 1, True, True, False), (BACK, AGAIN)),
    "a node is lost, and ranks failed since": (
        ON,
        Ended(ranks(FAILED, FAILED), LOST),
        (0, 1, True, True, False),
        (BACK, AGAIN),
    ),
    "a node is lost, and what was left has been ended": (
        with_kept(ON, preemptions=1, counted=True, pending=True),
        Ended(ranks(None, CUT), LOST),
        (0, 1, True, True, False),
        (BACK, AGAIN),
    ),
    "a node is lost more often than allowed": (
        with_kept(ON, max_preemptions=0),
        Ended(ranks(None, None), LOST),
        (0, 1, True, True, False),
        (
            Tell("node pod is PREEMPTED", "not started again: --max-preemptions 0 is used up"),
            FIX,
            Finish(),
        ),
    ),
    "a node is lost again in a later attempt": (
        with_kept(ON, preemptions=1, max_preemptions=2),
        Ended(ranks(None, None), LOST),
        (0, 2, True, True, False),
        (BACK, AGAIN),
    ),
    "preemptions use up no failures": (
        with_kept(ON, failures=1, max_failures=1),
        Ended(ranks(None, None), LOST),
        (1, 1, True, True, False),
        (BACK, AGAIN),
    ),
    "a host shuts down before the API reports its node": (
        ON,
        Ended(ranks(SHUT_DOWN, SHUT_DOWN)),
        (0, 1, True, True, True),
        (Tell("pod-w0: host shuts down", "bringing its nodes back"), AGAIN),
    ),
    "a worker was restarted": (
        ON,
        Ended(ranks(record("lost", reason="the host was restarted"), DONE | {"first": FAILED["first"]})),
        (0, 1, True, True, True),
        (Tell("pod-w0: the host was restarted", "bringing its nodes back"), AGAIN),
    ),
    "a worker knows nothing of an attempt that another one knows": (
        ON,
        Ended(ranks(None, FAILED)),
        (0, 1, True, True, True),
        (Tell("pod-w0: the worker knows nothing of this run", "bringing its nodes back"), AGAIN),
    ),
    "a host failed first": (
        ON,
        Ended(ranks(record("failed", first="lost contact with rank 1"), record("failed", first="lost contact"))),
        (0, 1, True, True, True),
        (Tell("rank 0 (pod-w0): lost contact with rank 1", "bringing its nodes back"), AGAIN),
    ),
    "the command failed, and no failure is allowed": (
        ON,
        Ended(ranks(FAILED, FAILED)),
        (1, 0, True, False, False),
        (Tell("rank 0 (pod-w0): exit code 3", "not started again: --max-failures 0 is used up"), FIX, Finish()),
    ),
    "the command failed within its budget": (
        with_kept(ON, max_failures=1),
        Ended(ranks(FAILED, FAILED)),
        (1, 0, True, False, False),
        (Tell("rank 0 (pod-w0): exit code 3", "starting the run again"), AGAIN),
    ),
    "failures use up no preemptions": (
        with_kept(ON, max_failures=1, max_preemptions=0),
        Ended(ranks(FAILED, FAILED)),
        (1, 0, True, False, False),
        (Tell("rank 0 (pod-w0): exit code 3", "starting the run again"), AGAIN),
    ),
    "the run stood still, and its user wants it stopped then": (
        with_kept(ON, max_failures=1),
        Ended(ranks(STALLED | {"stall": {"on": "stop"}}, STALLED | {"stall": {"on": "stop"}})),
        (0, 0, False, False, False),
        (Tell(f"the run {STILL}", "not started again because of --on-stall stop"), Finish()),
    ),
    "the run stood still, and its user wants it restarted then": (
        with_kept(ON, max_failures=1),
        Ended(ranks(STALLED | {"stall": {"on": "restart"}}, STALLED | {"stall": {"on": "restart"}})),
        (1, 0, True, False, False),
        (Tell(f"the run {STILL}", "starting the run again"), AGAIN),
    ),
    "no worker knows the attempt": (
        ON,
        Ended(ranks(None, None)),
        (0, 0, True, False, False),
        (Tell("the attempt has not begun", "starting the next attempt"), AGAIN),
    ),
    "every worker refused the attempt": (
        ON,
        Ended(ranks(REFUSED, REFUSED)),
        (0, 0, True, False, False),
        (Tell("the attempt has not begun", "starting the next attempt"), AGAIN),
    ),
    "its starter gave it up before it began": (
        ON,
        Ended(ranks(GIVEN_UP, GIVEN_UP)),
        (0, 0, True, False, False),
        (Tell("the attempt has not begun", "starting the next attempt"), AGAIN),
    ),
    "a node is lost, and a user of this machine wants a stop": (
        ON,
        Ended(ranks(None, None), LOST, stop_wanted=True),
        (0, 0, False, False, False),
        (Stop(forget=True),),
    ),
    "the command failed, and a user of this machine wants a stop": (
        with_kept(ON, max_failures=5),
        Ended(ranks(FAILED, FAILED), stop_wanted=True),
        (0, 0, False, False, False),
        (Stop(forget=True),),
    ),
    "it has not begun, and a user of this machine wants a stop": (
        ON,
        Ended(ranks(None, None), stop_wanted=True),
        (0, 0, True, False, False),
        (Stop(forget=True),),
    ),
    "it succeeded, and a user of this machine wants a stop": (
        ON,
        Ended(ranks(DONE, DONE), stop_wanted=True),
        (0, 0, False, False, False),
        (Finish(),),
    ),
}


@pytest.mark.parametrize(("state", "event", "counted", "actions"), ENDS.values(), ids=ENDS)
def test_the_end_of_an_attempt(
    state: State, event: Ended, counted: tuple[int, int, bool, bool, bool], actions: tuple[Action, ...]
) -> None:
    found, done = decide.decide(state, event)
    kept = found.kept
    assert (kept.failures, kept.preemptions, kept.pending, kept.counted, kept.early) == counted
    assert done == actions
    assert found == replace(state, kept=kept), "nothing else is changed"


#: The ranks of a worker that shut down after a notice.
NOTICED = SHUT_DOWN | {"intent": {"kind": "shutdown", "notice": "preempted"}}


@pytest.mark.parametrize(
    ("event", "announced"),
    [
        (Ended(ranks(SHUT_DOWN, SHUT_DOWN)), ""),
        (Ended(ranks(SHUT_DOWN, NOTICED)), PREEMPTED),
        (Ended(ranks(NOTICED, NOTICED | {"intent": {"kind": "shutdown", "notice": "maintenance"}})), PREEMPTED),
        (Ended(ranks(NO_ANSWER, SHUT_DOWN), announced=PREEMPTED), PREEMPTED),
        (Ended(ranks(NO_ANSWER, NO_ANSWER), LOST, announced=MAINTENANCE), MAINTENANCE),
    ],
)
def test_the_end_of_an_attempt_keeps_what_its_workers_announced(event: Ended, announced: str) -> None:
    state, actions = decide.decide(ON, event)
    assert (state.announced, actions[-1]) == (announced, AGAIN)
    assert (state.kept.failures, state.kept.preemptions) == (0, 1), "lost contact is no failure of the command"


@pytest.mark.parametrize(
    ("announced", "silent", "seconds"),
    [
        ("", False, None),
        ("", True, 10.0),
        (MAINTENANCE, False, None),
        (MAINTENANCE, True, 10.0),
        (PREEMPTED, False, decide.SOON),
        (PREEMPTED, True, decide.SOON),
    ],
)
def test_nodes_are_checked_often_once_a_preemption_is_announced(
    announced: str, silent: bool, seconds: float | None
) -> None:
    assert decide.next_look(announced, 10.0, silent=silent) == seconds


#: A new process, the run taken over while its nodes are brought back.
OVER = State(Recovery("r1", 1, PLAN, {}, pending=True), begun=True)
COUNTED = with_kept(OVER, preemptions=1, counted=True)
READY = replace(COUNTED, ready=NEW, made=True)
#: The first start of a run: what starts it is kept, and workers are being asked.
FIRST = State(Recovery("r1", 1, PLAN, {}), begins=True)
SAME, OTHER, GONE = {NODE: Seen("READY", "1")}, {NODE: Seen("READY", "2")}, {NODE: Seen("PREEMPTED", "1")}
NOT_STARTED = launch.NotStarted([Reply("pod-w0", {}, "failed", "D-Bus connection terminated")])
SILENT = UnreachableError("no answer")
OVER_BUDGET = GiveUp("not started again: node pod is PREEMPTED, and --max-preemptions 0 is used up")
BUSY = preflight.PreflightError([preflight.Fault("pod-w0", "busy", check="changing")], 2)

FILLED = launch.NotStarted([Reply("pod-w0", {"blamed": [0], "failed_checks": ["changing"]}, "failed", "busy")])


def later(error: Exception, seconds: float = FIRST_PAUSE) -> tuple[Action, ...]:
    return Tell(str(error), f"trying again in {seconds:g} s; Ctrl-C gives up"), Wait(seconds)


AWAIT = (
    Say(f"run r1: a preemption was announced; waiting for at most {decide.GOING:g} s until the API reports it"),
    AwaitLoss(decide.GOING),
)

#: State, event, changes of what is kept, other changes of the state, actions.
RULES: dict[str, tuple[State, Event, dict[str, Any], dict[str, Any], tuple[Action, ...]]] = {
    # --- the start of an attempt
    "the nodes of the first attempt are known": (
        State(Recovery("r1", 0, Plan(()), {}, pending=True)),
        Planned(PLAN),
        {"plan": PLAN},
        {"begins": True},
        (),
    ),
    "the first attempt is about to start": (
        State(Recovery("r1", 0, PLAN, {}, pending=True), begins=True),
        Starting(),
        {"attempt": 1, "pending": False},
        {},
        (),
    ),
    "the next attempt is about to start": (OVER, Starting(), {"attempt": 2, "pending": False}, {}, ()),
    "a start was interrupted that may have succeeded": (FIRST, Interrupted(may_be_on=True), {}, {"begun": True}, ()),
    "a start was interrupted before a worker could start": (
        with_kept(OVER, attempt=2, pending=False),
        Interrupted(may_be_on=False),
        {"pending": True},
        {},
        (),
    ),
    "an attempt is on": (
        replace(with_kept(READY, pending=False, early=True), refusals=3, pause=60.0),
        Following(started=True),
        {"counted": False, "early": False},
        {"followed": True, "ready": None, "refusals": 0, "pause": FIRST_PAUSE},
        (ForgetRequests(),),
    ),
    "an attempt is on, and the notice is that of an earlier one": (
        replace(with_kept(READY, pending=False), announced=MAINTENANCE),
        Following(started=True),
        {"counted": False},
        {"followed": True, "ready": None, "announced": ""},
        (ForgetRequests(),),
    ),
    "an attempt is followed that may have been refused": (
        replace(with_kept(READY, pending=False), refusals=3, pause=60.0),
        Following(started=False),
        {},
        {"followed": True, "ready": None},
        (),
    ),
    # --- nodes are lost
    "ranks are about to be ended as a node was lost": (
        ON,
        EndingRanks(),
        {"preemptions": 1, "counted": True, "pending": True},
        {},
        (),
    ),
    "the nodes are looked at before they are brought back": (OVER, Preparing(), {}, {}, (LookAtNodes(),)),
    "no look is needed where the loss is counted": (READY, Preparing(), {}, {}, ()),
    "a preemption was announced that the API has not reported yet": (
        replace(with_kept(COUNTED, early=True), announced=PREEMPTED),
        Preparing(),
        {},
        {"announced": ""},
        AWAIT,
    ),
    "a preemption was announced, and the command failed before it": (
        replace(OVER, announced=PREEMPTED),
        Preparing(),
        {},
        {"announced": ""},
        AWAIT,
    ),
    "a preemption was announced, and the API has reported it": (
        replace(COUNTED, announced=PREEMPTED),
        Preparing(),
        {},
        {},
        (),
    ),
    "maintenance was announced, so that the workers return": (
        replace(with_kept(COUNTED, early=True), announced=MAINTENANCE),
        Preparing(),
        {},
        {},
        (),
    ),
    "the loss that was waited for was counted before": (
        with_kept(COUNTED, early=True),
        Looked(LOST),
        {"early": False},
        {},
        (BACK,),
    ),
    "no look is needed before the first attempt": (
        with_kept(OVER, attempt=0, pending=False),
        Preparing(),
        {"pending": True},
        {},
        (),
    ),
    "nodes that were READY before are those of the plan where no loss is counted": (
        replace(OVER, ready=PLAN),
        Preparing(),
        {},
        {"ready": None},
        (LookAtNodes(),),
    ),
    "nodes were lost since the attempt ended": (
        OVER,
        Looked(LOST),
        {"preemptions": 1, "counted": True},
        {},
        (BACK,),
    ),
    "no node was lost since the attempt ended": (OVER, Looked({}), {}, {}, ()),
    "nodes were lost since the attempt ended, more often than allowed": (
        with_kept(OVER, max_preemptions=0),
        Looked(LOST),
        {"preemptions": 1, "counted": True},
        {},
        (OVER_BUDGET,),
    ),
    "the same nodes are back": (OVER, Back(SAME), {}, {"ready": PLAN}, ()),
    "the same nodes are back after a counted loss": (COUNTED, Back(SAME), {"counted": False}, {"ready": PLAN}, ()),
    "the same nodes are back, and the API has not reported their loss yet": (
        with_kept(COUNTED, early=True),
        Back(SAME),
        {},
        {"ready": PLAN},
        (),
    ),
    "other nodes are back after a counted loss": (COUNTED, Back(OTHER), {}, {"ready": NEW, "made": True}, ()),
    "other nodes are back after a loss that the API reports only now": (
        with_kept(COUNTED, early=True),
        Back(OTHER),
        {"early": False},
        {"ready": NEW, "made": True},
        (),
    ),
    "nodes were lost and recreated since they were looked at": (
        OVER,
        Back(OTHER),
        {"preemptions": 1, "counted": True},
        {"ready": NEW, "made": True},
        (Tell("node pod was recreated, state READY", "bringing its nodes back"),),
    ),
    "nodes that took the place of lost ones were lost and recreated as well": (
        READY,
        Back({NODE: Seen("READY", "3")}),
        {"preemptions": 2},
        {"ready": NEWER},
        (Tell("node pod was recreated, state READY", "bringing its nodes back"),),
    ),
    "nodes were recreated more often than allowed": (
        with_kept(OVER, max_preemptions=0),
        Back(OTHER),
        {"preemptions": 1, "counted": True},
        {},
        (GiveUp("not started again: node pod was recreated, state READY, and --max-preemptions 0 is used up"),),
    ),
    "the new nodes are configured": (READY, Configured(NEW), {"plan": NEW, "counted": False}, {}, ()),
    "the nodes are configured, and the API has not reported their loss yet": (
        with_kept(COUNTED, early=True),
        Configured(PLAN),
        {},
        {},
        (),
    ),
    # --- somebody else
    "another machine has started a later attempt": (
        READY,
        Superseded(3, NEW),
        {"attempt": 3, "plan": NEW, "pending": False, "counted": False},
        {},
        (Tell("attempt 3 was started by somebody else", "following that attempt"), AGAIN),
    ),
    "another machine has started a later attempt on nodes that are not known": (
        ON,
        Superseded(3),
        {"pending": True},
        {},
        (AGAIN,),
    ),
    "the workers have no later attempt": (READY, Superseded(1, NEW), {}, {}, ()),
    "workers have other names": (
        ON,
        Renamed("pod-w0: gone"),
        {},
        {},
        (Say("run r1: pod-w0: gone; looking for the run's workers by their new names"), AGAIN),
    ),
    "a stop while nodes are brought back": (READY, StopWanted(ranks(None, CUT), LOST), {}, {}, (Stop(forget=True),)),
    "a stop before anything is known of the attempt": (
        State(ON.kept, begun=True),
        StopWanted(),
        {},
        {},
        (Stop(forget=False),),
    ),
    "a stop before the first attempt": (with_kept(FIRST, attempt=0), StopWanted(), {}, {}, (Stop(forget=True),)),
    "a stop under a first start that cannot have succeeded": (FIRST, StopWanted(), {}, {}, (Stop(forget=True),)),
    "a stop as the run succeeds": (ON, StopWanted(ranks(DONE, DONE)), {}, {}, (Finish(),)),
    "a stop as the run succeeds, once the loss of a node was counted": (
        with_kept(ON, preemptions=1, counted=True, pending=True),
        StopWanted(ranks(None, DONE), LOST),
        {},
        {},
        (Finish(),),
    ),
    "a stop after the workers have stopped the run": (ON, StopWanted(ranks(STOPPED, STOPPED)), {}, {}, (Finish(),)),
    "a stop after a failure": (ON, StopWanted(ranks(FAILED, FAILED)), {}, {}, (Stop(forget=True),)),
    # --- errors
    "the first start failed, and its nodes are there": (FIRST, StartFailed(NOT_STARTED), {}, {}, (Fail(),)),
    "the first start failed as its nodes were lost": (
        FIRST,
        StartFailed(NOT_STARTED, LOST),
        {"preemptions": 1, "counted": True, "pending": True},
        {"begun": True},
        (BACK, AGAIN),
    ),
    "the first start failed as its nodes were lost more often than allowed": (
        with_kept(FIRST, max_preemptions=0),
        StartFailed(NOT_STARTED, LOST),
        {"preemptions": 1, "counted": True, "pending": True},
        {},
        (OVER_BUDGET,),
    ),
    "the first start failed for a reason that no lost node explains": (
        FIRST,
        StartFailed(UsageError("no such directory"), LOST),
        {},
        {},
        (Fail(),),
    ),
    "a run that is taken over cannot be followed": (ON, StartFailed(SILENT, LOST), {}, {}, (Fail(),)),
    "new nodes were lost": (
        replace(READY, refusals=4),
        TryFailed(HostError("site.yml failed"), LOST),
        {"preemptions": 2},
        {"ready": None, "refusals": 0},
        (BACK, AGAIN),
    ),
    "nodes that were there after a failure were lost": (
        replace(with_kept(OVER, failures=1, max_failures=1), ready=PLAN),
        TryFailed(SILENT, LOST),
        {"preemptions": 1, "counted": True},
        {"ready": None},
        (BACK, AGAIN),
    ),
    "nodes that were started after a counted loss were lost again": (
        replace(with_kept(COUNTED, counted=False), ready=PLAN),
        TryFailed(SILENT, LOST),
        {"preemptions": 2, "counted": True},
        {"ready": None},
        (BACK, AGAIN),
    ),
    "a loss that the API reports only after it was counted": (
        replace(with_kept(COUNTED, early=True), ready=PLAN),
        TryFailed(SILENT, LOST),
        {"early": False},
        {"ready": None},
        (BACK, AGAIN),
    ),
    "new nodes were lost more often than allowed": (
        with_kept(READY, max_preemptions=1),
        TryFailed(SILENT, LOST),
        {"preemptions": 2},
        {"ready": None},
        (GiveUp("not started again: node pod is PREEMPTED, and --max-preemptions 1 is used up"),),
    ),
    "an error once the budget is used up": (
        with_kept(READY, max_preemptions=0),
        TryFailed(SILENT),
        {},
        {},
        (Fail(),),
    ),
    "a worker does not answer": (
        replace(READY, refusals=4),
        TryFailed(SILENT),
        {},
        {"refusals": 0, "pause": 2 * FIRST_PAUSE},
        later(SILENT),
    ),
    "a worker does not answer in announced maintenance": (
        replace(READY, announced=MAINTENANCE, pause=240.0),
        TryFailed(SILENT),
        {},
        {},
        later(SILENT),
    ),
    "Ansible is changing what runs use": (
        replace(READY, refusals=4),
        TryFailed(BUSY),
        {},
        {"refusals": 0, "pause": 2 * FIRST_PAUSE},
        later(BUSY),
    ),
    "the pause has its limit": (
        replace(READY, pause=LONGEST_PAUSE),
        TryFailed(SILENT),
        {},
        {},
        later(SILENT, LONGEST_PAUSE),
    ),
    "a worker refuses the next attempt": (
        replace(READY, refusals=3),
        TryFailed(NOT_STARTED),
        {},
        {"refusals": 4, "pause": 2 * FIRST_PAUSE},
        later(NOT_STARTED),
    ),
    "a worker refuses the next attempt for the fifth time": (
        replace(READY, refusals=REFUSALS - 1),
        TryFailed(NOT_STARTED),
        {},
        {"refusals": REFUSALS},
        (Fail(),),
    ),
    "a new node refuses the login for the fifth time": (
        replace(READY, refusals=REFUSALS - 1),
        TryFailed(RefusedError("login was refused")),
        {},
        {"refusals": REFUSALS},
        (Fail(),),
    ),
    "Ansible is changing what runs use at the start itself": (
        replace(READY, refusals=REFUSALS - 1),
        TryFailed(FILLED),
        {},
        {"refusals": 0, "pause": 2 * FIRST_PAUSE},
        later(FILLED),
    ),
    "a worker is not fit at the first try of a takeover": (
        OVER,
        TryFailed(NOT_STARTED),
        {},
        {"refusals": 1},
        (Fail(),),
    ),
    "a login is refused at the first try of a takeover": (
        OVER,
        TryFailed(RefusedError("login was refused")),
        {},
        {"refusals": 1, "pause": 2 * FIRST_PAUSE},
        later(RefusedError("login was refused")),
    ),
    "this machine lacks processes for a moment": (
        READY,
        TryFailed(OSError("too few processes")),
        {},
        {"refusals": 1, "pause": 2 * FIRST_PAUSE},
        later(OSError("too few processes")),
    ),
    "this machine lacks processes at the first try of a takeover": (
        OVER,
        TryFailed(OSError("too few processes")),
        {},
        {"refusals": 1},
        (Fail(),),
    ),
    "the API refuses for good": (
        READY,
        TryFailed(ApiError("not you", status="PERMISSION_DENIED")),
        {},
        {"refusals": 1},
        (Fail(),),
    ),
}


@pytest.mark.parametrize(("state", "event", "kept", "changes", "actions"), RULES.values(), ids=RULES)
def test_the_rules(
    state: State, event: Event, kept: dict[str, Any], changes: dict[str, Any], actions: tuple[Action, ...]
) -> None:
    found, done = decide.decide(state, event)
    assert found == replace(with_kept(state, **kept), **changes)
    assert done == actions


@pytest.mark.parametrize(
    ("state", "event", "plan"),
    [
        (FIRST, StartFailed(NOT_STARTED), PLAN),
        (FIRST, StartFailed(SILENT), PLAN),
        (FIRST, StartFailed(UsageError("no such directory")), None),
        (with_kept(FIRST, attempt=0), StartFailed(SILENT), None),
        (ON, StartFailed(SILENT), None),
        (READY, TryFailed(SILENT), NEW),
        (READY, TryFailed(OSError("too few processes")), NEW),
        (with_kept(READY, max_preemptions=0), TryFailed(SILENT), None),
        (OVER, TryFailed(SILENT), None),
    ],
)
def test_the_nodes_whose_loss_may_be_behind_an_error(
    state: State, event: StartFailed | TryFailed, plan: Plan | None
) -> None:
    assert decide.suspected(state, event) == plan


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        ({"preemptions": 99}, ""),
        ({"max_preemptions": 2, "preemptions": 2}, ""),
        ({"max_preemptions": 2, "preemptions": 3}, "--max-preemptions 2"),
        ({"failures": 1}, "--max-failures 0"),
        ({"max_failures": 1, "failures": 1, "preemptions": 5}, ""),
    ],
)
def test_preemptions_and_failures_have_budgets_of_their_own(changes: dict[str, Any], over: str) -> None:
    assert decide.over_budget(replace(ON.kept, **changes)) == over


@pytest.mark.parametrize(
    ("checks", "passes"), [(["changing"], True), (["changing"] * 2, True), (["changing", "free"], False), ([], False)]
)
def test_a_worker_that_ansible_is_changing_is_waited_for(checks: list[str], passes: bool) -> None:
    faults = [preflight.Fault(f"pod-w{index}", "busy", check=check) for index, check in enumerate(checks)]
    assert decide.passes(preflight.PreflightError(faults, 2)) is passes


@pytest.mark.parametrize(
    ("refusals", "passes"),
    [
        ([["changing"]], True),
        ([["changing"], None], True),
        ([["changing", "free"]], False),
        ([["changing"], ["free"]], False),
        ([[]], False),
    ],
)
def test_a_worker_that_ansible_is_changing_at_the_start_itself_is_waited_for(
    refusals: list[list[str] | None], passes: bool
) -> None:
    refused = [
        Reply("pod-w0", {}, "timeout", "silent")
        if checks is None
        else Reply("pod-w1", {"blamed": [1], "failed_checks": checks}, "failed", "busy")
        for checks in refusals
    ]
    assert decide.passes(launch.NotStarted(refused)) is passes


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ApiError("a bad moment", status="UNAVAILABLE"), True),
        (ApiError("no quota", status="RESOURCE_EXHAUSTED"), True),
        (ApiError("not you", status="PERMISSION_DENIED"), False),
        (SILENT, True),
        (OpsError("no"), False),
    ],
)
def test_an_api_or_a_worker_that_does_not_answer_is_waited_for(error: OpsError, passes: bool) -> None:
    assert decide.passes(error) is passes
