"""What people and an administrator find on workers after site.yml of examples/fleet: behaviour, seen over ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from testinfra.backend.base import CommandResult
from testinfra.host import Host

PEOPLE = Path(__file__).resolve().parents[3] / "examples/fleet/inventory/group_vars/all/people.yml"
VENV = "/opt/venvs/jax/bin/python"
MARKER = "0123456789abcdef"
PROBE = f"""echo '{{"marker": "{MARKER}", "action": "probe"}}' | sudo -n /usr/local/sbin/tpu-host"""

Ada = Callable[[str], str]
Ssh = Callable[..., Any]


def as_person(host: Host, person: str, command: str) -> CommandResult:
    """Run a command as a person who has just logged in."""
    with host.sudo():
        return host.run(f"su - {person} -c {shlex.quote(command)}")


def says(host: Host, person: str, command: str) -> str:
    """Return what a command prints that must succeed for a person who has just logged in."""
    done = as_person(host, person, command)
    assert done.rc == 0, done.stderr
    return str(done.stdout).strip()


def stores(host: Host) -> bool:
    return bool(host.ansible.get_variables()["tpu_node"] == "store")


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


def test_people_have_the_rights_that_they_were_given(host: Host) -> None:
    assert says(host, "emmy", "sudo -n id -un") == "root"
    assert as_person(host, "lise", "sudo -n true").rc != 0
    assert json.loads(says(host, "lise", PROBE).partition(MARKER)[2])["probe"]
    assert set(says(host, "lise", "id -nG").split()) == {"lise", "research", "tpu-run"}


def test_a_user_of_one_node_is_only_there_and_a_removed_user_nowhere(host: Host) -> None:
    assert host.user("hedy").exists == stores(host)
    assert not host.user("niels").exists


def test_each_person_logs_in_to_the_right_environment(host: Host) -> None:
    assert says(host, "emmy", "python -c 'import rich, sys; print(sys.prefix)'") == "/opt/venvs/tools"
    assert says(host, "lise", "python -c 'import jax, sys; print(sys.prefix)'") == "/opt/venvs/jax"


def test_pip_installs_for_one_person_over_the_fleet_s_environment(ada: Ada, host: Host) -> None:
    before = host.check_output("ls /opt/venvs/jax/lib/python3*/site-packages")
    ada("pip install --quiet idna==3.7")
    # Importing JAX takes seconds.
    script = "import sys; from importlib.metadata import version as v; print(v('idna'), v('jax'), sys.prefix)"
    for shell in ("zsh -c", "zsh -lc", "bash -lc"):
        version, jax, prefix = ada(f"{shell} {shlex.quote(f'python -c {shlex.quote(script)}')}").split()
        assert (version, jax, prefix.startswith("/home/ada/.venvs/own-jax-3.")) == ("3.7", "0.10.2", True), shell
    assert host.check_output("ls /opt/venvs/jax/lib/python3*/site-packages") == before
    assert says(host, "lise", "python -c 'import sys; print(sys.prefix)'") == "/opt/venvs/jax"


def test_own_packages_do_not_replace_the_fleet_s(ssh: Ssh) -> None:
    done = ssh("pip install numpy==1.26.4")
    assert done.returncode != 0
    assert "packages of the fleet's environment, /opt/venvs/jax, keep their versions" in done.stderr


def test_the_environment_of_the_older_python_has_what_it_asks_for(host: Host) -> None:
    script = "import packaging, sys; print(packaging.__version__ < '25', sys.version_info < (3, 12))"
    assert says(host, "emmy", f"/opt/venvs/legacy/bin/python -c {shlex.quote(script)}") == "True True"


def test_nothing_preloads_tcmalloc_but_training_runs(ada: Ada, host: Host) -> None:
    assert "tcmalloc" not in ada("echo $LD_PRELOAD; cat /etc/ld.so.preload")
    probe = json.loads(ada(PROBE).partition(MARKER)[2])["probe"]
    assert probe["environment_files"]["/etc/tpu_ops/tcmalloc.env"]
    library = host.file("/etc/tpu_ops/tcmalloc.env").content_string.partition("LD_PRELOAD=")[2].strip()
    assert host.check_output(f"readlink {library}") == "/usr/local/lib/libtcmalloc.so.4"


def test_credentials_are_where_programs_look_for_them(host: Host) -> None:
    ask = "printf 'protocol=https\\nhost=git.example.org\\n\\n' | GIT_TERMINAL_PROMPT=0 git credential fill"
    assert "password=void-git" in says(host, "emmy", ask)
    netrc = "import netrc; print(netrc.netrc().authenticators('api.wandb.ai')[2])"
    assert says(host, "emmy", f"python3 -c {shlex.quote(netrc)}") == "void-wandb"
    files = ".cache/huggingface/token .config/tracker/token"
    assert says(host, "lise", f"cat {files}").split() == ["void-huggingface", "void-tracker"]
    assert "aws_secret_access_key = void-aws" in says(host, "lise", "cat .aws/credentials")


def test_people_clone_from_the_pinned_forge_with_the_deploy_key_as_who_they_are(host: Host) -> None:
    clone = "d=$(mktemp -d) && git clone -q git@git.example.org:vision.git $d/v && cd $d/v"
    commit = "git commit -q --allow-empty -m mine && git log -1 --format='%an <%ae>'"
    assert says(host, "lise", f"{clone} && {commit}") == "Lise <lise@example.org>"


def test_the_project_is_imported_from_its_clone(host: Host) -> None:
    script = "import vision; print(vision.__file__)"
    assert says(host, "lise", f"cd / && python -c {shlex.quote(script)}").startswith("/opt/workspaces/vision/")


def test_the_time_zone_is_the_fleet_s(host: Host) -> None:
    assert host.check_output("date +%Z") == "UTC"


def test_the_disk_is_mounted_and_what_one_writes_on_it_all_workers_read(host: Host) -> None:
    if stores(host):
        assert host.mount_point("/srv/data").filesystem == "ext4"
        assert "noatime" in host.mount_point("/srv/data").options
        assert host.check_output("systemctl is-enabled srv-data.mount") == "enabled"
        says(host, "hedy", "echo from hedy > /mnt/shared/hedys && cat /srv/data/shared/hedys")
        return
    # What the mount's unit names, over the wire: this kernel may have no client of its own.
    unit = host.file("/etc/systemd/system/mnt-shared.mount").content_string
    address, _, path = (
        next(line for line in unit.splitlines() if line.startswith("What=")).removeprefix("What=").partition(":")
    )
    hedy = next(row["uid"] for row in yaml.safe_load(PEOPLE.read_text())["users_people"] if row["name"] == "hedy")
    url = f"nfs://{address}{path}/{uuid.uuid4()}?version=4&gid=65534&uid="
    with host.sudo():
        written = host.run(f"timeout 30 nfs-cp /etc/hostname '{url}{hedy}'")
        assert written.rc == 0, written.stderr
        lise = host.check_output("id -u lise")
        assert host.check_output(f"timeout 30 nfs-cat '{url}{lise}'") == host.check_output("cat /etc/hostname")
        assert host.run(f"timeout 30 nfs-cp /etc/hostname '{url}{lise}'").rc != 0
