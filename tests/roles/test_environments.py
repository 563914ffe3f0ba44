"""How environments are looked at, filled, mended and resolved, by a program that plays uv."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roles.python.filter_plugins import environments as filters
from roles.python.library import uv_environments
from roles.python.module_utils import environment_guard, environment_state
from roles.python.module_utils.environment_work import plan_lines
from tpu_ops.host import probe

Run = Callable[..., dict[str, Any]]

NOBODY = pwd.getpwnam("nobody").pw_uid

#: Plays uv: packages are directories with the metadata of a wheel and one file.
FAKE_UV = """#!{python}
import os, pathlib, shutil, sys
arguments = sys.argv[1:]
pathlib.Path(__file__).with_name("calls").open("a").write(" ".join(arguments) + "\\n")
def after(option):
    return arguments[arguments.index(option) + 1]
if arguments[0] == "venv":
    path = pathlib.Path(arguments[-1])
    (path / "bin").mkdir(parents=True, exist_ok=True)
    (path / "bin" / "python").unlink(missing_ok=True)
    (path / "bin" / "python").symlink_to("{python}")
    (path / "pyvenv.cfg").write_text("version_info = 3.11.2\\n")
    sys.exit()
if arguments[1] == "compile":
    names = pathlib.Path(arguments[-1]).read_text().split()
    there = pathlib.Path(after("--output-file"))
    kept = [line for line in there.read_text().split() if line.partition("==")[0] in names]
    rest = [name + "==9" for name in names if not any(line.startswith(name + "==") for line in kept)]
    there.write_text("".join(name + " --hash=sha256:00\\n" for name in sorted(kept + rest)))
    sys.exit()
