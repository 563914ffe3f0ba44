"""However a recovery ends, it names its requests to the API and the command that deletes each."""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, stand_in
from tests.runs.world import DONE, NODE, PREEMPTED, World, run
from tests.support.lab_api import LOCATION, LabApi, lab_api
from tpu_ops.cli import attach, options, output, recovering, runs, stop
from tpu_ops.cli.interrupts import Asked
from tpu_ops.cloud import remaking
from tpu_ops.cloud.client import Abandoned, ApiError, connect
from tpu_ops.cloud.pending import CREATE, Request, Requests, read
from tpu_ops.cloud.remaking import Made, Plan
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.recovery import open_requests
from tpu_ops.runs import control, overview, recovery, spec

__all__ = ["lab_api", "run"]

BILLED = "its recovery requested node pod, zone us-central2-b, project lab at "
DELETES = "READY when last seen, and billed; `tpu_ops delete pod --zone us-central2-b --project lab` deletes it"
QUEUED = f"{LOCATION}/queuedResources/spring"


@pytest.fixture(autouse=True)
def _messages_are_printed() -> None:
    output.listen()


def ended_in(world: World, error: BaseException) -> World:
    """Return a world in which an error ends what configures new nodes."""

    def configure(*_: Any) -> None:
        raise error

    world.configure = configure  # type: ignore[assignment, method-assign]
    return world


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Asked(), UsageError("no vault password")], ids=repr)
def test_a_recovery_that_ends_before_the_start_names_the_node_it_has_made(
    run: Any, tmp_path: Path, capsys: Any, error: BaseException
) -> None:
    world = ended_in(World(PREEMPTED, DONE), error)
    if isinstance(error, Asked):
        run(world)
    else:
        with pytest.raises(type(error)):
            run(world, max_failures=0)
    said = capsys.readouterr().err
    assert BILLED in said
    assert DELETES in said
    (kept,) = read(recovery.requests_file(tmp_path, "r1"))
    assert (kept.name, kept.kind, kept.state, kept.made) == (NODE, CREATE, "READY", "2")


def test_a_recovery_whose_run_has_started_on_what_it_made_names_nothing(run: Any, tmp_path: Path, capsys: Any) -> None:
    code, *_ = run(World(PREEMPTED, DONE))
    assert code == 0
    assert "requested" not in capsys.readouterr().err
    assert not recovery.requests_file(tmp_path, "r1").exists()


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """The settings of a fleet in which a recovery was killed while it waited for a node and a queued resource."""
    asked = Requests(recovery.requests_file(tmp_path, "r1"))
    asked.send(NODE, CREATE, lambda: "operation")
    asked.seen(NODE, "READY", "2")
    asked.send(QUEUED, CREATE, lambda: "operation")
    keep(tmp_path)
    return stand_in(tmp_path)


def keep(state_dir: Path) -> None:
    """Keep what starts a run again that is between two attempts."""
    options = recovery.options_of(spec.RunSpec("r1", ("true",)), {})
    recovery.write(state_dir, recovery.Recovery("r1", 1, Plan(()), options, pending=True))


def test_runs_and_attach_name_what_a_killed_recovery_requested(
    kept: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    waiting = "not seen yet; it is billed once it is ACTIVE; `tpu_ops stop r1 --delete-requested` deletes it"
    runs.show(overview.Overview((), control.Found([])), kept, as_json=False)
    said = capsys.readouterr().err
    assert BILLED in said
    assert DELETES in said
    assert waiting in said
    monkeypatch.setattr(recovering.Recovering, "to_the_end", lambda *_: 0)
    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: kept)
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    attach.run(parser.parse_args(["r1", "--recover"]))
    said = capsys.readouterr().err
    assert DELETES in said
    assert waiting in said


def test_a_run_that_starts_on_a_requested_node_takes_it_up(kept: Any) -> None:
    node = pod(1)[0].node
    recovery.taken_up(kept.state_dir, [node._replace(queued_resource="spring")])
    assert not recovery.requests_file(kept.state_dir, "r1").exists()


def test_a_request_that_the_api_refuses_is_not_kept_and_a_lost_answer_is() -> None:
    asked = Requests()

    def answered(status: str) -> list[str]:
        def call() -> str:
            raise ApiError("no", status=status)

        with pytest.raises(ApiError):
            asked.send(NODE, CREATE, call)
        return [request.name for request in asked.all]

    assert answered("RESOURCE_EXHAUSTED") == []
    assert answered("ALREADY_EXISTS") == [], "somebody else made it"
    assert answered("DEADLINE_EXCEEDED") == [NODE]
    assert answered("ALREADY_EXISTS") == [NODE], "the request whose answer was lost made it"


@pytest.mark.parametrize(
    ("state", "made", "left"),
    [
        ("CREATING", "2", True),
        ("READY", "3", False),
        ("PREEMPTED", "2", False),
        ("DELETING", "2", False),
        ("gone", "", False),
    ],
)
def test_a_request_is_over_once_what_it_made_is_gone(state: str, made: str, left: bool) -> None:
    assert bool(Request(NODE, CREATE, 1.0, "READY", "2").now(state, made)) is left


def test_a_request_that_is_not_seen_yet_is_kept_while_it_may_appear() -> None:
    assert Request(NODE, CREATE, time.time()).now("gone", "")
    assert Request(NODE, CREATE, time.time() - 3600).now("gone", "") is None


