"""Host keys of workers that publish none: asked of the workers, recorded, and compared once they are published."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fleet import answering
from tests.support.nodes import key, node
from tests.support.published import document
from tpu_ops.cloud.node import workers_of
from tpu_ops.errors import UsageError
from tpu_ops.fleet import first_contact, lookup, selection, view
from tpu_ops.fleet.publishing import documents
from tpu_ops.fleet.state import Files
from tpu_ops.ssh import host_keys, known_hosts
from tpu_ops.ssh.host_keys import HostKeyAlarm


@pytest.fixture
def silent(fleet):
    """A pod whose guest agents publish nothing, as the fleet that was refreshed."""
    fleet.create("pod", "v4-32")
    fleet.api.fault(
        project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="guest attributes are disabled"
    )
    seen, _ = view.refresh(fleet.settings())
    yield seen
    fleet.api.clear_faults()


def known(fleet):
    return known_hosts.parse(fleet.known_hosts.read_text())


def test_each_worker_is_asked_by_its_own_alias_and_nothing_is_written(silent, play):
    for worker in silent.workers[:3]:
        answering(play, worker)
    before = silent.known_hosts.read_text()
    answers = first_contact.ask(silent.settings, silent, silent.workers)
    assert [answer.blob for answer in answers] == [key(worker.host) for worker in silent.workers[:3]] + [""]
    assert answers[0].fingerprint == known_hosts.fingerprint(key("pod-w0"))
    assert "Connection refused" in answers[3].problem
    assert silent.known_hosts.read_text() == before
    calls = (play / "calls").read_text().splitlines()
    assert len(calls) == 4
    for call in calls:
        assert call.split("UserKnownHostsFile=")[0].endswith("-o StrictHostKeyChecking=accept-new -o ")
        assert "PreferredAuthentications=none" in call
        assert call.index("ControlPath=none") < call.index(f"ControlPath={selection.mux_dir()}")


def test_a_key_of_another_worker_or_of_no_form_is_no_answer(silent, play):
    first, second = silent.workers[:2]
    (play / first.host_key_alias).write_text(f"ssh-ed25519 {key('a', 'ssh-rsa')}")
    (play / second.host_key_alias).write_text(f"x\ntpu-99-w0 ssh-ed25519 {key('a')}")
    assert [answer.key_type for answer in first_contact.ask(silent.settings, silent, silent.workers[:2])] == ["", ""]


def test_a_worker_without_a_way_is_not_asked(fleet, play):
    fleet.create("pod", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(connect_with=["external"])
    seen, _ = view.refresh(fleet.settings(), learn=False)
    answers = first_contact.ask(seen.settings, seen, seen.workers)
    assert [answer.problem for answer in answers] == ["it has no external address"] * 2
    assert not (play / "calls").exists()


def test_recorded_keys_are_marked_until_they_are_published(silent, play, fleet):
    for worker in silent.workers:
        answering(play, worker)
    first_contact.record(silent.settings, first_contact.ask(silent.settings, silent, silent.workers))
    assert known_hosts.trusted_first(silent.known_hosts.read_text()) == {w.host_key_alias for w in silent.workers}
    assert host_keys.has_keys(silent.settings, silent.workers)
    again, _ = view.refresh(silent.settings)
    assert known(again) == {w.host_key_alias: {"ssh-ed25519": key(w.host)} for w in silent.workers}
    assert again.warnings == ()


def test_a_published_key_that_is_the_same_takes_the_mark_away(silent, play, fleet):
    fleet.api.clear_faults()
    seen, _ = view.refresh(silent.settings)
    published = known(seen)
    seen.known_hosts.write_text("")
    for worker in silent.workers:
        answering(play, worker, published[worker.host_key_alias]["ssh-ed25519"])
    first_contact.record(silent.settings, first_contact.ask(silent.settings, silent, silent.workers))
    assert known_hosts.trusted_first(seen.known_hosts.read_text())
    again, _ = view.refresh(silent.settings)
    assert known(again) == published
    assert known_hosts.trusted_first(again.known_hosts.read_text()) == set()


def test_keys_that_a_publisher_trusted_first_are_compared_by_its_readers(silent, play, fleet, tmp_path):
    for worker in silent.workers:
        answering(play, worker)
    first_contact.record(silent.settings, first_contact.ask(silent.settings, silent, silent.workers))
    keys, first = Files(silent.settings.state_dir).host_keys()
    published = tmp_path / "published.json"
    of = documents.document(time.time(), (fleet.project,), (), silent.listed, keys, trusted_first=first)
    published.write_text(documents.publishable(of, time.time()))
    assert documents.parse(published.read_bytes(), "here", time.time()) == of
    aliases = {worker.host_key_alias for worker in silent.workers}
    for _ in ("whoever published it", "somebody else"):
        read, _ = view.refresh(silent.settings, source=str(published))
        assert known_hosts.trusted_first(read.known_hosts.read_text()) == aliases
        read.known_hosts.unlink()
    view.refresh(silent.settings, source=str(published))
    fleet.api.clear_faults()
    with pytest.raises(HostKeyAlarm, match=r"pod-w0.*trusted on first contact"):
        view.refresh(silent.settings, source="")


def test_a_published_key_that_differs_is_an_alarm_without_being_asked_for(silent, play, fleet):
    for worker in silent.workers:
        answering(play, worker)
    first_contact.record(silent.settings, first_contact.ask(silent.settings, silent, silent.workers))
    before = {path.name: path.read_text() for path in silent.known_hosts.parent.iterdir()}
    fleet.api.clear_faults()
    with pytest.raises(HostKeyAlarm, match=r"pod-w0.*trusted on first contact"):
        view.refresh(silent.settings)
    assert {path.name: path.read_text() for path in silent.known_hosts.parent.iterdir()} == before


def test_a_key_that_has_become_known_in_the_meantime_is_not_replaced(silent, play):
    worker, other = silent.workers[:2]
    answering(play, worker)
    answering(play, other)
    answers = first_contact.ask(silent.settings, silent, [worker, other])
    text = known_hosts.text_of({worker.host_key_alias: {"ssh-ed25519": key("published")}})
    silent.known_hosts.write_text(text)
    with pytest.raises(HostKeyAlarm, match=worker.host):
        first_contact.record(silent.settings, answers)
    assert silent.known_hosts.read_text() == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pod", []),
        ("nowhere", ["no node is called 'nowhere'", "pod"]),
        ("pod-w1", ["no node is called 'pod-w1'", "name its node: pod"]),
        ("off", ["STOPPED"]),
        ("twin", ["several nodes", "twin.us-central2-b or twin.us-west4-a"]),
        ("twin.us-west4-a", []),
    ],
)
def test_nodes_are_named_by_name_or_label(fleet, name, words):
    fleet.create("pod", "v4-16")
    fleet.create("off")
    fleet.create("twin")
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    fleet.act("stop", "off")
    seen, _ = view.refresh(fleet.settings())
    if not words:
        assert {worker.label for worker in first_contact.workers_of(seen, [name, name])} == {name}
        assert len(first_contact.workers_of(seen, [name, name])) == len(first_contact.workers_of(seen, [name]))
        return
    with pytest.raises(UsageError) as caught:
        first_contact.workers_of(seen, [name])
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_first_of_many_nodes_are_named_in_the_order_of_their_numbers():
    nodes = [node(f"tpu-{number}", node_id=str(number), count=1) for number in range(1, 30)]
    seen: Any = SimpleNamespace(nodes=nodes, listed=nodes, labels={one.full_name: one.name for one in nodes})
    known = ", ".join(f"tpu-{number}" for number in range(1, 9)) + " and 21 more"
    with pytest.raises(UsageError) as caught:
        first_contact._workers_of(workers_of(nodes), "nowhere")
    assert caught.value.fix == f"nodes with workers: {known}"
    with pytest.raises(UsageError) as caught:
        lookup.node(seen, "nowhere", lookup.NamedPlace())
    assert caught.value.fix == f"known nodes: {known}"


def test_a_jump_that_the_filters_hide_is_trusted_by_the_name_in_the_warning(silent, play, fleet):
    fleet.create("inner", networkConfig={"enableExternalIps": False})
    fleet.write(proxy_jump="pod-w1", names=["inner"])
    seen, _ = view.refresh(fleet.settings())
    assert any("`tpu_ops refresh --trust-first pod`" in text for text in seen.warnings)
    (jump,) = first_contact.workers_of(seen, ["pod"])
    assert jump.host == "pod-w1"
    answering(play, jump)
    first_contact.record(seen.settings, first_contact.ask(seen.settings, seen, [jump]))
    assert host_keys.has_keys(seen.settings, [jump])
    with pytest.raises(UsageError, match="name its node: pod"):
        first_contact.workers_of(seen, ["pod-w1"])
    with pytest.raises(UsageError, match=r"no node is called 'pod-w0'.*: inner, pod"):
        first_contact.workers_of(seen, ["pod-w0"])


def test_a_node_without_an_id_is_never_vouched_for(member, tmp_path):
    settings = member.settings()
    source = tmp_path / "published.json"
    nodes = [node(name)._replace(node_id="") for name in ("one", "two")]
    source.write_text(document(nodes).text())
    seen, _ = view.refresh(settings, source=str(source))
    for name in ("one", "two"):
        with pytest.raises(UsageError, match=f"node {name} no id"):
            first_contact.workers_of(seen, [name])
    assert all("--trust-first" not in text and "no id" in text for text in seen.warnings)
    assert len(seen.warnings) == 2
    # What an older program recorded under the alias of all such nodes holds no longer, and goes.
    seen.known_hosts.write_text(
        f"{seen.workers[0].host_key_alias} ssh-ed25519 {key('one')} {known_hosts.TRUSTED_FIRST}\n"
    )
    assert not host_keys.has_keys(settings, seen.workers[:1])
    view.refresh(settings)
    assert seen.known_hosts.read_text() == ""


def test_a_changed_host_key_and_silence_are_distinguished(fleet, play):
    fleet.create("pod", "v4-32")
    seen, _ = view.refresh(fleet.settings())
    keys = known(seen)
    for worker in seen.workers[:3]:
        answering(play, worker, keys[worker.host_key_alias]["ssh-ed25519"])
    answering(play, seen.workers[1], key("somebody else"))
    verdicts = first_contact.verify(seen.settings, seen, seen.workers)
    hosts = [[answer.worker.host for answer in answers] for answers in verdicts]
    assert hosts == [["pod-w0", "pod-w2"], ["pod-w1"], ["pod-w3"]]
    assert verdicts.others[0].address == seen.workers[1].external_ip
    assert known(seen) == keys, "nothing is written"
    preferred = {call.split("HostKeyAlgorithms=")[1].split()[0] for call in (play / "calls").read_text().splitlines()}
    assert preferred == {f"^{','.join(keys[seen.workers[0].host_key_alias])}"}
