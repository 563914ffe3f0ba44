"""The commands python and pip of the role python: a person's own environment over the fleet's, with a real pip."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
import pytest

from roles.python.filter_plugins import environments as filters
from tpu_ops.protocol import installed_packages

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "roles/python/templates"
VERSION = "{}.{}".format(*sys.version_info)

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


def rendered(name: str, commands: Path, cases: str) -> str:
    """Return a script of the role as a worker gets it."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=False)  # noqa: S701
    environment.filters |= {"quote": shlex.quote, "dirname": lambda path: str(Path(path).parent)}
    return environment.get_template(name).render(
        __python_cases=cases,
        __python_commands=commands,
        python_ca_bundle="/etc/ssl/certs/ca-certificates.crt",
        python_uv="/opt/uv/bin/uv",
    )


def add_package(site: Path, name: str, version: str) -> None:
    """Put a package into an environment, as uv and pip record packages."""
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    (site / f"{name}-{version}.dist-info").mkdir(parents=True)
    (site / f"{name}-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (site / f"{name}-{version}.dist-info/RECORD").write_text("")
    (site / f"{name}.py").write_text(f"version = {version!r}\n")


def write_wheel(directory: Path, name: str, needs: str) -> None:
    """Write a wheel that holds one module and requires another package."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the fleet's environment ``fleet``, a home, the role's commands and wheels."""
    place = tmp_path_factory.mktemp("own")
    fleet, commands = place / "fleet", place / "commands"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fleet], check=True, timeout=60)
    add_package(fleet / f"lib/python{VERSION}/site-packages", "shared", "1.0")
    for directory in (commands, place / "home", place / "wheels"):
        directory.mkdir()
    cases = filters.active_cases(str(fleet), {}, []).replace("  root) __venv= ;;\n", "")
    (commands / "python").write_text(rendered("command.sh.j2", commands, cases))
    (commands / "python").chmod(0o755)
    (commands / "pip").symlink_to("python")
    (place / "login.sh").write_text(rendered("login.sh.j2", commands, cases))
    write_wheel(place / "wheels", "einrops", "shared")
    write_wheel(place / "wheels", "newer", "shared>=2")
    return place


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    """Return a function that runs a command as somebody with an empty home, and its output."""

    def function(*command: str, **variables: str) -> Done:
        environment = {
            "HOME": str(place / "home"),
            "PATH": f"{place / 'commands'}:/usr/bin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(place / "wheels"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        environment |= variables
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)

    return function


@pytest.fixture(scope="module")
def own(place: Path, run: Run) -> Path:
    """Return a person's own environment that the first `python` after a change of Python has created."""
    venvs = place / "home/.venvs"
    add_package(venvs / "own-fleet-3.1/lib/python3.1/site-packages", "before", "1.5")
    (venvs / "own-fleet-3.1/pyvenv.cfg").touch()
    own = venvs / f"own-fleet-{VERSION}"
    made = run("python", "-c", "import sys; print(sys.prefix)")
    assert (made.returncode, made.stdout) == (0, f"{own}\n"), made.stderr
    assert f"{own} is new, since Python is {VERSION} here" in made.stderr
    assert f"pip install -r {own}/earlier.txt" in made.stderr
    assert (own / "earlier.txt").read_text() == "before==1.5\n"
    return own


def imported(run: Run, *modules: str) -> Done:
    return run("python", "-c", f"import {', '.join(modules)}; print(shared.version)")


def test_without_an_own_environment_python_is_the_fleet_s(place: Path, run: Run, tmp_path: Path) -> None:
    found = run("python", "-c", "import shared, sys; print(sys.prefix)", HOME=str(tmp_path))
    assert found.stdout == f"{place}/fleet\n"
    assert list(tmp_path.iterdir()) == []


def test_another_environment_s_own_one_whose_name_begins_the_same_does_not_count(
    place: Path, run: Run, tmp_path: Path
) -> None:
    other = tmp_path / ".venvs/own-fleet-two-3.1"
    (other / "lib/python3.1/site-packages").mkdir(parents=True)
    (other / "pyvenv.cfg").touch()
    found = run("python", "-c", "import sys; print(sys.prefix)", HOME=str(tmp_path))
    assert (found.stdout, found.stderr) == (f"{place}/fleet\n", "")
    active = run("pip", "--version", HOME=str(tmp_path), VIRTUAL_ENV=str(other))
    assert (active.returncode, "has no pip" in active.stderr) == (1, True)


