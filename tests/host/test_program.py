"""The program as a file: equal on all machines, and valid for the oldest Python on workers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_ops import host, protocol
from tpu_ops.host import build
from tpu_ops.host import compiled as compiled_copy
from tpu_ops.protocol.wire import PROTOCOL
from tpu_ops.runs import bucket_probe, project_environment, synced

FOLDERS = [Path(*package.__path__) for package in (host, protocol)]
SOURCES = sorted(path for folder in FOLDERS for path in folder.glob("*.py") if path.name != "build.py")
#: Newer than Python 3.8.
TOO_NEW = re.compile(
    r"\.removeprefix|\.removesuffix|pidfd_open|waitstatus_to_exitcode|functools\.cache\b|math\.lcm|process_group=|"
    r"\bgraphlib\b|zoneinfo|tomllib|ExceptionGroup|\.readlink\(\)|is_relative_to|strict=True"
)


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *(Path(str(each.__file__)) for each in (synced, bucket_probe, project_environment))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_every_module_is_python_3_8_and_imports_only_the_standard_library(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text, str(path), feature_version=(3, 8))
    assert not TOO_NEW.search(text)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            assert {alias.name.split(".")[0] for alias in statement.names} <= sys.stdlib_module_names
        if isinstance(statement, ast.ImportFrom) and statement.level == 0:
            package = ".".join((statement.module or "").split(".")[:2])
            assert package == protocol.__name__ or package.split(".")[0] in sys.stdlib_module_names
    evaluated = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node in tree.body]
    for node in evaluated:
        assert not re.search(r"\b(dict|list|set|tuple)\[|\|", ast.unparse(node.annotation)), "evaluated by 3.8"


def test_the_build_is_the_same_again_and_kept(tmp_path: Path) -> None:
    path, digest = build.build(tmp_path)
    before = path.stat().st_mtime_ns
    assert build.build(tmp_path) == (path, digest)
    assert path.stat().st_mtime_ns == before
    assert path.parent.name == digest
    path.write_bytes(b"damaged")
    assert build.build(tmp_path)[0].read_bytes() == build.archive()
    assert {info.date_time for info in zipfile.ZipFile(path).infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_the_command_prints_one_line_of_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tpu_ops.host.build"],
        capture_output=True,
        text=True,
        check=True,
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    said = json.loads(done.stdout)
    assert Path(said["path"]).read_bytes().startswith(b"#!/usr/bin/python3 -IS\n")
    assert Path(said["path"]) == tmp_path / "tpu_ops" / "host" / said["digest"] / "tpu-host"


def ask(program: Path, text: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", str(program), *argv]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


def test_the_built_program_describes_this_host(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    request = {"marker": "0123456789", "protocol": PROTOCOL, "action": "probe", "venv": sys.prefix}
    done = ask(program, json.dumps(request) + "\n")
    answer = json.loads(done.stdout.split("\n0123456789\n")[1])["probe"]
    assert answer["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert answer["venv"]["exists"] is True
    assert re.fullmatch(r"[0-9a-f]{12}", answer["venv"]["digest"])
    assert answer["space"]["/"]["free"] > 0


def test_the_built_program_tells_who_has_used_this_host(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    done = ask(program, json.dumps({"marker": "0123456789", "protocol": PROTOCOL, "action": "activity"}) + "\n")
    answer = json.loads(done.stdout.split("\n0123456789\n")[1])
    if os.geteuid() == 0:
        assert answer.keys() == {"ok", "clock", "signs", "unknown"}
    else:
        assert answer["error"]["kind"] == "denied"


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"action": "explode"}, "invalid"),
        ({"action": "start", "protocol": 99, "spec": {}}, "invalid"),
        ({"action": "follow", "protocol": PROTOCOL, "run_id": "../../etc"}, "invalid"),
        ({"action": "status", "protocol": PROTOCOL, "run_id": "a/b"}, "invalid"),
        ({"action": "follow", "protocol": PROTOCOL, "run_id": "never-was"}, "missing"),
    ],
)
def test_wrong_requests_get_a_reason_and_no_traceback(tmp_path: Path, request_: dict[str, object], kind: str) -> None:
    program, _ = build.build(tmp_path)
    done = ask(program, json.dumps({"marker": "0123456789", **request_}) + "\n")
    error = json.loads(done.stdout.split("\n0123456789\n")[1])["error"]
    assert error["kind"] in {kind, "denied"}  # denied: where the tests do not run as root
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(("text", "argv"), [("", ()), ("hello\n", ()), ("{}\n", ("supervise",)), ("", ("a", "b", "c"))])
def test_an_invalid_call_exits_with_2_and_one_line(tmp_path: Path, text: str, argv: tuple[str, ...]) -> None:
    program, _ = build.build(tmp_path)
    done = ask(program, text, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tpu-host: ")
    assert done.stderr.count("\n") == 1


def compiled(program: Path) -> Path:
    """Return the compiled copy, made where it is missing."""
    done = ask(program, "", "compile")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return program.with_name(f"tpu-host.{sys.implementation.cache_tag}.zip")


def rewritten(archive: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Change the members of an archive."""
    with zipfile.ZipFile(archive) as file:
        members = {info: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(archive, "w") as file:
        for info, data in members.items():
            file.writestr(info, change(info.filename, data))


def answered(program: Path) -> bool:
    """Return whether a program answers a request."""
    done = ask(program, json.dumps({"marker": "0123456789", "action": "explode"}) + "\n")
    return "unknown action" in done.stdout


def test_the_compiled_copy_is_taken_and_nothing_is_compiled_again(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    copy = compiled(program)
    assert copy.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in program.parent.iterdir()) == sorted([program.name, copy.name])
    rewritten(program, lambda name, data: data if name == "__main__.py" else b"no Python")
    assert answered(program)
    rewritten(copy, lambda name, data: b"no Python" if name.endswith(".py") else data)
    assert answered(program)
    rewritten(copy, lambda name, data: b"none" if name.endswith("host/main.pyc") else data)
    assert not answered(program)


def test_a_python_that_the_copy_is_not_made_for_does_without(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    copy = compiled(program)
    copy.rename(copy.with_name("tpu-host.cpython-38.zip")).write_bytes(b"of another Python")
    assert answered(program)
    # The same name, as of a Python before its release: its sources are taken.
    copy = compiled(program)
    rewritten(copy, lambda name, data: b"\0" * 4 + data[4:] if name.endswith(".pyc") else data)
    assert answered(program)


@pytest.mark.parametrize("size", [0, 200_000])
def test_a_copy_that_a_crash_has_cut_off_is_done_without(tmp_path: Path, size: int) -> None:
    program, _ = build.build(tmp_path)
    copy = compiled(program)
    assert copy.stat().st_size > size
    os.truncate(copy, size)
    assert answered(program)


def test_a_compiled_copy_that_is_there_stays_since_it_may_be_in_use(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    before, after = (compiled(program).stat() for _ in range(2))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_traceback_of_the_compiled_copy_shows_the_lines(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    compiled(program)
    run = "import sys, traceback; sys.path.insert(0, sys.argv[1]); from tpu_ops.protocol import wire\n"
    run += "try: wire.parse_request(None)\nexcept AttributeError: print(traceback.format_exc())"
    copy = compiled(program)
    done = subprocess.run([sys.executable, "-IS", "-c", run, copy], capture_output=True, text=True, check=True)
    assert 'json.loads(line.decode("utf-8"))' in done.stdout


def test_a_compiled_copy_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = build.build(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(OSError, match="No space"):
        compiled_copy.write(str(program), str(tmp_path / "copy"))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_copy_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    program, _ = build.build(tmp_path)
    # Its name would be too long.
    program = program.rename(program.with_name("x" * 240))
    done = ask(program, "", "compile")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"cannot write {program}" in done.stderr


@pytest.mark.parametrize("redirection", ["", "2>&-", "2>/dev/full"])
def test_an_answer_is_one_whatever_becomes_of_standard_error(tmp_path: Path, redirection: str) -> None:
    program, _ = build.build(tmp_path)
    words = ["sh", "-c", f'exec "$0" -IS "$1" {redirection}', sys.executable, str(program)]
    request = json.dumps({"marker": "0123456789", "action": "explode"}) + "\n"
    done = subprocess.run(words, input=request, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "unknown action" in done.stdout) == (0, True), done.stderr
