"""What programs read of the credentials on the workers, who else can, and what Ansible shows of them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from testinfra.backend.base import CommandResult
from testinfra.host import Host

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
VAULT = str(HERE / "files" / "vault_password")


def as_person(host: Host, person: str, command: str) -> CommandResult:
    """Run a command as a person who has just logged in."""
    with host.sudo():
        return host.run(f"su - {person} -c {shlex.quote(command)}")


def python(host: Host, person: str, script: str) -> str:
    done = as_person(host, person, f"python3 -c {shlex.quote(script)}")
    assert done.rc == 0, done.stderr
    return str(done.stdout).strip()


@pytest.mark.parametrize(
    ("person", "server", "found"),
    [
        ("cleo", "api.wandb.ai", "user void-secret-env"),
        ("cleo", "comet.test", "cleo void-secret-comet"),
        ("cleo", "own.test", "me own secret"),
        ("cleo", "elsewhere.test", "anonymous me@forge.test"),
        ("cyd", "wandb.forge.test", "user void-secret-cyd"),
    ],
)
def test_programs_find_logins_in_netrc_and_those_of_others_stay(
    host: Host, person: str, server: str, found: str
) -> None:
    script = f"import netrc; login, _, password = netrc.netrc().authenticators('{server}'); print(login, password)"
    assert python(host, person, script) == found


def test_profiles_of_aws_hold_the_keys_and_what_else_stood_there(host: Host) -> None:
    script = (
        "import configparser, os, json; c = configparser.RawConfigParser();"
        " c.read(os.path.expanduser('~/.aws/credentials')); print(json.dumps({s: dict(c[s]) for s in c.sections()}))"
    )
    assert python(host, "cleo", script) == (
        '{"default": {"aws_access_key_id": "OWN", "aws_secret_access_key": "own"},'
        ' "training": {"region": "us-central2", "aws_secret_access_key": "void-secret-aws/+",'
        ' "aws_access_key_id": "VOIDKEYID", "aws_session_token": "void-secret-session"}}'
    )


def test_git_finds_the_token_of_its_host_and_of_no_other(host: Host) -> None:
    ask = "printf 'protocol=https\\nhost=%s\\n\\n' {} | GIT_TERMINAL_PROMPT=0 git credential fill"
    found = as_person(host, "cleo", ask.format("forge.test")).stdout.splitlines()
    assert {"username=cleo", "password=void-secret-git:@"} <= set(found)
    assert as_person(host, "cleo", ask.format("own.test")).rc != 0
    assert "https://me:own@own.test" in as_person(host, "cleo", "cat .git-credentials").stdout


def test_whole_files_hold_the_secret(host: Host) -> None:
    assert as_person(host, "cleo", "cat .cache/huggingface/token").stdout == "void-secret-hub\n"
    assert (
        python(host, "cleo", "import json; print(json.load(open('.kaggle/kaggle.json'))['key'])")
        == "void-secret-kaggle"
    )


def test_absent_credentials_are_removed_and_their_directories_stay(host: Host) -> None:
    assert as_person(host, "cyd", "ls -A .aws .cache/huggingface").stdout.split() == [".aws:", ".cache/huggingface:"]


def test_nobody_else_reads_them(host: Host) -> None:
    files = ".netrc .aws/credentials .git-credentials .cache/huggingface/token .kaggle/kaggle.json"
    with host.sudo():
        listed = host.check_output(f"cd /home/cleo && stat -c '%a %U' {files}").splitlines()
        host.check_output("chmod 755 /home/cleo")
    assert listed == ["600 cleo"] * 5
    with host.sudo("cyd"):
        for name in files.split():
            assert host.run(f"cat /home/cleo/{name}").stdout == ""


def play(*options: str, **environment: str) -> str:
    """Run the scenario's play with all that Ansible can say, and return it."""
    limit = os.environ.get("MOLECULE_WORKERS", "all")
    done = subprocess.run(
        ["ansible-playbook", "-vvv", "--diff", f"--limit={limit}", *options, HERE / "converge.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"VOID_WANDB_KEY": "void-secret-env", "ANSIBLE_VAULT_PASSWORD_FILE": VAULT} | environment,
    )
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("options", [["--check"], ["--extra-vars", "ansible_remote_tmp=/var/tmp"]])
def test_no_output_of_ansible_holds_a_secret(options: list[str]) -> None:
    said = play(*options)
    assert said.startswith("0\n"), said
    assert "person_credentials" in said
    assert "void-secret" not in said


def test_a_variable_that_is_not_set_is_named_before_the_first_change() -> None:
    said = play(VOID_WANDB_KEY="")
    assert (
        "credentials_entries[0]: wandb of cleo: from_env: the environment variable VOID_WANDB_KEY is not set"
        in " ".join(said.split())
    )
    assert "Write people" not in said
    assert "void-secret" not in said
