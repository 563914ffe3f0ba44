from __future__ import annotations

import configparser
import netrc
import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.credentials.filter_plugins.credentials import (
    credentials_faults,
    credentials_resolved,
    credentials_variables,
)
from roles.credentials.library import person_credentials
from roles.credentials.module_utils.credential_edits import aws_edit, git_edits, helper_edit, netrc_edit
from tests.roles.conftest import Run

WANDB = {"person": "ada", "kind": "wandb", "secret": "s3cret"}
AWS = {"person": "ada", "kind": "aws", "login": "AKIA", "secret": "s3cret/+"}
GIT = {"person": "ada", "kind": "git", "login": "ada", "host": "github.com", "secret": "s3cret"}
ENV = {"person": "ada", "kind": "wandb", "from_env": "WANDB_API_KEY"}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([WANDB, AWS, GIT, AWS | {"profile": "two"}, GIT | {"host": "gitlab.com"}, WANDB | {"person": "bob"}], None),
        ([ENV], None),
        ([ENV | {"from_env": "EMPTY"}], "from_env: the environment variable EMPTY is not set or is empty"),
        ([ENV | {"secret": "s3cret"}], "both secret and from_env are given"),
        ([ENV | {"from_env": "A-B"}], "from_env is not the name of an environment variable"),
        ([WANDB | {"secret": ""}], "secret is missing"),
        ([WANDB | {"secret": "s3cret x"}], "secret contains a space"),
        ([WANDB | {"secret": "s3cret\nmachine evil"}], "secret contains a space"),
        ([AWS | {"login": ""}], "login is missing"),
        ([AWS | {"login_from_env": "WANDB_API_KEY", "login": ""}], None),
        ([AWS | {"session_token": "s3cret]\n["}], "session_token contains a space"),
        ([AWS | {"profile": "a]\n[b"}], "profile 'a]"),
        ([GIT | {"host": ""}], "host is missing"),
        ([GIT, GIT | {"login": "robot"}, GIT | {"login": "old", "state": "absent"}], None),
        ([GIT, GIT], "an earlier entry of this person also writes git github.com"),
        ([{"person": "ada", "kind": "git", "host": "h.test", "state": "absent"}], "login is missing"),
        ([GIT | {"host": "a b"}], "host 'a b' is not a host name"),
        ([GIT | {"host": "forge.test:65536"}], "host 'forge.test:65536' is not a host name"),
        ([WANDB | {"person": "eve"}], "eve has no account and is not in users_people"),
        ([{"person": "eve", "kind": "wandb", "state": "absent"}], None),
        ([{"person": "ada", "kind": "netrc", "state": "absent"}], "host is missing"),
        ([{"person": "ada", "kind": "file", "path": "../x", "secret": "s3cret"}], "path '../x' is not a path below"),
        ([{"person": "ada", "kind": "file", "path": "/etc/x", "secret": "s3cret"}], "is not a path below"),
        ([{"person": "ada", "kind": "file", "path": ".x/y", "secret": "s3cret\nof two lines"}], None),
        ([WANDB, {**GIT, "kind": "netrc", "host": "api.wandb.ai"}], "an earlier entry of this person also writes "),
        ([AWS, AWS | {"profile": "default"}], "an earlier entry of this person also writes aws default"),
    ],
)
def test_faults_name_entry_kind_and_person_and_never_the_secret(entries: list[Any], fault: str | None) -> None:
    faults = credentials_faults(entries, {"WANDB_API_KEY": "s3cret", "EMPTY": ""}, ["ada", "bob"])
    assert faults == [] if fault is None else (len(faults) == 1 and fault in faults[0]), faults
    assert "s3cret" not in str(faults)
    assert all(found.startswith(f"credentials_entries[{len(entries) - 1}]: ") for found in faults)


