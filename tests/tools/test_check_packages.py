"""The check of packages fails on each kind of wrong import."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checker(tmp_path, monkeypatch):
    """The checker, looking at an empty project."""
    spec = importlib.util.spec_from_file_location("check_packages", ROOT / "tools" / "check_packages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for room in ("cloud", "fleet", "cli", "lab", "host", "protocol"):
        (tmp_path / "tpu_ops" / room).mkdir(parents=True)
    (tmp_path / "roles/base/tasks").mkdir(parents=True)
    (tmp_path / "tpu_ops/config.py").touch()
    (tmp_path / "tpu_ops/options.py").touch()
    (tmp_path / "site.yml").touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("tpu_ops/cloud/a.py", "from tpu_ops.fleet.view import Fleet\n", "may not import tpu_ops.fleet.view.Fleet"),
        ("tpu_ops/cloud/a.py", "from ..fleet import view\n", "may not import tpu_ops.fleet.view"),
        ("tpu_ops/cloud/a.py", "def f():\n    import tpu_ops.runs\n", "may not import tpu_ops.runs"),
        (
            "tpu_ops/lab/a.py",
            "from tpu_ops.cloud.client import connect\n",
            "may not import tpu_ops.cloud.client.connect",
        ),
        ("tpu_ops/host/a.py", "from tpu_ops.errors import OpsError\n", "may not import tpu_ops.errors.OpsError"),
        ("tpu_ops/protocol/a.py", "from tpu_ops.host import proc\n", "may not import tpu_ops.host.proc"),
        ("tpu_ops/cli/run.py", "from tpu_ops.lab import instance\n", "may not import tpu_ops.lab.instance"),
        ("tpu_ops/fleet/a.py", 'if zone == "lab":\n    pass\n', "a.py:1: knows the lab"),
        ("roles/base/tasks/main.yml", "---\n- when: in_lab\n", "main.yml:2: knows the lab"),
    ],
)
def test_a_forbidden_import_or_word_is_named(checker, tmp_path, path, text, said):
    (tmp_path / path).write_text(text)
    assert [fault for fault in checker.faults() if said in fault]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tpu_ops/lab/a.py", "from tpu_ops.cloud.accelerators import accelerator_type\n"),
        ("tpu_ops/host/a.py", "from tpu_ops.protocol import wire\n"),
        ("tpu_ops/cloud/a.py", "from tpu_ops.protocol import wire\n"),
        ("tpu_ops/cli/lab.py", "from tpu_ops.lab import instance\n"),
        ("tpu_ops/fleet/a.py", "label = labels = 'available'\n"),
    ],
)
def test_allowed_imports_and_words_pass(checker, tmp_path, path, text):
    (tmp_path / path).write_text(text)
    assert checker.faults() == []
