from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from roles.base.library import ca_certificates
from roles.base.library.ca_certificates import split_pem
from roles.python.library import uv_environment
from roles.python.library.uv_environment import plan_lines, set_digest
from roles.tcmalloc.library import preload_entries
from roles.tcmalloc.library.preload_entries import strip

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one of the roles' modules in this process and return its result."""

    def call(module: ModuleType, arguments: dict[str, Any], *, check: bool = False) -> dict[str, Any]:
        umask = os.umask(0o022)
        try:
            with patch_module_args(arguments | {"_ansible_check_mode": check}), pytest.raises(SystemExit):
                module.main()
        finally:
            os.umask(umask)
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("/etc/environment", f"PATH=/bin\nLD_PRELOAD={TCMALLOC}\nLANG=C\n", "PATH=/bin\nLANG=C\n"),
        ("/etc/environment", f'LD_PRELOAD="{TCMALLOC}"\n', ""),
        ("/etc/environment", f"LD_PRELOAD={TCMALLOC}:/opt/other.so\n", "LD_PRELOAD=/opt/other.so\n"),
        ("/etc/environment", f'LD_PRELOAD="/opt/a.so {TCMALLOC} /opt/b.so"\n', 'LD_PRELOAD="/opt/a.so /opt/b.so"\n'),
        ("/etc/environment", f"MY_LD_PRELOAD={TCMALLOC}\n", f"MY_LD_PRELOAD={TCMALLOC}\n"),
        ("/etc/environment", f"NOTE={TCMALLOC}\n", f"NOTE={TCMALLOC}\n"),
        ("/etc/environment", f"# LD_PRELOAD={TCMALLOC}\n", f"# LD_PRELOAD={TCMALLOC}\n"),
        ("/etc/environment", f"LD_PRELOAD={TCMALLOC}", ""),
        ("/etc/environment.d/10-tpu.conf", "LD_PRELOAD=/usr/local/lib/libtcmalloc_minimal.so.4\n", ""),
        ("/etc/profile.d/tpu.sh", f"export LD_PRELOAD={TCMALLOC}\nexport A=1\n", "export A=1\n"),
        (
            "/etc/profile.d/tpu.sh",
            f"export LD_PRELOAD='{TCMALLOC}'; export A=1\n",
            "export LD_PRELOAD=''; export A=1\n",
        ),
        ("/etc/profile.d/tpu.sh", f"LD_PRELOAD={TCMALLOC}; export LD_PRELOAD\n", ""),
        ("/etc/profile.d/tpu.sh", f"LD_PRELOAD=$LD_PRELOAD:{TCMALLOC}\n", "LD_PRELOAD=$LD_PRELOAD\n"),
        (
            "/etc/profile.d/tpu.sh",
            f"if [ -e {TCMALLOC} ]; then\n  export LD_PRELOAD={TCMALLOC}\nfi\n",
            f"if [ -e {TCMALLOC} ]; then\n  :\nfi\n",
        ),
        (
            "/etc/bash.bashrc",
            f"if true; then\nexport LD_PRELOAD={TCMALLOC}\nfi\n",
            "if true; then\n:\nfi\n",
        ),
        (
            "/etc/bash.bashrc",
            f"[ -e {TCMALLOC} ] && export LD_PRELOAD={TCMALLOC}\n",
            f"[ -e {TCMALLOC} ] && export LD_PRELOAD=\n",
        ),
        ("/etc/security/pam_env.conf", f"LD_PRELOAD DEFAULT={TCMALLOC}\nA DEFAULT=1\n", "A DEFAULT=1\n"),
        (
            "/etc/security/pam_env.conf",
            f'LD_PRELOAD\tDEFAULT="{TCMALLOC} /opt/b.so"\n',
            'LD_PRELOAD\tDEFAULT="/opt/b.so"\n',
        ),
        ("/etc/security/pam_env.conf", f"OTHER DEFAULT={TCMALLOC}\n", f"OTHER DEFAULT={TCMALLOC}\n"),
        ("/etc/ld.so.preload", f"{TCMALLOC}\n/opt/b.so\n", "/opt/b.so\n"),
        ("/etc/ld.so.preload", f"/opt/a.so:{TCMALLOC} /opt/b.so\n", "/opt/a.so:/opt/b.so\n"),
        ("/etc/ld.so.preload", f"{TCMALLOC} # why\n", "# why\n"),
    ],
)
def test_exactly_the_entry_of_tcmalloc_goes(path: str, before: str, after: str) -> None:
    assert strip(path, before, "libtcmalloc") == after
    assert strip(path, after, "libtcmalloc") == after
    if path.endswith((".sh", ".bashrc")):
        subprocess.run(["bash", "-n"], input=after, text=True, check=True, timeout=10)


