"""What a person and an administrator find on workers after site.yml: behaviour, seen over ssh."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from testinfra.host import Host

VENV = "/opt/venvs/jax/bin/python"
MARKER = "0123456789abcdef"
PROBE = f"""echo '{{"marker": "{MARKER}", "action": "probe"}}' | sudo -n /usr/local/sbin/tpu-host"""

Done = subprocess.CompletedProcess[str]
Ada = Callable[[str], Done]


def ssh(host: Host, user: str, key: str, command: str) -> Done:
    """Run a command on a worker as somebody who logs in anew, host keys checked."""
    variables = host.ansible.get_variables()
    arguments = ["ssh", "-l", user, "-i", key, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    # A connection of its own: an open one keeps the environment that it began with.
    arguments += ["-o", "ControlPath=none", *shlex.split(variables["ansible_ssh_common_args"])]
    command_line = [*arguments, variables["ansible_host"], command]
    return subprocess.run(
        command_line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def ada(host: Host) -> Ada:
    """Return a function that runs a command as the person of the lab's group_vars."""
    return lambda command: ssh(host, "ada", os.environ["TPU_OPS_PRIVATE_KEY"], command)


def output(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_she_logs_in_with_her_key_and_zsh_is_her_shell(ada: Ada) -> None:
    assert output(ada("whoami; print -r -- zsh-${ZSH_VERSION%%.*}")).split() == ["ada", "zsh-5"]


def test_another_key_does_not_open_her_account(host: Host, tmp_path: Path) -> None:
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    done = ssh(host, "ada", str(key), "true")
    assert done.returncode == 255
    assert "Permission denied (publickey" in done.stderr


def test_no_password_opens_her_account(host: Host) -> None:
    with host.sudo():
        assert host.check_output("getent shadow ada").split(":")[1] == "*"


def test_sudo_gives_her_the_launcher_and_nothing_else(ada: Ada) -> None:
    for command in (
        "id",
        "-s",
        "/usr/local/sbin/tpu-host --help",
        "-u tpu id",
        "LD_PRELOAD=x /usr/local/sbin/tpu-host",
    ):
        done = ada(f"sudo -n {command}")
        assert done.returncode != 0, command
        assert "sudo:" in done.stderr
    listed = output(ada("sudo -n -l")).rpartition("following commands on")[2].splitlines()[1:]
    assert [line.strip() for line in listed] == ['(root) NOPASSWD: /usr/local/sbin/tpu-host ""']


def test_the_host_program_answers_her_probe(ada: Ada) -> None:
    _, marker, answer = output(ada(PROBE)).partition(MARKER)
    assert marker
    probe = json.loads(answer)["probe"]
    assert probe["venv"]["packages"]["jax"] == "0.10.2"
    assert all(probe["environment_files"].values())


def test_she_can_use_the_environment_and_not_change_it(ada: Ada) -> None:
    script = "import jax.numpy as jnp; print((jnp.arange(3) + jnp.ones(3)).tolist())"
    assert output(ada(f"JAX_PLATFORMS=cpu {VENV} -c {shlex.quote(script)}")) == "[1.0, 2.0, 3.0]"
    done = ada(f"touch {Path(VENV).parent.parent}/x")
    assert "Permission denied" in done.stderr


def test_scikit_learn_of_jax_packages_is_there(host: Host) -> None:
    assert host.check_output(f"{VENV} -c 'import sklearn; print(sklearn.__name__)'") == "sklearn"


def test_tmux_starts_with_the_workers_name_in_its_status_line(ada: Ada, host: Host) -> None:
    name = host.backend.host
    shown = output(ada("tmux new -d -s proof && tmux show -gv status-left; tmux kill-session -t proof"))
    assert shown.startswith(f"[{name}]")


def test_mosh_server_starts(ada: Ada) -> None:
    answer = output(ada("LC_ALL=C.UTF-8 mosh-server new -p 60001:60010; pkill -u ada mosh-server"))
    assert answer.startswith("MOSH CONNECT 600")


def test_zsh_shows_the_workers_name_and_asks_new_people_nothing(ada: Ada, host: Host) -> None:
    shown = output(ada("zsh -i -c 'print -P $PROMPT; print $HISTSIZE' 2>&1"))
    assert f"ada@{host.backend.host} " in shown
    assert "newuser" not in shown
    assert shown.endswith("50000")
    assert output(ada("zsh -c 'whence -f zsh-newuser-install'"))


def test_tcmalloc_is_gone_from_ld_preload_and_its_neighbours_are_not(ada: Ada, host: Host) -> None:
    assert output(ada("printenv LD_PRELOAD")) == "libm.so.6"
    assert host.file("/etc/environment").content_string.count("LD_PRELOAD") == 1
    login = output(ada("env -u LD_PRELOAD bash -lc 'echo ${LD_PRELOAD-unset} $BESIDE_TCMALLOC'"))
    assert login == "unset kept"


def test_the_account_that_configures_can_still_do_so(host: Host) -> None:
    with host.sudo():
        assert host.user().name == "root"


def test_shared_memory_outlives_the_last_ssh_session(ada: Ada, host: Host) -> None:
    output(ada("head -c 4096 /dev/zero > /dev/shm/proof"))
    closed = host.run("timeout 30 sh -c 'while loginctl show-user ada >/dev/null 2>&1; do sleep 0.2; done'")
    assert closed.rc == 0, "logind still counts a session of ada after 30 s"
    with host.sudo():
        assert host.file("/dev/shm/proof").user == "ada"
        host.run("rm /dev/shm/proof")
