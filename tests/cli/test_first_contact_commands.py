"""`tpu_ops keys push` and `tpu_ops firewall`, against a real API process."""

from __future__ import annotations

import io
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.commands import failed
from tests.support.lab_api import PATIENCE
from tests.support.nodes import key
from tpu_ops.cloud import firewalls

BOB = f"bob:ssh-ed25519 {key('bob')} bob"
EXPIRING = f'cleo:ssh-rsa {key("cleo")} google-ssh {{"userName":"cleo","expireOn":"2030-01-01T00:00:00+0000"}}'
SECRET = "s3cr3t"
HOME = "203.0.113.7/32"


@pytest.fixture
def place(fleet, monkeypatch):
    """A fleet whose API serves Compute Engine as well."""
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", fleet.api.rest)
    yield fleet
    fleet.api.clear_faults()


@pytest.fixture
def line(place):
    """The line of the person's key in the metadata."""
    return f"ada:{' '.join(place.private_key.with_suffix('.pub').read_text().split()[:2])} ada"


@pytest.fixture
def terminal(monkeypatch):
    """Puts a person at a terminal who answers this."""

    def answer(text: str) -> None:
        stdin = io.StringIO(text)
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)

    return answer


def compute(place, path=""):
    status, found = place.api.call("GET", f"compute/v1/projects/{place.project}{path}")
    assert status == 200, found
    return found


def items(place):
    return compute(place)["commonInstanceMetadata"]["items"]


def test_a_key_is_added_to_a_node_and_all_else_stays(place, line, tpu_ops):
    kept = {"ssh-keys": f"{BOB}\n{EXPIRING}", "startup-script": SECRET}
    place.create("pod", metadata=kept)
    code, out, err = tpu_ops("keys", "push", "pod", "--dry-run")
    assert (code, line in out, SECRET in out + err, key("bob") in out + err) == (0, True, False, False)
    assert place.api.node("pod", place.location())["metadata"] == kept

    place.api.fault(method="UpdateNode", code="UNAVAILABLE", times=1, project=place.project)
    code, out, err = tpu_ops("keys", "push", "pod", "--json")
    assert (code, SECRET in out + err, json.loads(out)["outcome"]) == (0, False, "added")
    merged = kept | {"ssh-keys": f"{BOB}\n{EXPIRING}\n{line}"}
    assert place.api.node("pod", place.location())["metadata"] == merged

    assert json.loads(tpu_ops("keys", "push", "pod", "--json")[1])["outcome"] == "unchanged"
    assert place.api.node("pod", place.location())["metadata"] == merged


def test_a_key_is_added_to_a_project_and_nodes_that_ignore_it_are_named(place, line, tpu_ops):
    before = [{"key": "first", "value": SECRET}, {"key": "ssh-keys", "value": BOB}, {"key": "last", "value": ""}]
    fingerprint = compute(place)["commonInstanceMetadata"]["fingerprint"]
    path = f"compute/v1/projects/{place.project}/setCommonInstanceMetadata"
    assert place.api.call("POST", path, {"items": before, "fingerprint": fingerprint})[0] == 200
    place.create("deaf", metadata={"block-project-ssh-keys": "TRUE", "enable-oslogin": "TRUE"})
    place.create("open", metadata={"block-project-ssh-keys": "false"})

    code, out, err = tpu_ops("keys", "push", place.project, "--dry-run")
    assert (code, line in out, SECRET in out + err, items(place)) == (0, True, False, before)
    code, out, err = tpu_ops("keys", "push", place.project, "--json")
    said = json.loads(out)
    assert (code, said["outcome"], said["ignored_by"], SECRET in out + err) == (0, "added", ["deaf"], False)
    assert "deaf ignores the project's keys" in err
    assert "open" not in err
    assert items(place) == [before[0], {"key": "ssh-keys", "value": f"{BOB}\n{line}"}, before[2]]
    assert "there already" in tpu_ops("keys", "push", place.project)[1]
    assert "with enable-oslogin, workers ignore all keys" in tpu_ops("keys", "push", "deaf", "--dry-run")[2]


def test_a_target_that_is_not_in_the_fleet_is_refused(place, tpu_ops):
    failed(tpu_ops("keys", "push", place.second), 2, f"no node is called '{place.second}'")


def test_with_only_one_endpoint_the_real_service_is_not_asked(fleet, tpu_ops, monkeypatch):
    monkeypatch.delenv("TPU_OPS_REST_ENDPOINT", raising=False)
    failed(tpu_ops("firewall", "ssh", "--source", HOME, "--yes"), 2, "at:  environment variable TPU_OPS_REST_ENDPOINT")
    failed(tpu_ops("keys", "push", fleet.project), 2, "at:  environment variable TPU_OPS_REST_ENDPOINT")


