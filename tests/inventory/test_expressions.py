"""Names, choice and groups by the expressions of the fleet's file; text of the API in them stays text."""

from __future__ import annotations

import json

import pytest

from tests.support.inventory import HOSTILE, hosts, inventory, variables

#: An expression that would be run where text is evaluated a second time.
BARE = "lookup('pipe','id')"

PODS = [f"pod-w{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ["tpu_worker_count > 1"]}, PODS),
        ({"include": ["tpu_worker_count > 1", "tpu_node == 'solo'"]}, [*PODS, "solo-w0"]),
        ({"exclude": ["tpu_worker_count > 1"]}, ["other-w0", "solo-w0"]),
        ({"exclude": ["not tpu_is_first_worker", "'alias' in tpu_labels"]}, ["pod-w0"]),
        ({"include": ["tpu_is_first_worker"], "exclude": ["tpu_node in ['pod', 'solo']"]}, ["other-w0"]),
        # One expression may stand without a list, with a comma in it.
        ({"include": "tpu_node in ['other', 'solo']"}, ["other-w0", "solo-w0"]),
        ({"include": ["ansible_user == 'ada'"], "exclude": []}, ["other-w0", *PODS, "solo-w0"]),
        ({"hostvars_prefix": "x_", "include": ["x_worker_index == 2"]}, ["pod-w2"]),
    ],
)
def test_include_and_exclude_choose_hosts(named, options, expected):
    named.write(**options)
    assert hosts(inventory(named)) == expected


def test_the_commands_know_what_the_inventory_leaves_out(named):
    from tpu_ops.fleet import view

    named.write(exclude=["true"])
    assert hosts(inventory(named)) == []
    assert len(view.current(named.settings()).workers) == 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hostnames": ["tpu_labels.alias"]}, ["blue", "green", *PODS]),
        ({"hostnames": ["{{ tpu_labels.alias }}.example.org", "tpu_host"]}, ["blue.example.org", "green.example.org"]),
        ({"hostnames": ["tpu_labels.nothing", "tpu_labels.alias ~ tpu_worker_index"]}, ["blue0", "green0"]),
        ({"hostnames": "tpu_zone ~ '.' ~ tpu_host"}, [f"us-central2-b.{host}" for host in ("other-w0", *PODS)]),
        ({"hostnames": ["tpu_external_ip"]}, []),
        ({"hostnames": ["7 if tpu_node == 'solo' else ''"]}, ["7", "other-w0"]),
    ],
)
def test_hostnames_are_tried_in_order(named, options, expected):
    named.write(**options)
    found = inventory(named)
    assert set(expected) <= set(hosts(found))
    assert sorted(variables(found, host)["tpu_host"] for host in hosts(found)) == ["other-w0", *PODS, "solo-w0"]
    if options["hostnames"] == ["tpu_external_ip"]:
        assert all(host == variables(found, host)["ansible_host"] for host in hosts(found))
    assert len(found.groups["node_pod"].get_hosts()) == 4


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("'a b'", "'a b' is not valid as a host's name"),
        ("'-x'", "'-x' is not valid"),
        ("'a,b'", "'a,b' is not valid"),
        ("'pod[0:3]'", "'pod[0:3]' is not valid"),
        ("'x' * 200 ~ ' '", "xxx...' is not valid"),
        ("'localhost'", "'localhost' has a special meaning for Ansible"),
        ("'all'", "'all' has a special meaning for Ansible"),
        ("'node_solo'", "'node_solo' is a group"),
        ("tpu_labels", "a value of type"),
        ("tpu_is_first_worker", "a value of type bool is not a name"),
        ("1 / 0", "division by zero"),
        ("tpu_node ~", "unexpected"),
    ],
)
def test_an_invalid_host_name_is_skipped_with_one_warning(named, said, entry, reason):
    named.write(hostnames=[entry])
    assert hosts(inventory(named)) == ["other-w0", *PODS, "solo-w0"]
    text = said()
    assert reason in text
    assert "skipped for 5 other workers" in text
    assert text.count("WARNING") == 1


