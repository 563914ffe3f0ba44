"""What a person and an administrator find on workers after site.yml: behaviour, seen over ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testinfra.host import Host

VENV = "/opt/venvs/jax/bin/python"
MARKER = "0123456789abcdef"
PROBE = f"""echo '{{"marker": "{MARKER}", "action": "probe"}}' | sudo -n /usr/local/sbin/tpu-host"""

Ada = Callable[[str], str]
Ssh = Callable[..., Any]


def test_she_logs_in_with_her_key_and_zsh_is_her_shell(ada: Ada) -> None:
    assert ada("whoami; print -r -- zsh-${ZSH_VERSION%%.*}").split() == ["ada", "zsh-5"]


def test_another_key_does_not_open_her_account(ssh: Ssh, tmp_path: Path) -> None:
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    done = ssh("true", key=str(key))
    assert done.returncode == 255
    assert "Permission denied (publickey" in done.stderr


def test_no_password_opens_her_account(host: Host) -> None:
    with host.sudo():
        assert host.check_output("getent shadow ada").split(":")[1] == "*"


def test_the_host_program_answers_her_probe(ada: Ada) -> None:
    _, marker, answer = ada(PROBE).partition(MARKER)
    assert marker
    probe = json.loads(answer)["probe"]
    assert probe["venv"]["packages"]["jax"] == "0.10.2"
    assert all(probe["environment_files"].values())


def test_she_can_use_the_environment_and_not_change_it(ada: Ada, ssh: Ssh) -> None:
    script = "import jax.numpy as jnp; print((jnp.arange(3) + jnp.ones(3)).tolist())"
    assert ada(f"JAX_PLATFORMS=cpu {VENV} -c {shlex.quote(script)}") == "[1.0, 2.0, 3.0]"
    assert "Permission denied" in ssh(f"touch {Path(VENV).parent.parent}/x").stderr


def test_scikit_learn_of_jax_packages_is_there(host: Host) -> None:
    assert host.check_output(f"{VENV} -c 'import sklearn; print(sklearn.__name__)'") == "sklearn"


def test_zsh_shows_her_the_worker_s_name(ada: Ada, host: Host) -> None:
    assert f"ada@{host.backend.host} " in ada("zsh -i -c 'print -P $PROMPT' 2>&1")


def test_the_account_that_configures_can_still_do_so(host: Host) -> None:
    with host.sudo():
        assert host.user().name == "root"