def test_secrets_come_from_the_environment_of_the_controller() -> None:
    entry = {"person": "ada", "kind": "aws", "from_env": "SECRET", "login_from_env": "ID"}
    assert credentials_variables([entry, entry]) == ["ID", "SECRET"]
    assert credentials_resolved([entry], {"ID": "i", "SECRET": "s"}) == [
        {"person": "ada", "kind": "aws", "secret": "s", "login": "i"}
    ]
    assert credentials_resolved([WANDB], {}) == [WANDB | {"host": "api.wandb.ai", "login": "user"}]


OWN = "machine own.test login me password own\n"


@pytest.mark.parametrize(
    "before",
    [
        "",
        OWN,
        OWN.strip(),
        f"# mine\n{OWN}machine h login old password older # stale\n# next\nmachine b login x password y\n",
        f"machine h\n\tlogin old\n\taccount a\n\tpassword older\n{OWN}machine h login again password twice\n",
        f"{OWN}default login anonymous password x\n",
        f"machine m login l password p\nmacdef init\nmachine h login no password no\n\n{OWN}",
        f'machine q login me password "machine h login x"\n{OWN}',
        f"machine odd login machine password h\n{OWN}",
        f"machine h login user password #old\n{OWN}",
        # Since 3.11, Python reads no file with an empty line in front of a comment.
        f"{OWN}\nmachine h login user password old\n# next\nmachine b login x password y\n",
        f"{OWN}default login x password y \n\nmachine h login user password old\n# next\n",
        "macdef init\ncd x\n\n\nmachine h login user password old\n# next\nmachine b login x password y\n",
    ],
)
def test_a_host_has_one_entry_in_netrc_and_all_others_stay(tmp_path: Path, before: str) -> None:
    def logins(text: str) -> dict[str, Any]:
        (tmp_path / "netrc").write_text(text)
        (tmp_path / "netrc").chmod(0o600)
        return dict(netrc.netrc(tmp_path / "netrc").hosts)

    edit = netrc_edit("h", "user", "new")
    after = edit(before)
    assert edit(after) == after
    others = {host: login for host, login in logins(before).items() if host != "h"}
    found = logins(after)
    assert found.pop("h")[::2] == ("user", "new")
    assert found == others
    gone = netrc_edit("h", None, None)(after)
    assert logins(gone) == others
    assert [line for line in before.splitlines() if line.startswith("#")] == [
        line for line in gone.splitlines() if line.startswith("#")
    ]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n \n"])
def test_an_entry_does_not_become_part_of_the_macro_in_front_of_it(tmp_path: Path, end: str) -> None:
    edit = netrc_edit("h", "user", "new")
    after = edit(f"{OWN}macdef init\ncd x{end}")
    assert edit(after) == after
    (tmp_path / "netrc").write_text(after)
    (tmp_path / "netrc").chmod(0o600)
    assert set(netrc.netrc(tmp_path / "netrc").hosts) == {"own.test", "h"}


@pytest.mark.parametrize("password", ['"old', "", '#"'])
def test_an_entry_that_readers_of_netrc_refuse_costs_no_other(password: str) -> None:
    before = f'machine h login user password {password}\n{OWN}machine q login me password "x\n'
    assert netrc_edit("h", None, None)(before).lstrip() == f'{OWN}machine q login me password "x\n'