def test_a_label_takes_over_no_host_of_another_source(named, said):
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader

    other = named.path / "inventory" / "others.yml"
    other.write_text("all: {hosts: {blue: {ansible_host: 10.9.9.9}, other-w0: {mine: true}}}")
    named.write(
        hostnames=["tpu_labels.alias", "tpu_host"], exclude=["tpu_labels.alias == 'green'", "tpu_node == 'pod'"]
    )
    found = InventoryManager(loader=DataLoader(), sources=[str(other), str(named.file)])
    assert hosts(found) == ["blue", "other-w0", "solo-w0"]
    assert variables(found, "blue")["ansible_host"] == "10.9.9.9"
    assert "'blue' is a host of another inventory source (worker solo-w0)" in said()
    # What another source says of a worker by its own name holds for it.
    named.write(hostnames=["tpu_host"], include=["tpu_node == 'other'"])
    found = InventoryManager(loader=DataLoader(), sources=[str(other), str(named.file)])
    assert (variables(found, "other-w0")["mine"], variables(found, "other-w0")["tpu_node"]) == (True, "other")
    assert "another source" not in said()


def test_two_hosts_of_one_name_are_an_error_that_names_both_and_the_key(named, said):
    from ansible.errors import AnsibleError

    named.write(hostnames=["tpu_node"])
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(named)
    text = said()
    assert "tpu_vm.yml, key 'hostnames': workers pod-w0 and pod-w1 would both be called 'pod'" in text


def test_a_group_that_is_made_of_the_text_of_a_hosts_name_is_warned_of(named, said):
    named.write(
        hostnames=["tpu_labels.alias", "tpu_host"],
        keyed_groups=[{"key": "tpu_labels.alias", "prefix": "", "separator": ""}],
    )
    found = inventory(named)
    assert {"blue", "green"} <= set(hosts(found)) & set(found.groups)
    text = said()
    assert all(f"Found both group and host with same name: {name}" in text for name in ("blue", "green"))


def test_a_name_that_another_host_has_by_itself_is_an_error_too(named, said):
    from ansible.errors import AnsibleError

    named.write(hostnames=["'solo-w0' if tpu_node == 'other' else ''"])
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(named)
    assert "workers other-w0 and solo-w0 would both be called 'solo-w0'" in said()


@pytest.mark.parametrize("key", ["include", "exclude", "hostnames", "compose", "groups", "keyed_groups"])
@pytest.mark.parametrize("strict", [True, False])
def test_strict_decides_about_expressions_that_fail(named, said, key, strict):
    from ansible.errors import AnsibleError

    wrong = "tpu_node | no_such_filter"
    values = {"compose": {"x": wrong}, "groups": {"x": wrong}, "keyed_groups": [{"key": wrong}]}
    named.write(strict=strict, **{key: values.get(key, [wrong])})
    if strict or key in ("include", "exclude"):
        with pytest.raises(AnsibleError, match="Completely failed"):
            inventory(named)
        text = said()
        assert "other-w0" in text
        assert f"tpu_vm.yml, key '{key}'" in text
    else:
        assert hosts(inventory(named)) == ["other-w0", *PODS, "solo-w0"]
        assert ("no_such_filter" in said()) == (key == "hostnames")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclude": "tpu_nope"}, ["key 'exclude'", "'tpu_nope' fails for every worker", "'tpu_nope' is undefined"]),
        ({"include": "tpu_labels.nope == 'x'"}, ["key 'include'", "fails for every worker"]),
        ({"include": "tpu_zone =="}, ["key 'include'", "'tpu_zone ==' is not an expression"]),
        ({"exclude": ["false", "a b"]}, ["key 'exclude'", "'a b' is not an expression"]),
        ({"groups": {"x": "nope +"}}, ["key 'groups', 'x'", "'nope +' is not an expression"]),
        ({"compose": {"x": "{{ tpu_zone }}"}}, ["key 'compose', 'x'", "is not an expression", "without braces"]),
        ({"keyed_groups": [{"key": "(" * 9}]}, ["key 'keyed_groups', entry 1", "is not an expression"]),
        ({"keyed_groups": [{"prefix": "a"}]}, ["key 'keyed_groups', entry 1", "no 'key'"]),
        (
            {"keyed_groups": [{"key": "tpu_zone", "prefix": "a", "separator": "", "parent_group": "aus-central2-b"}]},
            ["tpu_vm.yml, key 'keyed_groups'", "itself", "correct it"],
        ),
        ({"cache": True, "cache_plugin": "jsonfile"}, ["tpu_vm.yml, key 'cache_plugin'", "leave both keys out"]),
        ({"cache": True, "cache_plugin": "nope"}, ["tpu_vm.yml, key 'cache_plugin'", "leave both keys out"]),
        ({"cache_timeout": "x"}, ["tpu_vm.yml", "cache_timeout"]),
    ],
)
def test_a_fault_in_an_ansible_only_option_names_file_and_key(named, said, options, words):
    from ansible.errors import AnsibleError

    named.write(**options)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(named)
    text = said()
    assert [word for word in words if word not in text] == []