def test_a_package_is_installed_over_the_fleet_s_which_stay_as_they_are(place: Path, run: Run, own: Path) -> None:
    before = sorted(path for path in (place / "fleet").rglob("*") if "__pycache__" not in path.parts)
    done = run("python", "-m", "pip", "install", "einrops")
    assert done.returncode == 0, done.stderr
    assert imported(run, "einrops", "shared").stdout == "1.0\n"
    assert sorted(path for path in (place / "fleet").rglob("*") if "__pycache__" not in path.parts) == before
    found = installed_packages.packages(str(own))
    assert (found["shared"], found["einrops"]) == ("1.0", "1.0")
    # The fleet's environment, which runs use, counts for itself.
    assert installed_packages.packages(str(place / "fleet")) == {"shared": "1.0"}


def test_a_package_that_needs_another_version_of_the_fleet_s_is_refused(place: Path, run: Run, own: Path) -> None:
    done = run("pip", "install", "newer")
    assert done.returncode != 0
    assert f"packages of the fleet's environment, {place}/fleet, keep their versions" in done.stderr
    assert "newer" not in installed_packages.packages(str(own))


def test_own_packages_follow_the_fleet_s_environment(place: Path, run: Run, own: Path) -> None:
    add_package(place / f"fleet/lib/python{VERSION}/site-packages", "shared", "2.0")
    assert imported(run, "shared").stdout == "2.0\n"
    # Also a pip that is started without the role's command keeps the new versions.
    assert (own / "constraints.txt").read_text() == "shared==2.0\n"
    assert run("pip", "install", "newer").returncode == 0
    assert imported(run, "newer", "shared").stdout == "2.0\n"
    # The Python from which the environment was made has gone.
    (own / "bin/python").unlink()
    (own / "bin/python").symlink_to("/nowhere/python")
    assert imported(run, "newer", "shared").stdout == "2.0\n"


def test_pip_does_not_install_beside_another_active_environment(run: Run, tmp_path: Path) -> None:
    done = run("pip", "install", "einrops", HOME=str(tmp_path), VIRTUAL_ENV="/project/.venv")
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert done.stderr.startswith("pip: the active environment, /project/.venv, has no pip: use `uv pip`")


def test_a_user_without_the_fleet_s_environment_is_told_what_creates_it(place: Path, run: Run, tmp_path: Path) -> None:
    script = rendered("command.sh.j2", tmp_path, "__venv=/nowhere/venv")
    (tmp_path / "python").write_text(script)
    done = run("sh", str(tmp_path / "python"), "-V")
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "no environment at /nowhere/venv on this worker; `tpu_ops configure` creates it" in done.stderr


@pytest.mark.parametrize(
    ("before", "path", "active"),
    [
        ({}, "{commands}:{own}/bin:{fleet}/bin:/usr/bin:/bin", "{fleet}"),
        # A login shell in tmux: /etc/profile has set PATH anew.
        ({"VIRTUAL_ENV": "{fleet}"}, "{commands}:{own}/bin:{fleet}/bin:/usr/bin:/bin", "{fleet}"),
        ({"VIRTUAL_ENV": "{fleet}", "PATH": "{fleet}/bin:/usr/bin:/bin"}, "{fleet}/bin:/usr/bin:/bin", "{fleet}"),
        # Somebody has activated another environment.
        ({"VIRTUAL_ENV": "/project/.venv"}, "/usr/bin:/bin", "/project/.venv"),
    ],
)
def test_a_login_puts_both_environments_on_path_once(
    place: Path, tmp_path: Path, before: Mapping[str, str], path: str, active: str
) -> None:
    names = {
        "commands": place / "commands",
        "fleet": place / "fleet",
        "own": tmp_path / f".venvs/own-fleet-{VERSION}",
    }
    given = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    given |= {name: value.format(**names) for name, value in before.items()}
    script = f'. {place}/login.sh; echo "$PATH" "${{VIRTUAL_ENV-}}" ${{__venv-gone}} ${{__own-gone}}'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=10, env=given)
    assert done.stdout.split() == [path.format(**names), active.format(**names), "gone", "gone"]