venv = pathlib.Path(after("--python")).parent.parent
site = venv / "lib" / "python3.11" / "site-packages"
def remove(name):
    for path in site.glob(name + "*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
if arguments[1] == "uninstall":
    for name in arguments[arguments.index("--") + 1:]:
        remove(name)
    sys.exit()
have = [path.stem.replace("-", "==") for path in site.glob("*.dist-info")]
wanted = [line.split()[0] for line in pathlib.Path(after("--requirements")).read_text().splitlines() if line]
again = [option.partition("=")[2] for option in arguments if option.startswith("--reinstall-package=")]
missing = [name for name in wanted if not any(one == name or one.startswith(name + "==") for one in have)
           or name.partition("==")[0] in again]
if "broken==1" in missing:
    sys.exit("no such package: broken")
for name in missing:
    print(" + " + name, file=sys.stderr)
    if "--dry-run" not in arguments:
        plain, _, version = name.partition("==")
        remove(plain)
        info = site / (plain + "-" + (version or "9") + ".dist-info")
        info.mkdir(parents=True)
        (site / (plain + ".py")).write_text("x=1\\n")
        (info / "RECORD").write_text(plain + ".py,sha256=x,4\\n" + info.name + "/RECORD,,\\n")
"""


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    uv = tmp_path / "uv"
    uv.write_text(FAKE_UV.format(python=sys.executable))
    uv.chmod(0o755)
    environment = {
        "name": "jax",
        "path": str(tmp_path / "venv"),
        "python": sys.executable,
        "python_version": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "requirements": ["jax==1"],
    }
    return {"step": "fill", "uv": str(uv), "cache_dir": str(tmp_path / "cache"), "environments": [environment]}


def more(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return arguments | {"environments": [arguments["environments"][0] | changes]}


def state(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["environments"]["jax"]
    return found


def site(tmp_path: Path) -> Path:
    return tmp_path / "venv" / "lib" / "python3.11" / "site-packages"


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
def test_what_somebody_broke_is_reported_by_check_mode_and_mended(
    run: Run, tmp_path: Path, arguments: dict[str, Any], damage: Callable[[Path], None]
) -> None:
    whole = state(run(uv_environments, arguments))
    damage(tmp_path)
    assert run(uv_environments, arguments, check=True)["changed"] is True
    mended = run(uv_environments, arguments)
    assert (mended["changed"], state(mended)["digest"], state(mended)["damaged"]) == (True, whole["digest"], [])
    assert (site(tmp_path) / "jax.py").read_text() == "x=1\n"
    assert run(uv_environments, arguments, check=True)["changed"] is False


def test_a_lock_is_installed_as_it_is_and_with_its_hashes_only_where_all_have_one(
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


def test_a_directory_that_is_no_environment_is_refused_and_kept(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("years of work")
    assert "is in the way" in run(uv_environments, arguments)["msg"]
    assert (tmp_path / "venv" / "thesis.tex").read_text() == "years of work"


def by_hand(path: Path, version: str) -> None:
    """Make an environment as somebody might have, with what they keep in it."""
    lib = path / "lib" / f"python{version}" / "site-packages"
    for directory in (path / "bin", path / "notebooks", lib):
        directory.mkdir(parents=True)
    (path / "pyvenv.cfg").write_text(f"version = {version}.2\n")
    (path / "bin" / "python").symlink_to("/nowhere/python")
    (path / "bin" / "theirs").write_text("a script")
    (path / "notebooks" / "n.txt").write_text("years of work")
    (lib / "theirs.pth").write_text("/home/ada/code\n")


def test_an_environment_whose_python_is_gone_gets_it_back_and_loses_nothing(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    there = {path.relative_to(tmp_path) for path in (tmp_path / "venv").rglob("*")}
    assert state(run(uv_environments, arguments, check=True))["plan"] == ["~ Python 3.11"]
    assert state(run(uv_environments, arguments))["packages"] == {"jax": "1"}
    assert there <= {path.relative_to(tmp_path) for path in (tmp_path / "venv").rglob("*")}
    assert run(uv_environments, arguments)["changed"] is False


def test_what_was_there_for_another_python_is_kept_in_the_environment(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.8")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\necho 3.8\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    assert state(run(uv_environments, arguments, check=True))["plan"] == ["~ Python 3.11, which was 3.8", "+ jax==1"]
    made = run(uv_environments, arguments)
    assert (made["changed"], state(made)["packages"]) == (True, {"jax": "1"})
    (kept,) = (tmp_path / "venv").glob(".old-*")
    assert sorted(path.name for path in kept.iterdir()) == ["bin", "lib", "pyvenv.cfg"]
    assert (kept / "lib/python3.8/site-packages/theirs.pth").exists()
    assert (tmp_path / "venv" / "notebooks" / "n.txt").read_text() == "years of work"
    assert run(uv_environments, arguments)["changed"] is False


def test_an_interrupted_change_of_python_is_gone_on_with(run: Run, tmp_path: Path, arguments: dict[str, Any]) -> None:
    by_hand(tmp_path / "venv", "3.8")
    uv = Path(arguments["uv"])
    program = uv.read_text()
    uv.write_text("#!/bin/sh\nexit 1\n")
    assert "ended with 1" in run(uv_environments, arguments)["msg"]
    assert not (tmp_path / "venv" / "pyvenv.cfg").exists()
    uv.write_text(program)
    assert state(run(uv_environments, arguments))["packages"] == {"jax": "1"}


def test_a_python_that_does_not_answer_is_a_fault_and_no_reason_to_make_another(
    run: Run, tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(tmp_path / "venv", "3.8")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    monkeypatch.setattr("ansible.module_utils.environment_work.START", 0.2)
    said = run(uv_environments, arguments)["msg"]
    assert said.startswith(f"environment jax: {tmp_path}/venv/bin/python did not say its version within 0.2 s")
    assert not list((tmp_path / "venv").glob(".old-*"))


def _home(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, -1)


def _group(tmp_path: Path) -> None:
    os.chown(tmp_path / "venv", -1, NOBODY)
    (tmp_path / "venv").chmod(0o775)


def _program(tmp_path: Path) -> None:
    os.chown(tmp_path / "venv" / "bin" / "python", NOBODY, -1)


def _behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, -1)
    (tmp_path / "venv").rename(tmp_path / "theirs" / "venv")
    (tmp_path / "venv").symlink_to("theirs/venv")


def _started(tmp_path: Path) -> None:
    path = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "theirs.pth"
    path.touch()
    os.chown(path, NOBODY, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("theirs", [_home, _group, _program, _behind_a_link, _started])
@pytest.mark.parametrize("step", ["look", "resolve", "fill"])
def test_root_runs_nothing_that_somebody_else_can_put_there(
    run: Run, tmp_path: Path, arguments: dict[str, Any], theirs: Callable[[Path], None], step: str
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 3.11\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    theirs(tmp_path)
    wanted = more(arguments, variable="python_environments[0]")
    for check in (True, False):
        said = run(uv_environments, wanted | {"step": step}, check=check)["msg"]
        assert said.startswith("python_environments[0]: environment jax: root would run what others than root could")
    assert not (tmp_path / "ran").exists()


def test_nothing_is_run_for_an_owner_who_has_no_account_yet(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 3.11\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    assert state(run(uv_environments, more(arguments, owner="notyet") | {"step": "look"}))["fresh"] is True
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("uid", "path", "reason"),
    [
        (0, "sticky/x/y", "everybody may make entries in"),
        (0, "sticky/mine", ""),
        (0, "loop", "too many symbolic links"),
        (0, "venv/file/x", ""),
        (4711, "open/x", "others may write in"),
        (4711, "team/x", ""),
        (0, "team/x", "others may write in"),
    ],
)
def test_ways_on_which_others_have_a_say(tmp_path: Path, uid: int, path: str, reason: str) -> None:
    for name, mode in (("sticky", 0o1777), ("open", 0o777), ("team", 0o775), ("venv", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    os.chown(tmp_path / "team", -1, 4711 if os.geteuid() == 0 else -1)
    (tmp_path / "sticky" / "mine").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "venv" / "file").touch()
    found = environment_guard.stranger(str(tmp_path / path), uid)
    assert reason in found if reason else found == ""


def test_a_download_that_fails_comes_with_ways_out(run: Run, arguments: dict[str, Any], tmp_path: Path) -> None:
    Path(arguments["uv"]).write_text("#!/bin/sh\necho 'dns error' >&2\nexit 2\n")
    asked = arguments | {"step": "pythons", "pythons": ["3.13"], "python_dir": str(tmp_path / "none")}
    said = run(uv_environments, asked | {"environments": []})["msg"]
    for word in ("Python 3.13", "dns error", "python_more_versions", "python_uv_downloads_json_url", "python_source"):
        assert word in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requirements": ["broken==1"]}, "no such package: broken"),
        ({"proof": "raise SystemExit('no jax here')"}, "does not work: no jax here"),
        ({"owner": "nobody-at-all"}, "environment jax: there is no account nobody-at-all"),
        ({"lock": "torch==2\nnvidia-cublas==1\ntriton==3", "forbidden": "nvidia-.*|triton"}, "nvidia-cublas, triton"),
    ],
)
def test_a_failure_comes_with_its_reason(
    run: Run, arguments: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    assert said in run(uv_environments, more(arguments, **changes))["msg"]


def test_an_environment_that_does_not_work_fails_again_until_it_does(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    proved = more(arguments, proof=f"open({str(tmp_path / 'chip')!r})")
    for _ in range(2):
        assert "does not work" in run(uv_environments, proved)["msg"]
    assert state(run(uv_environments, proved, check=True))["plan"] == ["~ what did not work"]
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


def test_what_is_there_is_kept_when_the_set_is_resolved(run: Run, arguments: dict[str, Any]) -> None:
    run(uv_environments, more(arguments, requirements=["jax==1"]))
    result = run(uv_environments, more(arguments, requirements=["jax", "flax"]) | {"step": "resolve"})
    assert result["locks"]["jax"].split() == ["flax==9", "--hash=sha256:00", "jax==1", "--hash=sha256:00"]
    assert result["changed"] is False


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
    assert (environment_state.fully_hashed(lock), environment_state.pins(lock), filters.pinned(lock)) == (
        hashed,
        pins,
        pins,
    )