def test_a_rule_is_made_once_and_lets_in_only_what_was_asked(place, tpu_ops):
    assert "the rule would be created" in tpu_ops("firewall", "ssh", "--source", HOME, "--dry-run")[1]
    failed(tpu_ops("firewall", "ssh", "--source", HOME), 2, "add --yes", printed=True)
    assert compute(place, "/global/firewalls")["items"] == []

    assert "was created" in tpu_ops("firewall", "ssh", "--source", HOME, "--yes")[1]
    rule = compute(place, "/global/firewalls/tpu-ops-ssh-default")
    assert (rule["allowed"], rule["sourceRanges"]) == ([{"IPProtocol": "tcp", "ports": ["22"]}], [HOME])
    assert (rule["direction"], "targetTags" in rule) == ("INGRESS", False)
    assert json.loads(tpu_ops("firewall", "ssh", "--source", HOME, "--json")[1])["outcome"] == "unchanged"

    assert tpu_ops("firewall", "mosh", "--source", HOME, "--yes")[0] == 0
    mosh = compute(place, "/global/firewalls/tpu-ops-mosh-default")
    assert mosh["allowed"] == [{"IPProtocol": "udp", "ports": ["60000-61000"]}]


def test_a_rule_that_differs_is_replaced_only_on_demand_and_then_wholly(place, tpu_ops):
    other = {
        "name": "tpu-ops-ssh-default",
        "network": f"projects/{place.project}/global/networks/default",
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
        "sourceRanges": ["10.0.0.0/8"],
        "sourceTags": ["web"],
        "description": "by hand",
    }
    path = f"compute/v1/projects/{place.project}/global/firewalls"
    assert place.api.call("POST", path, other)[0] == 200
    failed(
        tpu_ops("firewall", "ssh", "--source", HOME, "--yes"),
        2,
        f"sourceRanges: it has 10.0.0.0/8, you asked for {HOME}",
        "sourceTags: it has web, you asked for none",
        "--replace",
    )
    assert compute(place, "/global/firewalls/tpu-ops-ssh-default")["sourceRanges"] == ["10.0.0.0/8"]
    assert "was replaced" in tpu_ops("firewall", "ssh", "--source", HOME, "--yes", "--replace")[1]
    rule = compute(place, "/global/firewalls/tpu-ops-ssh-default")
    assert (rule["sourceRanges"], rule.get("sourceTags"), rule["description"]) == ([HOME], None, "by hand")


@pytest.mark.parametrize(("source", "code"), [(HOME, 0), ("10.0.0.0/8", 2)])
def test_a_rule_that_somebody_else_makes_at_the_same_time_is_compared(place, tpu_ops, source, code):
    rule = firewalls.rule("ssh", place.project, "default", [source])
    place.api.forget_requests()
    place.api.fault(method="compute.firewalls.insert", seconds=PATIENCE, times=1, project=place.project)

    def insert():
        deadline = time.monotonic() + PATIENCE
        while not place.api.requests(place.project).get("compute.firewalls.insert"):
            assert time.monotonic() < deadline
            time.sleep(0.02)  # polls until the command's request is there, which the fault holds back
        status, _ = place.api.call("POST", f"compute/v1/projects/{place.project}/global/firewalls", rule)
        place.api.clear_faults()
        return status

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(insert)
        result = tpu_ops("firewall", "ssh", "--source", HOME, "--yes")
        assert other.result() == 200
    assert result[0] == code
    assert ("exists already, with the same content" if code == 0 else "nothing was changed") in "".join(result[1:])
    assert compute(place, "/global/firewalls/tpu-ops-ssh-default")["sourceRanges"] == [source]


def test_all_addresses_are_let_in_only_if_typed_twice_at_a_terminal(place, tpu_ops, terminal):
    wide = ("firewall", "ssh", "--source", "0.0.0.0/0")
    failed(tpu_ops(*wide, "--yes"), 2, "has to be confirmed at a terminal, also with --yes", printed=True)
    for typed in ("y\n", "y\ny\n", "n\n0.0.0.0/0\n"):
        terminal(typed)
        code, _, err = tpu_ops(*wide)
        assert (code, "nothing was changed" in err) == (1, True)
    assert compute(place, "/global/firewalls")["items"] == []
    terminal("y\n0.0.0.0/0\n")
    code, _, err = tpu_ops(*wide)
    assert (code, "everybody on the internet" in err) == (0, True)
    assert compute(place, "/global/firewalls/tpu-ops-ssh-default")["sourceRanges"] == ["0.0.0.0/0"]


def test_an_unknown_network_is_named_with_the_option(place, tpu_ops):
    result = tpu_ops("firewall", "ssh", "--source", HOME, "--network", "nope", "--yes")
    failed(result, 3, "networks/nope' was not found", "with --network", printed=True)
