from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import ansible.module_utils
import pytest
from ansible.module_utils.testing import patch_module_args

from roles.facts.module_utils import turns
from tests.support.environments import FAKE_UV

# As Ansible does for roles: what their modules share is a part of its own.
ansible.module_utils.__path__ += map(str, (Path(__file__).parents[2] / "roles").glob("*/module_utils"))

Run = Callable[..., dict[str, Any]]

# Ansible puts what roles share below its own package; each follows what it imports itself.
for role, name in (
    ("facts", "as_person"),
    ("facts", "mount_points"),
    ("facts", "turns"),
    ("facts", "worker"),
    ("nfs", "nfs_state"),
    ("nfs", "nfs_server"),
    ("nfs", "nfs_client"),
    ("workspace", "programs"),
    ("workspace", "clones"),
    ("workspace", "editables"),
):
    sys.modules[f"ansible.module_utils.{name}"] = importlib.import_module(f"roles.{role}.module_utils.{name}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that run a module of a role."""
    if "run" in getattr(item, "fixturenames", ()):
        item.add_marker("module")


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Run one of the roles' modules in this process and return its result."""
    held: dict[str, TextIO] = {}
    monkeypatch.setattr(turns, "DIRECTORY", str(tmp_path_factory.mktemp("turns")))
    monkeypatch.setattr(turns, "_HELD", held)
    # On a worker a module's warnings are in its result; where another test has loaded the controller's part of Ansible,
    # they would be displayed instead.
    monkeypatch.setattr("ansible.module_utils._internal.is_controller", False)

    def call(
        module: ModuleType, arguments: dict[str, Any], *, check: bool = False, no_log: bool = False
    ) -> dict[str, Any]:
        umask = os.umask(0o022)
        monkeypatch.setattr("ansible.module_utils.common.warnings._global_warnings", {})
        flags = {"_ansible_check_mode": check, "_ansible_no_log": no_log}
        try:
            with patch_module_args(arguments | flags), pytest.raises(SystemExit):
                module.main()
        finally:
            os.umask(umask)
            # On a worker they end with the process.
            while held:
                held.popitem()[1].close()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Return arguments of the module uv_environments, with a program that plays uv."""
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
