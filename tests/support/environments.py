"""A program that plays uv, the environments that it makes, and those that somebody made by hand."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

#: The real one, as tools/setup.sh has it.
UV = shutil.which("uv") or str(Path(__file__).parents[2] / ".build/uv/bin/uv")

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
    for name in names:
        if name.startswith("withdrawn"):
            sys.exit("Because " + name.partition("==")[0] + " was not found in the package registry and you require it")
    before = there.read_text().split() if there.exists() else []
    kept = [line for line in before if line.partition("==")[0] in names]
    rest = [name if "==" in name else name + "==9" for name in names
            if not any(line.startswith(name + "==") for line in kept)]
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
for name in missing:
    plain = name.partition("==")[0]
    if plain.startswith("young") and "--refresh-package=" + plain not in arguments:
        sys.exit("Because there is no version of " + name + " and you require it, we can conclude nothing")
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


def more(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the module's arguments with an environment that is asked for otherwise."""
    return arguments | {"environments": [arguments["environments"][0] | changes]}


def state(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the module said of the one environment."""
    found: dict[str, Any] = result["environments"]["jax"]
    return found


def site(tmp_path: Path) -> Path:
    """Return where the packages of the environment are."""
    return tmp_path / "venv" / "lib" / "python3.11" / "site-packages"


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


def plain_wheel(directory: Path, name: str, version: str, *requires: str) -> None:
    """Make a wheel of one module that requires other packages."""
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    files = {
        f"{name}.py": "x = 1\n",
        f"{info}/METADATA": "\n".join([*lines, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in (
            files | {f"{info}/RECORD": "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])}
        ).items():
            archive.writestr(path, text)


#: Builds an editable installation of the project whose pyproject.toml is next to it, without anything from an index.
BACKEND = """
import pathlib, tomllib, zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    name, info = project["name"], project["name"] + "-1.dist-info"
    lines = ["Metadata-Version: 2.1", "Name: " + name, "Version: 1"]
    lines += ["Requires-Dist: " + need for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines += ["Provides-Extra: " + extra]
        lines += ["Requires-Dist: %s ; extra == '%s'" % (need, extra) for need in needs]
    files = {
        name + ".pth": str(pathlib.Path.cwd()),
        info + "/METADATA": "\\n".join([*lines, ""]),
        info + "/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[info + "/RECORD"] = "".join(path + ",,\\n" for path in [*files, info + "/RECORD"])
    wheel = name + "-1-py3-none-any.whl"
    with zipfile.ZipFile(directory + "/" + wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
"""


def write_project(directory: Path, name: str, needs: list[str], **extras: list[str]) -> None:
    """Write a Python project that can be installed editable, also over an earlier one."""
    directory.mkdir(exist_ok=True)
    (directory / ".gitignore").write_text("__pycache__/\n")
    (directory / "backend.py").write_text(BACKEND)
    (directory / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "1"\ndependencies = {json.dumps(needs)}\n'
        f"[project.optional-dependencies]\n"
        + "".join(f"{extra} = {json.dumps(listed)}\n" for extra, listed in extras.items())
    )
