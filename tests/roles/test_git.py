from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import pwd
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.facts.module_utils.as_person import PersonFault, as_person
from roles.git.filter_plugins import git
from roles.git.library import git_includes
from tests.roles.conftest import Run
from tests.support.role_tasks import run_tasks

ROOT = Path(__file__).resolve().parents[2]
ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGXIlzKGDcj4bqZ6VBmPPWdMbHnzVrWFwgbEf6hYzwCM"
ME = pwd.getpwuid(os.geteuid())

#: What the forges publish beside their keys (GitHub: docs.github.com, "GitHub's SSH key fingerprints"; GitLab:
#: docs.gitlab.com, "GitLab.com settings", SSH host keys fingerprints).
FINGERPRINTS = {
    "github.com": {
        "ssh-ed25519": "+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU",
        "ecdsa-sha2-nistp256": "p2QAMXNIC1TJYWeIOttrVc98/R1BUFWu3/LiyKgUfQM",
        "ssh-rsa": "uNiVztksCsDhcc0u9e8BujQXVUpKZIDTMczCvj3tD2s",
    },
    "gitlab.com": {
        "ssh-ed25519": "eUXGGm1YGsMAS7vkcx6JOJdOGHPem5gQp4taiCfCLB8",
        "ssh-rsa": "ROQFvPThGrW4RuWLoL9tq9I9zJ42fK4XywyRtbOz/EQ",
        "ecdsa-sha2-nistp256": "HbW3g8zUjNSksFbqTiUWPWg2Bq1x8xdGUrliXFzSnUw",
    },
}


