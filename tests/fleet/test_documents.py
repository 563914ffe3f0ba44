"""Published snapshots: the document, what is refused in one."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as few
from hypothesis import strategies as st

from tests.support.drawn import text
from tests.support.nodes import key
from tests.support.published import NOW, POD, SOLO, document
from tpu_ops.cloud.node import FORMS, Node
from tpu_ops.errors import CloudError, OpsError
from tpu_ops.fleet import view
from tpu_ops.fleet.publishing import documents


def parsed(value):
    return documents.parse(json.dumps(value).encode(), "here", NOW)


def test_a_snapshot_holds_no_secret_of_a_node():
    """The API's metadata may contain secrets: only the names of its keys are kept."""
    assert json.loads(document().text())["nodes"][0]["metadata_keys"] == ["ssh-keys"]
    assert {*Node._fields} == FORMS.keys(), "say so in docs/members.md, too"


def test_a_published_document_is_parsed_back_unchanged():
    found = documents.parse(document().text().encode(), "here", NOW)
    assert found == document()
    assert document().text().encode().startswith(documents.BEGINNING)


def test_only_the_keys_of_its_own_workers_are_published():
    assert set(document(nodes=[SOLO]).host_keys) == {"tpu-2-w0"}


def test_a_key_that_a_newer_program_added_is_passed_over():
    value = json.loads(document().text())
    value["nodes"][0]["novelty"] = {"x": 1}
    value["more"] = True
    assert parsed(value) == document()


def test_a_view_that_readers_would_reject_is_not_published():
    assert documents.publishable(document(), NOW) == document().text()
    with pytest.raises(
        CloudError, match=r"cannot be published: two nodes have the same id: \S+/nodes/pod and \S+/nodes/twin"
    ):
        documents.publishable(document([POD, POD._replace(name="twin")]), NOW)


HOSTILE = "x\nHost *\n  ProxyCommand sh -c id"

