"""Nodes of a run are recreated through a real API process, from every state."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.support.lab_api import LOCATION, LabApi
from tpu_ops.cloud import bodies as cloud
from tpu_ops.cloud import lifecycle, operations, remaking
from tpu_ops.cloud.client import ApiError, connect
from tpu_ops.errors import CloudError, UsageError


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An API process whose operations take long enough to be met on their way."""
    api = LabApi(tmp_path_factory.mktemp("remaking") / "state.json", seconds=0.2)
    api.start()
    yield api
    api.close()


@pytest.fixture
def lab_api(started):
    """The API, empty."""
    yield started
    for kind, more in (("queuedResources", "?force=true"), ("nodes", "")):
        for found in started.call("GET", f"v2/{LOCATION}/{kind}")[1].get(kind, ()):
            started.done("DELETE", f"v2/{found['name']}{more}")
    started.clear_faults()
    started.forget_requests()


@pytest.fixture
def tpu(lab_api, monkeypatch):
    """A client of the API; nobody waits long."""
    monkeypatch.setattr(remaking, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(remaking, "LOOK", 0.05)
    with connect(lab_api.grpc, timeout=10) as client:
        yield client


def name(node="pod"):
    return f"{LOCATION}/nodes/{node}"


def back(tpu, plan, request="r1/2"):
    """Bring the nodes back; return how they are and what was said."""
    said: list[str] = []
    return remaking.bring_back(tpu, plan, request, said.append), said


def preempt(lab_api, node="pod"):
    assert lab_api.call("POST", "lab/preempt", {"node": name(node)})[0] == 200


def test_a_preempted_node_is_made_again_as_it_was(tpu, lab_api):
    lab_api.create(
        "pod",
        "v4-16",
        labels={"team": "vision"},
        metadata={"ssh-keys": "tpu:ssh-ed25519 AAAA tpu", "startup-script": "true"},
        tags=["a"],
        schedulingConfig={"spot": True},
        networkConfig={"network": "other", "enableExternalIps": False},
    )
    before = lab_api.node("pod")
    plan = remaking.remember(tpu, [name()])
    assert remaking.Plan.from_json(plan.to_json()) == plan
    assert "AAAA" not in repr(plan)
    assert remaking.lost(plan, remaking.look(tpu, plan)) == {}
    preempt(lab_api)
    assert remaking.lost(plan, remaking.look(tpu, plan)) == {name(): "node pod is PREEMPTED"}
    seen, said = back(tpu, plan)
    after = lab_api.node("pod")
    own = ("id", "createTime", "networkEndpoints", "cidrBlock")
    assert {key: after[key] for key in after if key not in own} == {
        key: before[key] for key in before if key not in own
    }
    assert after["id"] != before["id"]
    assert (seen[name()].state, seen[name()].node_id) == ("READY", after["id"])
    assert remaking.fresh(plan, seen) == {name()}
    assert remaking.fresh(plan.now(seen, [name()]), seen) == set()
    assert [text.partition(": ")[2] for text in said] == [
        "PREEMPTED; deleting what is left of it",
        "creating it as it was",
    ]


def test_a_deleted_node_is_made_again_beside_one_that_is_left_alone(tpu, lab_api):
    lab_api.create("a")
    lab_api.create("b")
    plan = remaking.remember(tpu, [name("a"), name("b")])
    lab_api.done("DELETE", f"v2/{name('a')}")
    assert remaking.lost(plan, remaking.look(tpu, plan)) == {name("a"): "node a is gone"}
    seen, _ = back(tpu, plan)
    assert remaking.fresh(plan, seen) == {name("a")}
    assert {found.state for found in seen.values()} == {"READY"}


def test_a_stopped_node_is_started_and_stays_the_same(tpu, lab_api):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    lab_api.done("POST", f"v2/{name()}:stop", {})
    seen, said = back(tpu, plan)
    assert remaking.fresh(plan, seen) == set()
    assert (seen[name()].state, len(said)) == ("READY", 1)


@pytest.mark.parametrize(
    ("state", "node_id"), [("HIDDEN", "same"), ("STATE_UNSPECIFIED", "same"), ("STOPPED", "another")]
)
def test_a_node_in_a_state_that_says_nothing_is_left_alone(tpu, lab_api, monkeypatch, state, node_id):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    found = plan.nodes[0].node_id if node_id == "same" else node_id
    monkeypatch.setattr(remaking, "_seen", lambda *_: remaking.Seen(state, found))
    with pytest.raises(CloudError, match=f"does not change a node or queued resource in this state: {state}"):
        back(tpu, plan)
    assert lab_api.node("pod")["state"] == "READY"


def test_a_node_that_somebody_else_makes_again_meanwhile_is_taken(tpu, lab_api, monkeypatch):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    preempt(lab_api)
    wait = operations.wait

    def outrun(client, operation, **options):
        monkeypatch.setattr(operations, "wait", wait)
        done = wait(client, operation, **options)
        lab_api.create("pod")
        return done

    monkeypatch.setattr(operations, "wait", outrun)
    seen, said = back(tpu, plan)
    assert (seen[name()].node_id, len(said)) == (lab_api.node("pod")["id"], 1)


def test_a_node_in_maintenance_is_waited_for(tpu, lab_api, monkeypatch):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    waited = []
    wait = operations.wait_for_state

    def waits(client, node, *, through, **options):
        waited.append(through)
        return wait(client, node, through=through, **options)

    monkeypatch.setattr(operations, "wait_for_state", waits)
    # The event itself may be over before anybody looks.
    looks = iter([remaking.Seen("REPAIRING", plan.nodes[0].node_id)])
    seen = remaking._seen
    monkeypatch.setattr(remaking, "_seen", lambda *of: next(looks, None) or seen(*of))
    assert lab_api.call("POST", f"v2alpha1/{name()}:simulateMaintenanceEvent", {})[0] == 200
    found, said = back(tpu, plan)
    assert remaking.fresh(plan, found) == set()
    assert waited[0] == lifecycle.ON_THE_WAY
    assert said[0].endswith("REPAIRING; waiting for at most 3600 s until it is READY")
    assert lab_api.node("pod")["state"] == "READY"


@pytest.mark.parametrize(
    ("state", "node_id", "said"),
    [
        ("READY", "1", None),
        ("READY", "2", "node pod was recreated, state READY"),
        ("REPAIRING", "1", "node pod is REPAIRING"),
        ("gone", "", "node pod is gone"),
    ],
)
def test_a_node_is_lost_where_it_is_not_what_it_was(state, node_id, said):
    plan = remaking.Plan((remaking.Made(name(), "1", {}),))
    found = remaking.lost(plan, {name(): remaking.Seen(state, node_id)})
    assert found == ({name(): said} if said else {})


def test_lacking_capacity_is_waited_for_with_growing_pauses(tpu, lab_api):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    preempt(lab_api)
    lab_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no more capacity", times=3)
    seen, said = back(tpu, plan)
    assert seen[name()].state == "READY"
    pauses = [text.rpartition("next try in ")[2] for text in said if "no more capacity" in text]
    assert pauses == ["0.05 s", "0.1 s", "0.2 s"]


def test_a_recovery_ends_if_creating_is_no_longer_allowed_after_a_pause(tpu, lab_api):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    preempt(lab_api)
    lab_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no more capacity", times=1)
    answers = iter([None, UsageError("the grant ended")])

    def allow():
        if answer := next(answers):
            raise answer

    with pytest.raises(UsageError, match="the grant ended"):
        remaking.bring_back(tpu, plan, "r1/2", lambda _: None, allow=allow)
    assert lab_api.call("GET", f"v2/{name()}")[0] == 404


def test_a_node_that_is_preempted_while_it_is_made_is_made_again(tpu, lab_api, monkeypatch):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    lab_api.done("DELETE", f"v2/{name()}")
    wait = operations.wait

    def preempted(client, operation, **options):
        wait(client, operation, **options)
        monkeypatch.setattr(operations, "wait", wait)
        preempt(lab_api)
        what = "Cloud TPU received a bad request. update is not supported while in state PREEMPTED [EID: 0x73]"
        raise operations.Failed(what, status="INVALID_ARGUMENT", where="node pod")

    monkeypatch.setattr(operations, "wait", preempted)
    seen, said = back(tpu, plan)
    assert seen[name()].state == "READY"
    assert [text for text in said if "while in state PREEMPTED" in text and "next try in" in text]


@pytest.mark.parametrize(
    ("status", "later"), [("UNKNOWN", True), ("INTERNAL", True), ("INVALID_ARGUMENT", False), ("NOT_FOUND", False)]
)
def test_only_transient_api_errors_may_succeed_later(status, later):
    assert remaking.passes(ApiError("Stream removed", status=status)) is later


def test_a_permanent_refusal_of_the_api_is_raised(tpu, lab_api):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    preempt(lab_api)
    lab_api.fault(method="CreateNode", code="PERMISSION_DENIED", message="not you", times=1)
    with pytest.raises(ApiError, match="not you"):
        back(tpu, plan)


def test_of_two_who_bring_a_node_back_both_have_the_same_one(tpu, lab_api, monkeypatch):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    lab_api.done("DELETE", f"v2/{name()}")
    create = cloud.create

    def outrun(client, *args):
        monkeypatch.setattr(cloud, "create", create)
        create(client, *args)
        return create(client, *args)

    monkeypatch.setattr(cloud, "create", outrun)
    seen, _ = back(tpu, plan)
    assert seen[name()].state == "READY"
    assert lab_api.requests()["CreateNode"] == 3


@pytest.mark.parametrize(("times", "pauses"), [(1, 0), (3, 2)])
def test_create_retries_while_a_deleted_name_is_reserved(tpu, lab_api, times, pauses):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    lab_api.done("DELETE", f"v2/{name()}")
    lab_api.fault(method="CreateNode", code="ALREADY_EXISTS", message="it is being deleted", times=times)
    seen, said = back(tpu, plan)
    assert seen[name()].state == "READY"
    assert len([text for text in said if "it is being deleted (ALREADY_EXISTS); next try in" in text]) == pauses


def test_a_missing_dependency_of_a_node_ends_the_recreation(tpu, lab_api):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    lab_api.done("DELETE", f"v2/{name()}")
    lab_api.fault(method="CreateNode", code="NOT_FOUND", message="the network net was not found")
    with pytest.raises(ApiError, match="the network net was not found"):
        back(tpu, plan)
    assert lab_api.requests()["CreateNode"] == 3


def test_a_permanent_error_of_one_node_is_raised_while_another_waits(tpu, lab_api, monkeypatch):
    monkeypatch.setattr(remaking, "FIRST_PAUSE", 60.0)
    for one in ("a", "b"):
        lab_api.create(one)
    plan = remaking.remember(tpu, [name("a"), name("b")])
    lab_api.done("DELETE", f"v2/{name('a')}")
    lab_api.done("POST", f"v2/{name('b')}:stop", {})
    lab_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no capacity")
    lab_api.fault(method="StartNode", code="PERMISSION_DENIED", message="not you")
    begun = time.monotonic()
    with pytest.raises(ApiError, match="not you"):
        back(tpu, plan)
    assert time.monotonic() - begun < 30


def test_a_node_that_takes_too_long_fails_with_the_command_to_wait_again(tpu, lab_api, monkeypatch):
    lab_api.create("pod")
    plan = remaking.remember(tpu, [name()])
    preempt(lab_api)
    with monkeypatch.context() as patch:
        patch.setattr(remaking, "MAKING", 0.0)
        with pytest.raises(CloudError, match="not done after 0 s") as late:
            back(tpu, plan)
    assert late.value.fix == "`tpu_ops attach RUN --recover` waits for it again"
    with connect(lab_api.grpc, timeout=10) as again:
        assert remaking.fresh(plan, back(again, plan)[0]) == {name()}


def queued(lab_api, tpu, *nodes, short="spring"):
    """Ask for nodes by a queued resource and wait until it is ACTIVE."""
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base", "metadata": {"a": "b"}}
    body = {
        "tpu": {"nodeSpec": [{"parent": LOCATION, "nodeId": one, "node": node} for one in nodes]},
        "spot": {},
        "queueingPolicy": {"validUntilDuration": "3600s"},
    }
    lab_api.done("POST", f"v2/{LOCATION}/queuedResources?queuedResourceId={short}", body)
    resource = f"{LOCATION}/queuedResources/{short}"
    plan = remaking.Plan(tuple(remaking.Made(name(one), "", {}, resource) for one in nodes), {resource: {}})
    remaking.bring_back(tpu, plan, "test", lambda _: None)
    return resource


def test_nodes_of_a_queued_resource_are_made_again_by_it(tpu, lab_api):
    resource = queued(lab_api, tpu, "a", "b")
    before = cloud.queued(tpu, resource)
    plan = remaking.remember(tpu, [name("a"), name("b")])
    assert {made.queued for made in plan.nodes} == {resource}
    preempt(lab_api, "a")
    seen, said = back(tpu, plan)
    assert remaking.fresh(plan, seen) == {name("a"), name("b")}
    assert before is not None
    now = cloud.queued(tpu, resource)
    assert now is not None
    assert replace(now, created=before.created) == before
    assert "spot" in before.body
    assert before.body["queueing_policy"] == {"valid_until_duration": "3600s"}
    assert lab_api.requests()["CreateQueuedResource"] == 2
    assert "CreateNode" not in lab_api.requests()
    assert any("deleting what is left of it" in text for text in said)
    assert any("asking for its resources again" in text for text in said)


def test_a_queued_resource_stays_while_another_run_is_active_on_its_nodes(tpu, lab_api):
    queued(lab_api, tpu, "a", "b")
    plan = remaking.remember(tpu, [name("a"), name("b")])
    preempt(lab_api, "a")
    asked: list[object] = []

    def used(names):
        asked.append(names)
        return "run late of bob is active"

    with pytest.raises(CloudError, match="would delete all of its nodes, and run late of bob is active") as refused:
        remaking.bring_back(tpu, plan, "r1/2", lambda _: None, used=used)
    assert "`tpu_ops attach RUN --recover` resumes" in refused.value.fix
    assert asked == [[name("b")]]
    with connect(lab_api.grpc, timeout=10) as again:
        seen = remaking.look(again, plan)
        assert [seen[name(node)].state for node in "ab"] == ["PREEMPTED", "READY"]
        seen = remaking.bring_back(again, plan, "r1/2", lambda _: None)
        assert remaking.fresh(plan, seen) == {name("a"), name("b")}


def test_a_recreated_queued_resource_keeps_later_updates_of_its_nodes(tpu, lab_api):
    """gcloud adds ssh keys to the metadata; without these, nobody could log in to the new nodes."""
    queued(lab_api, tpu, "a", "b")
    for node, keys in (("a", "ada:ssh-rsa A ada\neve:ssh-rsa E eve"), ("b", "bob:ssh-rsa B bob\nada:ssh-rsa A ada")):
        changes = {"metadata": {"a": "b", "ssh-keys": keys}, "labels": {"team": node}, "tags": ["t"]}
        lab_api.done("PATCH", f"v2/{name(node)}?updateMask=metadata,labels,tags", changes)
    before = {node: lab_api.node(node) for node in ("a", "b")}
    plan = remaking.remember(tpu, [name("a"), name("b")])
    preempt(lab_api, "a")
    back(tpu, plan)
    for node in ("a", "b"):
        after = lab_api.node(node)
        assert {key: after[key] for key in ("metadata", "labels", "tags")} == {
            key: before[node][key] for key in ("metadata", "labels", "tags")
        }


@pytest.mark.parametrize("unknown", [True, False])
def test_of_what_the_api_tells_more_than_is_known_here_is_named_once(tpu, lab_api, monkeypatch, unknown):
    queued(lab_api, tpu, "a", "b")
    lab_api.create("pod")
    monkeypatch.setattr(cloud, "_has_unknown", lambda *_: unknown)
    said: list[str] = []
    remaking.remember(tpu, [name("a"), name("b"), name()], said.append)
    assert said == (["queued resource spring", "node pod"] if unknown else [])


def test_a_queued_resource_lost_before_the_next_attempt_is_requested_again(tpu, lab_api):
    """The service repeats its earlier answer to a known request id, and does nothing."""
    queued(lab_api, tpu, "a")
    plan = remaking.remember(tpu, [name("a")])
    for _ in range(3):
        preempt(lab_api, "a")
        seen, _ = back(tpu, plan)
        assert remaking.fresh(plan, seen) == {name("a")}
        plan = plan.now(seen, [name("a")])


def test_a_failed_deletion_of_a_queued_resource_is_repeated(tpu, lab_api, monkeypatch):
    queued(lab_api, tpu, "a")
    plan = remaking.remember(tpu, [name("a")])
    preempt(lab_api, "a")
    ids = []
    delete, wait = cloud.delete_queued, operations.wait

    def counted(client, resource, request_id):
        ids.append(request_id)
        return delete(client, resource, request_id) if len(ids) > 1 else "nothing"

    def failing(client, operation, **more):
        if operation == "nothing":
            raise ApiError("a bad moment", status="INTERNAL", where="spring")
        wait(client, operation, **more)
        raise operations.Late("not done after 1800 s", where="spring")

    monkeypatch.setattr(cloud, "delete_queued", counted)
    monkeypatch.setattr(operations, "wait", failing)
    seen, said = back(tpu, plan)
    assert remaking.fresh(plan, seen) == {name("a")}
    assert len(set(ids)) == len(ids) == 2
    assert any("a bad moment" in text for text in said)


@pytest.fixture
def lost_queue(tpu, lab_api):
    """The plan of a queued resource that was deleted."""
    resource = queued(lab_api, tpu, "a")
    plan = remaking.remember(tpu, [name("a")])
    lab_api.done("DELETE", f"v2/{resource}?force=true")
    return plan


def failing_creations(monkeypatch, *statuses):
    """Have creations of a queued resource end with errors of these statuses, one after the other, and leave nothing."""
    left, create, is_done = list(statuses), cloud.create_queued, operations.is_done

    def creates(client, resource, body, request_id):
        return "fails" if left else create(client, resource, body, request_id)

    def ends(client, operation, *, what):
        if operation != "fails":
            return is_done(client, operation, what=what)
        raise operations.Failed(f"quota {len(left)}", status=left.pop(0), where=what)

    monkeypatch.setattr(cloud, "create_queued", creates)
    monkeypatch.setattr(operations, "is_done", ends)


def test_the_reason_of_a_failed_queued_resource_is_shown_before_a_retry(tpu, lab_api, lost_queue, monkeypatch):
    failing_creations(monkeypatch, *3 * ["RESOURCE_EXHAUSTED"])
    seen, said = back(tpu, lost_queue)
    assert seen[name("a")].state == "READY"
    first, *told = [text.partition(": ")[2] for text in said if "quota" in text]
    assert first == "quota 3; asking once more, since this error may be the answer to an earlier command"
    assert told == ["quota 2; next try in 0.05 s", "quota 1; next try in 0.1 s"]


def test_a_queued_resource_that_cannot_be_asked_for_at_all_ends_it(tpu, lab_api, lost_queue, monkeypatch):
    failing_creations(monkeypatch, "PERMISSION_DENIED", "PERMISSION_DENIED")
    with pytest.raises(ApiError, match="quota 1"):
        back(tpu, lost_queue)


@pytest.mark.parametrize("kind", ["create_queued", "delete_queued"])
def test_a_request_that_an_earlier_command_was_refused_is_sent_again(tpu, lab_api, monkeypatch, kind):
    """The service answers one request id with one operation, even after the obstacle is gone."""
    resource = queued(lab_api, tpu, "a")
    plan = remaking.remember(tpu, [name("a")])
    if kind == "create_queued":
        lab_api.done("DELETE", f"v2/{resource}?force=true")
    else:
        preempt(lab_api, "a")
    ask, is_done, refused, forbidden = getattr(cloud, kind), operations.is_done, set(), True

    def asks(client, resource, *further):
        if forbidden:
            refused.add(further[-1])
        return "refused" if further[-1] in refused else ask(client, resource, *further)

    def ends(client, operation, *, what):
        if operation == "refused":
            raise operations.Failed("not allowed", status="PERMISSION_DENIED", where=what)
        return is_done(client, operation, what=what)

    monkeypatch.setattr(cloud, kind, asks)
    monkeypatch.setattr(operations, "is_done", ends)
    for _ in range(2):
        with connect(lab_api.grpc, timeout=10) as client, pytest.raises(ApiError, match="not allowed"):
            back(client, plan)
    forbidden = False
    seen, _ = back(tpu, plan)
    assert seen[name("a")].state == "READY"


def test_a_creation_of_which_nothing_is_known_any_more_is_asked_for_again(tpu, lab_api, lost_queue, monkeypatch):
    create, is_done, known = cloud.create_queued, operations.is_done, []

    def creates(client, resource, body, request_id):
        known.append(request_id)
        return create(client, resource, body, request_id) if len(known) > 2 else "forgotten"

    def ends(client, operation, *, what):
        if operation == "forgotten":
            raise ApiError("operation not found", status="NOT_FOUND", where=what)
        return is_done(client, operation, what=what)

    monkeypatch.setattr(cloud, "create_queued", creates)
    monkeypatch.setattr(operations, "is_done", ends)
    seen, _ = back(tpu, lost_queue)
    assert seen[name("a")].state == "READY"
    assert len(set(known)) == len(known)


def failing_answers(monkeypatch, times, **failure):
    """Have a queued resource be FAILED that many times that it was asked for, as the API tells."""
    look, failed, left = cloud.queued, set(), times

    def looks(client, resource):
        nonlocal left
        found = look(client, resource)
        if found and found.created not in failed and left:
            left -= 1
            failed.add(found.created)
        return replace(found, state="FAILED", **failure) if found and found.created in failed else found

    monkeypatch.setattr(cloud, "queued", looks)


def test_a_failing_queued_resource_is_requested_after_growing_pauses(tpu, lab_api, lost_queue, monkeypatch):
    failing_answers(monkeypatch, 2, error="no capacity", status="OUT_OF_RANGE")
    seen, said = back(tpu, lost_queue)
    assert seen[name("a")].state == "READY"
    pauses = [text.rpartition("next try in ")[2] for text in said if "no capacity" in text]
    assert pauses == ["0.05 s", "0.1 s"]


def test_a_queued_resource_that_would_only_fail_again_ends_it(tpu, lab_api, lost_queue, monkeypatch):
    failing_answers(monkeypatch, 1, error="no such network", status="INVALID_ARGUMENT")
    with pytest.raises(CloudError, match="no such network"):
        back(tpu, lost_queue)


def test_a_queued_resource_that_somebody_asks_for_during_a_pause_is_taken(tpu, lab_api, lost_queue, monkeypatch):
    failing_answers(monkeypatch, 1, error="no capacity", status="RESOURCE_EXHAUSTED")
    resource, pause = lost_queue.nodes[0].queued, remaking._Pauses.wait

    def meanwhile(self, failure, seen):
        pause(self, failure, seen)
        lab_api.done("DELETE", f"v2/{resource}?force=true")
        queued(lab_api, tpu, "a")

    monkeypatch.setattr(remaking._Pauses, "wait", meanwhile)
    before = lab_api.requests().get("DeleteQueuedResource", 0)
    seen, _ = back(tpu, lost_queue)
    assert seen[name("a")].state == "READY"
    assert lab_api.requests()["DeleteQueuedResource"] == before + 1


def test_a_stopped_node_of_a_queued_resource_is_started_and_the_others_stay(tpu, lab_api):
    queued(lab_api, tpu, "a", "b")
    plan = remaking.remember(tpu, [name("a"), name("b")])
    lab_api.done("POST", f"v2/{name('a')}:stop", {})
    seen, _ = back(tpu, plan)
    assert remaking.fresh(plan, seen) == set()
    assert {found.state for found in seen.values()} == {"READY"}


def test_a_queued_resource_that_was_deleted_is_asked_for_again(tpu, lab_api):
    resource = queued(lab_api, tpu, "a")
    plan = remaking.remember(tpu, [name("a")])
    lab_api.done("DELETE", f"v2/{resource}?force=true")
    seen, _ = back(tpu, plan)
    assert remaking.fresh(plan, seen) == {name("a")}


def test_nodes_that_others_use_are_not_taken_away(tpu, lab_api):
    queued(lab_api, tpu, "a", "b")
    with pytest.raises(UsageError, match="it also created b"):
        remaking.remember(tpu, [name("a")])


@pytest.mark.parametrize(("one", "several"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_a_network_stays_whichever_way_the_service_says_it(one, several):
    networks = [{"network": f"n{number}", "subnetwork": "s"} for number in range(several)]
    node = {"accelerator_type": "v4-8", "network_configs": networks} | ({"network_config": networks[0]} if one else {})
    kept = cloud._settable(node)
    assert kept.get("network_configs") == (networks if several > 1 or not one else None)
    assert kept.get("network_config") == (networks[0] if one and several == 1 else None)
