"""The program as a file: the same everywhere, and fit for the oldest Python that it meets."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tpu_ops.host import build

SOURCES = sorted(path for path in Path(build.__file__).parent.glob("*.py") if path.name != "build.py")
#: Newer than Python 3.8.
TOO_NEW = re.compile(
    r"\.removeprefix|\.removesuffix|pidfd_open|waitstatus_to_exitcode|functools\.cache\b|math\.lcm|process_group=|"
    r"\bgraphlib\b|zoneinfo|tomllib|ExceptionGroup|\.readlink\(\)|is_relative_to|strict=True"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_module_is_python_3_8_and_imports_only_the_standard_library(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text, str(path), feature_version=(3, 8))
    assert not TOO_NEW.search(text)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            assert {alias.name.split(".")[0] for alias in statement.names} <= sys.stdlib_module_names
        if isinstance(statement, ast.ImportFrom) and statement.level == 0:
            assert (statement.module or "").split(".")[0] in sys.stdlib_module_names
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
    done = ask(
        program, json.dumps({"marker": "0123456789", "protocol": 2, "action": "probe", "venv": sys.prefix}) + "\n"
    )
    answer = json.loads(done.stdout.split("\n0123456789\n")[1])["probe"]
    assert answer["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert answer["venv"]["exists"] is True
    assert re.fullmatch(r"[0-9a-f]{12}", answer["venv"]["digest"])
    assert answer["space"]["/"]["free"] > 0


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"action": "explode"}, "invalid"),
        ({"action": "start", "protocol": 99, "spec": {}}, "invalid"),
        ({"action": "follow", "protocol": 2, "run_id": "../../etc"}, "invalid"),
        ({"action": "status", "protocol": 2, "run_id": "a/b"}, "invalid"),
        ({"action": "follow", "protocol": 2, "run_id": "never-was"}, "missing"),
    ],
)
def test_wrong_requests_get_a_reason_and_no_traceback(tmp_path: Path, request_: dict[str, object], kind: str) -> None:
    program, _ = build.build(tmp_path)
    done = ask(program, json.dumps({"marker": "0123456789", **request_}) + "\n")
    error = json.loads(done.stdout.split("\n0123456789\n")[1])["error"]
    assert error["kind"] in {kind, "denied"}  # denied: where the tests do not run as root
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(("text", "argv"), [("", ()), ("hello\n", ()), ("{}\n", ("supervise",)), ("", ("a", "b", "c"))])
def test_what_is_no_call_ends_with_2_and_one_line(tmp_path: Path, text: str, argv: tuple[str, ...]) -> None:
    program, _ = build.build(tmp_path)
    done = ask(program, text, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tpu-host: ")
    assert done.stderr.count("\n") == 1
