"""The cache of the plugin, and the snapshot of the commands."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import FleetDir
from tests.support.inventory import hosts, inventory
from tests.support.nodes import node
from tests.support.published import KEYS, POD, document
from tpu_ops.cloud.client import connect
from tpu_ops.fleet import origin, selection, view
from tpu_ops.fleet.publishing import documents
from tpu_ops.fleet.state import Files


class Cached:
    """A fleet with the node ``pod``, whose inventory is cached in files; the API has a node ``new`` besides.

    The node in the cached answer is called ``cached`` and that in the snapshot ``known``, so that a test sees which
    one was used.
    """

    def __init__(self, fleet: FleetDir, **options: Any) -> None:
        self.fleet = fleet
        self.directory = fleet.path / "cache"
        self.options = {
            "cache": True,
            "cache_plugin": "jsonfile",
            "cache_connection": str(self.directory),
            "cache_timeout": 600,
            **options,
        }
        fleet.create("pod", "v4-8")
        fleet.write(**self.options)
        assert self.hosts() == ["pod-w0"]
        self.snapshot = Files(fleet.settings().state_dir).snapshot
        fleet.create("new", "v4-8")
        self.age(10, 20)

    @property
    def file(self) -> Path:
        """The file of the cached answer."""
        (found,) = self.directory.iterdir()
        return found

    def hosts(self, *, cache: bool = True) -> list[str]:
        """Return the hosts that the inventory has now."""
        return hosts(inventory(self.fleet, cache=cache))

    def age(self, cached: float | None, known: float | None) -> None:
        """Set the age in seconds of the cached answer and of the snapshot; None removes one."""
        if cached is None:
            self.file.unlink()
        else:
            content = json.loads(self.file.read_text())
            answer = json.loads(content["__payload__"])
            answer["asked_at"] = time.time() - cached
            answer["nodes"][0]["name"] = "cached"
            self.file.write_text(json.dumps({"__payload__": json.dumps(answer)}))
            os.utime(self.file, (answer["asked_at"],) * 2)
        if known is None:
            self.snapshot.unlink()
        else:
            content = json.loads(self.snapshot.read_text())
            content["asked_at"] = time.time() - known
            content["nodes"][0]["name"] = "known"
            self.snapshot.write_text(json.dumps(content))


#: A cached answer whose only node has the right keys and one wrong type.
WRONG_TYPE = (
    '{"version": 2, "asked_at": 1, "nodes": [{"name": "a", "project": "p", "zone": "z", "node_id": "1", '
    '"accelerator_type": "v4-8", "internal_ips": null}]}'
)

CACHED, KNOWN, ASKED = ["cached-w0"], ["known-w0"], ["new-w0", "pod-w0"]


@pytest.fixture
def cached(fleet):
    return Cached(fleet)


@pytest.mark.parametrize(
    ("cached_age", "known_age", "found"),
    [
        (10, 20, CACHED),
        (20, 10, KNOWN),
        (10, None, CACHED),
        (None, 10, KNOWN),
        (10, 700, CACHED),
        # The cache has expired.
        (700, 10, KNOWN),
        (700, 700, ASKED),
        (None, 700, ASKED),
        (700, None, ASKED),
        (None, None, ASKED),
        # The clock was set back after the API was asked.
        (-100, None, ASKED),
        (None, -100, ASKED),
        (-100, -100, ASKED),
        (10, -100, CACHED),
        (-100, 10, KNOWN),
    ],
)
def test_the_newest_answer_that_is_young_enough_is_used(cached, cached_age, known_age, found):
    cached.age(cached_age, known_age)
    assert cached.hosts() == found


def test_without_a_cache_the_api_is_asked_whatever_is_known(cached):
    cached.fleet.write()
    assert cached.hosts() == ASKED


def test_without_a_time_out_no_answer_is_too_old(fleet):
    cached = Cached(fleet, cache_timeout=0)
    cached.age(10_000_000, 20_000_000)
    assert cached.hosts() == CACHED
    cached.age(None, 10_000_000)
    assert cached.hosts() == KNOWN


def test_the_snapshot_is_enough_of_a_cache(fleet):
    fleet.create("pod", "v4-8")
    fleet.write(cache=True)
    assert hosts(inventory(fleet)) == ["pod-w0"]
    fleet.create("new", "v4-8")
    fleet.api.forget_requests()
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert fleet.api.requests(fleet.project) == {}


def test_the_age_of_an_answer_counts_from_publication_not_from_caching(fleet):
    published = fleet.path / "published.json"

    def publish(name: str, age: float) -> None:
        of = node(name, project=fleet.project, count=1)
        asked_at = time.time() - age
        published.write_text(documents.document(asked_at, (fleet.project,), (), (of,), KEYS).text())

    options = {"cache": True, "cache_plugin": "jsonfile", "cache_connection": str(fleet.path / "cache")}
    fleet.write(**options, cache_timeout=600, snapshot=str(published))
    publish("before", 7200)
    assert hosts(inventory(fleet)) == ["before-w0"]
    publish("after", 60)
    assert hosts(inventory(fleet)) == ["after-w0"]
    publish("later", 0)
    assert hosts(inventory(fleet)) == ["after-w0"]


def test_a_refresh_by_the_command_is_news_for_the_inventory(cached):
    view.refresh(cached.fleet.settings())
    cached.fleet.api.forget_requests()
    assert cached.hosts() == ASKED
    assert cached.fleet.api.requests(cached.fleet.project) == {}


@pytest.mark.parametrize(("cached_age", "known_age"), [(100, None), (300, 100)])
def test_an_answer_does_not_renew_its_own_age(cached, cached_age, known_age):
    cached.age(cached_age, known_age)
    age = cached.file.stat().st_mtime
    cached.hosts()
    assert cached.file.stat().st_mtime == age


def test_refresh_inventory_and_flush_cache_ask_the_api_and_rewrite_the_cache(cached):
    found = inventory(cached.fleet)
    assert hosts(found) == CACHED
    found.refresh_inventory()
    assert hosts(found) == ASKED
    assert cached.hosts() == ASKED
    cached.fleet.act("delete", "new")
    assert cached.hosts(cache=False) == ["pod-w0"]
    assert cached.hosts() == ["pod-w0"]


@pytest.mark.parametrize(
    "options",
    [
        {"zones": ["us-central2-b"]},
        {"projects": ["{project}", "{second}"]},
        {"endpoint": "localhost:{port}"},
        {"snapshot": ""},
    ],
    ids=["zones", "projects", "endpoint", "same"],
)
def test_an_answer_to_another_question_is_not_used(cached, options):
    fleet = cached.fleet
    words = {"project": fleet.project, "second": fleet.second, "port": fleet.api.grpc.rpartition(":")[2]}
    options = {
        key: value.format(**words) if isinstance(value, str) else [text.format(**words) for text in value]
        for key, value in options.items()
    }
    fleet.write(**cached.options, **options)
    assert cached.hosts() == (ASKED if any(options.values()) else CACHED)


@pytest.mark.parametrize(("key", "found"), [("second.json", ASKED), ("first.json", CACHED)])
def test_a_cached_answer_is_used_only_with_the_same_credentials(fleet, monkeypatch, key, found):
    """The service itself is asked with credentials; the lab's API, which needs none, plays it."""
    monkeypatch.setattr(origin, "connect", lambda endpoint, timeout, auth: connect(fleet.api.grpc, timeout))
    cached = Cached(fleet, endpoint="", auth_kind="serviceaccount", service_account_file="first.json")
    fleet.write(**cached.options | {"service_account_file": key})
    assert cached.hosts() == found


