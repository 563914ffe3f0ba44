from __future__ import annotations

import base64
import grp
import json
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roles.facts.action_plugins.managed_files import ActionModule, done
from roles.facts.library import managed_files, worker_facts
from roles.facts.module_utils import guarded_paths

Run = Callable[..., dict[str, Any]]

#: Tests are not always run by root.
SELF = {"owner": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}


@pytest.fixture
def keep(run: Run) -> Callable[..., dict[str, Any]]:
    """Keep entries that belong to whoever runs the test."""
    return lambda *files, **flags: run(managed_files, {"files": [SELF | file for file in files]}, **flags)


Keep = Callable[..., dict[str, Any]]


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Return every entry below a folder with its mode and content."""
    return {
        str(path.relative_to(folder)): (
            stat.S_IMODE(path.lstat().st_mode),
            str(path.readlink()) if path.is_symlink() else path.read_bytes().decode() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def nothing(_: Path) -> None:
    """Leave an empty folder."""


@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        (nothing, {"path": "a", "content": "x\n"}, {"a": (0o644, "x\n")}),
        (nothing, {"path": "a", "content": "é\r\n", "mode": "0440"}, {"a": (0o440, "é\r\n")}),
        (nothing, {"path": "d/e/a", "content": ""}, {"d": (0o755, ""), "d/e": (0o755, ""), "d/e/a": (0o644, "")}),
        (nothing, {"path": "d", "state": "directory", "mode": "1777"}, {"d": (0o1777, "")}),
        (nothing, {"path": "l", "state": "link", "target": "/etc"}, {"l": (0o777, "/etc")}),
        (lambda at: (at / "a").write_text("old"), {"path": "a", "content": "x"}, {"a": (0o644, "x")}),
        (lambda at: (at / "a").write_text("old"), {"path": "a", "content": "x", "once": True}, {"a": (0o644, "old")}),
        (lambda at: (at / "a").write_text("own"), {"path": "a", "mode": "0600"}, {"a": (0o600, "own")}),
        (lambda at: (at / "a").write_text("old"), {"path": "a", "state": "absent"}, {}),
        (lambda at: (at / "a").write_text("# m\nx"), {"path": "a", "state": "absent", "begins": "# m\n"}, {}),
        (
            lambda at: (at / "a").write_text("own\n# m\n"),
            {"path": "a", "state": "absent", "begins": "# m\n"},
            {"a": (0o644, "own\n# m\n")},
        ),
        (
            lambda at: (at / "a").symlink_to("# m"),
            {"path": "a", "state": "absent", "begins": "# m"},
            {"a": (0o777, "# m")},
        ),
        (nothing, {"path": "a", "state": "absent", "begins": "# m\n"}, {}),
        (lambda at: (at / "d").mkdir(), {"path": "d", "state": "absent"}, {}),
        (lambda at: (at / "d").mkdir(0o700), {"path": "d", "state": "directory"}, {"d": (0o755, "")}),
        (lambda at: (at / "a").symlink_to("/etc/hostname"), {"path": "a", "content": "x"}, {"a": (0o644, "x")}),
        (
            lambda at: (at / "l").symlink_to("/usr"),
            {"path": "l", "state": "link", "target": "/etc"},
            {"l": (0o777, "/etc")},
        ),
        (
            lambda at: (at / "l").write_text("x"),
            {"path": "l", "state": "link", "target": "/etc"},
            {"l": (0o777, "/etc")},
        ),
        (
            lambda at: (at / "a").write_text("one"),
            {"path": "a", "state": "block", "content": "two\n"},
            {"a": (0o644, "one\n# BEGIN tpu_ops\ntwo\n# END tpu_ops\n")},
        ),
        (
            lambda at: (at / "a").write_text("one\n# BEGIN tpu_ops\ntwo\n# END tpu_ops\nthree\n"),
            {"path": "a", "state": "block", "content": r"\1"},
            {"a": (0o644, "one\n# BEGIN tpu_ops\n\\1\n# END tpu_ops\nthree\n")},
        ),
        (
            lambda at: (at / "a").write_text("one\n# BEGIN tpu_ops\ntwo\n# END tpu_ops\nthree\n"),
            {"path": "a", "state": "block", "content": ""},
            {"a": (0o644, "one\nthree\n")},
        ),
        (nothing, {"path": "a", "state": "block", "content": ""}, {}),
        (
            lambda at: ((at / "a").write_text("own\n"), (at / "a").chmod(0o600)),
            {"path": "a", "state": "block", "content": ""},
            {"a": (0o600, "own\n")},
        ),
        (
            lambda at: ((at / "a").write_text("own\n"), (at / "a").chmod(0o640)),
            {"path": "a", "state": "block", "content": "x"},
            {"a": (0o640, "own\n# BEGIN tpu_ops\nx\n# END tpu_ops\n")},
        ),
        (
            lambda at: ((at / "a").write_text("own\n"), (at / "a").chmod(0o640)),
            {"path": "a", "state": "block", "content": "x", "mode": "0604"},
            {"a": (0o604, "own\n# BEGIN tpu_ops\nx\n# END tpu_ops\n")},
        ),
        (
            lambda at: (at / "a").symlink_to("none"),
            {"path": "a", "state": "block", "content": ""},
            {"a": (0o777, "none")},
        ),
        (lambda at: (at / "a").mkdir(0o755), {"path": "a", "state": "block", "content": ""}, {"a": (0o755, "")}),
    ],
)
def test_an_entry_is_made_once_and_check_mode_says_so_before(
    keep: Keep, tmp_path: Path, before: Callable[[Path], Any], entry: dict[str, Any], after: dict[str, Any]
) -> None:
    before(tmp_path)
    wanted = entry | {"path": str(tmp_path / entry["path"])}
    start = snapshot(tmp_path)
    checked = keep(wanted, check=True)
    assert snapshot(tmp_path) == start
    done = keep(wanted)
    assert snapshot(tmp_path) == after
    assert (checked["changed"], checked["diff"]) == (done["changed"], done["diff"])
    assert done["changed"] is (start != after)
    assert done["changed_paths"] == ([wanted["path"]] if start != after else [])
    again = keep(wanted)
    assert (again["changed"], again["diff"]) == (False, [])


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"path": "relative", "content": ""}, "relative: the path is not absolute"),
        ({"path": "{}/a"}, "the file does not exist, and the entry has no content"),
        ({"path": "{}/dir", "content": "x"}, "the path is a directory"),
        ({"path": "{}/dir", "state": "absent"}, "not empty; move its files away"),
        ({"path": "{}/file", "state": "directory"}, "is not a directory; move away what exists there"),
        ({"path": "{}/file/a", "content": "x"}, "it is not a directory; move it away"),
        ({"path": "{}/a", "content": "x", "mode": "rw"}, "is not octal"),
        ({"path": "{}/a", "content": "x", "begins": "y"}, "begins can only be used with the state absent"),
        ({"path": "{}/a", "content": "x", "owner": "nobody-here"}, "there is no owner nobody-here"),
        ({"path": "{}/a", "state": "link"}, "target must be given for the state link, and for no other state"),
        ({"path": "{}/a", "state": "link", "target": "/none"}, "its target /none is missing"),
        ({"path": "{}/a", "content": "x", "validate": "grep -q good %s"}, "grep rejects it"),
        ({"path": "{}/a", "content": "x", "validate": "/none/visudo -cf %s"}, "which checks it, is missing"),
        (
            {"path": "{}/shared/link/a", "content": "x"},
            "a symbolic link in a place where others than root can create one",
        ),
        (
            {"path": "{}/shared/link", "state": "directory"},
            "a symbolic link in a place where others than root can create one",
        ),
        ({"path": "{}/shared/new/a", "content": "x"}, "root does not create it where others can write"),
        ({"path": "{}/loop/a", "content": "x"}, "too many symbolic links"),
    ],
)
def test_an_impossible_entry_is_refused_before_anything_changes(
    keep: Keep, tmp_path: Path, entry: dict[str, Any], fault: str
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "link").symlink_to("/etc")
    (tmp_path / "shared").chmod(0o1777)
    start = snapshot(tmp_path)
    entry = entry | {"path": entry["path"].replace("{}", str(tmp_path))}
    result = keep({"path": str(tmp_path / "first"), "content": "x"}, entry)
    assert fault in result["msg"]
    assert snapshot(tmp_path) == start


def test_links_that_only_root_can_have_put_are_followed(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "way").symlink_to("real")
    keep({"path": str(tmp_path / "way" / "a"), "content": "x"}, {"path": str(tmp_path / "way"), "state": "directory"})
    assert snapshot(tmp_path) == {"real": (0o755, ""), "real/a": (0o644, "x"), "way": (0o777, "real")}


BLOCKED = {"state": "block", "content": "x\n"}
WITH_BLOCK = "mine\n# BEGIN tpu_ops\nx\n# END tpu_ops\n"


@pytest.mark.parametrize("target", ["own/rc", "../{}/own/rc", "second", "way/rc"])
def test_a_block_goes_into_the_file_that_a_link_leads_to(keep: Keep, tmp_path: Path, target: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rc").write_text("mine\n")
    (tmp_path / "second").symlink_to(tmp_path / "own" / "rc")
    (tmp_path / "way").symlink_to("own")
    link = tmp_path / "rc"
    link.symlink_to(target.format(tmp_path.name))
    entry = SELF | BLOCKED | {"path": str(link)}
    assert not done(entry, worker_facts.entries([str(link)]))
    checked = keep(entry, check=True)
    assert (link.is_symlink(), link.read_text(), checked["changed"]) == (True, "mine\n", True)
    assert checked["diff"][0]["after_header"].startswith(f"{link} -> {tmp_path}/own/rc ")
    assert keep(entry)["changed"] is True
    assert (link.is_symlink(), (tmp_path / "own" / "rc").read_text()) == (True, WITH_BLOCK)
    assert keep(entry)["changed"] is False
    assert keep(entry | {"content": ""})["changed"] is True
    assert (link.is_symlink(), link.read_text()) == (True, "mine\n")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("none", "the path is a link to none, which is missing; create that file, or remove the link"),
        ("none/rc", "the path is a link to none/rc, which is missing"),
        ("dir", "the path is a link to dir, which is not a file; remove the link"),
        ("rc", "too many symbolic links"),
        (
            "open/rc",
            "the path is a link to open/rc, which others than root can change; replace the link with the file itself",
        ),
        ("open/new", "the path is a link to open/new, which is missing"),
        ("open/dir/rc", "which others than root can change"),
        ("writable", "which others than root can change"),
        ("open/way/rc", "a symbolic link in a place where others than root can create one"),
    ],
)
def test_a_block_behind_a_dangling_or_unsafe_link_is_refused(
    keep: Keep, tmp_path: Path, target: str, fault: str, check: bool
) -> None:
    for folder in ("dir", "open/dir"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("dir/rc", "open/rc", "open/dir/rc", "writable"):
        (tmp_path / name).write_text("mine\n")
    (tmp_path / "open" / "way").symlink_to("../dir")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "writable").chmod(0o666)
    (tmp_path / "rc").symlink_to(target)
    start = snapshot(tmp_path)
    message = keep(BLOCKED | {"path": str(tmp_path / "rc")}, check=check)["msg"]
    assert message.startswith(f"{tmp_path}/rc: ")
    assert fault in message
    assert snapshot(tmp_path) == start


@pytest.mark.parametrize("content", ["SSL_CERT_FILE=/y", ""])
@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("A=1\n# BEGIN tpu_ops\nSSL_CERT_FILE=/x\nB=2\n", 2),
        ("# BEGIN tpu_ops\nx\n# END tpu_ops\nA=1\n# BEGIN tpu_ops\nB=2\n", 5),
        ("# BEGIN tpu_ops\nB=2\n# BEGIN tpu_ops\nx\n# END tpu_ops\n", 1),
    ],
)
def test_a_block_that_does_not_end_costs_nobody_a_line(
    keep: Keep, tmp_path: Path, before: str, line: int, content: str
) -> None:
    path = tmp_path / "environment"
    path.write_text(before)
    entry = {"path": str(path), "state": "block", "content": content}
    assert not done(SELF | entry, worker_facts.entries([str(path)]))
    message = keep(entry)["msg"]
    assert message.startswith(f"{path}: line {line}, # BEGIN tpu_ops, has no # END tpu_ops after it; add that line")
    assert path.read_text() == before


def test_a_block_leaves_the_file_to_whom_it_belongs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text("A=1\n")
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    owned = path.stat()
    entry = {"path": str(path), "state": "block", "content": "B=2"}
    assert run(managed_files, {"files": [entry]})["changed"] is True
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode) == (owned.st_uid, owned.st_gid, owned.st_mode)
    assert done(entry, worker_facts.entries([str(path)]))
    assert not done(entry | {"mode": "0644"}, worker_facts.entries([str(path)]))


def test_a_place_in_a_sticky_directory_is_guarded_once_root_has_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / "rc").touch()
    found = [guarded_paths.guarded_way(str(tmp_path / name)) for name in ("shared", "shared/none", "shared/rc")]
    assert found == [False, False, True]


def test_entries_are_made_in_order_and_several_at_once(keep: Keep, tmp_path: Path) -> None:
    files = [
        {"path": str(tmp_path / "d"), "state": "directory", "mode": "0700"},
        {"path": str(tmp_path / "d" / "program"), "content": "x", "mode": "0755", "validate": "grep -q x %s"},
        {"path": str(tmp_path / "link"), "state": "link", "target": str(tmp_path / "d" / "program")},
    ]
    assert keep(*files, check=True)["changed_paths"] == [file["path"] for file in files]
    assert keep(*files)["changed_paths"] == [file["path"] for file in files]
    (tmp_path / "d" / "program").write_text("drifted")
    result = keep(*files, check=True)
    assert result["changed_paths"] == [str(tmp_path / "d" / "program")], result


def test_another_file_in_a_shared_directory_keeps_its_owner(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x")
    (tmp_path / "shared").mkdir(0o777)
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "shared" / "a").hardlink_to(tmp_path / "theirs")
    assert "other hard links" in keep({"path": str(tmp_path / "shared" / "a"), "mode": "0666"})["msg"]
    keep({"path": str(tmp_path / "shared" / "a"), "content": "y"})
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "shared" / "a").read_text()) == ("x", "y")


def test_check_mode_accepts_owners_and_validators_that_are_yet_to_come(keep: Keep, tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "a"), "content": "x", "owner": "ada-to-come", "validate": "/none/check %s"}
    kept = {"path": str(tmp_path / "copied"), "mode": "0755"}
    assert keep(entry, kept, check=True)["changed_paths"] == [entry["path"], kept["path"]]


def test_secrets_are_in_no_diff_and_need_no_log(run: Run, tmp_path: Path) -> None:
    entry = SELF | {"path": str(tmp_path / "token"), "content": "hunter2hunter2", "mode": "0600"}
    assert "no_log: true" in run(managed_files, {"files": [entry], "secret": True})["msg"]
    result = run(managed_files, {"files": [entry], "secret": True}, no_log=True)
    assert (result["changed"], result["diff"]) == (True, [])
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_the_diff_of_a_block_has_no_lines_of_others(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("API_KEY=hunter2\n# BEGIN tpu_ops\nA=1\n# END tpu_ops\nTOKEN=hunter3\n")
    entry = {"path": str(tmp_path / "environment"), "state": "block", "content": "A=2"}
    for check in (True, False):
        diff = keep(entry, check=check)["diff"][0]
        assert (diff["before"], diff["after"]) == ("A=1\n", "A=2\n")
    assert "TOKEN=hunter3\n" in (tmp_path / "environment").read_text()


def test_the_diff_has_no_login_of_an_address_and_the_file_has_it(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "conf").write_text("old=https://ada:hunter2@index.test/simple\n")
    new = "url = https://eve:hunter3@index.test/simple\nplain = https://index.test/@scope\nmail = a@b.test\n"
    diff = keep({"path": str(tmp_path / "conf"), "content": new})["diff"][0]
    assert diff["before"] == "old=https://***@index.test/simple\n"
    assert diff["after"] == new.replace("eve:hunter3", "***")
    assert (tmp_path / "conf").read_text() == new


def test_a_failure_on_the_way_names_what_was_done(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fchmod

    def full(handle: int, mode: int) -> None:
        if mode == 0o600:
            raise OSError(28, "No space left on device")
        real(handle, mode)

    monkeypatch.setattr(os, "fchmod", full)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    result = keep({"path": paths[0], "content": "x"}, {"path": paths[1], "content": "y", "mode": "0600"})
    assert "No space left" in result["msg"]
    assert (result["changed"], result["changed_paths"]) == (True, [paths[0]])
    assert snapshot(tmp_path) == {"a": (0o644, "x")}


def test_binary_content_is_written_unchanged_and_not_shown(keep: Keep, tmp_path: Path) -> None:
    data = bytes(range(256))
    entry = {"path": str(tmp_path / "program"), "base64": base64.b64encode(data).decode(), "mode": "0755"}
    result = keep(entry)
    assert "not text" in result["diff"][0]["after"]
    # Ansible refuses an answer with anything else in it.
    assert json.dumps(result, ensure_ascii=False).encode()
    assert (tmp_path / "program").read_bytes() == data
    assert keep(entry)["changed"] is False


BLOCK = "one\n# BEGIN tpu_ops\nx\n# END tpu_ops\n"
KEPT: list[dict[str, Any]] = [
    {"path": "a", "content": "é\r\n", "mode": "0640"},
    {"path": "a", "base64": base64.b64encode(bytes(range(256))).decode(), "mode": "755"},
    {"path": "a", "mode": "0600"},
    {"path": "a", "content": "x", "once": True},
    {"path": "a", "state": "block", "content": "x\n"},
    {"path": "a", "state": "block", "content": ""},
    {"path": "a", "state": "directory"},
    {"path": "a", "state": "link", "target": "/etc"},
    {"path": "a", "state": "absent"},
    {"path": "a", "state": "absent", "begins": "# m\n"},
]
DRIFTS: dict[str, Callable[[Path], Any]] = {
    "as it was": nothing,
    "content": lambda path: path.write_text("drifted") if path.is_file() else None,
    "mode": lambda path: path.chmod(0o604) if path.exists() and not path.is_symlink() else None,
    "gone": lambda path: shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True),
    "a block": lambda path: path.write_text(BLOCK) if path.is_file() or not path.exists() else None,
    "another block": lambda path: path.write_text(BLOCK.replace("x", "y")) if path.is_file() else None,
    "a block cut off": lambda path: path.write_text(BLOCK[:-1]) if path.is_file() else None,
    "two blocks": lambda path: path.write_text(BLOCK + BLOCK) if path.is_file() else None,
    "a link": lambda path: path.rename(f"{path}2").with_name("a").symlink_to(f"{path}2") if path.exists() else None,
}


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: f"{entry.get('state', 'file')} {'-'.join(entry)}")
def test_a_skipped_entry_is_one_that_the_module_would_not_change(
    keep: Keep, tmp_path: Path, entry: dict[str, Any], drift: str
) -> None:
    path = tmp_path / "a"
    wanted = SELF | entry | {"path": str(path)}
    if "content" not in entry and entry.get("state", "file") == "file":
        path.write_text("own")
    keep(wanted)
    DRIFTS[drift](path)
    files = worker_facts.entries([str(path)])
    skipped = done(wanted, files)
    found = keep(wanted, check=True)
    assert not (skipped and (found.get("failed") or found["changed"]))
    assert skipped or drift != "as it was"
    for key in {"owner", "group"} & files[str(path)].keys():
        assert not done(wanted, {str(path): files[str(path)] | {key: "somebody"}})


def test_the_module_is_executed_where_something_differs_or_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []

    def execute(*_: Any, **given: Any) -> dict[str, Any]:
        executed.append(given)
        return {"changed": True}

    monkeypatch.setattr(ActionModule, "_execute_module", execute)
    listed: dict[str, Any] = {"files": [{"path": "/a", "state": "absent"}, {"path": "/b", "state": "absent"}]}

    def result(files: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        task = SimpleNamespace(args=arguments, async_val=0, check_mode=False, action="managed_files")
        connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=None))
        action = ActionModule(task, connection, SimpleNamespace(), None, None, None)
        found: dict[str, Any] = action.run(task_vars={"ansible_facts": {"worker": {"files": files}}})
        return found

    skipped = result({"/a": {}, "/b": {}}, listed)
    assert (skipped["skipped"], skipped["changed"], skipped["changed_paths"], executed) == (True, False, [], [])
    for files, arguments in (
        ({"/a": {}, "/b": {"state": "other"}}, listed),
        ({"/a": {}}, listed),
        ({"/a": {}}, {"files": [{"state": "absent"}]}),
        ({"/a": {}}, {}),
    ):
        assert result(files, arguments) == {"changed": True}
    assert len(executed) == 4