# --- with an API --------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(lab_api: LabApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet on the lab's API whose killed recovery has requested a queued resource that starts later."""
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {
        "tpu": {"nodeSpec": [{"parent": LOCATION, "nodeId": "q", "node": node}]},
        "queueingPolicy": {"validAfterDuration": "3600s"},
    }
    lab_api.done("POST", f"v2/{LOCATION}/queuedResources?queuedResourceId=spring", body)
    Requests(recovery.requests_file(tmp_path, "r1")).send(QUEUED, CREATE, lambda: "operation")
    settings = SimpleNamespace(**vars(stand_in(tmp_path)), endpoint=lab_api.grpc, request_timeout=10, auth=None)
    found = SimpleNamespace(settings=settings, workers=(), listed=(), nodes=())
    monkeypatch.setattr("tpu_ops.cli.stop.config.load", lambda _: settings)
    monkeypatch.setattr("tpu_ops.cli.stop.view.current", lambda _: found)
    monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _: None)
    return settings


def stopped(state_dir: Path, *words: str) -> int:
    """Run `tpu_ops stop r1`."""
    keep(state_dir)
    parser = argparse.ArgumentParser()
    stop.add_arguments(parser)
    return stop.run(parser.parse_args([*words, "r1"]))


def is_there(lab_api: LabApi) -> bool:
    return bool(lab_api.call("GET", f"v2/{QUEUED}")[0] == 200)


def test_stop_in_a_script_names_a_queued_resource_and_leaves_it(
    fleet: Any, lab_api: LabApi, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert stopped(fleet.state_dir, "--json") == 0
    out, err = capsys.readouterr()
    (told,) = json.loads(out)
    (one,) = told["requested"]
    assert (one["name"], one["deleted"], one["command"]) == (QUEUED, False, "tpu_ops stop r1 --delete-requested")
    assert one["state"] in ("ACCEPTED", "WAITING_FOR_RESOURCES")
    assert f"{one['state']} when last seen; it is billed once it is ACTIVE" in err
    assert is_there(lab_api)


@pytest.mark.parametrize("answer", ["", "y\n", "n\n"], ids=repr)
def test_stop_deletes_a_queued_resource_that_is_not_active_if_wanted(
    fleet: Any, lab_api: LabApi, monkeypatch: pytest.MonkeyPatch, capsys: Any, answer: str
) -> None:
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: bool(answer)  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert stopped(fleet.state_dir, *([] if answer else ["--delete-requested"])) == 0
    said = capsys.readouterr().err
    kept_ = read(recovery.requests_file(fleet.state_dir, "r1"))
    if answer == "n\n":
        assert is_there(lab_api)
        assert len(kept_) == 1
    else:
        assert "run r1: deleted queued resource spring, zone us-central2-b, project lab" in said
        assert not is_there(lab_api)
        assert kept_ == []


def test_stop_keeps_the_request_for_a_node_that_has_not_appeared(fleet: Any, capsys: Any) -> None:
    path = recovery.requests_file(fleet.state_dir, "r1")
    Requests(path).send(NODE, CREATE, lambda: "operation")
    with pytest.raises(CloudError, match="the API does not list this resource yet"):
        stopped(fleet.state_dir, "--delete-requested")
    assert "not seen yet; it is billed once it is READY" in capsys.readouterr().err
    assert [request.name for request in read(path)] == [NODE], "the queued resource was deleted"


def test_stop_deletes_nothing_that_another_run_uses(fleet: Any, lab_api: LabApi) -> None:
    def used(_: object, request: Request) -> str:
        return "run late of bob is active"

    keep(fleet.state_dir)
    left, problem = open_requests.settle(fleet, "r1", delete=True, confirmed=None, waiting=options.Waiting, used=used)
    assert "not deleted: run late of bob is active there" in str(problem)
    assert [one["deleted"] for one in left] == [False]
    assert is_there(lab_api)


def test_stop_without_the_api_names_what_was_requested(fleet: Any, lab_api: LabApi, capsys: Any) -> None:
    fleet.request_timeout = 1
    lab_api.fault(method="GetQueuedResource", code="PERMISSION_DENIED")
    assert stopped(fleet.state_dir) == 0
    assert "not seen yet; it is billed once it is ACTIVE" in capsys.readouterr().err
    with pytest.raises(ApiError):
        stopped(fleet.state_dir, "--delete-requested")


def test_an_interrupted_recovery_says_nothing_of_its_own_closed_channel(lab_api: LabApi, tmp_path: Path) -> None:
    """The answer about the operation that makes the node is late."""
    plan = Plan((Made(NODE, "1", {"accelerator_type": "v4-8", "runtime_version": "tpu-ubuntu2204-base"}),))
    said: list[str] = []
    path = recovery.requests_file(tmp_path, "r1")
    lab_api.fault(method="GetOperation", seconds=30)
    with connect(lab_api.grpc, timeout=20) as tpu:

        def close() -> None:
            while not lab_api.requests().get("GetOperation"):
                assert not tpu.closed.wait(0.02)
            tpu.close()

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(Abandoned):
            remaking.bring_back(tpu, plan, "r1/2", said.append, Requests(path))
        closing.join()
    assert [text.partition(": ")[2] for text in said] == ["creating it as it was"]
    assert [request.name for request in read(path)] == [NODE]
