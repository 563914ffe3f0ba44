"""Installing the packages that a project lists, with the real uv and wheels made here, on workers that share a home."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import UV, plain_wheel, write_project
from tests.support.nodes import node
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import HostError, UsageError
from tpu_ops.runs import installs, project_environment, sync
from tpu_ops.ssh.replies import Result


class Workers:
    """Workers that share a home directory, and that have the fleet's environment `base`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.base = folder / "home", folder / "base"
        self.home.mkdir()
        self.workers = [Worker(f"pod-w{index}", node(), index) for index in range(2)]
        do(UV, "venv", "--quiet", str(self.base))
        self.to_base("common==1")

    def to_base(self, *packages: str) -> None:
        do(UV, "pip", "install", "--quiet", "--python", f"{self.base}/bin/python", *packages)

    async def run(
        self, hosts: Sequence[str], argv: Sequence[str], *, limit: float, stdin: Mapping[str, bytes]
    ) -> Mapping[str, Result]:
        async def one(host: str) -> Result:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv[1:], cwd=self.home, stdin=-1, stdout=-1, stderr=-1
            )
            return Result(host, *_of(await process.communicate(stdin[host]), process.returncode))

        return {result.host: result for result in await asyncio.gather(*map(one, hosts))}

    async def install(self, tree: sync.Tree) -> installs.Installed:
        """Copy a tree to the workers, and install the packages that it lists."""
        fanout: Any = self
        listed, hosts = installs.listing(tree), [worker.host for worker in self.workers]
        assert listed
        there = self.home / tree.cwd
        there.mkdir(parents=True, exist_ok=True)
        for name in tree.files:
            (there / name).parent.mkdir(exist_ok=True)
            (there / name).write_bytes((tree.source / name).read_bytes())
        seen = await installs.look(fanout, hosts, tree, listed, str(self.base))
        return seen.installed or await installs.install(
            fanout, self.workers, tree, listed, base=str(self.base), pins=seen.pins
        )


def versions(made: installs.Installed) -> str:
    """Return the versions that a program finds in an environment."""
    program = "import common, extra; from importlib.metadata import version as v; print(v('common'), v('extra'))"
    return do(f"{made.path}/bin/python", "-c", program)


def do(*argv: str) -> str:
    """Run a command; return its output."""
    return subprocess.check_output(argv, text=True).strip()


def there(made: installs.Installed, name: str = "") -> Path:
    """Return the path of an environment, or of a file in it."""
    return Path(made.path, name)


def _of(said: tuple[bytes, bytes], code: int | None) -> tuple[int | None, bytes, bytes]:
    return code, *said


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    wheels = tmp_path / "wheels"
    for name, version in (("common", "1"), ("common", "2"), ("extra", "1"), ("extra", "2")):
        plain_wheel(wheels, name, version)
    cache = tmp_path / "cache"
    for name, value in {"UV_OFFLINE": 1, "UV_NO_INDEX": 1, "UV_FIND_LINKS": wheels, "UV_CACHE_DIR": cache}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{Path(UV).parent}:{os.environ['PATH']}")
    return Workers(tmp_path)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "digits").mkdir()
    return tmp_path / "digits"


async def test_listed_packages_are_installed_and_the_fleets_are_used(workers: Workers, code: Path) -> None:
    (code / "requirements.txt").write_text("common\nextra<2\n")
    made = await workers.install(sync.read(code))
    assert (made.anew, made.packages, versions(made)) == (True, 1, "1 1"), "the fleet's version is preferred"
    again = await workers.install(sync.read(code))
    assert (again.anew, again.path, again.digest, again.pins) == (False, made.path, made.digest, made.pins)
    # The digest covers files that a listing can include, and no code.
    (code / "train.py").write_text("x")
    assert not (await workers.install(sync.read(code))).anew
    (code / "constraints.txt").write_text("common==2\n")
    (code / "requirements.txt").write_text("-c constraints.txt\ncommon\nextra\n")
    other = await workers.install(sync.read(code))
    assert (other.packages, versions(other)) == (2, "2 2"), "another version than the fleet's"
    assert not there(made).exists()