def test_a_choice_that_fails_for_some_workers_only_is_a_warning(named, said):
    named.write(include=["tpu_labels.alias == 'blue'", "tpu_node == 'pod'"], exclude=["tpu_labels.alias == 'x'"])
    assert hosts(inventory(named)) == [*PODS, "solo-w0"]
    assert said().count("key 'exclude'") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"keyed_groups": [{"key": "'pod' if tpu_node == 'solo' else 'x'", "prefix": "node"}]},
            ["key 'keyed_groups'", "'node_pod'", "built-in group", "solo-w0"],
        ),
        ({"groups": {"state_ready": "tpu_node == 'solo'"}}, ["key 'groups'", "'state_ready'", "other-w0"]),
        ({"groups": {"node_pod": "tpu_node == 'solo'"}}, ["key 'groups'", "'node_pod'", "solo-w0"]),
        (
            {"keyed_groups": [{"key": "tpu_state", "prefix": "x", "parent_group": "node_pod"}]},
            ["key 'keyed_groups'", "'node_pod'", "other-w0"],
        ),
    ],
)
def test_a_group_of_the_file_never_merges_into_a_built_in_one(named, said, options, words):
    from ansible.errors import AnsibleError

    named.write(**options)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(named)
    text = said()
    assert [word for word in ["tpu_vm.yml", *words] if word not in text] == []


def test_a_group_of_the_file_may_be_a_built_in_one_or_lie_below_it(named, said):
    keyed = [
        {"key": "tpu_node", "prefix": "node"},
        {"key": "tpu_labels.alias", "prefix": "alias", "parent_group": "state_ready"},
    ]
    named.write(keyed_groups=keyed)
    found = inventory(named)
    assert (len(found.groups["node_pod"].get_hosts()), len(found.groups["state_ready"].get_hosts())) == (4, 6)
    assert "alias_blue" in found.groups
    assert said() == ""


def test_an_undefined_variable_is_a_failure_of_a_choice_but_not_of_a_name(named, said):
    from ansible.errors import AnsibleError

    named.write(strict=True, hostnames=["tpu_labels.alias"])
    assert "blue" in hosts(inventory(named))
    named.write(strict=True, include=["tpu_labels.alias == 'blue'"])
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(named)
    named.write(include=["tpu_labels.alias == 'blue'"])
    said()
    assert hosts(inventory(named)) == ["solo-w0"]
    assert "'alias'" in said()


def test_variables_of_the_command_line_are_seen_on_request(named):
    named.write(use_extra_vars=True, include=["tpu_node == wanted"], hostnames=["'my-' ~ wanted"])
    done = named.ansible("ansible", "all", "--list-hosts", "-e", "wanted=solo")
    assert done.stdout.split() == ["hosts", "(1):", "my-solo"], done.stderr


@pytest.fixture
def named(fleet):
    """A pod and two single hosts that have aliases."""
    fleet.create("pod", "v4-32")
    fleet.create("solo", "v4-8", labels={"alias": "blue"})
    fleet.create("other", "v4-8", labels={"alias": "green"})
    return fleet


