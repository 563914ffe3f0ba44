"""Settings of a fleet: accepted values, precedence, and the message of every fault."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpu_ops import config
from tpu_ops.ansible.playbook import project_of
from tpu_ops.errors import UsageError

MINIMAL = {"plugin": "tpu_vm", "projects": ["lab"], "user": "ada"}


def settings(file, environ, **options):
    return config.from_data({**MINIMAL, **options}, file, environ)


def test_defaults(file, environ):
    found = settings(file, environ)
    assert (found.projects, found.zones, found.endpoint) == (("lab",), (), "")
    assert (found.states, found.connect_with) == (("READY",), ("external", "internal"))
    assert found.private_key is None
    assert found.path == file.parent.parent
    assert found.state_dir.parent == Path(environ["TPU_OPS_STATE"]) / "fleets"
    assert found.state_dir.name.startswith("fleet-")


def test_settings_cannot_be_changed(file, environ):
    with pytest.raises(AttributeError, match="can't set attribute"):
        settings(file, environ).user = "eve"


def test_the_environment_wins_over_the_file(file, environ, tmp_path):
    key = tmp_path / "key"
    key.touch()
    environ |= {
        "TPU_OPS_PROJECT": "one,two",
        "TPU_OPS_ZONES": "us-west4-a, us-west4-b",
        "TPU_OPS_ENDPOINT": "127.0.0.1:18470",
        "TPU_OPS_USER": "grace",
        "TPU_OPS_PRIVATE_KEY": str(key),
    }
    found = settings(
        file, environ, zones=["us-central2-b"], endpoint="localhost:1", user="ada", private_key="/nowhere/key"
    )
    assert found.projects == ("one", "two")
    assert found.zones == ("us-west4-a", "us-west4-b")
    assert (found.endpoint, found.user, found.private_key) == ("127.0.0.1:18470", "grace", key)


def test_a_single_name_needs_no_list(file, environ):
    assert settings(file, environ, projects="lab", zones="us-central2-b").zones == ("us-central2-b",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"project": "lab"}, ["tpu_vm.yml", "'project'", "did you mean 'projects'"]),
        ({"zoness": []}, ["'zoness'", "'zones'"]),
        ({"colour": "blue"}, ["'colour'", "ansible-doc"]),
        ({7: "x"}, ["7"]),
        ({"snapshot": "api", "auth_kind": "serviceaccount"}, ["'auth_kind'", "credentials of this kind are not set"]),
        ({"projects": {"lab": 1}}, ["'projects'", "a list of strings", "dict"]),
        ({"projects": [7]}, ["'projects'", "a list of strings"]),
        ({"projects": ["lab\n"]}, ["'projects'", "project id"]),
        ({"projects": ["Lab!"]}, ["'projects'", "'Lab!'", "project id"]),
        ({"zones": ["us central"]}, ["'zones'", "'us central'", "a zone"]),
        ({"zones": True}, ["'zones'", "bool"]),
        ({"states": ["REDAY"]}, ["'states'", "did you mean 'READY'"]),
        ({"states": ["ready"]}, ["'states'", "did you mean 'READY'"]),
        ({"states": []}, ["'states'", "empty"]),
        ({"connect_with": ["wormhole"]}, ["'connect_with'", "external, internal"]),
        ({"request_timeout": "soon"}, ["'request_timeout'", "number of seconds", "'soon'"]),
        ({"request_timeout": 0}, ["'request_timeout'"]),
        ({"request_timeout": True}, ["'request_timeout'", "bool"]),
        ({"user": 7}, ["'user'", "a string", "int", "put it in quotes"]),
        ({"projects": "p1, p2"}, ["'projects'", "write it as a list: [p1, p2]"]),
        ({"projects": ["P"]}, ["'projects'", "'P' is not a project id (use a project id, as in my-project)"]),
        ({"private_key": "/"}, ["'private_key'", "is not a file", "name the key's own file"]),
        ({"user": "-oProxyCommand=x"}, ["'user'", "not a login name"]),
        ({"private_key": "nowhere"}, ["'private_key'", "nowhere", "ssh-keygen"]),
        ({"endpoint": "10.0.0.1:80"}, ["'endpoint'", "loopback"]),
        ({"endpoint": "tpu.example.com:443"}, ["'endpoint'", "loopback"]),
        ({"endpoint": "http://127.0.0.1:80"}, ["'endpoint'", "HOST:PORT"]),
        ({"endpoint": "127.0.0.1"}, ["'endpoint'", "HOST:PORT"]),
        ({"endpoint": "127.0.0.1:99999"}, ["'endpoint'", "HOST:PORT"]),
        ({"endpoint": "127.0.0.1:\u0661\u0662"}, ["'endpoint'", "HOST:PORT"]),
        ({"endpoint": "127.0.0.1:" + "9" * 5000}, ["'endpoint'", "HOST:PORT"]),
        ({"request_timeout": 16**9000}, ["'request_timeout'", "very large"]),
        ({"plugin": "gcp_compute"}, ["'plugin'", "plugin: tpu_vm"]),
        *(({key: "maybe"}, [repr(key), "true or false", "'maybe'"]) for key in config.PLUGIN_FLAGS),
    ],
)
def test_a_mistake_in_the_file_names_file_and_key(file, environ, options, words):
    with pytest.raises(UsageError) as caught:
        config.from_data({**MINIMAL, **options}, file, environ)
    text = str(caught.value)
    assert str(file) in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TPU_OPS_ENDPOINT", "192.168.1.1:80"),
        ("TPU_OPS_PROJECT", "no such name"),
        ("TPU_OPS_ZONES", "mars"),
        ("TPU_OPS_USER", "a b"),
        ("TPU_OPS_PRIVATE_KEY", "/nowhere/key"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(file, environ, name, value):
    with pytest.raises(UsageError, match=f"environment variable {name}"):
        settings(file, environ | {name: value})


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "127.8.8.8:18470", "localhost:18470", "[::1]:18470"])
def test_loopback_endpoints_are_taken(file, environ, endpoint):
    assert settings(file, environ, endpoint=endpoint).endpoint == endpoint


def test_keys_of_ansible_stand_in_the_same_file(file, environ):
    assert settings(file, environ, keyed_groups=[{"key": "tpu_zone"}], compose={}, strict=True, cache="{{ x }}")


def test_all_usual_keys_are_offered_and_the_first_is_used_for_new_nodes(file, environ):
    ssh = Path(environ["HOME"]) / ".ssh"
    ssh.mkdir(parents=True)
    there: list[Path] = []
    for name in reversed(config.PRIVATE_KEYS):
        (ssh / name).touch()
        there.insert(0, ssh / name)
        found = settings(file, environ)
        assert [found.private_key, *found.more_keys] == there
    assert settings(file, environ, private_key=str(there[-1])).more_keys == ()


def test_a_key_that_is_named_is_the_only_one_though_it_is_a_usual_one(file, environ):
    key = Path(environ["HOME"]) / ".ssh" / "id_ed25519"
    key.parent.mkdir(parents=True)
    key.touch()
    assert not settings(file, environ).only_key
    assert not settings(file, environ | {"TPU_OPS_PRIVATE_KEY": ""}).only_key
    assert settings(file, environ, private_key="~/.ssh/id_ed25519").only_key
    assert settings(file, environ | {"TPU_OPS_PRIVATE_KEY": str(key)}).only_key


def test_a_private_key_starts_at_home_or_at_the_file(file, environ):
    for path in (Path(environ["HOME"]) / "a", file.parent / "b"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert settings(file, environ, private_key="~/a").private_key == Path(environ["HOME"]) / "a"
    assert settings(file, environ, private_key="b").private_key == file.parent / "b"


def test_a_key_that_is_not_there_is_to_be_made_only_where_a_file_names_it(file, environ):
    for options, variables, fix in (
        ({"private_key": "my key"}, {}, f"ssh-keygen -t ed25519 -f '{file.parent}/my key'"),
        (
            {},
            {"TPU_OPS_PRIVATE_KEY": "/gone/ssh_key"},
            "unset the variable, or set the variable to a key that you have",
        ),
        (
            {},
            {"TPU_OPS_PRIVATE_KEY": "/gone/ssh_key", "TPU_OPS_ENDPOINT": "localhost:8470"},
            "this shell uses the API at localhost:8470 (TPU_OPS_ENDPOINT); if that API was taken down",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            settings(file, environ | variables, **options)
        assert fix in caught.value.fix
        assert ("ssh-keygen" in caught.value.fix) == bool(options)


def test_the_public_half_of_a_key_is_no_private_key(file, environ):
    file.parent.mkdir(parents=True)
    (file.parent / "id.pub").touch()
    with pytest.raises(UsageError, match=r"id\.pub is the public half") as caught:
        settings(file, environ, private_key="id.pub")
    assert caught.value.fix.endswith(str(file.parent / "id"))


def test_every_endpoint_and_every_file_has_a_state_of_its_own(file, environ):
    dirs = {
        settings(file, environ).state_dir,
        settings(file, environ, endpoint="127.0.0.1:1").state_dir,
        settings(file, environ, endpoint="127.0.0.1:2").state_dir,
        settings(file.with_name("other.tpu_vm.yml"), environ).state_dir,
    }
    assert len(dirs) == 4


@pytest.mark.parametrize(("variable", "key"), [("TPU_OPS_PROJECT", "projects"), ("TPU_OPS_ZONES", "zones")])
def test_projects_and_zones_of_the_environment_have_a_separate_state(file, environ, variable, key):
    """Commands in another shell must not suddenly reach workers of these projects."""
    form = "{}" if key == "projects" else "here-{}"

    def state(shell, **options):
        named = ",".join(form.format(letter) for letter in shell.split(",")) if shell else ""
        given = [form.format(letter) for letter in options.get("same", ())]
        return settings(file, environ | {variable: named}, **({key: given} if given else {})).state_dir

    assert len({state(""), state("a"), state("b"), state("a,b")}) == 4
    assert state("a,b") == state("b,a")
    for same in (["a"], "a"):
        assert state("a", same=same) == state("", same=same) == state("")
    assert state("b,a", same=["a", "b"]) == state("")


@pytest.mark.parametrize(
    ("shell", "login"),
    [
        ({}, False),
        ({"TPU_OPS_USER": ""}, False),
        ({"TPU_OPS_USER": "ada"}, False),
        ({"TPU_OPS_USER": "eve"}, True),
        ({"TPU_OPS_PROXY_JUMP": "gate"}, True),
        ({"TPU_OPS_PRIVATE_KEY": "~/key"}, True),
        # Nobody else has what is known there.
        ({"TPU_OPS_USER": "eve", "TPU_OPS_ENDPOINT": "127.0.0.1:1"}, False),
    ],
)
def test_a_login_that_only_a_shell_has_is_told_from_the_files(file, environ, shell, login):
    key = Path(environ["HOME"]) / "key"
    key.parent.mkdir(parents=True, exist_ok=True)
    key.touch()
    found = settings(file, environ | shell, user="ada")
    plain = settings(file, environ, user="ada")
    assert (bool(found.login), found.shared) == (login, plain if login else None)
    assert (plain.login, plain.shared) == ("", None)
    assert "TPU_OPS_ENDPOINT" in shell or found.state_dir == plain.state_dir


def test_somebody_without_a_home_is_told_so(file, environ, monkeypatch):
    def nobody(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(UsageError, match="there is no home directory"):
        settings(file, environ | {"HOME": ""})


def test_a_login_of_a_shell_does_not_need_what_the_file_says_of_it(file, environ):
    hers = file.parent / "hers"
    hers.parent.mkdir(parents=True)
    hers.touch()
    found = settings(file, environ | {"TPU_OPS_PRIVATE_KEY": str(hers)}, private_key="/nowhere/key")
    assert (found.private_key, bool(found.login), found.shared) == (hers, True, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plugin: tpu_vm\nprojects: [", ["not valid YAML", "line 2"]),
        ("- plugin", ["not a mapping"]),
        ("", ["not a mapping"]),
        (b"\xff\xfe\x00", ["not UTF-8"]),
        (None, ["cannot read", "No such file"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, words):
    file = tmp_path / "tpu_vm.yml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        config.load_file(file)
    assert [word for word in [str(file), *words] if word not in str(caught.value)] == []


def test_the_fleet_is_the_nearest_directory_upwards(tmp_path):
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/tpu_vm.yml").touch()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert config.find_file(None, {}, below) == tmp_path / config.FLEET_FILE
    other = tmp_path / "other" / "inventory"
    other.mkdir(parents=True)
    (other / "tpu_vm.yml").touch()
    assert config.find_file(None, {"TPU_OPS_FLEET": str(other.parent)}, below) == other / "tpu_vm.yml"
    assert config.find_file(str(tmp_path), {"TPU_OPS_FLEET": str(other.parent)}, below) == tmp_path / config.FLEET_FILE


@pytest.mark.parametrize(
    ("fleet", "environ", "words"),
    [
        (None, {}, ["no fleet", "--fleet"]),
        ("here", {}, ["--fleet", "inventory/tpu_vm.yml"]),
        (None, {"TPU_OPS_FLEET": "there"}, ["TPU_OPS_FLEET", "inventory/tpu_vm.yml"]),
    ],
)
def test_no_fleet_is_an_error_that_says_where_it_looked(tmp_path, fleet, environ, words):
    with pytest.raises(UsageError) as caught:
        config.find_file(fleet, environ, tmp_path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_commands_name_a_fleet_directory_only_if_they_have_to(tmp_path, monkeypatch, environ):
    folder = tmp_path / "a fleet"
    (folder / "inventory").mkdir(parents=True)
    (folder / "inventory" / "tpu_vm.yml").write_text("plugin: tpu_vm\nprojects: [lab]\nuser: ada\n")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert config.fleet_option(config.load("a fleet").file) == f"--fleet '{folder}'"
    assert config.fleet_option(folder / "inventory" / "tpu_vm.yml") == f"--fleet '{folder}'"
    monkeypatch.setenv("TPU_OPS_FLEET", str(folder))
    assert config.fleet_option(config.load().file) == ""
    monkeypatch.delenv("TPU_OPS_FLEET")
    monkeypatch.chdir(folder)
    assert config.fleet_option(config.load().file) == config.fleet_option(config.load(".").file) == ""


@pytest.mark.parametrize("place", ["our.tpu_vm.yml", "inventory/tpu_vm.yaml", "inventory/our.tpu_vm.yml"])
def test_a_file_of_another_name_is_a_fleet_of_its_own_wherever_it_is_named(tmp_path, monkeypatch, environ, place):
    file = tmp_path / "a fleet" / place
    file.parent.mkdir(parents=True)
    file.write_text("plugin: tpu_vm\nprojects: [lab]\nuser: ada\n")
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = config.load(f"a fleet/{place}")
    monkeypatch.setenv("TPU_OPS_FLEET", str(file))
    known, alone = config.load(), config.load_file(file)
    assert config.fleet_option(known.file) == ""
    assert known == found == alone
    assert (found.path, found.file) == (tmp_path / "a fleet", file)
    monkeypatch.delenv("TPU_OPS_FLEET")
    assert config.fleet_option(found.file) == f"--fleet '{file}'"
    assert project_of(found.path, found.file).inventory == file
    for fleet, start in ((None, file.parent), (str(tmp_path / "a fleet"), tmp_path), (str(file.parent), tmp_path)):
        with pytest.raises(UsageError) as caught:
            config.find_file(fleet, {}, start)
        assert str(file) in caught.value.fix


def test_from_a_directory_that_is_gone_a_fleet_can_be_named(tmp_path, monkeypatch, environ, file):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    file.parent.mkdir(parents=True)
    file.write_text("plugin: tpu_vm\nprojects: [lab]\nuser: ada\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert config.fleet_option(config.load(str(file)).file)
    with pytest.raises(UsageError, match="no fleet"):
        config.load()


def test_a_file_that_ansible_would_not_read_is_no_fleet(tmp_path):
    (tmp_path / "fleet.yml").write_text("plugin: tpu_vm\n")
    with pytest.raises(UsageError, match=r"tpu_vm\.yml or tpu_vm\.yaml"):
        config.find_file(str(tmp_path / "fleet.yml"), {}, tmp_path)


@pytest.fixture
def odd(tmp_path):
    """Paths that no file can be read by, or none that is UTF-8 can hold."""
    (tmp_path / "loop").symlink_to(tmp_path / "round")
    (tmp_path / "round").symlink_to(tmp_path / "loop")
    latin = tmp_path / os.fsdecode(b"fl\xe9")
    (latin / "inventory").mkdir(parents=True)
    (latin / "inventory" / "tpu_vm.yml").write_text("plugin: tpu_vm\nprojects: [lab]\nuser: ada\n")
    (tmp_path / "link").symlink_to(latin)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loop", ["leads back to itself"]),
        ("loop/below", ["leads back to itself"]),
        (os.fsdecode(b"fl\xe9"), ["not UTF-8", r"fl\udce9"]),
        ("link", ["not UTF-8", r"fl\udce9"]),
        ("~nobodyhere/x", ["no home directory"]),
    ],
)
@pytest.mark.parametrize("said", ["--fleet", "TPU_OPS_FLEET"])
def test_an_unusable_path_is_reported_with_its_place(odd, monkeypatch, name, words, said):
    monkeypatch.chdir(odd)
    with pytest.raises(UsageError) as caught:
        config.find_file(name if said == "--fleet" else None, {"TPU_OPS_FLEET": name}, odd)
    assert caught.value.where == said
    assert [word for word in words if word not in caught.value.what] == []


def test_a_fleet_and_a_state_whose_path_is_no_text_are_refused(odd, file, environ):
    latin = odd / os.fsdecode(b"fl\xe9")
    for read in (
        lambda: config.nearest_file(latin),
        lambda: config.load_file(latin / "inventory" / "tpu_vm.yml"),
        lambda: settings(file, environ | {"TPU_OPS_STATE": str(latin)}),
        lambda: settings(file, environ | {"TPU_OPS_STATE": "", "HOME": str(latin)}),
        lambda: settings(file, environ | {"TPU_OPS_STATE": "", "XDG_STATE_HOME": str(latin)}),
    ):
        with pytest.raises(UsageError, match="not UTF-8"):
            read()


@pytest.mark.parametrize("name", ["a${HOME}b", "a\nb", "\x1b[2J"])
def test_values_that_ssh_config_cannot_hold_are_refused(file, environ, tmp_path, name):
    odd = tmp_path / name
    (odd / ".ssh").mkdir(parents=True)
    (odd / ".ssh" / "id_rsa").touch()
    for options, variables, where in (
        ({}, {"TPU_OPS_STATE": str(odd)}, "the directory for state (TPU_OPS_STATE, else below HOME)"),
        ({}, {"TPU_OPS_STATE": "", "HOME": str(odd)}, "HOME"),
        ({}, {"HOME": str(odd)}, "HOME"),
        ({"private_key": str(odd / ".ssh" / "id_rsa")}, {}, f"{file}, key 'private_key'"),
    ):
        with pytest.raises(UsageError, match="ssh cannot use") as caught:
            settings(file, environ | variables, **options)
        assert caught.value.where == where
    state = settings(odd / "inventory" / "tpu_vm.yml", environ).state_dir.name
    assert (state.isprintable(), "${" in state) == (True, False)
    assert list(tmp_path.iterdir()) == [odd], "nothing is written"


def test_the_example_fleet_names_no_project_and_all_zones():
    example = Path(__file__).parents[2] / "inventory" / "tpu_vm.yml"
    for variables, projects in (({}, ()), ({"TPU_OPS_PROJECT": "lab"}, ("lab",))):
        found = config.from_data(config.read_file(example), example, {"HOME": "/", **variables})
        assert (found.projects, found.zones) == (projects, ())


def bomb() -> str:
    lines = ["plugin: tpu_vm", "projects: [lab]", "a: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)), "zones: *a11"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plugin: tpu_vm\nzones: " + "[" * 5000, "nested too deeply"),
        ("plugin: tpu_vm\nzones: 2026-99-99", "not valid YAML"),
        ("plugin: tpu_vm\nrequest_timeout: " + "9" * 5000, "not valid YAML"),
        ("zones: [a]\nnames: [b]\nzones: [c]", "the key 'zones' occurs twice, in lines 1 and 3"),
        ("labels: {team: a, tier: b, team: c}", "the key 'team' occurs twice, in lines 1 and 1"),
        ("names: [!!timestamp foo]", "does not fit the tag before it"),
        ("iap: !!bool foo", "does not fit the tag before it"),
        ("request_timeout: !!int ''", "does not fit the tag before it"),
        ("request_timeout: !!float ''", "does not fit the tag before it"),
        ("request_timeout: !!int foo", "not valid YAML"),
        ("names: !!python/name:os.system ''", "not valid YAML"),
        ("names: !!binary \u00e4", "not valid YAML"),
        ("? !!set [a]\n: b", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_taken_is_an_error_in_words(file, text, words):
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        config.read_file(file)
    assert caught.value.where.startswith(str(file))


def test_a_value_of_any_size_is_shown_shortly(file, environ):
    file.parent.mkdir(parents=True)
    file.write_text(bomb())
    zones = config.read_file(file)["zones"]
    for options in ({"zones": zones}, {"user": zones}, {"zones": ["x" * 10**6]}, {"k" * 10**6: 1}):
        with pytest.raises(UsageError) as caught:
            settings(file, environ, **options)
        assert len(str(caught.value)) < 600