async def test_another_environment_of_the_fleet_means_another_environment_of_the_project(
    workers: Workers, code: Path
) -> None:
    (code / "requirements.txt").write_text("extra==1\n")
    before = await workers.install(sync.read(code))
    workers.to_base("common==2")
    after = await workers.install(sync.read(code))
    assert after.anew
    assert after.path != before.path
    assert versions(after) == "2 1"
    # On workers that share the home directory and were not configured yet, a run may be using it.
    assert there(before).exists()
    os.utime(there(before, "tpu_ops.json"), (0, 0))
    (code / "requirements.txt").write_text("extra==2\n")
    await workers.install(sync.read(code))
    assert not there(before).exists()
    assert not there(after).exists()


async def test_an_interrupted_installation_is_done_again(workers: Workers, code: Path) -> None:
    (code / "requirements.txt").write_text("extra==1\n")
    made = await workers.install(sync.read(code))
    there(made, "tpu_ops.json").unlink()
    there(made, "bin/python").unlink()
    again = await workers.install(sync.read(code))
    assert (again.anew, versions(again)) == (True, "1 1")


async def test_a_lock_is_installed_as_it_is_with_the_project_itself(workers: Workers, code: Path) -> None:
    (code / "digits.py").write_text("x = 1")
    write_project(code, "digits", ["common"])
    do(UV, "lock", "--quiet", "--python", sys.executable, "--directory", str(code))
    (code / "requirements.txt").write_text("extra==9\n")
    made = await workers.install(sync.read(code))
    assert made.packages == 2, "common in version 2, and the project"
    found = do(f"{made.path}/bin/python", "-Pc", "import digits; print(digits.__file__)")
    assert found == str(workers.home / "tpu_ops/digits/digits.py")


async def test_a_failed_installation_names_the_file_and_the_reason(workers: Workers, code: Path) -> None:
    (code / "requirements.txt").write_text("extra==7\n")
    with pytest.raises(HostError, match="there is no version of extra==7") as failure:
        await workers.install(sync.read(code))
    assert failure.value.where == "pod-w0"
    assert failure.value.fix == "correct requirements.txt, or start without it: --no-install"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.py": ""}, None),
        ({"pyproject.toml": "[tool.ruff]"}, None),
        ({"pyproject.toml": "[project]\nname='x'"}, ("pyproject.toml", False)),
        ({"pyproject.toml": "[project]\n[build-system]", "requirements.txt": ""}, ("requirements.txt", True)),
        ({"pyproject.toml": "[project]", "uv.lock": "", "requirements.txt": ""}, ("uv.lock", False)),
        ({"uv.lock": ""}, None),
    ],
)
def test_the_first_listing_is_used(code: Path, files: dict[str, str], found: tuple[str, bool] | None) -> None:
    for name, text in files.items():
        (code / name).write_text(text)
    listed = installs.listing(sync.read(code))
    assert (listed and (listed.name, listed.editable)) == found


@pytest.mark.parametrize(
    "line", ["lib", "libs/one", "./lib", "one @ ../lib", "one[x] @ file:///lib ; python_version > '3'"]
)
def test_a_directory_that_would_be_a_copy_is_refused(line: str) -> None:
    with pytest.raises(project_environment.Failed, match="editable"):
        project_environment.without_copies(f"common==1 \\\n    --hash=sha256:0\n{line}\n")


@pytest.mark.parametrize(
    "line",
    ["", "# lib", "-e libs/one", "one[x]==1", "one @ https://host/one.whl", "one @ git+ssh://host/one@1", "./a.whl"],
)
def test_other_lines_stay(line: str) -> None:
    assert project_environment.without_copies(line) == line


async def test_a_directory_in_pyproject_is_not_taken_for_a_package_of_the_index(workers: Workers, code: Path) -> None:
    # uv names it like a package, and the index has one of this name.
    write_project(code / "extra", "one", [])
    project = '[project]\nname = "top"\nversion = "1"\nrequires-python = ">=3.8"\ndependencies = ["one"]\n'
    (code / "pyproject.toml").write_text(f'{project}[tool.uv.sources]\none = {{ path = "extra" }}\n')
    with pytest.raises(HostError, match="the directory extra would be installed as a copy"):
        await workers.install(sync.read(code))


def test_a_damaged_pyproject_is_named(code: Path) -> None:
    (code / "pyproject.toml").write_text("[project")
    with pytest.raises(UsageError, match="this file cannot be read") as failure:
        installs.listing(sync.read(code))
    assert failure.value.where.endswith("digits/pyproject.toml")