#: Where in the document (`{}` is the first node) something stands that does not belong there, and words of the refusal.
WRONG = [
    (("format",), "snapshot", "format"),
    (("version",), 2, "version"),
    (("asked_at",), None, "asked_at"),
    (("asked_at",), True, "asked_at"),
    (("asked_at",), float("nan"), "asked_at"),
    (("asked_at",), float("inf"), "asked_at"),
    *((("asked_at",), value, "asked_at is not a time") for value in (10**400, -(10**400), -1e300, -1e18, 0)),
    (("asked_at",), NOW + documents.AHEAD + 60, "ahead of this machine's clock"),
    (("scope",), None, "scope"),
    (("scope", "projects"), "lab", "scope"),
    (("scope", "zones"), [HOSTILE], "scope"),
    (("nodes",), {}, "nodes"),
    (("nodes", 0), [], "node 0"),
    (("nodes", 0, "name"), HOSTILE, "node 0"),
    (("nodes", 0, "name"), "pod\n", "node 0"),
    (("nodes", 0, "name"), "-oProxyCommand=id", "node 0"),
    (("nodes", 0, "name"), "../../x", "node 0"),
    (("nodes", 0, "name"), "a" * 101, "node 0"),
    (("nodes", 0, "zone"), HOSTILE, "node 0"),
    (("nodes", 0, "zone"), "*", "node 0"),
    (("nodes", 0, "project"), HOSTILE, "node 0"),
    (("nodes", 0, "project"), "a b", "node 0"),
    (("nodes", 0, "node_id"), "1 *", "node_id"),
    (("nodes", 0, "node_id"), "\u0661", "node_id"),
    (("nodes", 0, "node_id"), 1, "node_id"),
    (("nodes", 0, "accelerator_type"), "v4-16\x1b[2J", "accelerator_type"),
    (("nodes", 0, "runtime_version"), HOSTILE, "runtime_version"),
    (("nodes", 0, "runtime_version"), "x" * 300, "runtime_version"),
    (("nodes", 0, "state"), "ready", "state"),
    (("nodes", 0, "state"), HOSTILE, "state"),
    (("nodes", 0, "health"), 1, "health"),
    (("nodes", 0, "health_description"), "x" * 70000, "health_description"),
    (("nodes", 0, "health_description"), "\ud800", "health_description"),
    (("nodes", 0, "internal_ips"), "10.0.0.1", "internal_ips"),
    (("nodes", 0, "internal_ips"), ["10.0.0.1\n  ProxyCommand id", ""], "internal_ips"),
    (("nodes", 0, "external_ips"), ["fe80::1%\n  ProxyCommand id", ""], "external_ips"),
    (("nodes", 0, "external_ips"), ["evil.example.com", ""], "external_ips"),
    (("nodes", 0, "external_ips"), ["34.0.1.1 ", ""], "external_ips"),
    (("nodes", 0, "external_ips"), ["0034.0.1.1", ""], "external_ips"),
    (("nodes", 0, "external_ips"), [1, ""], "external_ips"),
    (("nodes", 0, "external_ips"), ["34.0.1.1"], "addresses differs from its number of workers"),
    (("nodes", 0, "instance_names"), ["a", "b", "c"], "addresses differs from its number of workers"),
    (("nodes", 0, "instance_names"), ["a; id", ""], "instance_names"),
    (("nodes", 0, "instance_names"), [HOSTILE, ""], "instance_names"),
    (("nodes", 0, "chips"), -1, "chips"),
    (("nodes", 0, "chips"), True, "chips"),
    (("nodes", 0, "chips_per_worker"), "4", "chips_per_worker"),
    (("nodes", 0, "topology"), ["2x2"], "topology"),
    (("nodes", 0, "labels"), ["team"], "labels"),
    (("nodes", 0, "labels"), {"team": 1}, "labels"),
    (("nodes", 0, "symptoms"), [{"details": "x"}], "symptoms"),
    (("nodes", 0, "data_disks"), [{"source": "x", "mode": "y", "key": "z"}], "data_disks"),
    (("nodes", 0, "queued_resource"), HOSTILE, "queued_resource"),
    (("trusted_first",), "tpu-1-w0", "trusted_first"),
    (("trusted_first",), ["pod-w0"], "trusted_first"),
    (("unlisted",), [["lab"]], "unlisted"),
    (("unlisted",), [["lab", HOSTILE]], "unlisted"),
    (("nodes", 0, "spot"), 1, "spot"),
    (("nodes", 0, "service_account"), HOSTILE, "service_account"),
    (("nodes", 0, "create_time"), HOSTILE, "create_time"),
    (("nodes", 0, "metadata_keys"), [HOSTILE], "metadata_keys"),
    (("nodes", 1, "node_id"), "1", "two nodes have the same id"),
    (("host_keys",), [], "host_keys"),
    (("host_keys", "*"), {"ssh-ed25519": key("a")}, "not a worker's"),
    (("host_keys", "@cert-authority *"), {"ssh-ed25519": key("a")}, "not a worker's"),
    (("host_keys", "tpu-1-w0\n*"), {"ssh-ed25519": key("a")}, "not a worker's"),
    (("host_keys", "tpu-1-w0"), {}, "tpu-1-w0"),
    (("host_keys", "tpu-1-w0"), {"ssh-ed25519": "not base64"}, "not a host key"),
    (("host_keys", "tpu-1-w0"), {"ssh-ed25519": key("a") + "\n* ssh-rsa x"}, "not a host key"),
    (("host_keys", "tpu-1-w0"), {"ssh-rsa": key("a")}, "not a host key"),
    (("host_keys", "tpu-1-w0"), {"ssh-ed25519\n*": key("a")}, "not a host key"),
    (("host_keys", "tpu-1-w0"), {"ssh-ed25519": None}, "not a host key"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_a_malformed_document_is_refused_as_a_whole(path, value, words):
    changed = json.loads(document().text())
    *parents, last = path
    place = changed
    for step in parents:
        place = place[step]
    place[last] = value
    with pytest.raises(CloudError) as caught:
        parsed(changed)
    assert words in caught.value.what
    assert caught.value.where == "here"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"asked_at": ' + b"9" * 10_000 + b"}", b"<html></html>"],
)
def test_data_that_is_not_a_snapshot_is_refused(data):
    with pytest.raises(CloudError, match="not a snapshot"):
        documents.parse(data, "here", NOW)


@pytest.mark.parametrize("name", ["name", "project", "zone", "node_id", "accelerator_type"])
def test_a_node_without_a_key_that_it_must_have_is_refused(name):
    value = json.loads(document().text())
    del value["nodes"][0][name]
    with pytest.raises(CloudError):
        parsed(value)


def test_two_nodes_of_one_name_are_refused():
    value = json.loads(document().text())
    value["nodes"].append(value["nodes"][0] | {"node_id": "3"})
    with pytest.raises(CloudError, match="the same name"):
        parsed(value)


#: All that may stand in a fleet's ssh config and known_hosts, line by line.
CONFIG_LINE = re.compile(
    r"# Written by tpu_ops.*||Host [a-z0-9.:_-]+( [a-z0-9.:_-]+)?"
    r"|Match originalhost [a-z0-9.:_,-]+( !exec \"test -O \S+ \|\| mkdir -p -m 700 \S+ && test -O \S+\")?"
    r"|    (HostName [0-9a-fA-F.:]+|HostName [a-z0-9.:_-]+\.has-no-address\.invalid|HostKeyAlias tpu-[0-9]*-w[0-9]+"
    r"|User ada|IdentityFile \S+|ForwardAgent no|UserKnownHostsFile \S+|StrictHostKeyChecking yes"
    r"|ControlMaster auto|ControlPath \S+|ControlPersist 10m|ServerAlive\w+ \d+|ConnectTimeout 10|KexAlgorithms \S+)"
)
KNOWN_LINE = re.compile(r"tpu-[0-9]+-w[0-9]+ [a-z0-9@.-]+ [A-Za-z0-9+/=]+")

LEAVES = [
    (*path, index)
    for path in [("nodes", 0), ("nodes", 0, "labels"), ("nodes", 0, "symptoms", 0), ("scope",), ("host_keys",)]
    for index in (
        ["name", "zone", "project", "node_id", "runtime_version", "labels", "internal_ips", "external_ips", "state"]
        if path == ("nodes", 0)
        else ["details", "worker_id", "projects", "team", "tpu-1-w0"]
    )
]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | text(20) | st.sampled_from([HOSTILE, "10.0.0.9", "READY", "pod"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(10), inner, max_size=2),
    max_leaves=4,
)


@few(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(LEAVES), value=ANY)
def test_whatever_a_document_holds_only_hosts_and_keys_are_written(member, path, value):
    changed = json.loads(document(asked_at=time.time()).text())
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    source = member.home / "hostile.json"
    source.write_text(json.dumps(changed))
    settings = member.settings()._replace(state_dir=member.home / "fuzz")
    for old in ("snapshot.json", "known_hosts"):
        (settings.state_dir / old).unlink(missing_ok=True)
    try:
        fleet, _ = view.refresh(settings, source=str(source))
    except OpsError:
        return
    assert [line for line in fleet.ssh_config.read_text().splitlines() if not CONFIG_LINE.fullmatch(line)] == []
    assert [line for line in fleet.known_hosts.read_text().splitlines() if not KNOWN_LINE.fullmatch(line)] == []
