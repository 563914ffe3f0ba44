"""What people find after the role python: several Pythons, and environments that are the same on all workers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from testinfra.host import Host

SHOW = "import sys, json; from importlib.metadata import version; print(json.dumps([*sys.version_info[:2], {}]))"

Ssh = Callable[..., subprocess.CompletedProcess[str]]

#: What the first worker holds, by environment.
LISTINGS: dict[str, str] = {}


def asked(host: Host, name: str, *packages: str) -> list[object]:
    """Return major, minor and the packages' versions of an environment."""
    versions = ", ".join(f"version('{package}')" for package in packages)
    found: list[object] = json.loads(host.check_output(f'/opt/venvs/{name}/bin/python -I -c "{SHOW.format(versions)}"'))
    return found


def test_pythons_stand_side_by_side_and_the_systems_own_is_untouched(host: Host) -> None:
    system = host.check_output("/usr/bin/python3 -I -c 'import sys; print(sys.prefix, *sys.version_info[:2])'").split()
    assert system[0] == "/usr"
    older = asked(host, "older")
    assert older[:2] != [int(part) for part in system[1:]]
    # No file of its packages differs from what they installed, and there are no other files.
    names = host.check_output(
        "dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' 'python3*' 'libpython3*' | sed -n 's/^ii *//p'"
    ).split()
    assert "python3" in names
    # Small images have no documents.
    differing = host.run(f"dpkg --verify {' '.join(names)}").stdout.splitlines()
    assert [line for line in differing if " /usr/share/" not in line] == []
    assert host.check_output("find /usr/local/lib/python3*/dist-packages -mindepth 1") == ""
    host.check_output("find /usr/lib/python3/dist-packages -mindepth 1 -maxdepth 1 ! -name __pycache__ | xargs dpkg -S")
    assert host.check_output("readlink -f /opt/venvs/older/bin/python") == f"/usr/bin/python{older[0]}.{older[1]}"
    assert host.package(f"python{older[0]}.{older[1]}-venv").is_installed
    assert host.check_output("readlink -f /opt/venvs/tools/bin/python").startswith("/opt/python-of-molecule/cpython-")


def test_environments_hold_what_was_asked(host: Host) -> None:
    assert str(asked(host, "tools", "idna", "packaging")[2]).startswith("3.7")
    assert asked(host, "locked", "six", "idna")[2:] == ["1.16.0", "3.7"]
    used = "import idna; print(idna.encode('bücher').decode())"
    assert host.check_output(f'/opt/venvs/locked/bin/python -I -c "{used}"') == "xn--bcher-kva"
    # Packages that are not in the lock are removed if exact is set.
    assert host.run("/opt/venvs/locked/bin/python -I -c 'import packaging'").rc == 1
    assert host.check_output("stat -c %U /opt/venvs/older /opt/venvs/older/bin/python /opt/venvs/tools").split() == [
        "tpu",
        "tpu",
        "root",
    ]


def test_uv_is_of_the_version_that_was_asked(host: Host) -> None:
    defaults = yaml.safe_load((Path(__file__).parents[3] / "roles/python/defaults/main.yml").read_text())
    assert host.check_output("/opt/uv/bin/uv --version").split()[1] == defaults["python_uv_version"]


@pytest.mark.parametrize("name", ["tools", "older", "locked"])
def test_two_workers_hold_the_same(host: Host, name: str) -> None:
    listing = host.check_output(f"cd /opt/venvs/{name}/lib/python3*/site-packages && ls -d *.dist-info")
    # Each worker is compared with the first one that was asked; their systems' Pythons have different versions.
    assert LISTINGS.setdefault(name, listing) == listing


@pytest.mark.parametrize(("person", "name"), [("tpu", "locked"), ("nobody", "tools")])
def test_the_users_environment_is_active_at_login(host: Host, person: str, name: str) -> None:
    for shell in ("bash", "sh", "zsh"):
        with host.sudo(person):
            shown = 'echo $VIRTUAL_ENV; command -v python; command -v pip; python -c "import sys; print(sys.prefix)"'
            found = host.check_output(f"env -u VIRTUAL_ENV {shell} -lc {shlex.quote(shown)}").split()
        commands = [f"/usr/local/lib/tpu_ops/python/{program}" for program in ("python", "pip")]
        assert found == [f"/opt/venvs/{name}", *commands, f"/opt/venvs/{name}"], shell


def test_root_s_login_has_none(host: Host) -> None:
    with host.sudo():
        assert host.check_output("bash -lc 'echo [$VIRTUAL_ENV]'") == "[]"
        assert "no environment is active for root" in host.run("pip install idna").stderr


def test_a_command_over_ssh_finds_python_and_uv(host: Host, ssh: Ssh) -> None:
    done = ssh("python -c 'import sys; print(sys.prefix)' && uv --version", os.environ["TPU_OPS_USER"])
    assert done.stdout.split()[:2] == ["/opt/venvs/locked", "uv"], done.stderr


def test_the_archive_s_key_is_its_own(host: Host) -> None:
    key = host.file("/etc/apt/keyrings/tpu_ops-deadsnakes.asc")
    archive = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / host.system_info.codename / "archive"
    assert key.content_string == (archive / "good.asc").read_text()
    assert (key.user, key.group, key.mode) == ("root", "root", 0o644)


def test_a_refused_build_or_archive_is_not_installed(host: Host) -> None:
    assert not host.file("/opt/python-refused").exists or not host.file("/opt/python-refused").listdir()
    assert "/good " in host.file("/etc/apt/sources.list.d/tpu_ops-deadsnakes.list").content_string