def test_preload_entries_keeps_mode_and_reports_without_changing_in_check_mode(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text(f"A=1\nLD_PRELOAD={TCMALLOC}\n")
    path.chmod(0o640)
    arguments = {"files": [str(tmp_path / "env*"), str(tmp_path / "none")], "library": "libtcmalloc"}
    checked = run(preload_entries, arguments, check=True)
    assert (checked["changed"], checked["files"]) == (True, [str(path)])
    assert "LD_PRELOAD" in path.read_text()
    assert run(preload_entries, arguments)["changed"] is True
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("A=1\n", 0o640)
    assert run(preload_entries, arguments)["changed"] is False


def certificate(seed: int) -> str:
    """Return something in the form of a certificate; the store does not look inside."""
    return ssl.DER_cert_to_PEM_cert(bytes([48, seed]) * 40)


def test_a_bundle_is_split_into_its_certificates() -> None:
    text = f"# one\n{certificate(1)}\n# two\r\n{certificate(2)}".replace("\n", "\r\n")
    assert sorted(split_pem(text).values()) == sorted([certificate(1), certificate(2)])
    with pytest.raises(ValueError, match="no certificate"):
        split_pem("nothing here")


def test_certificates_the_system_has_from_elsewhere_need_no_file_and_others_go(run: Run, tmp_path: Path) -> None:
    directory, bundle = tmp_path / "ours", tmp_path / "bundle.crt"
    directory.mkdir()
    (directory / "left.crt").write_text(certificate(9))
    bundle.write_text(certificate(1) + certificate(9))
    arguments = {"certificates": [certificate(1) + certificate(2)], "directory": str(directory), "bundle": str(bundle)}
    result = run(ca_certificates, arguments, check=True)
    assert result["changed"] is True
    assert (len(result["added"]), result["removed"]) == (1, ["left.crt"])
    assert [path.name for path in directory.iterdir()] == ["left.crt"]


def test_a_bundle_that_an_interrupted_run_left_stale_is_noticed(run: Run, tmp_path: Path) -> None:
    directory, bundle = tmp_path / "ours", tmp_path / "bundle.crt"
    directory.mkdir()
    bundle.write_text(certificate(1))
    arguments = {"certificates": [certificate(2)], "directory": str(directory), "bundle": str(bundle)}
    name = run(ca_certificates, arguments, check=True)["added"][0]
    (directory / name).write_text(certificate(2))
    stale = run(ca_certificates, arguments, check=True)
    assert (stale["changed"], stale["added"]) == (True, [])
    bundle.write_text(certificate(1) + certificate(2))
    assert run(ca_certificates, arguments, check=True)["changed"] is False


def test_plan_lines_are_what_uv_reports() -> None:
    report = "Resolved 2 packages in 5ms\nWould install 2 packages\n + jax==0.10.2\n - numpy==1.0\n ~ scipy==1.17\n"
    assert plan_lines(report) == ["+ jax==0.10.2", "- numpy==1.0", "~ scipy==1.17"]
    assert plan_lines("Audited 2 packages in 3ms\n") == []


def test_equal_sets_have_equal_digests() -> None:
    assert set_digest(["a==1", "b==2"]) == set_digest(["b==2", "a==1"]) != set_digest(["a==1", "b==3"])


#: Plays uv: an environment holds the requirements that stand in its file `installed`.
FAKE_UV = """#!{python}
import os, pathlib, sys
arguments = sys.argv[1:]
pathlib.Path(__file__).with_name("calls").open("a").write(" ".join(arguments) + "\\n")
if arguments[0] == "venv":
    path = pathlib.Path(arguments[-1])
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to("{python}")
    (path / "pyvenv.cfg").touch()
    sys.exit()
installed = pathlib.Path(arguments[arguments.index("--python") + 1]).parent.parent / "installed"
have = installed.read_text().splitlines() if installed.exists() else []
if arguments[1] == "freeze":
    print("\\n".join(have)) if have else None
    sys.exit()
missing = [name for name in arguments[arguments.index("--") + 1:] if name not in have]
if "broken==1" in missing:
    sys.exit("no such package: broken")
for name in missing:
    print(" + " + name, file=sys.stderr)
if "--dry-run" not in arguments:
    installed.write_text("".join(name + "\\n" for name in have + missing))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, Any]:
    uv = tmp_path / "uv"
    uv.write_text(FAKE_UV.format(python=sys.executable))
    uv.chmod(0o755)
    return {
        "path": str(tmp_path / "venv"),
        "uv": str(uv),
        "python": sys.executable,
        "python_version": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "requirements": ["jax==1"],
        "cache_dir": str(tmp_path / "cache"),
        "timeout": 20,
    }


def test_an_environment_is_made_once_and_then_only_asked(run: Run, tmp_path: Path, environment: dict[str, Any]) -> None:
    assert run(uv_environment, environment, check=True)["plan"] == ["+ jax==1"]
    assert not (tmp_path / "venv").exists()
    made = run(uv_environment, environment)
    assert (made["changed"], made["packages"]) == (True, ["jax==1"])
    again = run(uv_environment, environment)
    assert (again["changed"], again["digest"]) == (False, made["digest"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum(call.startswith("pip install") and "--dry-run" not in call for call in calls) == 1
    more = environment | {"requirements": ["jax==1", "flax==2"]}
    assert run(uv_environment, more, check=True)["plan"] == ["+ flax==2"]
    assert run(uv_environment, more)["packages"] == ["flax==2", "jax==1"]


def test_an_environment_whose_python_does_not_run_is_made_anew(
    run: Run, tmp_path: Path, environment: dict[str, Any]
) -> None:
    run(uv_environment, environment)
    python = tmp_path / "venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    result = run(uv_environment, environment)
    assert (result["changed"], result["packages"]) == (True, ["jax==1"])


def test_a_directory_that_is_no_environment_is_refused_and_kept(
    run: Run, tmp_path: Path, environment: dict[str, Any]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("years of work")
    result = run(uv_environment, environment)
    assert "is in the way" in result["msg"]
    assert (tmp_path / "venv" / "thesis.tex").read_text() == "years of work"


def test_uv_s_own_words_come_with_its_failure(run: Run, environment: dict[str, Any]) -> None:
    result = run(uv_environment, environment | {"requirements": ["broken==1"]})
    assert "no such package: broken" in result["msg"]


def test_a_cache_that_another_installation_holds_is_waited_for_and_named(
    run: Run, tmp_path: Path, environment: dict[str, Any]
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
        result = run(uv_environment, environment | {"timeout": 1})
    assert "another installation has held" in result["msg"]
    assert run(uv_environment, environment)["changed"] is True


def test_a_missing_uv_is_named_with_the_role_that_installs_it(
    run: Run, tmp_path: Path, environment: dict[str, Any]
) -> None:
    result = run(uv_environment, environment | {"uv": str(tmp_path / "none")})
    assert "the role python installs it" in result["msg"]
