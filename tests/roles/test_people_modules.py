from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roles.users.filter_plugins import accounts, people
from roles.users.library import people_leave, people_state
from roles.users.module_utils import homes
from tests.roles.conftest import Run

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIGXIlzKGDcj4bqZ6VBmPPWdMbHnzVrWFwgbEf6hYzwCM"
KEY = f"ssh-ed25519 {BLOB}"
OTHER = KEY[:-1] + "A"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{KEY} ada@analytical\n", [(KEY, "ada@analytical", False)]),
        (f"{KEY}\n# Added by Google\n{OTHER} x y\n{KEY}", [(KEY, "", False), (OTHER, "x y", True), (KEY, "", False)]),
        (f'command="echo ssh-rsa x",no-pty {KEY} c', [(KEY, "c", False)]),
        (f"  # {KEY}\n\n#\n", []),
        ("root:*:19000:0:99999:7:::\n", []),
        (f"# Added by Google\n\n{KEY}", [(KEY, "", False)]),
    ],
)
def test_keys_of_homes_are_read_with_who_wrote_them(text: str, found: list[tuple[str, str, bool]]) -> None:
    keys = people_state.authorized_keys(text)
    assert [(key["key"], key["comment"], key["agent"]) for key in keys] == found


def test_keys_are_described_by_the_fingerprint_of_ssh_keygen(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY} ada\n")
    command = ["ssh-keygen", "-l", "-f", str(tmp_path / "key")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[1]
    key = {"key": KEY, "comment": "ada\x1b[31m" + "x" * 99}
    described = people_state.described(key)
    assert described.startswith(f"{shown} (ada[31mxxx")
    assert len(described) < 120


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("%sudo   ALL=(ALL:ALL) ALL\n", ["%sudo"]),
        ("%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL\n", ["%google-sudoers"]),
        ("ada ALL=(ALL) \\\n NOPASSWD: ALL\n", ["ada"]),
        ("ada ALL=(root) /bin/ls, ALL\n", ["ada"]),
        ('%tpu-run ALL=(root) NOPASSWD: /usr/local/sbin/tpu-host ""\n', []),
        ("# ada ALL=(ALL) ALL\nDefaults env_reset\n@includedir /etc/sudoers.d\n", []),
    ],
)
def test_rules_of_sudo_that_allow_everything_are_known(text: str, who: list[str]) -> None:
    assert people_state.sudo_rules(text) == who


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("%sudo ALL=(ALL:ALL) ALL\n", []),
        ("%sudo ALL=(ALL:ALL) NOPASSWD:ALL\n", ["%sudo"]),
        ("ada ALL=(ALL) \\\n NOPASSWD : ALL\n", ["ada"]),
        ("ada ALL=(ALL) NOPASSWD: SETENV: ALL\n", ["ada"]),
        ("ada ALL=(root) NOPASSWD: /bin/ls, ALL\n", ["ada"]),
        ("ada ALL=(root) NOPASSWD: /bin/ls, PASSWD: ALL\n", []),
        ("ada ALL=(root) PASSWD: /bin/ls, NOPASSWD: ALL\n", ["ada"]),
        ("ada ALL=(root) NOPASSWD: /bin/ls\n", []),
        ("ada ALL=(ALL) ALL\nada ALL=(ALL) NOPASSWD: ALL\n", ["ada"]),
        ("%sudo ALL=(ALL) ALL\nDefaults env_reset, !authenticate\n", ["%sudo"]),
        ("Defaults !authenticate\n%sudo ALL=(ALL) PASSWD: ALL\n", []),
        ("Defaults !authenticate\nDefaults authenticate\n%sudo ALL=(ALL) ALL\n", []),
        ("Defaults:ada,%sudo !authenticate\n%sudo ALL=(ALL) ALL\nbob ALL=(ALL) ALL\n", ["%sudo"]),
        ("# Defaults !authenticate\nDefaults!/bin/ls !authenticate\n%sudo ALL=(ALL) ALL\n", []),
    ],
)
def test_rules_of_sudo_that_ask_for_no_password_are_known(text: str, who: list[str]) -> None:
    assert people_state.unasked_rules(text) == who


