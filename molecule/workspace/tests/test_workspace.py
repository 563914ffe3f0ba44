"""What is on the workers after projects were added, moved, broken and repaired."""

from __future__ import annotations

import shlex

import pytest
from testinfra.backend.base import CommandResult
from testinfra.host import Host

PYTHON = "/opt/venvs/workspace/bin/python"


def as_person(host: Host, person: str, command: str) -> CommandResult:
    """Run a command as a person who has just logged in."""
    with host.sudo():
        return host.run(f"su - {person} -c {shlex.quote(command)}")


def test_all_workers_are_at_the_commit_that_the_forge_has(host: Host) -> None:
    at = as_person(host, "root", "git -C /opt/workspaces/vision rev-parse HEAD").stdout
    assert len(at.strip()) == 40
    for url in ("git@forge.test:vision.git",):
        assert as_person(host, "root", f"git ls-remote {url} main").stdout.split()[0] == at.strip()


def test_the_clone_of_root_has_its_remote_and_lets_everybody_read(host: Host) -> None:
    shown = as_person(host, "root", "cd /opt/workspaces/vision && git remote get-url origin && stat -c '%a %U:%G' .")
    assert shown.stdout.splitlines() == ["git@forge.test:vision.git", "755 root:root"], shown.stderr


def test_the_installation_is_editable_and_of_this_commit(host: Host) -> None:
    script = "import vision; print(vision.ANSWER, vision.__file__)"
    done = as_person(host, "wim", f"cd /; {PYTHON} -c {shlex.quote(script)}")
    assert done.stdout.split() == ["2", "/opt/workspaces/vision/vision/__init__.py"], done.stderr


@pytest.mark.parametrize(
    ("package", "below"),
    [("packaging", "26"), ("typing_extensions", "4.12.3")],
)
def test_constraints_and_pinned_packages_hold(host: Host, package: str, below: str) -> None:
    script = f"import importlib.metadata as m; print(m.version('{package}'))"
    version = as_person(host, "root", f"{PYTHON} -c {shlex.quote(script)}").stdout.strip()
    assert [int(part) for part in version.split(".")] < [int(part) for part in below.split(".")]


def test_a_person_uses_git_in_the_clone_of_root(host: Host) -> None:
    done = as_person(host, "wim", "git -C /opt/workspaces/vision log -1 --format=%s")
    assert done.stdout.strip() == "third", done.stderr


def test_a_person_s_own_clone_is_hers_at_the_commit_of_the_tag(host: Host) -> None:
    asked = "git describe --tags && git status --porcelain && git remote get-url origin && git fetch -q"
    done = as_person(host, "wim", f"cd code/vision && {asked}")
    assert (done.rc, done.stdout.split()) == (0, ["v1", "ssh://git@forge.test/srv/forge/vision.git"]), done.stderr
    with host.sudo():
        listed = host.check_output(
            "find /home/wim/code ! -user wim; stat -c '%a %U' /home/wim/code /home/wim/code/vision"
        )
    assert listed.splitlines() == ["755 wim", "750 wim"]


def test_the_dotfiles_of_a_person_were_installed_once_as_that_person(host: Host) -> None:
    done = as_person(host, "wim", "cat .from-dotfiles; stat -c '%a %U' .dotfiles; tail -n 1 .dotfiles/install.sh")
    assert done.stdout.splitlines() == ["/home/wim/.dotfiles of wim", "700 wim", "# mine"], done.stderr


def test_nothing_is_left_beside_the_clones(host: Host) -> None:
    with host.sudo():
        assert host.check_output("ls -A /opt/workspaces /home/wim/code").split() == [
            "/home/wim/code:",
            "vision",
            "/opt/workspaces:",
            "vision",
        ]