def test_published_snapshots_and_api_answers_are_cached_apart(cached, tmp_path):
    published = tmp_path / "published.json"
    published.write_text(document([POD], asked_at=time.time()).text())
    cached.fleet.write(**cached.options, projects=["lab"], snapshot=str(published))
    assert cached.hosts() == ["pod-w0", "pod-w1"]
    cached.fleet.write(**cached.options)
    assert cached.hosts() == CACHED


def test_filters_are_applied_to_what_is_remembered(cached):
    cached.fleet.write(**cached.options, names=["nothing"])
    assert cached.hosts() == []
    cached.fleet.write(**cached.options, names=["cached"])
    assert cached.hosts() == CACHED


@pytest.mark.parametrize(("cached_age", "known_age"), [(10, None), (None, 10)])
def test_each_use_of_an_incomplete_answer_warns_of_the_missing_project(fleet, said, cached_age, known_age):
    from ansible.errors import AnsibleError
    from ansible.utils.display import Display

    cached = Cached(fleet, projects=[fleet.project, "nobodys"])
    said()
    cached.age(cached_age, known_age)
    for _ in range(2):
        Display()._warns.clear()
        assert cached.hosts() == (CACHED if cached_age else KNOWN)
        assert said().count("project nobodys: not listed: ") == 1
    fleet.write(**cached.options, strict_permissions=True)
    with pytest.raises(AnsibleError, match="Completely failed"):
        cached.hosts()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[1, 2]",
        '{"version": 2}',
        '{"version": 2, "asked_at": "today", "nodes": []}',
        '{"version": 2, "asked_at": NaN, "nodes": []}',
        '{"version": 2, "asked_at": 1, "nodes": [{"evil": 1}]}',
        '{"version": 2, "asked_at": 1, "warnings": 5, "nodes": []}',
        WRONG_TYPE,
        '{"version": 1, "asked_at": 1, "nodes": []}',
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_damaged_cache_is_survived(cached, text, wrapped):
    cached.age(0, None)
    text = text.replace('"asked_at": 1,', f'"asked_at": {time.time() - 1},')
    cached.file.write_text(json.dumps({"__payload__": text}) if wrapped else text)
    assert cached.hosts() == ASKED
    cached.age(0, None)
    assert cached.hosts()[0] == "cached-w0"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("external_ips", ["-oProxyCommand=touch /tmp/x;"]),
        ("internal_ips", ["evil.example.com"]),
        ("name", "-oProxyCommand=id"),
    ],
)
def test_a_cached_answer_with_values_unsafe_for_ssh_is_ignored(cached, field, value):
    content = json.loads(cached.file.read_text())
    answer = json.loads(content["__payload__"])
    answer["nodes"][0][field] = value
    cached.file.write_text(json.dumps({"__payload__": json.dumps(answer)}))
    cached.snapshot.unlink()
    assert cached.hosts() == ASKED


def test_a_node_whose_host_keys_were_lost_is_asked_for_again(cached):
    known_hosts = cached.fleet.settings().state_dir / "known_hosts"
    known_hosts.write_text("")
    assert cached.hosts() == ASKED
    assert known_hosts.read_text() != ""


def test_without_learn_host_keys_an_answer_without_keys_is_used(fleet):
    cached = Cached(fleet, learn_host_keys=False)
    assert cached.hosts() in (CACHED, KNOWN)


def test_instance_names_for_iap_are_requested_for_known_nodes(cached):
    cached.fleet.write(**cached.options, iap=True)
    assert cached.hosts() == ASKED
    cached.fleet.api.forget_requests()
    assert cached.hosts() == ASKED
    assert cached.fleet.api.requests(cached.fleet.project) == {}


def test_the_directory_of_the_control_sockets_is_made_again(cached):
    mux = selection.mux_dir()
    mux.rmdir()
    cached.age(10, None)
    assert cached.hosts() == CACHED
    assert mux.is_dir()