@pytest.mark.parametrize(
    ("rule", "password", "found_in"),
    [
        ("%sudo ALL=(ALL:ALL) ALL", "*", ["refused"]),
        ("%sudo ALL=(ALL:ALL) ALL", "!$6$x", ["refused"]),
        # Ansible is given no password.
        ("%sudo ALL=(ALL:ALL) ALL", "$6$x", ["refused", "reported"]),
        ("%sudo ALL=(ALL:ALL) NOPASSWD: ALL", "*", ["reported"]),
        ("Defaults !authenticate\n%sudo ALL=(ALL:ALL) ALL", "*", ["reported"]),
    ],
)
def test_a_rule_that_asks_for_a_password_keeps_nobody_s_way_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rule: str, password: str, found_in: list[str]
) -> None:
    for name, text in (("sudoers", rule), ("shadow", f"ada:{password}:1:0:99999:7:::\n")):
        (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(people_state, name.upper(), str(tmp_path / name))
    own = tmp_path / "sudoers.d" / "own"
    own.parent.mkdir()
    own.write_text("ada ALL=(ALL:ALL) NOPASSWD: ALL\n")
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: [WANTED])
    monkeypatch.setattr(pwd, "getpwnam", lambda _: person("ada", os.getuid(), str(tmp_path)))
    monkeypatch.setattr("grp.getgrall", lambda: [SimpleNamespace(gr_name="sudo", gr_mem=["ada"])])
    ada = {"name": "ada", "keys": [], "shell": "/bin/sh", "sudo": "none", "state": "present"}
    arguments = {"people": [ada], "connecting_user": "ada", "keys_directory": "/keys", "sshd_file": "/none"}
    found = run(people_state, arguments | {"sudoers": str(own)})
    worker = {"accounts": {"ada": {"groups": ["sudo"]}}}
    faults = accounts.people_refusals([ada], worker, found, "ada")
    assert ["sudo: this account would no longer" in fault for fault in faults] == [True] * ("refused" in found_in)
    assert ("ada" in found["foreign"]) == ("reported" in found_in)


def test_groups_as_good_as_root_are_refused_where_they_are_reported() -> None:
    assert people_state.ROOT_ALIKE_GROUPS == people.ROOT_ALIKE_GROUPS


@pytest.mark.parametrize(
    ("listed", "connecting_user", "given", "root"),
    [
        ({}, "tpu", "", ["disk", "docker", "lxd"]),
        ({"sudo": "launcher"}, "tpu", "", ["disk", "docker", "lxd"]),
        ({"sudo": "full"}, "tpu", "", []),
        ({"state": "absent"}, "tpu", "", []),
        # Whoever connects has full sudo, whatever the list says.
        ({}, "ada", "", []),
        # The role gave them before, and takes them back.
        ({}, "tpu", "# Groups: docker video\n", ["disk", "lxd"]),
    ],
)
def test_groups_as_good_as_root_that_others_gave_are_reported(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    listed: dict[str, str],
    connecting_user: str,
    given: str,
    root: list[str],
) -> None:
    for name in ("SUDOERS", "SHADOW"):
        monkeypatch.setattr(people_state, name, str(tmp_path / "none"))
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: [WANTED])
    monkeypatch.setattr(pwd, "getpwnam", lambda name: person(name, os.getuid(), str(tmp_path)))
    # Those of the guest agent, and the disks'.
    groups = ("adm", "dip", "disk", "docker", "lxd", "plugdev", "video")
    entries = [SimpleNamespace(gr_name=group, gr_mem=["ada", "tpu"]) for group in groups]
    monkeypatch.setattr("grp.getgrall", lambda: entries)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ada").write_text(f"{people_state.HEADER}; changes are lost.\n{given}")
    ada = {"name": "ada", "keys": [], "shell": "/bin/sh", "sudo": "none", "state": "present"} | listed
    paths = {"keys_directory": str(tmp_path / "keys"), "sudoers": str(tmp_path / "none"), "sshd_file": "/none"}
    found = run(people_state, paths | {"people": [ada], "connecting_user": connecting_user})
    assert found["foreign"].get("ada", {"root": []})["root"] == root