def test_the_keys_of_the_forges_have_the_fingerprints_that_they_publish() -> None:
    listed = yaml.safe_load((ROOT / "roles/git/vars/main.yml").read_text())["__git_published_host_keys"]
    found: dict[str, dict[str, str]] = {}
    for host, keys in listed.items():
        for key in keys:
            kind, blob = key.split()
            digest = base64.b64encode(hashlib.sha256(base64.b64decode(blob)).digest()).decode().rstrip("=")
            found.setdefault(host, {})[kind] = digest
    assert found == FINGERPRINTS


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return private keys by what they are."""
    directory, found = tmp_path_factory.mktemp("keys"), {}
    for name, options in {
        "openssh": ["-t", "ed25519", "-N", ""],
        "pem": ["-t", "ecdsa", "-m", "PEM", "-N", ""],
        "passphrase": ["-t", "ed25519", "-N", "secret"],
        "pem passphrase": ["-t", "ecdsa", "-m", "PEM", "-N", "secret"],
    }.items():
        subprocess.run(["ssh-keygen", "-q", *options, "-f", directory / name], check=True, timeout=30)
        found[name] = (directory / name).read_text()
    return found


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("openssh", lambda key: key, ""),
        ("openssh", lambda key: key.strip().replace("\n", "\r\n"), ""),
        ("pem", lambda key: key, ""),
        ("passphrase", lambda key: key, "has a passphrase"),
        ("pem passphrase", lambda key: key, "has a passphrase"),
        ("openssh", lambda key: key.replace("\n", " "), "is not a private key"),
        ("openssh", lambda key: key[: len(key) // 2], "is not a private key"),
        ("openssh", lambda key: key.replace("b3Blbn", "!3Blbn"), "is damaged"),
        ("openssh", lambda _: ED25519, "is not a private key"),
    ],
)
def test_deploy_keys_are_judged_without_being_shown(keys: dict[str, str], name: str, change: Any, fault: str) -> None:
    found = git.private_key_fault(change(keys[name]))
    assert fault in found
    assert bool(found) == bool(fault)
    assert not any(line in found for line in keys[name].splitlines()[1:-1] if line)


KNOWN = {"accounts": ["ada"], "groups": ["deploy"]}
PERSON = {"person": "ada", "name": "Ada", "email": "ada@example.org"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"people": [PERSON | {"person": "eve"}]}, "git_people[0]: eve has no account"),
        ({"people": [PERSON, PERSON]}, "git_people[1]: ada is listed twice"),
        ({"people": [PERSON | {"email": "ada"}]}, "email 'ada' is not of the form"),
        ({"people": [PERSON | {"name": "A <b>"}]}, "name must not contain"),
        ({"people": [PERSON | {"settings": {"nodot": 1}}]}, "settings: 'nodot' is not a setting"),
        ({"settings": {"a.b": ["c"]}}, "git_settings: a.b: the value"),
        ({"settings": {"a b.c": 1}}, "'a b.c' is not a setting"),
        ({"host_keys": {"forge.test/x": [ED25519]}}, "'forge.test/x' is not a host name"),
        ({"host_keys": {"forge.test:0": [ED25519]}}, "'forge.test:0' is not a host name"),
        ({"host_keys": {"forge.test:65536": [ED25519]}}, "'forge.test:65536' is not a host name"),
        ({"host_keys": {"forge.test": []}}, "forge.test has no list of keys"),
        ({"host_keys": {"forge.test": ED25519}}, "forge.test has no list of keys"),
        ({"host_keys": {"forge.test": [ED25519, "ssh-dss AAAA"]}}, "forge.test[1] starts with 'ssh-dss'"),
        ({"host_keys": {"forge.test": [ED25519[:52]]}}, "is truncated"),
        ({"host_keys": {"forge.test": [f"{ED25519} comment"]}}, "something other than base64"),
        ({"deploy_keys": [{"host": "else.test"}]}, "else.test has no pinned key"),
        ({"deploy_keys": [{"host": "forge.test"}, {"host": "forge.test"}]}, "already has a key"),
        ({"deploy_keys": [{"host": "forge.test", "alias": "a b"}]}, "alias is not a host name"),
        ({"deploy_keys": [{"host": "forge.test", "alias": "forge.test"}]}, "the alias is the name of a forge"),
        ({"deploy_keys": [{"host": "forge.test", "group": "nobody2"}]}, "there is no group nobody2"),
    ],
)
def test_faults_name_variable_and_entry(keys: dict[str, str], change: dict[str, Any], fault: str | None) -> None:
    right: dict[str, Any] = {"people": [PERSON], "settings": {}, "host_keys": {"forge.test": [ED25519]}}
    given = right | {"deploy_keys": []} | change
    given["deploy_keys"] = [{"key": keys["openssh"]} | entry for entry in given["deploy_keys"]]
    faults = git.git_faults(**given, known=KNOWN)
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0]), faults


def test_git_reads_back_what_is_written_for_it(tmp_path: Path) -> None:
    settings = {"core.abbrev": 12, "a.b": True, 'url.x"y\\.insteadOf': 'q"\\\t\nend ; # ', "alias.st": "!f() { :; }; f"}
    (tmp_path / "config").write_text(git.git_config_text(settings))
    for key, value in settings.items():
        command = ["git", "config", "--file", str(tmp_path / "config"), "--get", key]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout[:-1]
        assert found == (str(value).lower() if value is True else str(value))


def told(config: Path, host: str) -> dict[str, list[str]]:
    """Return what ssh makes of a configuration for a host."""
    done = subprocess.run(["ssh", "-G", "-F", config, host], capture_output=True, text=True, check=True, timeout=30)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def test_ssh_takes_pinned_keys_only_and_finds_them_by_port_and_alias(tmp_path: Path) -> None:
    forges = {"forge.test": [ED25519], "other.test:2222": [ED25519], "third.test:22": [ED25519]}
    keys = [
        {"host": "forge.test", "key": ""},
        {"host": "other.test:2222", "alias": "vision", "key": "", "group": "deploy"},
    ]
    (tmp_path / "config").write_text(git.git_ssh_config(forges, keys, "/d"))
    for host in ("forge.test", "other.test", "third.test", "vision"):
        found = told(tmp_path / "config", host)
        assert found["globalknownhostsfile"] == ["/d/known_hosts"]
        assert found["userknownhostsfile"] == ["/dev/null"]
        assert found["stricthostkeychecking"] == ["true"]
    assert (found["hostname"], found["port"], found["hostkeyalias"]) == (
        ["other.test"],
        ["2222"],
        ["[other.test]:2222"],
    )
    assert told(tmp_path / "config", "elsewhere.test")["stricthostkeychecking"] != ["true"]
    known = git.git_known_hosts(forges).splitlines()[1:]
    assert [line.split()[0] for line in known] == ["forge.test", "[other.test]:2222", "third.test"]


def test_a_group_has_a_key_of_its_own_that_is_shown_to_those_who_may_read_it(tmp_path: Path) -> None:
    entry = {"host": "forge.test", "key": "K\r\nE\n", "group": "deploy"}
    files = git.git_key_files([entry], str(tmp_path))
    assert [(Path(file["path"]).name, file["mode"], file.get("group")) for file in files] == [
        ("forge.test", "0600", None),
        ("forge.test.group", "0640", "deploy"),
    ]
    assert {file["content"] for file in files} == {"K\nE\n"}
    text = git.git_ssh_config({"forge.test": [ED25519]}, [entry], str(tmp_path)).replace(
        "localuser root", "localuser nobody2"
    )
    (tmp_path / "config").write_text(text)
    (tmp_path / "keys").mkdir()
    without = told(tmp_path / "config", "forge.test")["identityfile"]
    (tmp_path / "keys" / "forge.test.group").write_text("")
    assert told(tmp_path / "config", "forge.test")["identityfile"] == [f"{tmp_path}/keys/forge.test.group"] != without


INCLUDE = "[include]\n\tpath = /x/ada\n"


@pytest.mark.parametrize(
    ("before", "first", "last"),
    [
        ("", INCLUDE, INCLUDE),
        ("[user]\n\tname = A", f"{INCLUDE}[user]\n\tname = A", f"[user]\n\tname = A\n{INCLUDE}"),
        ("[include]\n  path = /y\n", f"{INCLUDE}[include]\n  path = /y\n", f"[include]\n  path = /y\n{INCLUDE}"),
    ],
)
def test_an_include_comes_and_goes_and_leaves_the_rest(before: str, first: str, last: str) -> None:
    for position, wanted in ((True, first), (False, last)):
        after = git_includes.with_include(before, "/x/ada", first=position)
        assert after == wanted
        assert git_includes.with_include(after, "/x/ada", first=position) == after
        assert git_includes.without_include(after, "/x/ada").rstrip("\n") == before.rstrip("\n")


def test_an_include_among_others_goes_alone() -> None:
    text = '[Include] # mine\n\tpath = "/x/ada"\n\tpath = /y\n[a]\n\tpath = /x/ada\n'
    assert git_includes.without_include(text, "/x/ada") == "[Include] # mine\n\tpath = /y\n[a]\n\tpath = /x/ada\n"


def test_people_and_keys_that_left_the_list_leave_the_worker(run: Run, tmp_path: Path) -> None:
    directory, system = tmp_path / "d", tmp_path / "gitconfig"
    for name in ("people/leaver-of-no-account", "keys/old", "keys/forge.test"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("")
    arguments = {"directory": str(directory), "people": [], "keys": ["forge.test"], "system": str(system)}
    gone = [str(system), f"{directory}/people/leaver-of-no-account", f"{directory}/keys/old"]
    assert run(git_includes, arguments, check=True)["changed_paths"] == gone
    assert (directory / "keys" / "old").exists()
    assert run(git_includes, arguments)["changed_paths"] == gone
    assert run(git_includes, arguments)["changed"] is False
    assert sorted(path.name for path in directory.rglob("*") if path.is_file()) == ["forge.test"]


def test_a_system_setting_that_overrides_a_configured_one_is_a_warning(run: Run, tmp_path: Path) -> None:
    directory, system = tmp_path / "d", tmp_path / "gitconfig"
    directory.mkdir()
    (directory / "known_hosts").write_text("")
    (directory / "config").write_text("[pull]\n\tff = only\n")
    system.write_text(f"[include]\n\tpath = {directory}/config\n[pull]\n\tff = true\n")
    arguments = {"directory": str(directory), "people": [], "keys": [], "system": str(system)}
    done = run(git_includes, arguments | {"settings": {"pull.ff": "only"}})
    assert "pull.ff is true, not only" in str(done["warnings"])


@pytest.mark.parametrize("mode", [[], ["--check"]])
def test_why_a_deploy_key_could_not_be_installed_is_said_without_the_key(tmp_path: Path, mode: list[str]) -> None:
    # Where its file belongs there is a directory.
    (tmp_path / "keys/github.com").mkdir(parents=True)
    variables = {"git_deploy_keys": [{"host": "github.com", "key": "s3cret"}], "__git_directory": str(tmp_path)}
    names = ["Install the deploy keys", "Report why the deploy keys could not be installed"]
    done = run_tasks(tmp_path, "git", names, variables, "-vvv", "--diff", *mode)
    said = f"git_deploy_keys of pod-w0: {tmp_path}/keys/github.com: the path is a directory and not a file"
    assert (done.returncode, said in done.stdout) == (2, True), done.stdout + done.stderr
    assert "s3cret" not in done.stdout + done.stderr


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return arguments for a person whose home is an empty directory."""
    account = pwd.struct_passwd((*ME[:5], str(tmp_path), ME.pw_shell))
    monkeypatch.setattr("pwd.getpwnam", lambda _: account)
    return {"directory": "/d", "people": ["ada"], "keys": [], "system": str(tmp_path / "system")}


