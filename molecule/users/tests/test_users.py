"""Who gets in after people came, changed and left, and with which rights: seen over ssh with each person's own key."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from testinfra.host import Host

KEYS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "keys"
KEYS_DIRECTORY = "/etc/ssh/authorized_keys.d"
ARCHIVES = "/var/backups/tpu_ops/homes"
PRESENT = ["ada", "dave", "erin", "grace", "heidi", "ivan", "judy"]

Done = subprocess.CompletedProcess[str]
Login = Callable[..., Done]


@pytest.fixture
def login(ssh: Login) -> Login:
    """Return a function that logs in as a person, with that person's key or somebody else's."""
    return lambda user, command="whoami", key="": ssh(command, user, str(KEYS / (key or user)))


@pytest.mark.parametrize("name", ["ada", "grace", "heidi", "dave", "ivan", "judy"])
def test_people_log_in_with_their_keys(login: Login, name: str) -> None:
    done = login(name)
    assert (done.returncode, done.stdout.strip()) == (0, name), done.stderr


@pytest.mark.parametrize(
    ("name", "key"),
    [
        # Removed; does not belong on this node; taken out of the metadata; added by hand; somebody else's.
        ("bob", "bob"),
        ("carol", "carol"),
        ("fred", "fred"),
        ("fred", "stranger"),
        ("ada", "stranger"),
        ("heidi", "stranger"),
        ("grace", "ada"),
    ],
)
def test_nobody_else_gets_in(login: Login, name: str, key: str) -> None:
    done = login(name, key=key)
    assert done.returncode == 255
    assert "Permission denied (publickey" in done.stderr


def test_keys_that_another_tool_keeps_let_in_as_before(login: Login) -> None:
    assert login("dave", key="stranger").stdout.strip() == "dave"


@pytest.mark.parametrize("name", ["ada", "grace", "heidi", "dave"])
def test_no_password_opens_an_account(host: Host, name: str) -> None:
    with host.sudo():
        assert host.check_output(f"getent shadow {name}").split(":")[1] == "*"


@pytest.mark.parametrize(("name", "root"), [("ada", False), ("heidi", False), ("dave", False), ("grace", True)])
def test_sudo_gives_exactly_what_was_granted(login: Login, name: str, root: bool) -> None:
    done = login(name, "sudo -n id -u")
    assert (done.returncode == 0, done.stdout.strip()) == (root, "0" if root else "")
    assert root or "sudo:" in done.stderr


@pytest.mark.parametrize(
    ("name", "groups"),
    [("ada", {"tpu-run", "vision"}), ("grace", {"tpu-run"}), ("heidi", set()), ("judy", {"vision"}), ("fred", set())],
)
def test_groups_are_those_of_the_list(host: Host, name: str, groups: set[str]) -> None:
    assert set(host.user(name).groups) - {name} == groups


def test_a_group_that_was_removed_is_back_as_one_of_the_system(host: Host) -> None:
    assert sorted(host.group("vision").members) == ["ada", "judy"]
    assert host.group("vision").gid < 1000
    assert host.group("storage").gid == 6100


def test_an_account_has_the_number_of_the_list(host: Host) -> None:
    assert host.user("heidi").uid == 5007


def test_an_account_that_was_changed_by_hand_is_as_listed_again(host: Host, login: Login) -> None:
    assert login("ivan", "echo $0").stdout.strip() == "bash"
    assert host.user("erin").gecos == "Erin of the speech group"


def test_removed_users_have_no_account_and_no_process_ignoring_sigterm(host: Host) -> None:
    for name in ("bob", "carol"):
        assert not host.user(name).exists
        assert not host.file(f"/home/{name}").exists
        assert not host.file(f"/var/lib/systemd/linger/{name}").exists
    # The brackets keep the search from finding itself.
    assert host.run("pgrep --full stubborn-of-[b]ob").rc == 1


def test_a_home_is_archived_whole_and_for_root_only(host: Host) -> None:
    assert host.run(f"ls {ARCHIVES}").rc != 0
    with host.sudo():
        archives = host.check_output(f"ls -A {ARCHIVES}").split()
        assert len(archives) == 1
        assert archives[0].startswith("bob-")
        path = f"{ARCHIVES}/{archives[0]}"
        assert (host.file(path).user, host.file(path).mode) == ("root", 0o600)
        # In a directory of its own, which is gone afterwards.
        script = (
            f"d=$(mktemp -d) && trap 'rm -rf $d' EXIT && tar -xzf {path} -C $d && cd $d/bob"
            " && sha256sum --check --quiet work/digest && cd work && cat secret 'a b' && readlink link && test -p pipe"
            " && stat -c %h model"
        )
        assert host.check_output(script).split() == ["secret", "spaces", "/etc/shadow", "2"]


@pytest.mark.parametrize("name", ["dave", "grace"])
def test_a_user_who_is_added_again_owns_the_home_directory(host: Host, login: Login, name: str) -> None:
    done = login(name, "touch ~/mine && stat -c %U ~ ~/mine" + (" ~/kept && cat ~/kept" if name == "dave" else ""))
    assert done.stdout.split() == ([name] * 3 + ["kept"] if name == "dave" else [name] * 2), done.stderr


def test_whatever_is_in_a_home_that_is_given_back_is_given_back_and_what_links_lead_to_is_not(host: Host) -> None:
    with host.sudo():
        assert host.check_output("find /home/grace ! -user grace; find /home/grace ! -group grace") == ""
        assert host.check_output("find /home/grace/a -printf '%y %P\\n' | sort").split("\n") == [
            "d ",
            "d b",
            "f b/hers",
            "l passwd",
        ]
    assert host.file("/etc/passwd").user == "root"


def test_the_keys_directory_holds_exactly_the_listed_keys_and_what_is_another_tool_s(host: Host) -> None:
    assert host.file(KEYS_DIRECTORY).mode == 0o755
    assert sorted(host.file(KEYS_DIRECTORY).listdir()) == [*PRESENT, "www-data"]
    for name in PRESENT:
        lines = host.file(f"{KEYS_DIRECTORY}/{name}").content_string.splitlines()
        assert [line for line in lines if not line.startswith("#")] == [(KEYS / f"{name}.pub").read_text().strip()]


def test_the_guest_agent_still_lets_in_whom_the_metadata_names(host: Host) -> None:
    with host.sudo():
        assert host.check_output("whoami") == "root"
        assert "# Added by Google" in host.file("/home/tpu/.ssh/authorized_keys").content_string