def test_an_account_has_expired_from_its_day_on() -> None:
    text = "a:*:1:0:99999:7::1:\nb:*:1:0:99999:7:::\nc:*:1:0:99999:7::101:\nd:*:1:0:99999:7::100:\nbroken\n"
    assert people_state.expired_accounts(text, 100) == ["a", "d"]


@pytest.mark.parametrize(
    ("written", "loaded", "behind"),
    [(100, 200, False), (200, 100, True), (None, 100, False), (200, None, False), (4e10, 100, False)],
)
def test_sshd_is_behind_where_its_file_is_younger_than_its_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: float | None, loaded: float | None, behind: bool
) -> None:
    monkeypatch.setattr(people_state, "PID_FILE", str(tmp_path / "pid"))
    for name, moment in (("conf", written), ("pid", loaded)):
        if moment is not None:
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (moment, moment))
    assert people_state.sshd_behind(str(tmp_path / "conf")) is behind


@pytest.mark.parametrize(
    ("listed", "own_text", "others"),
    [
        ([".ssh/authorized_keys", ".ssh/authorized_keys2"], "", [".ssh/authorized_keys2"]),
        ([".ssh/authorized_keys", "/other/%u", "/keys/%u"], "", ["/other/%u"]),
        # The role kept its files elsewhere before.
        ([".ssh/authorized_keys", "/other/%u", "/old/%u"], "AuthorizedKeysFile x /other/%u /old/%u\n", ["/other/%u"]),
        (["none"], "", []),
        ([], "", []),
    ],
)
def test_sshd_goes_on_reading_keys_where_others_told_it_to(listed: list[str], own_text: str, others: list[str]) -> None:
    text = own_text and f"{people_state.HEADER}; changes are lost.\n{own_text}"
    assert people_state.other_keys_files(listed, text, "/keys") == others


WANTED = "/keys/%u"
INCLUDE = "Include {}/sshd_config.d/*.conf\n"
ELSEWHERE = "AuthorizedKeysFile .ssh/none\n"
OWN = "sshd_config.d/20-own.conf"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"sshd_config": INCLUDE + ELSEWHERE}, ""),
        ({"sshd_config": INCLUDE + ELSEWHERE, "sshd_config.d/30-other.conf": ELSEWHERE, OWN: ELSEWHERE}, ""),
        ({"sshd_config": "Include sshd_config.d/*.conf\n", "sshd_config.d/30-other.conf": ELSEWHERE}, ""),
        ({"sshd_config": f"AuthorizedKeysFile = .ssh/keys {WANTED}\n{INCLUDE}"}, ""),
        ({"sshd_config": f"Port 22\n#{ELSEWHERE}{INCLUDE}"}, ""),
        ({"sshd_config": INCLUDE, "sshd_config.d/10-other.conf": f"Match User ada\n{ELSEWHERE}"}, ""),
        # sshd's words are in no case of their own.
        (
            {"sshd_config": f"# x\n{ELSEWHERE.lower()}{INCLUDE}"},
            "{}/sshd_config:2: AuthorizedKeysFile .ssh/none: sshd uses the first such line, would not read /keys/%u",
        ),
        (
            {"sshd_config": INCLUDE, "sshd_config.d/10-other.conf": ELSEWHERE},
            "{}/sshd_config.d/10-other.conf:1: AuthorizedKeysFile .ssh/none: ",
        ),
        ({"sshd_config": ELSEWHERE}, "does not read {}/sshd_config.d/20-own.conf; begin it with the line: Include {}/"),
        ({"sshd_config": f"Match all\n{INCLUDE}"}, "does not read {}/sshd_config.d/20-own.conf; "),
        ({"sshd_config": "Include sshd_config\n"}, "does not read {}/sshd_config.d/20-own.conf; "),
        ({}, "does not read {}/sshd_config.d/20-own.conf; "),
    ],
)
def test_an_earlier_line_of_sshd_is_named_before_any_change(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], fault: str
) -> None:
    monkeypatch.setattr("ansible.module_utils.sshd_keys.CONFIG", str(tmp_path / "sshd_config"))
    (tmp_path / "sshd_config.d").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("{}", str(tmp_path)))
    own = str(tmp_path / OWN)
    arguments = {"people": [], "keys_directory": "/keys", "sudoers": str(tmp_path / "none"), "sshd_file": own}
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: [".ssh/none"])
    found = run(people_state, arguments)["keys_fault"]
    assert fault.replace("{}", str(tmp_path)) in found
    assert bool(found) == bool(fault)
    # The proof says it too, and what else may be the cause.
    proof = run(people_state, arguments | {"prove": True})["msg"]
    assert found in proof
    assert "sshd looks for keys in .ssh/none and not in /keys/%u; change these lines: " in proof or fault
    monkeypatch.setattr(people_state, "sshd_keys_files", list)
    assert "sshd rejects its configuration" in run(people_state, arguments | {"prove": True})["msg"]
    # What sshd itself says goes first.
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: [WANTED])
    assert run(people_state, arguments | {"prove": True})["keys_fault"] == ""