def test_the_diff_shows_no_line_of_the_person(run: Run, tmp_path: Path, person: dict[str, Any]) -> None:
    text = "[http]\n\textraheader = Authorization: Bearer sekret"
    for name in (".gitconfig", "system"):
        (tmp_path / name).write_text(text)
    for wanted in (["ada"], []):
        # What an earlier run left names those who leave.
        person["directory"] = str(tmp_path / "d")
        (tmp_path / "d" / "people").mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / "people" / "ada").touch()
        for check in (True, False):
            done = run(git_includes, person | {"people": wanted}, check=check)
            assert str(tmp_path / ".gitconfig") in done["changed_paths"]
            assert "sekret" not in str(done)
    assert (tmp_path / ".gitconfig").read_text() == text


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.write_text("#\n" * (1 << 20))


@pytest.mark.parametrize(
    ("put", "said"),
    [(_pipe, "is not a regular file"), (_endless, "is not a regular file"), (_large, "is larger than 1048576 bytes")],
)
def test_a_gitconfig_that_is_irregular_or_large_is_refused_at_once(
    run: Run, tmp_path: Path, person: dict[str, Any], put: Any, said: str
) -> None:
    put(tmp_path / ".gitconfig")
    assert f"{tmp_path}/.gitconfig {said}" in run(git_includes, person)["msg"]


