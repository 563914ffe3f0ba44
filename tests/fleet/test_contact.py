"""Workers that do not answer are looked up in a real API process or in a published snapshot."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nodes import key, node
from tests.support.published import KEYS, NOW, POD, document
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.errors import UnreachableError, UsageError
from tpu_ops.files import unwritable
from tpu_ops.fleet import contact, first_contact, view
from tpu_ops.fleet.diff import Changes
from tpu_ops.fleet.targets import UnknownError
from tpu_ops.ssh import jump as jump_host
from tpu_ops.ssh.host_keys import HostKeyAlarm
from tpu_ops.ssh.renewal import News
from tpu_ops.ssh.ways import Way, Ways


@pytest.fixture
def said():
    """What is logged, for people, as it comes."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, handler = logging.getLogger("tpu_ops.fleet.contact"), Keep()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def search(monkeypatch):
    """Returns what the fan-out of a fleet asks, as it is known now, of workers that do not answer."""

    def search(fleet):
        given = []
        monkeypatch.setattr(contact, "Fanout", lambda _config, renew, *_, **__: given.append(renew))
        contact.fanout(view.current(fleet.settings()))
        return given[0]

    return search


def test_workers_of_a_node_that_moved_are_all_found_by_one_question(fleet, said, search):
    fleet.create("pod", "v4-16")
    fleet.create("solo")
    looking = search(fleet)
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    fleet.api.forget_requests()
    news = looking(["pod-w1"])
    assert (news.changed, news.notes) == ({"pod-w0", "pod-w1"}, {})
    assert said[0] == "pod-w1 does not answer: asking the API for its address"
    assert [line.split()[:3] for line in said[1:]] == [["address", "pod-w1", "external:"]]
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1}
    assert looking(["pod-w1"]).changed == frozenset()


def test_fleet_warnings_are_not_repeated_when_the_api_is_asked_again(fleet, said, search):
    fleet.create("pod", "v4-16")
    fleet.write(projects=[fleet.project, "nobodys"])
    looking = search(fleet)
    looking(["pod-w1"])
    assert said == ["pod-w1 does not answer: asking the API for its address"]


def test_the_master_of_a_worker_that_moved_is_looked_for_elsewhere(fleet, monkeypatch):
    fleet.create("pod", "v4-16")
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        contact, "Fanout", lambda _config, renew, _proxied, find, **_: given.update(look=renew, find=find)
    )
    contact.fanout(view.current(fleet.settings()))
    before = given["find"]("pod-w1")
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    given["look"](["pod-w1"])
    after = given["find"]("pod-w1")
    assert before.path != after.path
    assert before.path.parent == after.path.parent
    assert given["find"]("pod-w9") is None


@pytest.mark.parametrize(
    ("verbs", "note", "news"),
    [
        (["stop"], "its node is STOPPED now", ["state      pod: READY -> STOPPED"]),
        (["delete"], "its node no longer exists", ["gone       pod"]),
    ],
)
def test_a_stopped_or_deleted_node_is_reported_for_each_worker(fleet, said, search, *, verbs, note, news):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    for verb in verbs:
        fleet.act(verb, "pod")
    found = looking(["pod-w0", "pod-w1"])
    assert found.notes == {"pod-w0": note, "pod-w1": note}
    assert found.changed == frozenset()
    assert [line.strip() for line in said[1:] if "address" not in line] == news


def test_workers_whose_node_was_taken_away_are_known_and_asked_for_as_such(fleet, said, monkeypatch):
    fleet.create("pod", "v4-16")
    fleet.create("solo")
    given: dict[str, Any] = {}
    monkeypatch.setattr(contact, "Fanout", lambda _config, renew, *_, **more: given.update(more, look=renew))
    fleet.act("stop", "pod")
    view.refresh(fleet.settings())
    contact.fanout(view.current(fleet.settings()))
    look, is_taken = given["look"], given["taken"]
    assert [host for host in ("pod-w0", "pod-w1", "solo-w0", "pod-w9") if is_taken(host)] == ["pod-w0", "pod-w1"]
    found = look(["pod-w0"])
    assert said.pop() == "pod was STOPPED when last seen: asking the API for its address"
    assert found.notes == dict.fromkeys(["pod-w0", "pod-w1"], "its node is STOPPED now"), (
        "of both, whoever is asked for"
    )
    assert {*found.fixes} == {"pod-w0", "pod-w1"}
    assert found.fixes["pod-w0"] == until_ready(view.current(fleet.settings()).workers[0].node)
    fleet.act("start", "pod")
    assert look(["pod-w0", "solo-w0"]).changed == {"pod-w0", "pod-w1"}
    assert said[0] == "pod-w0, solo-w0 do not answer: asking the API for their addresses"
    assert not is_taken("pod-w0")