def test_the_owner_of_a_home_that_a_new_account_would_get_is_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ansible.module_utils.homes.HOMES", str(tmp_path))
    numbers = {"nobodys-bob": 4242, "nobodys-eve": 5001, "nobodys-ann": 0}
    for name in (*numbers, "nobodys-new"):
        (tmp_path / name).mkdir(mode=0o700)
    real = os.lstat

    def lstat(path: str, **way: int) -> os.stat_result:
        entry = list(real(path, **way))
        entry[4] = numbers.get(Path(path).name, 0)
        return os.stat_result(entry)

    def account(uid: int) -> pwd.struct_passwd:
        return {0: person("root", 0, "/root"), 5001: person("zed", 5001, "/none")}[uid]

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(pwd, "getpwuid", account)
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: [WANTED])
    people = [
        {"name": name, "keys": [], "shell": "/bin/sh", "sudo": "none", "state": "present"}
        for name in (*numbers, "nobodys-new", "nobodys-none")
    ]
    paths = {"sudoers": str(tmp_path / "none"), "sshd_file": str(tmp_path / "none")}
    found = run(people_state, {"people": people, "keys_directory": "/keys", **paths})
    assert (found["taken_homes"], found["numbered_homes"]) == ({"nobodys-eve": "zed"}, {"nobodys-bob": 4242})
    assert found["ownerless_homes"] == ["nobodys-ann", "nobodys-bob", "nobodys-new"]


def test_key_files_are_the_role_s_where_they_begin_as_it_writes_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people_state, "sshd_keys_files", lambda: ["none", "/other/%u"])
    (tmp_path / "own").write_text(f"{people_state.HEADER}; changes are lost.\n# Groups: video\n{KEY}\n")
    (tmp_path / "other").write_text(f"{KEY}\n")
    (tmp_path / "folder").mkdir()
    paths = {"sudoers": str(tmp_path / "none"), "sshd_file": str(tmp_path / "none")}
    found = run(people_state, {"people": [], "keys_directory": str(tmp_path), **paths})
    assert (found["key_files"], found["foreign_key_files"]) == (["own"], ["folder", "other"])
    assert found["other_keys_files"] == ["/other/%u"]


def test_nothing_but_files_is_read_as_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * (people_state.LARGEST + 1))
    (tmp_path / "right").write_text("x")
    names = ("fifo", "large", "missing", "", "right")
    assert [people_state.read(str(tmp_path / name)) for name in names] == ["", "", "", "", "x"]


def test_root_opens_no_device_that_a_link_in_a_home_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open

    def noted(path: str, flags: int, *more: Any, **named: Any) -> int:
        opened.extend([] if flags & os.O_PATH else [path])
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr("builtins.open", lambda path, *_: opened.append(path))
    (tmp_path / "authorized_keys").symlink_to("/dev/null")
    assert people_state.read(str(tmp_path / "authorized_keys")) == ""
    assert opened == []


