"""Environments are inspected, filled, repaired and resolved with a stand-in for uv."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from roles.facts.module_utils import active_run, turns
from roles.python.library import uv_environments
from roles.python.module_utils import environment_state, environment_work
from roles.python.module_utils.uv_program import Fault, Uv, plan_lines
from tests.roles.conftest import Run
from tests.support.environments import UV, by_hand, more, site, state
from tpu_ops.host import fitness, probe, unit
from tpu_ops.protocol import installed_packages


def test_an_environment_is_made_once_and_then_only_looked_at(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    checked = run(uv_environments, arguments, check=True)
    assert (checked["changed"], state(checked)["plan"]) == (True, ["+ jax==1"])
    assert not (tmp_path / "venv").exists()
    made = run(uv_environments, arguments)
    assert (made["changed"], state(made)["packages"]) == (True, {"jax": "1"})
    again = run(uv_environments, arguments)
    assert (again["changed"], state(again)["digest"]) == (False, state(made)["digest"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum(call.startswith("pip install") and "--dry-run" not in call for call in calls) == 1
    wider = more(arguments, requirements=["jax==1", "flax==2"])
    assert state(run(uv_environments, wider, check=True))["plan"] == ["+ flax==2"]
    assert state(run(uv_environments, wider))["packages"] == {"flax": "2", "jax": "1"}


@pytest.fixture
def systemd_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have systemctl, from now on, show this of any unit."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/shown\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    def show(text: str) -> None:
        (tmp_path / "shown").write_text(text)

    return show


ACTIVE = "ActiveState=active\nDescription=tpu_ops run spring-7\n"


def test_an_environment_is_not_changed_under_a_run(
    run: Run, tmp_path: Path, arguments: dict[str, Any], systemd_shows: Callable[[str], None]
) -> None:
    systemd_shows(ACTIVE)
    made = run(uv_environments, arguments)
    assert state(made)["packages"] == {"jax": "1"}  # a new one is nobody's yet
    assert run(uv_environments, arguments)["changed"] is False
    assert not (tmp_path / "asked").exists()

    fresh = arguments["environments"][0] | {"name": "fresh", "path": str(tmp_path / "fresh")}
    wider = more(arguments, requirements=["jax==1", "flax==2"])
    wider["environments"].insert(0, fresh)
    reason = "environment jax: not changed, since the run spring-7 is active on this worker"
    refused = run(uv_environments, wider)
    assert refused["failed"] is True
    assert refused["msg"].startswith(reason)
    assert "end it with `tpu_ops stop`, or set python_fill_during_runs: true" in refused["msg"]
    assert not (tmp_path / "fresh").exists()
    assert installed_packages.packages(str(tmp_path / "venv")) == {"jax": "1"}

    checked = run(uv_environments, wider, check=True)
    assert (checked["changed"], state(checked)["plan"]) == (True, ["+ flax==2"])
    assert reason in str(checked["warnings"])

    allowed = run(uv_environments, wider | {"during_runs": True})
    assert state(allowed)["packages"] == {"flax": "2", "jax": "1"}
    assert (tmp_path / "fresh").exists()


def test_no_run_starts_while_an_environment_that_exists_is_changed(
    run: Run,
    tmp_path: Path,
    arguments: dict[str, Any],
    systemd_shows: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    systemd_shows("ActiveState=inactive\n")
    fill, asked, seen = environment_work.Environment.fill, active_run.active_run, list[list[dict[str, Any]]]()

    def look(work: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any) -> Any:
            seen.append(fitness.changes(turns.DIRECTORY))
            return work(*args)

        return looked

    monkeypatch.setattr("ansible.module_utils.environment_work.Environment.fill", look(fill))
    monkeypatch.setattr(uv_environments, "active_run", look(asked))
    run(uv_environments, arguments)
    assert seen == [[]], "a new one is nobody's yet"
    assert run(uv_environments, more(arguments, requirements=["jax==1", "flax==2"]))["changed"] is True
    # Before it looks for a run: whoever starts one at that moment sees this, or is seen.
    asking, filling = seen[1:]
    assert [change["changing"] for change in (*asking, *filling)] == [[str(tmp_path / "venv")]] * 2
    nothing: dict[str, Any] = {"venv": {"path": ""}, "environment_files": {}, "chips": [], "holders": [], "space": {}}
    (fault,) = fitness.faults(nothing | {"changes": asking}, 0)
    assert f" has been changing {tmp_path}/venv since " in fault["problem"]
    assert fault["fix"] == f"wait until the change has ended (pid {os.getpid()}), and start again"
    assert fitness.changes(turns.DIRECTORY) == [], "both have ended"


def test_an_environment_that_is_to_be_recreated_is_kept_under_a_run(
    run: Run, tmp_path: Path, arguments: dict[str, Any], systemd_shows: Callable[[str], None]
) -> None:
    systemd_shows(ACTIVE)
    by_hand(tmp_path / "venv", "3.8")
    there = sorted((tmp_path / "venv").rglob("*"))
    assert "the run spring-7 is active" in run(uv_environments, arguments)["msg"]
    assert sorted((tmp_path / "venv").rglob("*")) == there


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (ACTIVE, "spring-7"),
        ("Description=tpu_ops run a=b\nActiveState=activating\n", "a=b"),
        ("ActiveState=deactivating\nDescription=tpu-run.service\n", "tpu-run.service"),
        ("ActiveState=inactive\nDescription=tpu-run.service\n", ""),
        ("ActiveState=failed\nDescription=tpu_ops run spring-7\n", ""),
        ("", ""),
    ],
)
def test_the_active_run_is_named_as_systemd_knows_it(shown: str, name: str) -> None:
    assert active_run.named_run(shown) == name


def test_the_active_run_is_named_as_the_launcher_starts_it() -> None:
    command = unit.start_command("program", "spring-7", 30, "marker")
    (title,) = (word.partition("=")[2] for word in command if word.startswith("--description="))
    assert f"--unit={active_run.UNIT}" in command
    assert active_run.named_run(f"ActiveState=active\nDescription={title}\n") == "spring-7"


def test_a_host_without_systemd_has_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert active_run.active_run() == ""


def test_a_systemd_that_does_not_answer_is_not_taken_for_no_run(
    run: Run, tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(uv_environments, arguments)
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("ansible.module_utils.active_run.ANSWER", 0.1)
    said = run(uv_environments, more(arguments, requirements=["jax==1", "flax==2"]))["msg"]
    assert said == "systemd did not say within 0.1 s whether a run is active; run again"
    assert installed_packages.packages(str(tmp_path / "venv")) == {"jax": "1"}


def test_the_digest_is_the_one_that_training_runs_compare(run: Run, tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert state(run(uv_environments, arguments))["digest"] == probe.venv_facts(str(tmp_path / "venv"))["digest"]


def _python(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")


def _removed(tmp_path: Path) -> None:
    shutil.rmtree(site(tmp_path) / "jax-1.dist-info")


def _upgraded(tmp_path: Path) -> None:
    (site(tmp_path) / "jax-1.dist-info").rename(site(tmp_path) / "jax-2.dist-info")


def _lost(tmp_path: Path) -> None:
    (site(tmp_path) / "jax.py").unlink()


def _cut(tmp_path: Path) -> None:
    (site(tmp_path) / "jax.py").write_text("x")


@pytest.mark.parametrize("damage", [_python, _removed, _upgraded, _lost, _cut])
def test_a_damaged_environment_is_reported_by_check_mode_and_repaired(
    run: Run, tmp_path: Path, arguments: dict[str, Any], damage: Callable[[Path], None]
) -> None:
    whole = state(run(uv_environments, arguments))
    damage(tmp_path)
    assert run(uv_environments, arguments, check=True)["changed"] is True
    mended = run(uv_environments, arguments)
    assert (mended["changed"], state(mended)["digest"], state(mended)["damaged"]) == (True, whole["digest"], [])
    assert (site(tmp_path) / "jax.py").read_text() == "x=1\n"
    assert run(uv_environments, arguments, check=True)["changed"] is False


def test_hashes_of_a_lock_are_required_only_if_all_packages_have_one(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    locked = more(arguments, lock="jax==1 \\\n    --hash=sha256:00\nnumpy==2 --hash=sha256:00\n")
    assert state(run(uv_environments, locked, check=True))["plan"] == ["+ jax==1", "+ numpy==2"]
    # The fake reads the first word of a line only.
    run(uv_environments, more(arguments, lock="jax==1 --hash=sha256:00\nnumpy==2 --hash=sha256:00\n"))
    run(uv_environments, more(arguments, lock="jax==1 --hash=sha256:00\nnumpy==3\n"))
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("pip install")]
    calls = [call for call in calls if "--dry-run" not in call]
    assert [("--require-hashes" in call, "--no-deps" in call) for call in calls] == [(True, True), (False, True)]


def test_exact_removes_what_no_lock_has_but_for_editable_packages(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    run(uv_environments, more(arguments, requirements=["jax==1", "mine==1", "stray==1"]))
    (site(tmp_path) / "mine-1.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    locked = more(arguments, lock="jax==1")
    assert run(uv_environments, locked, check=True)["changed"] is False
    exact = more(arguments, lock="jax==1", exact=True)
    assert state(run(uv_environments, exact, check=True))["plan"] == ["- stray"]
    assert state(run(uv_environments, exact))["packages"] == {"jax": "1", "mine": "1"}
    assert run(uv_environments, exact)["changed"] is False


@pytest.mark.parametrize("address", ["@ https://a.test/x-1.whl", "@ git+https://a.test/x@0123 # via mine", "[y] @ a"])
def test_exact_keeps_what_the_lock_has_by_its_address(run: Run, arguments: dict[str, Any], address: str) -> None:
    exact = more(arguments, lock=f"jax==1\nbyaddress {address}\n", exact=True)
    assert set(state(run(uv_environments, exact))["packages"]) == {"jax", "byaddress"}
    assert run(uv_environments, exact)["changed"] is False


def test_the_agreed_lock_decides_all_packages_from_the_index(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    run(uv_environments, more(arguments, requirements=["jax==1", "mine==1", "here==1", "dropped==1", "bad==1"]))
    (site(tmp_path) / "mine-1.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    (site(tmp_path) / "here-1.dist-info" / "direct_url.json").write_text('{"url": "file:///here.whl"}')
    asked = more(arguments, requirements=["jax"], forbidden="bad")
    lock = run(uv_environments, asked | {"step": "resolve"})["locks"]["jax"]
    assert installed_packages.pinned_packages(lock) == {"jax": "1"}
    agreed = more(asked, lock=lock, agreed=True)
    assert state(run(uv_environments, agreed, check=True))["plan"] == ["- bad", "- dropped"]
    filled = state(run(uv_environments, agreed))
    assert (filled["packages"], filled["editable"], filled["local"]) == (
        {"jax": "1", "mine": "1", "here": "1"},
        ["mine"],
        ["here"],
    )


def test_the_last_part_of_python_s_version_makes_no_difference(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    before = state(run(uv_environments, arguments))["digest"]
    for version, same in (("3.11.9", True), ("3.12.2", False)):
        (tmp_path / "venv" / "pyvenv.cfg").write_text(f"version_info = {version}\n")
        now = installed_packages.digest(version, installed_packages.packages(str(tmp_path / "venv")))
        assert (now == before) is same
        assert probe.venv_facts(str(tmp_path / "venv"))["digest"] == now


def test_a_directory_that_is_no_environment_is_refused_and_kept(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("years of work")
    assert "is in the way" in run(uv_environments, arguments)["msg"]
    assert (tmp_path / "venv" / "thesis.tex").read_text() == "years of work"


def test_a_file_in_the_place_of_an_environment_is_refused_and_kept(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "venv").write_text("years of work")
    said = run(uv_environments, arguments)["msg"]
    assert "is in the way: it is not a directory; move it elsewhere, or give the environment another path" in said
    assert (tmp_path / "venv").read_text() == "years of work"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requirements": ["broken==1"]}, "no such package: broken"),
        ({"proof": "raise SystemExit('no jax here')"}, "does not work: no jax here"),
        ({"owner": "nobody-at-all"}, "environment jax: the owner nobody-at-all has no account"),
        ({"lock": "torch==2\nnvidia-cublas==1\ntriton==3", "forbidden": "nvidia-.*|triton"}, "nvidia-cublas, triton"),
    ],
)
def test_a_failure_comes_with_its_reason(
    run: Run, arguments: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    assert said in run(uv_environments, more(arguments, **changes))["msg"]


def test_versions_younger_than_the_pages_in_the_cache_are_looked_for_again(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    lock = "jax==1\nyoung==2\nyounger==3"
    assert state(run(uv_environments, more(arguments, lock=lock)))["packages"] == {
        "jax": "1",
        "young": "2",
        "younger": "3",
    }
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("pip install")]
    assert [call.count("--refresh-package=") for call in calls] == [0, 1, 2]
    assert "--refresh-package=jax" not in str(calls)


@pytest.fixture
def index(tmp_path: Path) -> Generator[tuple[str, Callable[[str], None]]]:
    """Serve a package index whose pages count for ten minutes; yield its address and what gives it a version."""
    (tmp_path / "index/simple/demo").mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "index"))

        def end_headers(self) -> None:
            self.send_header("Cache-Control", "max-age=600")
            super().end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    def publish(version: str) -> None:
        wheel = f"demo-{version}-py3-none-any.whl"
        info = f"demo-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / "index" / wheel, "w") as archive:
            archive.writestr("demo.py", "")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", f"demo.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        wheels = sorted(path.name for path in (tmp_path / "index").glob("*.whl"))
        page = "".join(f'<a href="/{name}">{name}</a>' for name in wheels)
        (tmp_path / "index/simple/demo/index.html").write_text(f"<html><body>{page}</body></html>")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple/", publish
        server.shutdown()
        thread.join()


def test_uv_takes_a_version_that_came_out_after_its_page_was_kept(
    index: tuple[str, Callable[[str], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, publish = index
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", address)
    uv, venv = Uv(UV, str(tmp_path / "cache"), 60), str(tmp_path / "venv")
    uv.run("venv", "--no-project", "--python", sys.executable, venv)
    publish("1")
    install = ("pip", "install", "--python", f"{venv}/bin/python", "--no-deps")
    uv.run(*install, "demo==1")
    publish("2")
    with pytest.raises(Fault, match="there is no version of demo==2"):
        uv.run_once(*install, "demo==2", place="/")
    assert "demo==2" in uv.run(*install, "demo==2")[1]
    with pytest.raises(Fault, match="there is no version of demo==3"):
        uv.run(*install, "demo==3")
    publish("3")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("demo==3\n")
    uv.run("pip", "compile", "--quiet", "--output-file", str(tmp_path / "lock"), "--", str(requirements))
    assert "demo==3" in (tmp_path / "lock").read_text()


def _wheel(directory: Path, name: str, files: dict[str, str], longer: int = 0) -> None:
    """Make a wheel whose record has its files with lengths that are so many bytes longer."""
    info = f"{name}-1.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256=x,{len(text) + longer}" for path, text in files.items()]
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,", ""])}).items():
            archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that is all that the real uv, which the arguments name from now on, takes packages from."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    arguments["uv"] = UV
    arguments["environments"][0]["find_links"] = [str(tmp_path / "wheels")]
    return tmp_path / "wheels"


def test_a_wheel_with_a_wrong_record_is_installed_once_and_mended_as_any(
    run: Run, tmp_path: Path, arguments: dict[str, Any], wheels: Path
) -> None:
    _wheel(wheels, "odd", {"odd.py": "x = 1\n", "odd.txt": "text"}, longer=20)
    odd = more(arguments, requirements=["odd==1"])
    assert state(run(uv_environments, odd))["damaged"] == []
    assert run(uv_environments, odd, check=True)["changed"] is False
    (file,) = (tmp_path / "venv").glob("lib/python3*/site-packages/odd.py")
    file.write_text("x")
    mended = run(uv_environments, odd)
    assert (mended["changed"], state(mended)["plan"], state(mended)["damaged"]) == (True, ["~ odd==1"], [])
    assert file.read_text() == "x = 1\n"
    assert run(uv_environments, odd, check=True)["changed"] is False


@pytest.mark.parametrize("first", [["one==1"], ["other==1"], ["one==1", "other==1"]])
def test_packages_with_one_file_in_common_are_not_reinstalled_in_turns(
    run: Run, arguments: dict[str, Any], wheels: Path, first: list[str]
) -> None:
    _wheel(wheels, "one", {"one.py": "", "tests/__init__.py": "# of one\n"})
    _wheel(wheels, "other", {"other.py": "", "tests/__init__.py": "# of the other\n"})
    both = more(arguments, requirements=["one==1", "other==1"])
    run(uv_environments, more(both, requirements=first))
    assert state(run(uv_environments, both))["damaged"] == []
    assert run(uv_environments, both, check=True)["changed"] is False


def test_a_package_keeps_what_the_one_that_it_takes_the_place_of_had_as_well(
    run: Run, tmp_path: Path, arguments: dict[str, Any], wheels: Path
) -> None:
    """As opencv-python-headless has what opencv-python has."""
    for name in ("one", "other"):
        _wheel(wheels, name, {"cv.py": f"name = {name!r}\n"})
    run(uv_environments, more(arguments, requirements=["one==1"]))
    other = more(arguments, lock="other==1\n", agreed=True)
    changed = run(uv_environments, other)
    (file,) = (tmp_path / "venv").glob("lib/python3*/site-packages/cv.py")
    assert file.read_text() == "name = 'other'\n"
    assert (changed["changed"], state(changed)["packages"], state(changed)["damaged"]) == (True, {"other": "1"}, [])
    assert run(uv_environments, other, check=True)["changed"] is False


def test_an_environment_that_does_not_work_fails_again_until_it_does(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    proved = more(arguments, proof=f"open({str(tmp_path / 'chip')!r})")
    for _ in range(2):
        assert "does not work" in run(uv_environments, proved)["msg"]
    assert state(run(uv_environments, proved, check=True))["plan"] == ["~ packages that did not work"]
    (tmp_path / "chip").touch()
    assert run(uv_environments, proved)["changed"] is True
    assert run(uv_environments, proved)["changed"] is False


def test_a_cache_that_another_installation_holds_is_waited_for_and_named(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "cache").mkdir()
    flock = shutil.which("flock")
    assert flock
    lock = tmp_path / "cache" / ".tpu_ops.lock"
    with subprocess.Popen(
        [flock, str(lock), "sh", "-c", "echo held; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        result = run(uv_environments, arguments | {"timeout": 1})
    assert "another installation has held" in result["msg"]
    assert run(uv_environments, arguments)["changed"] is True


def test_a_missing_uv_is_named_with_the_role_that_installs_it(run: Run, arguments: dict[str, Any]) -> None:
    assert "the role python installs it" in run(uv_environments, arguments | {"uv": "/no/uv"})["msg"]


def test_resolving_keeps_the_installed_versions(run: Run, arguments: dict[str, Any]) -> None:
    run(uv_environments, more(arguments, requirements=["jax==1"]))
    result = run(uv_environments, more(arguments, requirements=["jax", "flax"]) | {"step": "resolve"})
    assert result["locks"]["jax"].split() == ["flax==9", "--hash=sha256:00", "jax==1", "--hash=sha256:00"]
    assert result["changed"] is False


def test_a_requirement_outside_the_index_does_not_stop_the_resolution(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    run(uv_environments, arguments)
    for name, needs, origin in (
        (
            "vision",
            ["withdrawn==1", "flax>=1 ; extra == 'x'", "optax"],
            {"dir_info": {"editable": True}, "url": "file:///v"},
        ),
        ("withdrawn", [], None),
    ):
        info = site(tmp_path) / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("".join(f"Requires-Dist: {need}\n" for need in needs))
        (info / "RECORD").write_text(f"{name}.py,,\n")
        (site(tmp_path) / f"{name}.py").touch()
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))
    resolved = run(uv_environments, more(arguments, requirements=["jax==1", "numpy"]) | {"step": "resolve"})
    assert [line.split()[0] for line in resolved["locks"]["jax"].splitlines()] == ["jax==1", "numpy==9", "optax==9"]


def _no_uv(tmp_path: Path, arguments: dict[str, Any]) -> None:
    arguments["uv"] = "/no/uv"


def _no_python(tmp_path: Path, arguments: dict[str, Any]) -> None:
    _python(tmp_path)


def _no_environment(tmp_path: Path, arguments: dict[str, Any]) -> None:
    shutil.rmtree(tmp_path / "venv")


def _no_account(tmp_path: Path, arguments: dict[str, Any]) -> None:
    arguments["environments"][0]["owner"] = "notyet"


@pytest.mark.parametrize("lacking", [_no_uv, _no_python, _no_environment, _no_account])
def test_check_mode_resolves_nothing_where_it_lacks_what_that_needs(
    run: Run, tmp_path: Path, arguments: dict[str, Any], lacking: Callable[[Path, dict[str, Any]], None]
) -> None:
    run(uv_environments, arguments)
    assert run(uv_environments, arguments | {"step": "resolve"}, check=True)["locks"]["jax"] != ""
    lacking(tmp_path, arguments)
    assert run(uv_environments, arguments | {"step": "resolve"}, check=True)["locks"] == {"jax": ""}


def test_plan_lines_are_what_uv_reports() -> None:
    report = "Resolved 2 packages in 5ms\nWould install 2 packages\n + jax==0.10.2\n - numpy==1.0\n ~ scipy==1.17\n"
    assert plan_lines(report) == ["+ jax==0.10.2", "- numpy==1.0", "~ scipy==1.17"]
    assert plan_lines("Audited 2 packages in 3ms\n") == []


@pytest.mark.parametrize(
    ("lock", "hashed", "pins"),
    [
        ("", False, {}),
        ("# only a comment\n", False, {}),
        ("a==1 --hash=sha256:0\n", True, {"a": "1"}),
        ("A_b[tpu]==1 \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\n    # via x\n", True, {"a-b": "1"}),
        ("a==1 --hash=sha256:0\nb==2\n", False, {"a": "1", "b": "2"}),
        ("a==1 ; python_version < '3.12' \\\n    --hash=sha256:0\n", True, {"a": "1"}),
    ],
)
def test_locks_are_read(lock: str, hashed: bool, pins: dict[str, str]) -> None:
    assert (environment_state.fully_hashed(lock), installed_packages.pinned_packages(lock)) == (hashed, pins)


@pytest.mark.parametrize(
    "report",
    [
        "Would install 2 packages\n - idna==3.7\n + idna==3.7\n - six==1.17.0\n + six==1.16.0\n",
        "Installed 2 packages in 1ms\n ~ idna==3.7\n - six==1.17.0\n + six==1.16.0\n",
    ],
)
def test_a_dry_run_says_the_same_as_what_is_then_done(report: str) -> None:
    assert plan_lines(report) == ["~ idna==3.7", "- six==1.17.0", "+ six==1.16.0"]