def test_whether_a_worker_takes_connections_is_known_but_behind_a_proxy(fleet, monkeypatch):
    fleet.create("pod")
    given: dict[str, Any] = {}
    monkeypatch.setattr(contact, "Fanout", lambda *_, **more: given.update(more))
    contact.fanout(view.current(fleet.settings()))
    way = Way("127.0.0.1")
    monkeypatch.setattr(Ways, "of", lambda *_: way)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        monkeypatch.setattr(contact, "SSH_PORT", listens.getsockname()[1])
        assert asyncio.run(given["connects"]("pod-w0"))
    assert not asyncio.run(given["connects"]("pod-w0"))
    assert asyncio.run(given["connects"]("nobody-w0"))
    # Without a jump that is a worker.
    way = Way("127.0.0.1", proxy="ssh -W")
    assert asyncio.run(given["connects"]("pod-w0"))


@pytest.fixture
def jump(fleet):
    """A fleet with a node behind a jump, of whose workers one is no further away than this machine."""
    fleet.create("gate", "v4-8")
    fleet.create("inner", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(proxy_jump="gate")
    return fleet


def test_workers_behind_a_jump_that_moved_are_reached_another_way(jump, search):
    looking = search(jump)
    jump.act("stop", "gate")
    jump.act("start", "gate")
    news = looking(["inner-w1"])
    assert (news.changed, news.notes) == ({"gate-w0", "inner-w0", "inner-w1"}, {})


def test_workers_behind_a_dead_jump_fail_together_with_the_cause(jump, search, monkeypatch):
    monkeypatch.setattr(
        Ways, "_address", lambda _, worker: ("127.0.0.1" if worker.external_ip else worker.internal_ip, "")
    )
    given: dict[str, Any] = {}
    monkeypatch.setattr(contact, "Fanout", lambda _config, renew, *_, **more: given.update(more, look=renew))
    for listens in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as server:
            jump.write(proxy_jump=f"gate:{server.getsockname()[1]}")
            if not listens:
                server.close()
            contact.fanout(view.current(jump.settings()))
            assert asyncio.run(given["connects"]("inner-w1")) == listens
            news = given["look"](["inner-w1"])
        assert news.changed == frozenset()
        assert {*news.notes} == {*news.fixes} == (set() if listens else {"inner-w0", "inner-w1"})
    (note,) = set(news.notes.values())
    assert note.startswith(
        "the worker is reached through gate-w0 (proxy_jump), which takes no connections at 127.0.0.1 port "
    )
    # Whoever is asked for that goes another way is told of none of this.
    assert given["look"](["gate-w0"]).notes == {}


@pytest.mark.parametrize("further", ["", "ProxyJump elsewhere.example.org\n"], ids=["plain", "behind another"])
def test_workers_behind_a_silent_own_jump_fail_together(jump, monkeypatch, tmp_path, further):
    (tmp_path / "own/.ssh").mkdir(parents=True)
    (tmp_path / "own/.ssh/config").write_text(f"Host bastion\nHostName 127.0.0.1\nPort 1\n{further}")
    monkeypatch.setattr("tpu_ops.ssh.ways.openssh.home", lambda: tmp_path / "own")
    given: dict[str, Any] = {}
    monkeypatch.setattr(contact, "Fanout", lambda _config, renew, *_, **more: given.update(more, look=renew))
    for listens in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            jump.write(proxy_jump=f"eve@bastion:{port}")
            if not listens:
                server.close()
            contact.fanout(view.current(jump.settings()))
            is_there = listens or bool(further)
            assert asyncio.run(given["connects"]("inner-w1")) is is_there
            news = given["look"](["inner-w1"])
        assert {*news.notes} == {*news.fixes} == (set() if is_there else {"inner-w0", "inner-w1"})
        for note in news.notes.values():
            place = f"bastion (proxy_jump), which takes no connections at 127.0.0.1 port {port}"
            assert note == f"the worker is reached through {place}"
    assert given["look"](["gate-w0"]).notes == {}


def test_a_connection_to_the_jump_that_is_open_says_more_than_its_port(monkeypatch, tmp_path):
    """The user may have opened it in a way that a plain connection cannot use."""
    codes = iter([0])
    monkeypatch.setattr(jump_host, "answer", lambda _: SimpleNamespace(returncode=next(codes)))
    assert jump_host.place_of(tmp_path / "jump_config", (), "bastion") == ("", 0)


def test_a_worker_that_is_called_otherwise_now_is_named(fleet, search):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    fleet.create("pod", "v5p-8", zone="europe-west4-b")
    assert looking(["pod-w1"]).notes == {"pod-w1": "its name is pod.us-central2-b-w1 now"}


def test_a_recreated_node_is_reached_under_its_new_key(fleet, said, search):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    fleet.act("delete", "pod")
    fleet.create("pod", "v4-8")
    found = looking(["pod-w0", "pod-w1"])
    assert (found.changed, found.notes) == ({"pod-w0"}, {"pod-w1": "its node has 1 worker now"})
    assert "  recreated  pod" in said


def test_a_worker_whose_key_is_known_now_is_tried_again(fleet, search):
    """Its guest agent was still starting when the fleet was last looked at."""
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    (fleet.settings().state_dir / "known_hosts").write_text("")
    assert looking(["pod-w0"]).changed == {"pod-w0", "pod-w1"}


def test_each_worker_without_a_published_host_key_gets_a_fix(fleet, search):
    fleet.create("gate", "v4-8")
    fleet.create("pod", "v4-16")
    fleet.create("inner", "v4-8", networkConfig={"enableExternalIps": False})
    fleet.write(proxy_jump="gate")
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    looking = search(fleet)
    notes = looking(["pod-w0"]).notes
    fleet.api.clear_faults()
    assert {host: note.split("`")[1] for host, note in notes.items()} == {
        "gate-w0": "tpu_ops refresh --trust-first gate",
        "inner-w0": "tpu_ops refresh --trust-first gate",
        "pod-w0": "tpu_ops refresh --trust-first pod",
        "pod-w1": "tpu_ops refresh --trust-first pod",
    }
    assert looking(["pod-w0"]).notes == {}
    assert contact.out_of_reach(view.current(fleet.settings()), ["pod-w0"]) == {}


def test_an_api_that_does_not_answer_leaves_the_first_problem(fleet, said, search):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    fleet.api.fault(project=fleet.project, code="PERMISSION_DENIED", message="not you")
    assert looking(["pod-w0"]) == News()
    assert "not you" in said[-1]
    fleet.api.clear_faults()


def test_if_a_refresh_cannot_be_written_the_first_problem_stays(fleet, said, search, monkeypatch):
    """A worker that is silent for a moment is asked again, although the local disk is full."""
    fleet.create("pod", "v4-16")
    looking = search(fleet)

    def full(_):
        raise unwritable(Path("known_hosts"), OSError(28, "No space left on device"))

    monkeypatch.setattr(view, "refresh", full)
    assert looking(["pod-w0"]) == News()
    assert "No space left on device" in said[-1]


def test_many_that_do_not_answer_are_not_all_named(fleet, said, search):
    fleet.create("big", "v4-128")
    looking = search(fleet)
    fleet.act("stop", "big")
    fleet.act("start", "big")
    looking([f"big-w{index}" for index in range(16)])
    assert said[0].startswith("big-w0, big-w1, big-w2, big-w3 and 12 others do not answer: asking the API")
    assert len(said) == 1 + 12 + 1
    assert said[-1].strip() == "and 4 more changes"


def test_a_name_is_unknown_only_once_the_api_was_asked(fleet, said):
    fleet.create("old")
    with pytest.raises(UnknownError):
        contact.find(fleet.settings(), "new")
    assert said == [], "asked just now"
    fleet.create("new", "v4-16")
    fleet.api.forget_requests()
    found, workers = contact.find(fleet.settings(), "new,old")
    assert [worker.host for worker in workers] == ["new-w0", "new-w1", "old-w0"]
    assert {worker.host for worker in found.workers} == {worker.host for worker in workers}
    assert said == ["no node or worker is called 'new' in the last known view: asking the API for new nodes"]
    contact.find(fleet.settings(), "new")
    assert fleet.api.requests(fleet.project)["ListNodes"] == 1
    fleet.api.fault(method="ListNodes", project=fleet.project, code="PERMISSION_DENIED")
    with pytest.raises(UnknownError, match="'nobody'"):
        contact.find(fleet.settings(), "nobody")
    assert said[-1].startswith("the refresh failed: ")


def test_a_group_is_empty_only_once_the_api_was_asked(fleet, said):
    with pytest.raises(UnknownError, match="the fleet has no workers"):
        contact.find(fleet.settings(), "@all")
    fleet.create("new")
    _, workers = contact.find(fleet.settings(), "@all")
    assert [worker.host for worker in workers] == ["new-w0"]
    assert said == ["the target matches no worker in the last known view: asking the API for new nodes"]


def test_a_node_that_is_still_being_made_has_no_worker_yet(fleet, monkeypatch):
    view.refresh(fleet.settings())
    young = view.current(fleet.settings())._replace(nodes=(node("young", count=0, state="CREATING"),))
    young = young._replace(labels={each.full_name: each.name for each in young.nodes})
    monkeypatch.setattr(view, "refresh", lambda settings: (young, Changes()))
    with pytest.raises(UnreachableError, match="in state CREATING and has no workers yet"):
        contact.find(fleet.settings(), "young")
    with pytest.raises(UnreachableError, match="no node has workers: young is CREATING"):
        contact.find(fleet.settings(), "@all")


def test_a_ready_node_without_endpoints_is_not_waited_for(fleet, tmp_path):
    path = tmp_path / "snapshot.json"
    path.write_text(document([POD, node("bare", node_id="9", count=0)]).text())
    fleet.write(projects=["lab"], snapshot=str(path))
    with pytest.raises(UnreachableError) as alone:
        contact.find(fleet.settings(), "bare")
    assert alone.value.what == "it is READY, but the API lists no network endpoints for it"
    with pytest.raises(UnknownError) as several:
        contact.find(fleet.settings(), "pod,bare")
    assert several.value.what == f"node 'bare' {alone.value.what.removeprefix('it ')}"
    path.write_text(document([node("bare", node_id="9", count=0)]).text())
    view.refresh(fleet.settings())
    with pytest.raises(UnreachableError) as group:
        contact.find(fleet.settings(), "@all")
    assert group.value.what == "no node has workers: bare is READY without network endpoints"
    with pytest.raises(UsageError) as trusted:
        first_contact.workers_of(view.current(fleet.settings()), ["bare"])
    assert trusted.value.what == f"node bare {alone.value.what.removeprefix('it ')}"
    for error in (alone, several, group, trusted):
        assert (
            "`tpu_ops refresh` asks the API again; if the API still lists no workers: `tpu_ops delete bare"
            in error.value.fix
        )


def test_a_node_that_is_known_to_serve_is_not_asked_for(fleet, said):
    fleet.create("pod", "v4-16")
    known = view.current(fleet.settings())
    fleet.api.forget_requests()
    assert contact.serving(known, known.workers) is known
    assert (said, fleet.api.requests(fleet.project)) == ([], {})


def test_a_member_reads_the_published_snapshot_again(member, tmp_path, said, search):
    path = tmp_path / "snapshot.json"
    path.write_text(document([POD]).text())
    view.refresh(member.settings(), source=str(path))
    looking = search(member)
    found = looking(["pod-w0"])
    assert found.changed == frozenset()
    assert found.notes["pod-w0"].startswith("its address is as published ")
    assert said == [f"pod-w0 does not answer: reading {path} again for its address"]
    path.write_text(document([POD._replace(external_ips=("34.0.9.0", "34.0.9.1"))], asked_at=NOW + 1).text())
    assert looking(["pod-w0"]).changed == {"pod-w0", "pod-w1"}
    path.unlink()
    assert looking(["pod-w0"]) == News()
    assert "No such file" in said[-1]


def test_a_changed_key_ends_the_command(member, tmp_path, search):
    path = tmp_path / "snapshot.json"
    path.write_text(document([POD]).text())
    view.refresh(member.settings(), source=str(path))
    path.write_text(document([POD], KEYS | {"tpu-1-w0": {"ssh-ed25519": key("evil")}}, NOW + 1).text())
    with pytest.raises(HostKeyAlarm):
        search(member)(["pod-w0"])
