"""The module that runs a script on a worker as a training run would."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

from tests.support.fleet import ROOT
from tpu_ops.host.build import archive

spec = importlib.util.spec_from_file_location("slice_worker", ROOT / "playbooks" / "library" / "slice_worker.py")
assert spec
assert spec.loader
slice_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slice_worker)


def run(script: str, timeout: float = 20, **variables: str):
    return slice_worker.run([sys.executable, "-I", "-c", script, "{}"], {"PATH": "/usr/bin:/bin", **variables}, timeout)


def test_the_last_line_is_the_report():
    assert run("print('noise'); print('{\"devices\": 8}')") == ({"devices": 8}, "")


def test_only_the_variables_of_a_run_reach_the_script():
    script = "import json, os; print(json.dumps(sorted(set(os.environ) - {'LC_CTYPE'})))"
    assert run(script, TPU_WORKER_ID="1") == (["PATH", "TPU_WORKER_ID"], "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('one', 'two', file=sys.stderr); sys.exit(3)", "exited with 3: one two"),
        ("raise RuntimeError('no chips')", "RuntimeError: no chips"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "exited with -6: no message"),
        ("pass", "printed no result"),
        ("print('{')", "printed no result"),
    ],
)
def test_a_failed_script_is_reported_with_the_reason(script, words):
    report, fault = run(script)
    assert report == {}
    assert words in fault


def test_a_python_that_is_not_there_is_a_fault():
    assert (
        slice_worker.run(["/nowhere/python"], {}, 1)[1]
        == "/nowhere/python: No such file or directory; site.yml installs it"
    )


def test_a_script_that_waits_too_long_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(slice_worker, "GRACE", 0.2)
    note = tmp_path / "pid"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    script = (
        "import pathlib, subprocess, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"started = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(started.pid))\n"
        "print('waiting for worker 3', file=sys.stderr, flush=True)\n"
        "time.sleep(600)"
    )
    report, fault = run(script, timeout=3)
    assert (report, fault) == ({}, "the script did not end within 3 s and was terminated: waiting for worker 3")
    assert gone(int(note.read_text()))


def gone(pid: int) -> bool:
    """Return whether a process ends within seconds; what nobody has collected yet counts as gone."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_only_files_of_the_calling_person_are_removed(tmp_path, monkeypatch):
    mine, missing, others = tmp_path / "mine", tmp_path / "missing", tmp_path / "others"
    mine.touch()
    slice_worker.remove_own([str(mine), str(missing)])
    others.touch()
    me = os.getuid()
    monkeypatch.setattr(slice_worker.os, "getuid", lambda: me + 1)
    slice_worker.remove_own([str(others)])
    assert list(tmp_path.iterdir()) == [others]


def test_the_environment_is_that_of_the_launcher(tmp_path, monkeypatch):
    program, variables = tmp_path / "tpu-host", tmp_path / "environment"
    program.write_bytes(archive())
    variables.write_text("TPU_WORKER_ID=1\n")
    config = {"venv": "/opt/venvs/other", "environment_files": [str(variables)]}
    monkeypatch.setattr("tpu_ops.host.environment.load_config", lambda: config)
    monkeypatch.setenv("LD_PRELOAD_OF_SOMEBODY", "x")
    found = slice_worker.environment(str(program))
    assert found["TPU_WORKER_ID"] == "1"
    assert found["PATH"].startswith("/opt/venvs/other/bin:")
    assert sorted(found) == ["HOME", "LANG", "LOGNAME", "PATH", "TPU_WORKER_ID", "USER", "VIRTUAL_ENV"]
    alone = slice_worker.environment(str(program), alone=True)
    none = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
    assert alone == found | dict.fromkeys(none, "")
    variables.unlink()
    with pytest.raises(slice_worker.CannotRunError, match=str(variables)):
        slice_worker.environment(str(program))


@pytest.mark.parametrize(("index", "alone"), [(None, False), (0, True), (3, True)])
def test_a_slice_that_is_one_of_several_is_verified_alone(index, alone):
    (play,) = yaml.safe_load((ROOT / "playbooks" / "verify.yml").read_text())
    (started,) = (task["slice_worker"] for task in play["tasks"] if "slice_worker" in task)
    assert NativeEnvironment().from_string(started["alone"]).render(tpu_slice_index=index) is alone


def test_the_built_launcher_can_be_imported_from(tmp_path):
    """In a process of its own, where no other tpu_ops is at hand."""
    program = tmp_path / "tpu-host"
    program.write_bytes(archive())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tpu_ops.host import environment as e;"
        "print(e.load_config('/nowhere')['venv'] == '', e.__file__.startswith(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, program], capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", done.stderr


def test_a_worker_without_launcher_is_a_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "tpu_ops.host.environment", None)
    before = list(sys.path)
    with pytest.raises(slice_worker.CannotRunError, match="the launcher /nowhere/tpu-host cannot be imported"):
        slice_worker.environment("/nowhere/tpu-host")
    assert sys.path == before
