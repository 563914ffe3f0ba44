"""What becomes of workers that do not answer: asked from a real API process, or read from a published snapshot."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.support.nodes import key
from tests.support.published import KEYS, NOW, POD, document
from tpu_ops.fleet import contact, view
from tpu_ops.fleet.hostkeys import HostKeyAlarm
from tpu_ops.remote.renewal import News


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


def search(fleet):
    """Return what looks for the workers of a fleet as it is known now."""
    return contact._Search(view.current(fleet.settings()))


def test_workers_of_a_node_that_moved_are_all_found_by_one_question(fleet, said):
    fleet.create("pod", "v4-16")
    fleet.create("solo")
    looking = search(fleet)
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    fleet.api.forget_requests()
    news = looking.news(["pod-w1"])
    assert (news.changed, news.notes) == ({"pod-w0", "pod-w1"}, {})
    assert said[0] == "pod-w1 does not answer: asking the API for its address"
    assert [line.split()[:3] for line in said[1:]] == [["address", "pod-w1", "external:"]]
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1}
    assert looking.news(["pod-w1"]).changed == frozenset()


@pytest.mark.parametrize(
    ("verbs", "note", "news"),
    [
        (["stop"], "its node is STOPPED now", ["state      pod: READY -> STOPPED"]),
        (["delete"], "its node no longer exists", ["gone       pod"]),
    ],
)
def test_what_became_of_a_node_is_said(fleet, said, verbs, note, news):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    for verb in verbs:
        fleet.act(verb, "pod")
    found = looking.news(["pod-w0", "pod-w1"])
    assert found.notes == {"pod-w0": note, "pod-w1": note}
    assert found.changed == frozenset()
    assert [line.strip() for line in said[1:] if "address" not in line] == news


def test_a_recreated_node_is_reached_under_its_new_key(fleet, said):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    fleet.act("delete", "pod")
    fleet.create("pod", "v4-8")
    found = looking.news(["pod-w0", "pod-w1"])
    assert (found.changed, found.notes) == ({"pod-w0"}, {"pod-w1": "its node has 1 worker now"})
    assert "  recreated  pod" in said


def test_a_worker_whose_key_is_known_now_is_tried_again(fleet):
    """Its guest agent was still starting when the fleet was last looked at."""
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    (fleet.settings().state_dir / "known_hosts").write_text("")
    assert looking.news(["pod-w0"]).changed == {"pod-w0", "pod-w1"}


def test_an_api_that_does_not_answer_leaves_the_first_problem(fleet, said):
    fleet.create("pod", "v4-16")
    looking = search(fleet)
    fleet.api.fault(project=fleet.project, code="PERMISSION_DENIED", message="not you")
    assert looking.news(["pod-w0"]) == News()
    assert "not you" in said[-1]
    fleet.api.clear_faults()


def test_many_that_do_not_answer_are_not_all_named(fleet, said):
    fleet.create("big", "v4-128")
    looking = search(fleet)
    fleet.act("stop", "big")
    fleet.act("start", "big")
    looking.news([f"big-w{index}" for index in range(16)])
    assert said[0].startswith("big-w0, big-w1, big-w2, big-w3 and 12 others do not answer: asking the API")
    assert len(said) == 1 + contact._LINES + 1
    assert said[-1].strip() == "and 4 more changes"


def test_a_node_that_is_known_to_serve_is_not_asked_for(fleet, said):
    fleet.create("pod", "v4-16")
    known = view.current(fleet.settings())
    fleet.api.forget_requests()
    assert contact.serving(known, known.workers) is known
    assert (said, fleet.api.requests(fleet.project)) == ([], {})


def test_a_member_reads_the_published_snapshot_again(member, tmp_path, said):
    path = tmp_path / "snapshot.json"
    path.write_text(document([POD]).text())
    view.refresh(member.settings(), source=str(path))
    looking = contact._Search(view.current(member.settings()))
    found = looking.news(["pod-w0"])
    assert found.changed == frozenset()
    assert found.notes["pod-w0"].startswith("its address is as published ")
    assert said == [f"pod-w0 does not answer: reading {path} again for its address"]
    path.write_text(document([replace(POD, external_ips=("34.0.9.0", "34.0.9.1"))], asked_at=NOW + 1).text())
    assert looking.news(["pod-w0"]).changed == {"pod-w0", "pod-w1"}
    path.unlink()
    assert looking.news(["pod-w0"]) == News()
    assert "No such file" in said[-1]


def test_a_changed_key_ends_the_command(member, tmp_path):
    path = tmp_path / "snapshot.json"
    path.write_text(document([POD]).text())
    view.refresh(member.settings(), source=str(path))
    path.write_text(document([POD], KEYS | {"tpu-1-w0": {"ssh-ed25519": key("evil")}}, NOW + 1).text())
    with pytest.raises(HostKeyAlarm):
        contact._Search(view.current(member.settings())).news(["pod-w0"])
