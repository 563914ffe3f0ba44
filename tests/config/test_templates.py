"""Values of the fleet's file may be templates, evaluated by Ansible; nothing else ever is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpu_ops import config
from tpu_ops.config.templates import evaluated
from tpu_ops.errors import UsageError

ENV = "{{ lookup('env', 'FLEET_TEST') }}"


@pytest.fixture(autouse=True)
def _variable(monkeypatch):
    monkeypatch.setenv("FLEET_TEST", "grant")


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"projects": [ENV]}, "projects", ("grant",)),
        ({"projects": ENV}, "projects", ("grant",)),
        ({"projects": ["{{ lookup('ansible.builtin.env', 'FLEET_TEST') }}"]}, "projects", ("grant",)),
        ({"projects": ["first", f"{ENV}-2", "last"]}, "projects", ("first", "grant-2", "last")),
        ({"projects": "{{ ['a', lookup('env', 'FLEET_TEST')] }}"}, "projects", ("a", "grant")),
        ({"zones": "{{ 'us-west4-a,us-west4-b' | split(',') }}"}, "zones", ("us-west4-a", "us-west4-b")),
        ({"zones": "{{ lookup('env', 'FLEET_TEST_NOTHING') }}"}, "zones", ()),
        ({"user": "{% if true %}grace{% endif %}"}, "user", "grace"),
        ({"request_timeout": "{{ 7 }}"}, "request_timeout", 7.0),
        ({"iap": "{{ 'yes' | bool }}"}, "iap", True),
        ({"snapshot": "gs://{{ lookup('env', 'FLEET_TEST') }}/fleet.json"}, "snapshot", "gs://grant/fleet.json"),
        ({"user": "{{ none }}", "proxy_jump": "{{ none }}"}, "proxy_jump", ""),
    ],
)
def test_a_template_is_evaluated(read, options, name, value):
    found = getattr(read(**options), name)
    assert (found, type(found)) == (value, type(value))
    if isinstance(found, tuple):
        assert {type(entry) for entry in found} <= {str}


def test_templates_in_lists_and_mappings_are_evaluated(read):
    labels = {"team": ENV, "tier": ["fixed", "{{ 'spot' | upper }}"], "any": None, "both": "{{ ['x', 'y'] }}"}
    found = dict(read(labels=labels).filters.labels)
    assert found == {"team": ("grant",), "tier": ("fixed", "SPOT"), "any": (), "both": ("x", "y")}


def test_names_of_labels_are_no_templates(read):
    assert read(labels={"{{ 7 }}": "x"}).filters.labels == (("{{ 7 }}", ("x",)),)


def test_braces_that_a_label_has_are_written_as_text_in_a_template(read):
    assert read(labels={"evil": "{{ '{{ 7 * 7 }}' }}"}).filters.labels == (("evil", ("{{ 7 * 7 }}",)),)


def test_the_result_of_a_lookup_is_not_evaluated_again(read, monkeypatch):
    monkeypatch.setenv("FLEET_TEST", "{{ 7 * 7 }}")
    assert read(labels={"a": ENV, "b": "{{ [lookup('env', 'FLEET_TEST')] }}"}).filters.labels == (
        ("a", ("{{ 7 * 7 }}",)),
        ("b", ("{{ 7 * 7 }}",)),
    )


def test_the_environment_is_no_template(read):
    with pytest.raises(UsageError, match="environment variable TPU_OPS_USER"):
        read({"TPU_OPS_USER": ENV})


def test_a_lookup_of_a_file_starts_at_the_fleets_file(read, file):
    file.parent.mkdir(parents=True)
    (file.parent / "team.txt").write_text("vision\n")
    assert read(labels={"team": "{{ lookup('file', 'team.txt') }}"}).filters.labels == (("team", ("vision",)),)


@pytest.mark.parametrize("key", ["compose", "groups", "keyed_groups", "hostnames", "hostvars_prefix", "include"])
def test_keys_of_the_plugin_are_left_to_it(file, key):
    data = {key: ["{{ undefined_name }}"]}
    assert evaluated(data, config.OWN_KEYS, file) == data


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zones": "{{ nope }}"}, ["'zones'", "'nope' is undefined", "lookup('env', 'NAME')"]),
        ({"zones": ["us-west4-a", "{{ nope.nope }}"]}, ["'zones'", "undefined"]),
        ({"labels": {"team": ["{{ nope }}"]}}, ["'labels'", "undefined"]),
        ({"projects": ["{{ 1 +"]}, ["'projects'", "Syntax error"]),
        ({"projects": ["{% if %}"]}, ["'projects'", "Syntax error"]),
        ({"user": "{{ 'x' | no_such_filter }}"}, ["'user'", "no_such_filter"]),
        ({"user": "{{ lookup('no_such_lookup') }}"}, ["'user'", "no_such_lookup"]),
        ({"user": "{{ lookup('file', '/nowhere/at/all') }}"}, ["'user'", "/nowhere/at/all"]),
        ({"user": "{{ omit }}"}, ["'user'"]),
        ({"user": "{{ 7 }}"}, ["'user'", "a string", "int"]),
        ({"zones": "{{ {'a': 1} }}"}, ["'zones'", "a list of strings"]),
        ({"zones": ["{{ ['us-west4-a'] }}"]}, ["'zones'", "a list of strings"]),
        ({"projects": ["{{ 'No Project' }}"]}, ["'projects'", "'No Project'", "project id"]),
        ({"endpoint": "{{ '10.0.0.1:80' }}"}, ["'endpoint'", "loopback"]),
    ],
)
def test_a_template_that_fails_or_gives_the_wrong_thing_names_file_and_key(read, file, options, words):
    with pytest.raises(UsageError) as caught:
        read(**options)
    text = str(caught.value)
    assert str(file) in text
    assert [word for word in words if word not in text] == []


def test_a_secret_that_a_template_gives_is_not_shown(read, monkeypatch):
    monkeypatch.setenv("FLEET_TEST", "ya29.the-secret")
    assert read(auth_kind="accesstoken", access_token=ENV).auth.access_token == "ya29.the-secret"
    for template in ("{{ [lookup('env', 'FLEET_TEST')] }}", "{{ lookup('env', 'FLEET_TEST') | from_json }}"):
        with pytest.raises(UsageError, match="'access_token'") as caught:
            read(auth_kind="accesstoken", access_token=template)
        assert "ya29" not in str(caught.value)


def test_without_templates_ansible_is_not_imported():
    text = "plugin: tpu_vm\nprojects: [lab]\nuser: ada\ncompose: {a: '{{ b }}'}\n"
    program = (
        "import sys, pathlib, yaml; from tpu_ops import config; "
        "config.from_data(yaml.safe_load(sys.argv[1]), pathlib.Path('/x/tpu_vm.yml'), {'HOME': '/'}); "
        "sys.exit('ansible' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, text], check=False).returncode == 0


def test_full_names_of_plugins_are_found_outside_of_ansible_too():
    program = (
        "import pathlib; from tpu_ops.config.templates import evaluated; "
        "import sys; print(evaluated({'user': sys.argv[1]}, ('user',), pathlib.Path('/x')))"
    )
    command = [sys.executable, "-c", program, "{{ lookup('ansible.builtin.env', 'FLEET_TEST') }}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{'user': 'grant'}\n", "")


def bomb(key: str) -> str:
    """YAML of a few hundred bytes that stands for ten thousand million texts, some of them templates."""
    lines = ["a: &a0 ['{{ 7 }}', x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 11)]
    return "\n".join([*lines, f"{key}: *a10"])


@pytest.mark.parametrize("key", ["zones", "labels", "user", "access_token", "service_account_contents", "proxy_jump"])
@pytest.mark.parametrize("text", ["bomb", "KEY: &a [*a]", "KEY: &a {x: *a}", "KEY: {x: &a [*a]}", "KEY: &a {x: [*a]}"])
def test_yaml_that_stands_for_more_than_it_is_ends_soon_in_an_error(read, file, key, text):
    file.parent.mkdir(parents=True)
    file.write_text(bomb(key) if text == "bomb" else text.replace("KEY", key))
    with pytest.raises(UsageError, match=f"'{key}'") as caught:
        read(**{key: config.read_file(Path(file))[key]})
    assert len(str(caught.value)) < 600
