"""Filters, credentials, ways to workers: the values of each key, and the message of every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpu_ops.cloud.auth import Auth
from tpu_ops.config import Filters
from tpu_ops.errors import UsageError

#: What no error and no printed form may show.
SECRET = "ya29.the-secret"


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({}, Filters()),
        ({"names": "pod*"}, Filters(names=("pod*",))),
        ({"names": ["pod", "pod", "pod.us-*"]}, Filters(names=("pod", "pod.us-*"))),
        ({"accelerator_types": ["v4-*", "v5litepod-1"]}, Filters(accelerator_types=("v4-*", "v5litepod-1"))),
        ({"labels": {"team": "vision"}}, Filters(labels=(("team", ("vision",)),))),
        ({"labels": {"team": ["vision", "speech"]}}, Filters(labels=(("team", ("vision", "speech")),))),
        ({"labels": {"team": None, "slot": 7}}, Filters(labels=(("team", ()), ("slot", ("7",))))),
        ({"labels": {}, "names": [], "accelerator_types": None}, Filters()),
    ],
)
def test_filters(read, options, filters):
    assert read(**options).filters == filters


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        (Filters(), True),
        (Filters(names=("pod",)), True),
        (Filters(names=("po",)), False),
        (Filters(names=("x", "p?d")), True),
        (Filters(names=("pod.us-*",)), True),
        (Filters(names=("POD",)), False),
        (Filters(accelerator_types=("v4-*",)), True),
        (Filters(accelerator_types=("v5*",)), False),
        (Filters(labels=(("team", ()),)), True),
        (Filters(labels=(("team", ("speech", "vision")),)), True),
        (Filters(labels=(("team", ("speech",)),)), False),
        (Filters(labels=(("team", ("vis*",)),)), False),
        (Filters(labels=(("team", ()), ("owner", ()))), False),
        (Filters(names=("pod",), accelerator_types=("v5*",)), False),
        (Filters(labels=(("raw", ("{{ 7 }}",)),)), True),
    ],
)
def test_a_node_belongs_to_the_fleet_where_every_filter_lets_it_pass(filters, passes):
    labels = {"team": "vision", "raw": "{{ 7 }}"}
    assert filters.match("pod", "pod.us-central2-b", "v4-32", labels) is passes


def test_flags_and_ways(read):
    usual = read()
    assert (usual.strict_permissions, usual.iap, usual.forward_agent, usual.learn_host_keys) == (False,) * 3 + (True,)
    assert (usual.proxy_jump, usual.snapshot, usual.auth) == ("", "", Auth())
    other = read(strict_permissions=True, iap=True, forward_agent=True, learn_host_keys=False)
    assert (other.strict_permissions, other.iap, other.forward_agent, other.learn_host_keys) == (True,) * 3 + (False,)


@pytest.mark.parametrize(
    "jump", ["pod-w0", "pod.us-central2-b-w0", "ada@bastion.example.org:2222", "10.0.0.1", "[fd20::1]:22", "ada@[::1]"]
)
def test_hosts_to_jump_through(read, jump):
    assert read(proxy_jump=jump).proxy_jump == jump


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": 7}, ["'names'", "a list of strings", "int"]),
        ({"names": ["a b"]}, ["'names'", "'a b'", "pattern of node names"]),
        ({"names": [""]}, ["'names'", "pattern of node names"]),
        ({"accelerator_types": {"v4": 1}}, ["'accelerator_types'", "dict"]),
        ({"accelerator_types": ["v4 -8"]}, ["'accelerator_types'", "pattern of accelerator types"]),
        ({"accelerator_type": "v4-8"}, ["did you mean 'accelerator_types'"]),
        ({"labels": ["team"]}, ["'labels'", "a mapping of labels", "list"]),
        ({"labels": {7: "x"}}, ["'labels'", "a mapping of labels"]),
        ({"labels": {"team": True}}, ["'labels', label 'team'", "found True", "quotes"]),
        ({"labels": {"team": [["x"]]}}, ["label 'team'", "list of strings"]),
        ({"labels": {"team": 1.5}}, ["label 'team'", "1.5"]),
        ({"labels": {"team": 16**9000}}, ["label 'team'", "very large"]),
        ({"label": {"team": "x"}}, ["did you mean 'labels'"]),
        ({"strict_permissions": "yes"}, ["'strict_permissions'", "true or false", "'yes'"]),
        ({"strict_permission": True}, ["did you mean 'strict_permissions'"]),
        ({"iap": 1}, ["'iap'", "true or false", "int"]),
        ({"forward_agent": "no"}, ["'forward_agent'", "true or false"]),
        ({"learn_host_keys": []}, ["'learn_host_keys'", "true or false"]),
        ({"learn_hostkeys": True}, ["did you mean 'learn_host_keys'"]),
        ({"snapshot": ["gs://x"]}, ["'snapshot'", "a string", "list"]),
        ({"proxy_jump": 7}, ["'proxy_jump'", "a string"]),
        ({"proxy_jump": "-oProxyCommand=id"}, ["'proxy_jump'", "jump through"]),
        ({"proxy_jump": "a b"}, ["'proxy_jump'", "jump through"]),
        ({"proxy_jump": "a,b"}, ["'proxy_jump'", "jump through"]),
        ({"proxy_jump": "host:99999"}, ["'proxy_jump'", "jump through"]),
        ({"proxy_jump": "host:0"}, ["'proxy_jump'", "jump through"]),
        ({"proxy_jump": "host\n"}, ["'proxy_jump'", "jump through"]),
        ({"proxyjump": "host"}, ["did you mean 'proxy_jump'"]),
        ({"proxy_jump": "host", "iap": True}, ["'proxy_jump'", "exclude each other"]),
        ({"auth_kind": "service_account"}, ["'auth_kind'", "did you mean 'serviceaccount'"]),
        ({"auth_kind": "machineaccount"}, ["'auth_kind'", "use one of application, serviceaccount, accesstoken"]),
        ({"auth_kind": ["application"]}, ["'auth_kind'", "a string"]),
        ({"auth_kind": "serviceaccount"}, ["'auth_kind'", "not set", "GCP_SERVICE_ACCOUNT_FILE"]),
        ({"auth_kind": "accesstoken"}, ["'auth_kind'", "not set", "GCP_ACCESS_TOKEN"]),
        (
            {"service_account_file": "key.json"},
            ["'service_account_file'", "auth_kind is application", "serviceaccount"],
        ),
        ({"service_account_file": 7}, ["'service_account_file'", "a string"]),
        ({"service_acount_file": "x"}, ["did you mean 'service_account_file'"]),
        ({"keyed_groups": {"key": "tpu_zone"}}, ["'keyed_groups'", "a list"]),
        ({"keyed_groups": ["tpu_zone"]}, ["'keyed_groups', entry 1", "a mapping", "'tpu_zone'"]),
        ({"keyed_groups": [{"key": "a"}, {"prefix": "a"}]}, ["'keyed_groups', entry 2", "no 'key'"]),
        ({"keyed_groups": [{"key": "a", "prefx": "a"}]}, ["'keyed_groups', entry 1", "did you mean 'prefix'"]),
        ({"keyed_groups": [{"key": 5}]}, ["entry 1, 'key'", "a string", "quotes"]),
        ({"keyed_groups": [{"key": "a", "trailing_separator": "no"}]}, ["'trailing_separator'", "true or false"]),
        ({"groups": ["x"]}, ["'groups'", "a mapping of groups"]),
        ({"groups": {"x": 5}}, ["'groups', 'x'", "an expression", "quotes"]),
        ({"compose": ["a"]}, ["'compose'", "a mapping of variables"]),
        ({"compose": {"x": 5}}, ["'compose', 'x'", "an expression", "quotes"]),
        ({"compose": {"a b": "1"}}, ["'compose', 'a b'", "not valid"]),
    ],
)
def test_a_mistake_names_file_and_key(read, file, options, words):
    with pytest.raises(UsageError) as caught:
        read(**options)
    text = str(caught.value)
    assert str(file) in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"TPU_OPS_PROXY_JUMP": "a b"}, {}, ["environment variable TPU_OPS_PROXY_JUMP"]),
        ({"TPU_OPS_PROXY_JUMP": "host"}, {"iap": True}, ["environment variable TPU_OPS_PROXY_JUMP", "exclude"]),
        ({"GCP_AUTH_KIND": "token"}, {}, ["environment variable GCP_AUTH_KIND", "use one of"]),
        ({"GCP_AUTH_KIND": "accesstoken"}, {}, ["environment variable GCP_AUTH_KIND", "GCP_ACCESS_TOKEN"]),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(read, variables, options, words):
    with pytest.raises(UsageError) as caught:
        read(variables, **options)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_environment_wins_over_the_file(read):
    found = read(
        {"TPU_OPS_PROXY_JUMP": "other", "TPU_OPS_SNAPSHOT": "gs://grant/fleet.json"},
        proxy_jump="host",
        snapshot="/nowhere",
    )
    assert (found.proxy_jump, found.snapshot) == ("other", "gs://grant/fleet.json")


def test_empty_variables_say_nothing(read):
    found = read({"TPU_OPS_PROXY_JUMP": "", "GCP_AUTH_KIND": "", "GCP_ACCESS_TOKEN": ""}, proxy_jump="host")
    assert (found.proxy_jump, found.auth) == ("host", Auth())


def test_a_snapshot_fleet_needs_no_project_and_no_credentials(read):
    assert read(projects=None).projects == ()
    found = read(projects=[], snapshot="fleet.json", auth_kind="serviceaccount")
    assert (found.projects, found.snapshot, found.auth.kind) == ((), "fleet.json", "serviceaccount")


def test_an_endpoint_needs_no_credentials(read):
    assert read({"TPU_OPS_ENDPOINT": "127.0.0.1:1"}, auth_kind="accesstoken").auth == Auth("accesstoken")


HERE, CWD, HOME = "the file's directory", "the working directory", "the home"


@pytest.fixture
def places(file, environ, tmp_path, monkeypatch):
    """Where relative paths may begin."""
    monkeypatch.chdir(tmp_path)
    return {HERE: file.parent, CWD: tmp_path, HOME: Path(environ["HOME"]), "": Path("/")}


@pytest.mark.parametrize(
    ("variables", "options", "auth"),
    [
        ({}, {"auth_kind": "application"}, Auth()),
        ({}, {"auth_kind": "serviceaccount", "service_account_file": "k.json"}, (HERE, "k.json")),
        ({}, {"auth_kind": "serviceaccount", "service_account_file": "~/k.json"}, (HOME, "k.json")),
        ({}, {"auth_kind": "serviceaccount", "service_account_file": "/etc/k.json"}, ("", "/etc/k.json")),
        ({"GCP_SERVICE_ACCOUNT_FILE": "k.json", "GCP_AUTH_KIND": "serviceaccount"}, {}, (CWD, "k.json")),
        (
            {"GCP_SERVICE_ACCOUNT_FILE": "env.json"},
            {"auth_kind": "serviceaccount", "service_account_file": "k.json"},
            (CWD, "env.json"),
        ),
        (
            {"GCP_SERVICE_ACCOUNT_FILE": "env.json"},
            {"auth_kind": "serviceaccount", "service_account_contents": "{}"},
            (CWD, "env.json"),
        ),
        (
            {"GCP_SERVICE_ACCOUNT_CONTENTS": '{"a": 1}'},
            {"auth_kind": "serviceaccount", "service_account_file": "k.json"},
            Auth("serviceaccount", None, '{"a": 1}'),
        ),
        (
            {},
            {"auth_kind": "serviceaccount", "service_account_contents": {"type": "service_account"}},
            Auth("serviceaccount", None, '{"type": "service_account"}'),
        ),
        ({}, {"auth_kind": "accesstoken", "access_token": SECRET}, Auth("accesstoken", None, "", SECRET)),
        (
            {"GCP_ACCESS_TOKEN": "new"},
            {"auth_kind": "accesstoken", "access_token": SECRET},
            Auth("accesstoken", None, "", "new"),
        ),
        (
            {"GCP_ACCESS_TOKEN": SECRET, "GCP_SERVICE_ACCOUNT_FILE": "/k"},
            {},
            Auth("application", Path("/k"), "", SECRET),
        ),
        (
            {"GCP_AUTH_KIND": "application"},
            {"auth_kind": "accesstoken", "access_token": SECRET},
            Auth("application", None, "", SECRET),
        ),
    ],
)
def test_credentials(read, places, variables, options, auth):
    expected = auth if isinstance(auth, Auth) else Auth("serviceaccount", places[auth[0]] / auth[1])
    assert read(variables, **options).auth == expected


def test_a_key_in_the_file_and_as_text_is_one_too_many(read):
    with pytest.raises(UsageError, match="exclude each other"):
        read(auth_kind="serviceaccount", service_account_file="k.json", service_account_contents="{}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("access_token", [SECRET]),
        ("access_token", {"token": SECRET}),
        ("access_token", SECRET),
        ("service_account_contents", [SECRET]),
        ("service_account_contents", {"private_key": [SECRET]}),
        ("service_account_contents", {SECRET: {}}),
        ("service_account_contents", {"private_key": SECRET}),
        ("service_account_contents", json.dumps({"private_key": SECRET})),
    ],
)
def test_no_error_shows_a_secret(read, key, value):
    with pytest.raises(UsageError) as caught:
        read(**{key: value})
    assert f"'{key}'" in str(caught.value)
    assert SECRET not in repr(caught.value) + str(caught.value)


def test_settings_are_printed_without_secrets(read):
    found = [
        read(auth_kind="accesstoken", access_token=SECRET),
        read(auth_kind="serviceaccount", service_account_contents={"private_key": SECRET}),
    ]
    assert SECRET not in repr(found) + str(found)
    assert "accesstoken" in repr(found)