KEYS: dict[str, str | None] = {"aws_access_key_id": "I", "aws_secret_access_key": "S", "aws_session_token": None}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[p]\naws_access_key_id = I\naws_secret_access_key = S\n"),
        ("[a]\nx = 1\n", "[a]\nx = 1\n\n[p]\naws_access_key_id = I\naws_secret_access_key = S\n"),
        (
            "# top\n[p]\n# note = 1\naws_session_token=old\naws_secret_access_key=S\nregion = r\n\n[b]\ny = 2\n",
            "# top\n[p]\n# note = 1\naws_secret_access_key=S\nregion = r\naws_access_key_id = I\n\n[b]\ny = 2\n",
        ),
        (
            "[p]\naws_access_key_id = I\naws_access_key_id = J\naws_secret_access_key = old",
            "[p]\naws_access_key_id = I\naws_secret_access_key = S\n",
        ),
    ],
)
def test_a_profile_s_keys_are_set_and_all_else_stays(before: str, after: str) -> None:
    edit = aws_edit("p", KEYS)
    assert edit(before) == after
    assert edit(after) == after
    parsed = configparser.RawConfigParser()
    parsed.read_string(after)
    assert parsed["p"]["aws_secret_access_key"] == "S"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("[p]\naws_access_key_id = I\n", ""),
        ("[a]\nx = 1\n\n[p]\naws_access_key_id = I\naws_session_token = T\n", "[a]\nx = 1\n\n"),
        ("[p]\naws_access_key_id = I\nregion = r\n", "[p]\nregion = r\n"),
        ("[a]\naws_access_key_id = I\n", "[a]\naws_access_key_id = I\n"),
    ],
)
def test_an_absent_profile_loses_its_keys_and_nothing_else(before: str, after: str) -> None:
    assert aws_edit("p", dict.fromkeys(KEYS))(before).rstrip("\n") == after.rstrip("\n")


def test_a_login_of_git_has_one_escaped_line_for_a_host_and_all_others_stay() -> None:
    others = (
        "https://me:x@own.test\nhttps://me:x@h.test.evil\nhttps://me:mine@h.test\n"
        "https://a%40b:x@h.test/org/repo\nhttps://u:p@[x\nhttp://a%40b:x@h.test\n"
    )
    edit = git_edits("h.test", "a@b", "s:/@%")[0]
    text = edit(f"https://a%40b:old@H.test\n{others}https://a%40b@h.test/\n")
    assert text == f"https://a%40b:s%3A%2F%40%25@h.test\n{others}"
    assert edit(text) == text
    assert git_edits("h.test", "a@b", None)[0](text) == others


@pytest.mark.parametrize(
    ("others", "stays"),
    [("", False), ("https://me:x@h.test.evil\n", False)]
    + [(f"https://me:x@{end}\n", True) for end in ("h.test", "H.test/", "h.test/org/repo")],
)
def test_git_reads_the_file_as_long_as_there_is_a_line_for_the_host(others: str, stays: bool) -> None:
    lines, helper = git_edits("h.test", "ada", None)
    section = helper_edit("h.test", wanted=True)("")
    # The file could not be read.
    assert helper(section) == section
    assert lines(f"https://ada:x@h.test\n{others}") == others
    assert helper(section) == (section if stays else "")
    assert helper("") == ""


def test_git_s_helper_is_set_for_the_host_once() -> None:
    text = helper_edit("h.test", wanted=True)("[a]\n\tb = 1")
    assert text == '[a]\n\tb = 1\n[credential "https://h.test"]\n\thelper = store\n'
    assert helper_edit("h.test", wanted=True)(text) == text
    assert helper_edit("h.test", wanted=False)(text) == "[a]\n\tb = 1\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of the person who runs this."""
    me = pwd.getpwuid(os.geteuid())
    account = pwd.struct_passwd((*me[:5], str(tmp_path), me[6]))
    monkeypatch.setattr(pwd, "getpwnam", lambda _: account)
    return tmp_path


