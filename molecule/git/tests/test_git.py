"""What people find of git on workers: their identities, which forges they reach, and with which key."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from testinfra.backend.base import CommandResult
from testinfra.host import Host

FILES = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "forge"


def as_person(host: Host, person: str, command: str) -> CommandResult:
    """Run a command as a person who has just logged in."""
    with host.sudo():
        return host.run(f"su - {person} -c {shlex.quote(command)}")


def setting(host: Host, person: str, key: str) -> str:
    return str(as_person(host, person, f"git config --get {key}").stdout).strip()


@pytest.mark.parametrize("person", ["gilda", "root"])
@pytest.mark.parametrize("name", ["forge.test", "vision.forge.test"])
def test_those_who_may_clone_over_ssh_from_the_pinned_forge_with_the_deploy_key(
    host: Host, person: str, name: str
) -> None:
    done = as_person(host, person, f"d=$(mktemp -d) && git clone -q git@{name}:vision.git $d/v && cat $d/v/README.md")
    if (person, name) == ("gilda", "vision.forge.test"):
        # The alias has a key of root's alone.
        assert done.rc != 0
        assert "Permission denied (publickey" in done.stderr
    else:
        assert (done.rc, done.stdout) == (0, "A project to clone.\nsecond\n"), done.stderr


def test_a_forge_with_another_key_is_refused_whatever_people_once_accepted(host: Host) -> None:
    accept = (
        "mkdir -p .ssh; ssh-keyscan -t ed25519 impostor.test > .ssh/known_hosts 2>/dev/null; test -s .ssh/known_hosts"
    )
    assert as_person(host, "gilda", accept).rc == 0
    for options in ("", "-c core.sshCommand='ssh -o StrictHostKeyChecking=accept-new' "):
        done = as_person(host, "gilda", f"git {options}ls-remote git@impostor.test:vision.git")
        assert done.rc != 0
        assert "Host key verification failed" in done.stderr


def test_a_user_without_access_to_a_deploy_key_is_not_shown_it(host: Host) -> None:
    done = as_person(host, "gus", "git ls-remote git@forge.test:vision.git")
    assert "Permission denied (publickey" in done.stderr
    assert "deploy" not in done.stderr
    assert "/etc/tpu_ops" not in done.stderr
    with host.sudo("gus"):
        for name in ("forge.test", "forge.test.group", "vision.forge.test"):
            assert not host.run(f"cat /etc/tpu_ops/git/keys/{name}").stdout


def test_a_forwarded_agent_opens_the_forge_to_who_has_no_deploy_key(host: Host) -> None:
    variables = host.ansible.get_variables()
    with host.sudo():
        host.run("install -d -o gus -g gus -m 700 /home/gus/.ssh")
        public = shlex.quote((FILES / "member.pub").read_text())
        host.check_output(f"printf %s {public} > /home/gus/.ssh/authorized_keys && chown gus: /home/gus/.ssh/*")
    # The lab's key is named in the common arguments, and beside a named key the agent's others are not offered.
    ssh = ["ssh", "-A", "-i", str(FILES / "member"), "-l", "gus", "-o", "BatchMode=yes", "-o", "ControlPath=none"]
    ssh += [*shlex.split(variables["ansible_ssh_common_args"]), variables["ansible_host"]]
    clone = f"{shlex.join(ssh)} git ls-remote git@forge.test:vision.git"
    command = ["ssh-agent", "sh", "-c", f"ssh-add -q {shlex.quote(str(FILES / 'member'))} && {clone}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "refs/heads/main" in done.stdout, done.stderr


def test_settings_for_everybody_win_over_what_stood_there_and_the_rest_stays(host: Host) -> None:
    assert setting(host, "gilda", "pull.ff") == "only"
    assert setting(host, "gilda", "pull.rebase") == "false"
    assert setting(host, "gilda", "alias.st") == "status"
    assert setting(host, "gilda", "init.defaultBranch") == "trunk"
    assert setting(host, "gilda", "url.https://mirror.test/.insteadOf") == "https://far.test/"


def test_people_are_who_the_fleet_says_unless_they_say_otherwise(host: Host) -> None:
    assert setting(host, "gilda", "user.name") == "Gilda G."
    assert setting(host, "gilda", "user.email") == "gilda@home.test"
    assert (setting(host, "gus", "user.email"), setting(host, "gus", "pull.rebase")) == ("gus@forge.test", "true")
    assert setting(host, "gus", "core.abbrev") == "12"


def diverge(host: Host, person: str) -> CommandResult:
    """Have both sides of a clone make a commit, and pull."""
    return as_person(
        host,
        person,
        "d=$(mktemp -d) && cd $d && git init -q --bare there && git clone -q there a 2>/dev/null && cd a"
        " && git commit -q --allow-empty -m one && git push -q origin HEAD:trunk && git branch -q -u origin/trunk"
        " && git clone -q -b trunk ../there ../b && cd ../b && echo b > b && git add b && git commit -q -m theirs"
        " && git push -q && cd ../a && echo a > a && git add a && git commit -q -m ours && git pull -q"
        " && git log --format=%s",
    )


def test_git_pull_refuses_where_both_sides_have_commits(host: Host) -> None:
    done = diverge(host, "gilda")
    assert done.rc != 0
    assert "Not possible to fast-forward" in done.stderr


def test_git_pull_rebases_for_who_is_to_rebase(host: Host) -> None:
    done = diverge(host, "gus")
    assert done.stdout.split() == ["ours", "theirs", "one"], done.stderr


def test_git_that_was_removed_is_installed(host: Host) -> None:
    assert host.package("git").is_installed


def test_keys_are_those_of_the_list_and_their_owners_alone_and_strays_have_gone(host: Host) -> None:
    with host.sudo():
        listed = host.check_output("cd /etc/tpu_ops/git/keys && stat -c '%n %a %U:%G' *").splitlines()
        people = host.check_output("ls /etc/tpu_ops/git/people").split()
        contents = [host.file(f"/etc/tpu_ops/git/keys/{line.split()[0]}").content_string for line in listed]
    assert listed == [
        "forge.test 600 root:root",
        "forge.test.group 640 root:deploy",
        "vision.forge.test 600 root:root",
    ]
    assert all(content == (FILES / "deploy").read_text() for content in contents)
    assert people == ["gilda", "gus"]