@pytest.fixture
def hostile(fleet):
    """A node whose labels would be run if they were taken for templates, and whose options use them everywhere."""
    labels = {"evil": HOSTILE, "team": HOSTILE, "note": "#jinja2:variable_start_string:'('", "bare": BARE}
    fleet.create("pod", "v4-8", labels=labels)
    fleet.write(
        keyed_groups=[{"key": "tpu_labels.team", "prefix": "team"}, {"key": "tpu_labels", "prefix": ""}],
        compose={"owner": "tpu_labels.evil", "said": "'by ' ~ tpu_labels.evil"},
        groups={"odd": "tpu_labels.evil is search('uid')"},
        hostnames=["tpu_labels.evil", "{{ tpu_labels.evil }}", "tpu_host"],
        include=["tpu_labels.evil is search('lookup')"],
        exclude=["tpu_labels.evil is search('uid')"],
        strict=True,
    )
    return fleet


def test_text_of_the_api_is_data_in_every_expression(hostile, said):
    found = inventory(hostile)
    assert hosts(found) == ["pod-w0"]
    pod = variables(found, "pod-w0")
    assert pod["tpu_labels"]["evil"] == pod["owner"] == HOSTILE
    assert pod["said"] == f"by {HOSTILE}"
    assert "odd" not in found.groups
    assert all(name.isidentifier() for name in found.groups)
    assert not any("uid=" in name or "uid_" in name for name in found.groups)
    assert f'"{HOSTILE}" is not valid as a host' in said()


def test_text_of_the_api_is_data_in_a_task_and_a_listing(hostile):
    done = hostile.ansible(
        "ansible",
        "pod-w0",
        "-m",
        "ansible.builtin.debug",
        "-a",
        "msg={{ tpu_labels.evil ~ '|' ~ owner ~ '|' ~ tpu_labels.note }}",
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )
    assert done.returncode == 0, done.stderr
    assert f"{HOSTILE}|{HOSTILE}|#jinja2" in done.stdout
    assert "uid=" not in done.stdout
    listing = json.loads(hostile.ansible("ansible-inventory", "--list").stdout)
    assert listing["_meta"]["hostvars"]["pod-w0"]["tpu_labels"]["evil"] == {"__ansible_unsafe": HOSTILE}


@pytest.mark.parametrize("text", [BARE, "tpu_zone | upper", "x['y']", "range(3)", "1 > 0"])
def test_text_of_the_api_is_data_even_where_a_task_evaluates_twice(fleet, text):
    from ansible.template import is_trusted_as_template

    fleet.create("pod", "v4-8", labels={"bare": text, "tame": "vision-2"}, description=text)
    pod = variables(inventory(fleet), "pod-w0")
    assert not is_trusted_as_template(pod["tpu_labels"]["bare"])
    assert is_trusted_as_template(pod["tpu_labels"]["tame"])


def test_ansible_refuses_to_evaluate_such_text(hostile):
    from ansible.errors import AnsibleError
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    # As the argument of a task does that is a template itself: `var: "{{ tpu_labels.bare }}"`.
    templar = Templar(loader=DataLoader(), variables=variables(inventory(hostile), "pod-w0"))
    found = templar.template(trust_as_template("{{ tpu_labels.bare }}"))
    assert found == BARE
    with pytest.raises(AnsibleError, match="untrusted template or expression"):
        templar.evaluate_expression(found)


def test_a_text_equal_to_a_variables_name_is_evaluated_by_debug_var(fleet):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    fleet.create("pod", "v4-8", labels={"v": "tpu_zone"})
    templar = Templar(loader=DataLoader(), variables=variables(inventory(fleet), "pod-w0"))
    once = templar.template(trust_as_template("{{ tpu_labels.v }}"))
    assert (once, templar.evaluate_expression(once)) == ("tpu_zone", "us-central2-b")


def test_keyed_groups_groups_and_compose_use_the_variables(mixed):
    mixed.write(
        projects=[mixed.project, mixed.second],
        keyed_groups=[{"key": "tpu_labels.team | default('none')", "prefix": "team"}],
        groups={"first_workers": "tpu_is_first_worker"},
        compose={"rank": "tpu_worker_index + 100", "owner": "tpu_labels.team | default('nobody')"},
        strict=True,
    )
    found = inventory(mixed)
    assert len(found.groups["team_vision"].get_hosts()) == 4
    assert len(found.groups["team_none"].get_hosts()) == 3
    assert len(found.groups["first_workers"].get_hosts()) == 4
    assert (variables(found, "pod-w3")["rank"], variables(found, "pod-w3")["owner"]) == (103, "vision")
