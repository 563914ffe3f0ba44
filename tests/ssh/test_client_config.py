"""The texts of ssh_config and known_hosts, and what OpenSSH itself makes of them."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from tests.support.nodes import key, node
from tpu_ops.cloud.node import workers_of
from tpu_ops.errors import OpsError
from tpu_ops.ssh import client_config, known_hosts, ways
from tpu_ops.ssh.ways import Way

MUX = Path("/run/user/7/tpu_ops/mux")


OPTIONS = client_config.common_options(Path("/state dir/known_hosts"))


def config_of(workers, private_key=Path("/home/ada/.ssh/id"), mux=MUX, **options):
    found = [
        (worker, Way(ways.address(worker, ("external", "internal")), control=ways.control_path(mux, worker)))
        for worker in workers
    ]
    return client_config.ssh_config(found, user="ada", private_key=private_key, options=OPTIONS, mux=mux, **options)


def test_ssh_config_text():
    workers = workers_of([node(), node("solo", node_id="2", count=1, external_ips=("",), internal_ips=("",))])
    assert config_of(workers) == (Path(__file__).parent / "ssh_config.golden").read_text()


def test_ssh_understands_the_config(tmp_path):
    path = tmp_path / "ssh_config"
    path.write_text(config_of(workers_of([node()]), mux=tmp_path))
    seen = subprocess.run(["ssh", "-F", path, "-G", "pod-w1"], capture_output=True, text=True, check=True).stdout
    for line in (
        "hostname 34.0.1.1",
        "user ada",
        "hostkeyalias tpu-1-w1",
        'userknownhostsfile "/state dir/known_hosts"',
        "stricthostkeychecking true",
        "identityfile /home/ada/.ssh/id",
    ):
        assert line in seen.splitlines() or line.replace('"', "") in seen.splitlines(), line


def test_the_only_worker_of_a_node_has_its_name_too_unless_another_worker_is_called_so(tmp_path):
    path = tmp_path / "ssh_config"
    nodes = [node(), node("solo", node_id="2", count=1), node("pod-w1", node_id="3", count=1)]
    path.write_text(config_of(workers_of(nodes), mux=tmp_path))

    def seen(name):
        command = ["ssh", "-F", path, "-G", name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line for line in lines if not line.startswith(("host ", "originalhost"))]

    assert "hostkeyalias tpu-2-w0" in seen("solo")
    assert seen("solo") == seen("solo-w0")
    assert "hostkeyalias tpu-1-w1" in seen("pod-w1")


@pytest.mark.parametrize("forward", [False, True])
def test_the_agent_is_forwarded_only_when_that_is_said(tmp_path, forward):
    path = tmp_path / "ssh_config"
    path.write_text(config_of(workers_of([node()]), mux=tmp_path, forward_agent=forward))
    seen = subprocess.run(["ssh", "-F", path, "-G", "pod-w1"], capture_output=True, text=True, check=True).stdout
    assert f"forwardagent {'yes' if forward else 'no'}" in seen.splitlines()


def test_connections_are_shared_only_where_their_directory_can_be_had(tmp_path):
    """The directory vanishes with the last session or a reboot; ssh recreates it or does not share."""
    mux, path = tmp_path / "run time" / "mux", tmp_path / "ssh_config"
    path.write_text(config_of(workers_of([node()]), mux=mux))

    def control_path(host: str) -> str:
        command = ["ssh", "-F", path, "-G", host]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return next((line for line in seen.splitlines() if line.startswith("controlpath")), "controlpath none")

    (tmp_path / "run time").write_text("no directory")
    assert control_path("pod-w1") == "controlpath none"
    (tmp_path / "run time").unlink()
    assert control_path("another") == "controlpath none"
    assert not mux.exists()
    assert control_path("pod-w1").startswith(f"controlpath {mux}/")
    assert mux.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        os.chown(mux, 1234, 1234)
        assert control_path("pod-w0") == "controlpath none"


def test_ansible_gets_the_same_options_as_ssh(tmp_path):
    """What `ssh -G` makes of the config and of the arguments for Ansible is the same."""
    worker = workers_of([node()])[1]
    path, private_key = tmp_path / "ssh_config", tmp_path / "id"
    private_key.touch()
    path.write_text(config_of([worker], private_key, tmp_path))

    def effective(arguments: str) -> set[str]:
        argv = ["sh", "-c", f"ssh {arguments}"]
        lines = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines())
        return {line for line in lines if not line.startswith("host ")}

    by_config = effective(f"-F {path} -G pod-w1")
    way = Way("", control=ways.control_path(tmp_path, worker))
    options = client_config.arguments([*client_config.own_options(worker, way), *OPTIONS])
    by_args = effective(f"-F none {options} -i {private_key} -o User=ada -G 34.0.1.1")
    assert by_config == by_args


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/h"}, "/run/user/7/tpu_ops/mux"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/tpu_ops/mux"),
        ({"HOME": "/home/" + "a" * 15}, "/home/aaaaaaaaaaaaaaa/.cache/tpu_ops/mux"),
        ({"HOME": "/home/" + "a" * 16}, "/tmp/tpu_ops-7"),
        ({"HOME": "/home/" + "a" * 60}, "/tmp/tpu_ops-7"),
        ({"XDG_RUNTIME_DIR": "/run/my own"}, "/run/my own/tpu_ops/mux"),
        ({"XDG_RUNTIME_DIR": "/run/it's"}, "/tmp/tpu_ops-7"),
        ({"XDG_RUNTIME_DIR": "run"}, "/tmp/tpu_ops-7"),
        ({"XDG_RUNTIME_DIR": "/run/%h"}, "/tmp/tpu_ops-7"),
        ({"XDG_RUNTIME_DIR": "/run/${HOME}"}, "/tmp/tpu_ops-7"),
    ],
)
def test_the_directory_of_control_sockets_is_short_and_plain(environ, expected, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: True)
    path = client_config.mux_dir(environ, 7)
    assert str(path) == expected
    # The longest name of a socket that ssh makes there, with the final NUL; Linux allows 108 bytes.
    assert len(f"{path}/{'c' * ways.CONTROL_NAME}.{'r' * 16}") + 1 <= 108


def test_the_runtime_directory_of_another_user_is_not_taken():
    """`su` keeps the variable of the first user."""
    runtime = os.environ["XDG_RUNTIME_DIR"]
    environ = {"XDG_RUNTIME_DIR": runtime, "HOME": "/home/ada"}
    assert str(client_config.mux_dir(environ, os.getuid())) == f"{runtime}/tpu_ops/mux"
    assert str(client_config.mux_dir(environ, os.getuid() + 1)) == "/home/ada/.cache/tpu_ops/mux"
    yet_to_be_made = {"XDG_RUNTIME_DIR": f"{runtime}/x"}
    assert str(client_config.mux_dir(environ | yet_to_be_made, os.getuid())) == f"{runtime}/x/tpu_ops/mux"


def test_a_runtime_directory_that_is_gone_and_cannot_be_made_is_not_taken(tmp_path, monkeypatch):
    """/run/user/UID is missing without a session, and in containers and jobs that inherit the variable."""
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "user" / "7"), "HOME": "/home/ada"}
    assert str(client_config.mux_dir(environ, 7)) == "/home/ada/.cache/tpu_ops/mux"
    (tmp_path / "user").mkdir()
    assert ".cache" not in client_config.mux_dir(environ, 7).parts


def test_the_directory_of_control_sockets_is_absolute_whatever_home_says(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.chdir("/")
    for environ, home in (({}, pwd.getpwuid(os.getuid()).pw_dir), ({"HOME": "relative"}, "/relative")):
        assert str(client_config.mux_dir(environ, 7)) == f"{home}/.cache/tpu_ops/mux"


def test_a_directory_of_control_sockets_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OpsError, match="not this user's own"):
        client_config.make_mux_dir(tmp_path / "link")
    client_config.make_mux_dir(tmp_path / "a" / "mux")
    assert (tmp_path / "a" / "mux").stat().st_mode & 0o777 == 0o700


def test_a_socket_directory_that_cannot_be_created_is_a_clear_error(tmp_path):
    (tmp_path / "runtime").write_text("")
    with pytest.raises(OpsError) as caught:
        client_config.make_mux_dir(tmp_path / "runtime" / "mux")
    assert caught.value.where == str(tmp_path / "runtime" / "mux")


def test_known_hosts_is_read_as_it_is_written():
    keys = {
        "tpu-1-w0": {"ssh-ed25519": key("a"), "ssh-rsa": key("b", "ssh-rsa")},
        "tpu-1-w1": {"ssh-rsa": key("c", "ssh-rsa")},
    }
    text = known_hosts.text_of(keys)
    assert text.splitlines()[0] == f"tpu-1-w0 ssh-ed25519 {key('a')}"
    assert known_hosts.parse("# a comment\n\nbroken line here and more\n" + text) == keys
    assert known_hosts.trusted_first(text) == set()


def test_host_keys_trusted_on_first_contact_are_marked(tmp_path):
    keys = {"tpu-1-w0": {"ssh-ed25519": key("a")}, "tpu-1-w1": {"ssh-ed25519": key("b")}}
    text = known_hosts.text_of(keys, {"tpu-1-w1"})
    assert known_hosts.parse(text) == keys
    assert known_hosts.trusted_first(text) == {"tpu-1-w1"}
    (tmp_path / "known_hosts").write_text(text)
    for alias in keys:
        found = subprocess.run(
            ["ssh-keygen", "-F", alias, "-f", tmp_path / "known_hosts"], capture_output=True, check=False
        )
        assert found.returncode == 0, alias


@pytest.mark.parametrize("options", [("ed25519",), ("ecdsa", "-b", "384"), ("rsa", "-b", "2048")])
def test_fingerprints_are_those_of_ssh_keygen(tmp_path, options):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", *options, "-N", "", "-f", path], check=True)
    kind, blob = path.with_suffix(".pub").read_text().split()[:2]
    told = subprocess.run(["ssh-keygen", "-lf", f"{path}.pub"], capture_output=True, text=True, check=True).stdout
    assert known_hosts.valid_key(kind, blob)
    assert known_hosts.fingerprint(blob) == told.split()[1]