def test_files_are_private_and_check_mode_names_what_would_be_written(run: Run, home: Path) -> None:
    (home / ".netrc").write_text(OWN)
    (home / ".netrc").chmod(0o644)
    entries = [
        WANDB | {"host": "h", "login": "user"},
        {"person": "ada", "kind": "netrc", "host": "two", "login": "l", "secret": "s3cret2"},
        {"person": "ada", "kind": "huggingface", "secret": "s3cret3"},
    ]
    paths = [str(home / ".netrc"), str(home / ".cache/huggingface/token")]
    assert run(person_credentials, {"entries": entries}, check=True)["changed_paths"] == paths
    assert (home / ".netrc").read_text() == OWN
    assert run(person_credentials, {"entries": entries})["changed_paths"] == paths
    again = run(person_credentials, {"entries": entries})
    assert (again["changed"], again["faults"]) == (False, [])
    assert [Path(path).stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert (home / ".cache").stat().st_mode & 0o777 == 0o700
    assert set(netrc.netrc(home / ".netrc").hosts) == {"own.test", "h", "two"}
    absent = [entry | {"state": "absent"} for entry in entries]
    assert run(person_credentials, {"entries": absent})["changed_paths"] == paths
    assert (home / ".netrc").read_text() == OWN
    assert not (home / ".cache/huggingface/token").exists()


def test_check_mode_names_a_person_whose_account_is_still_to_be_made(run: Run) -> None:
    wandb = WANDB | {"person": "nobody-here", "host": "h", "login": "user"}
    arguments = {"entries": [wandb]}
    assert run(person_credentials, arguments, check=True)["changed_paths"] == ["~nobody-here"]
    assert run(person_credentials, arguments)["faults"] == [
        "nobody-here has no account; create one, or remove these entries from the list"
    ]
    absent = {"entries": [wandb | {"state": "absent"}]}
    assert run(person_credentials, absent, check=True)["changed_paths"] == []


@pytest.mark.parametrize(
    ("line", "reads"),
    [
        ("https://ada:s3cret@h.test", True),
        ("https://ada:s3cret@h.test/", True),
        ("https://ada:s%3A%40@h.test", True),
        ("https://ada:@h.test", True),
        ("https://ada@h.test", False),
        ("https://h.test", False),
        ("https://h.test/ada:s3cret@x", False),
        ("ada:s3cret@h.test", False),
        ("https:/ada:s3cret@h.test", False),
        (" https://ada:s3cret@h.test", False),
        ("machine h.test login ada password s3cret", False),
    ],
)
def test_lines_that_git_passes_over_are_named_by_their_number(run: Run, home: Path, line: str, reads: bool) -> None:
    store = home / ".git-credentials"
    store.write_text(f"{line}\n")
    ask = ["git", "-c", "credential.helper=", "-c", f"credential.helper=store --file={store}", "credential", "fill"]
    environ = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "SSH_ASKPASS": ""}
    given = "protocol=https\nhost=h.test\n\n"
    done = subprocess.run(ask, input=given, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode == 0) is reads, done.stderr
    store.write_text(f"# mine\n\n{line}\n")
    entry = {"person": "ada", "kind": "git", "login": "eve", "secret": "s3cret2"}
    entries = [entry | {"host": "one.test"}, entry | {"host": "two.test"}]
    for _ in range(2):
        said = run(person_credentials, {"entries": entries})
        notes = [] if reads else [f"{store}, git ignores line 5; git reads lines such as https://LOGIN:SECRET@HOST"]
        assert said["notes"] == notes
        assert "s3cret" not in str(said)


@pytest.mark.usefixtures("home")
def test_a_home_that_does_not_answer_keeps_nobody_else_s_from_being_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(person_credentials, "TIME_LIMIT", 1)
    monkeypatch.setattr(person_credentials, "look", lambda _: signal.pause())
    entry = {"person": "ada", "kind": "huggingface", "secret": "s3cret"}
    assert run(person_credentials, {"entries": [entry]})["faults"] == [
        "credentials of ada: the work in the person's home did not end within 1 s"
    ]


def test_a_file_that_cannot_be_written_does_not_stop_the_others(run: Run, home: Path) -> None:
    (home / ".netrc").mkdir()
    entries = [WANDB | {"host": "h", "login": "user"}, {"person": "ada", "kind": "huggingface", "secret": "s3cret3"}]
    done = run(person_credentials, {"entries": entries})
    assert len(done["faults"]) == 1
    assert done["faults"][0].startswith(f"wandb of ada: {home}/.netrc")
    assert done["changed_paths"] == [str(home / ".cache/huggingface/token")]
    assert "s3cret" not in str(done)