def test_a_mount_in_a_home_is_seen_and_that_of_a_neighbour_is_not() -> None:
    lines = ["/", "/home", "/home/ada/data", "/home/ada\\040b", "/home/adam", "/home/ada"]
    mountinfo = "".join(f"36 35 98:0 / {target} rw - ext4 /dev/sda rw\n" for target in lines)
    assert people_leave.mounts_below("/home/ada", mountinfo) == ["/home/ada", "/home/ada/data"]


def test_a_home_that_is_not_the_person_s_is_not_removed(tmp_path: Path) -> None:
    me = os.getuid()
    home = tmp_path / "ada"
    assert people_leave.home_fault("ada", str(home), me) == ""
    home.mkdir()
    assert people_leave.home_fault("ada", str(home), me) == ""
    assert "does not belong to ada" in people_leave.home_fault("ada", str(home), me + 1)
    (tmp_path / "link").symlink_to(home)
    assert "is not a directory" in people_leave.home_fault("ada", str(tmp_path / "link"), me)


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to mount")
def test_a_mount_at_a_path_that_is_not_utf8_does_not_stop_a_removal(tmp_path: Path) -> None:
    home, odd = tmp_path / "ada", f"{tmp_path}/\udcff\rx"
    home.mkdir()
    Path(odd).mkdir()
    script = (
        "import json, os, sys; from tests.roles import conftest; from roles.users.library import people_leave;"
        " from roles.facts.library import worker_facts; from ansible.module_utils.mount_points import read;"
        " mounted = worker_facts.mounts(read('/proc/self/mountinfo'));"
        " print(json.dumps([people_leave.home_fault('ada', sys.argv[1], os.getuid()),"
        " sum(each['target'].startswith(sys.argv[2]) for each in mounted)]))"
    )
    # In a namespace of its own: it goes with the process.
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', odd, sys.executable, "-c"]
    done = subprocess.run(
        [*command, script, str(home), str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == '["", 1]\n', done.stderr


def person(name: str, uid: int, home: Path | str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", str(home), "/bin/bash"))


@pytest.mark.parametrize("home", ["keep", "archive", "remove"])
def test_nobody_leaves_twice(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setattr("ansible.module_utils.homes.HOMES", str(tmp_path))
    arguments = {"people": [{"name": "nobodys", "home": home}], "archive_directory": str(tmp_path / "archives")}
    assert run(people_leave, arguments)["changed"] is False
    # Kept and closed when the person left.
    (tmp_path / "nobodys").mkdir(mode=0o700)
    assert run(people_leave, arguments, check=True)["changed"] is (home != "keep" and os.geteuid() == 0)


def test_nobody_is_removed_whose_number_or_home_is_another_s_as_well(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "ada"
    (home / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("ada")
    ada = person("ada", 2001, home)
    others = {
        "uid 2001 is also the uid of eve": person("eve", 2001, "/none"),
        "the home of eve": person("eve", 2002, home),
        f"{home}/below, the home of eve": person("eve", 2002, home / "below"),
        f"{tmp_path}/link, the home of eve": person("eve", 2002, tmp_path / "link"),
    }
    monkeypatch.setattr(pwd, "getpwnam", lambda _: ada)
    for fault, other in others.items():
        monkeypatch.setattr(pwd, "getpwall", lambda other=other: [ada, other])
        for wish in ("keep", "remove"):
            arguments = {"people": [{"name": "ada", "home": wish}], "archive_directory": str(tmp_path / "archives")}
            done = run(people_leave, arguments, check=True)
            assert fault in done["msg"]
            assert done["msg"].startswith("users_people: ada: state: absent is refused: ")
    aside = [ada, person("eve", 2002, tmp_path / "adam"), person("root", 0, "/"), person("bob", 2003, tmp_path)]
    assert people_leave.sharing_fault(ada, aside) == ""
    # Accounts without a home share the place where there is none.
    assert people_leave.sharing_fault(person("a", 1, "/none"), [person("b", 2, "/none")]) == ""


def test_a_home_in_useradds_place_with_an_unknown_uid_has_no_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "HOMES", str(tmp_path))
    for name in ("ada", "bob"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("ada")
    asked = [("ada", "ada"), ("ada", "bob"), ("link", "link"), ("gone", "gone")]
    assert [homes.ownerless(name, str(tmp_path / home)) for name, home in asked] == [False] * 4
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert [homes.ownerless(name, str(tmp_path / home)) for name, home in asked] == [True, False, False, False]


def test_an_archive_is_whole_or_not_there_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "chown", lambda *_: None)
    home, archives = tmp_path / "homes" / "ada", tmp_path / "archives"
    home.mkdir(parents=True)
    (home / "model").write_bytes(os.urandom(5000))
    (home / ".hidden").symlink_to("/etc/shadow")
    first = people_leave.archive("ada", str(home), str(archives))
    second = people_leave.archive("ada", str(home), str(archives))
    assert first != second
    with tarfile.open(second) as packed:
        assert sorted(packed.getnames()) == ["./ada", "./ada/.hidden", "./ada/model"]
    assert [path.stat().st_mode & 0o777 for path in (archives, Path(first))] == [0o700, 0o600]

    real = people_leave.tar

    def cut(*arguments: str) -> None:
        """Archive, and lose the end: what a full disk may do."""
        real(*arguments)
        if arguments[0] == "--create":
            os.truncate(arguments[arguments.index("--file") + 1], 3000)

    monkeypatch.setattr(people_leave, "tar", cut)
    with pytest.raises(people_leave.Fault, match="tar says"):
        people_leave.archive("ada", str(home), str(archives))
    assert sorted(path.name for path in archives.iterdir()) == sorted(Path(path).name for path in (first, second))
    assert (home / "model").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("wish", ["keep", "remove"])
def test_a_new_account_with_a_reused_uid_gets_no_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    home, runs = tmp_path / "home", tmp_path / "runs"
    for path, uid in ((home, 54321), (runs / "hers" / "files", 54321), (runs / "his" / "files", 54322)):
        path.mkdir(parents=True)
        path.chmod(0o755)
        os.chown(path, uid, uid)
    said: list[str] = []
    monkeypatch.setattr(people_leave, "command", lambda *words, **_: said.append(words[0]))
    monkeypatch.setattr(people_leave, "end_processes", lambda *_: None)
    monkeypatch.setattr(people_leave, "RUN_FILES", str(runs / "*" / "files"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: person(name, 54321, home))
    people_leave.leave("ada", wish, str(tmp_path / "archives"), 0)
    assert said[-1] == "userdel"
    found = {path: path.stat() for path in (home, *runs.glob("*/files")) if path.exists()}
    assert {str(path.relative_to(tmp_path)): (each.st_uid, each.st_mode & 0o777) for path, each in found.items()} == {
        **({"home": (0, 0o700)} if wish == "keep" else {}),
        "runs/hers/files": (0, 0o700),
        "runs/his/files": (54322, 0o755),
    }


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process as another user")
def test_processes_that_ignore_sigterm_end_as_well() -> None:
    # A number that no account has.
    uid = next(number for number in range(54321, 60000) if number not in {entry.pw_uid for entry in pwd.getpwall()})
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, user=uid, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.pid in people_leave.processes_of(uid)
        people_leave.end_processes(uid, patience=0.2)
        assert people_leave.processes_of(uid) == []
        assert process.wait(10) == -signal.SIGKILL


def test_only_processes_of_that_user_are_found(tmp_path: Path) -> None:
    for process, uid, state in (("1", "0\t0\t0\t0", "S"), ("7", "0\t0\t1005\t0", "S"), ("8", "1005\t1005\t0\t0", "Z")):
        (tmp_path / process).mkdir()
        (tmp_path / process / "status").write_text(f"Name:\tx\nState:\t{state} (x)\nUid:\t{uid}\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "self").mkdir()
    assert people_leave.processes_of(1005, str(tmp_path)) == [7]