@pytest.mark.parametrize("check", [False, True])
def test_a_gitconfig_link_into_a_missing_directory_is_named(
    run: Run, tmp_path: Path, person: dict[str, Any], check: bool
) -> None:
    (tmp_path / ".gitconfig").symlink_to("none/config")
    message = run(git_includes, person, check=check)["msg"]
    assert f"the file is a link to {tmp_path}/none/config, whose directory is missing; create the directory" in message
    assert "Errno" not in message
    assert ".new" not in message


def test_work_as_a_person_may_be_given_a_time_limit() -> None:
    with pytest.raises(PersonFault, match="the work in the person's home did not end within 1 s"):
        as_person(ME, lambda: time.sleep(60), seconds=1)


def test_work_that_no_signal_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of a process that waits for a file system by FUSE: it keeps neither the lock nor the output of the module."""
    handle = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    kill, ended = os.kill, list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))

    def deaf() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)

    with pytest.raises(PersonFault, match="did not end within 1 s; perhaps a mount there does not answer"):
        as_person(ME, deaf, seconds=1)
    os.close(handle)
    try:
        with (tmp_path / "lock").open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert {Path(f"/proc/{ended[0]}/fd/{number}").readlink() for number in range(3)} == {Path("/dev/null")}
    finally:
        kill(ended[0], signal.SIGKILL)
        os.waitpid(ended[0], 0)


def test_work_as_a_person_brings_results_and_faults_back() -> None:
    assert as_person(ME, lambda: [os.environ["HOME"], "SUDO_USER" in os.environ]) == [ME.pw_dir, False]

    def refuse() -> None:
        raise PersonFault("no")

    def fail() -> None:
        raise ValueError("holds a secret")

    for work, said in (
        (refuse, "^no$"),
        (fail, "^ValueError in the module$"),
        (lambda: os._exit(3), "without a result"),
    ):
        with pytest.raises(PersonFault, match=said):
            as_person(ME, work)
