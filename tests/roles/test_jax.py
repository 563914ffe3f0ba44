"""The Python versions for each JAX, and the environment of the role jax."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from roles.jax.filter_plugins.jax import (
    NEWEST_JAX,
    NEWEST_JAX_DATE,
    dotted,
    jax_environment,
    jax_faults,
    jax_or_newest,
    jax_python_fault,
)
from roles.python.filter_plugins.environments import wanted_environments
from roles.python.library import uv_environments
from tests.roles.conftest import Run
from tests.support.environments import UV
from tpu_ops.protocol.installed_packages import pinned_packages

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("jax", "python", "needs"),
    [
        ("0.10.2", "3.11", None),
        ("0.10.2", "3.12", None),
        ("0.10.2", "3.13", None),
        ("0.10.2", "3.10", "needs Python 3.11 or later"),
        ("0.12.0.1", "3.11", "needs Python 3.12 or later"),
        ("0.12.0.1", "3.12", None),
        ("0.13.0", "3.12", None),
        ("0.13.0", "3.11", "needs Python 3.12 or later"),
        ("0.13.0", "3.15", None),
        ("0.6.2", "3.10", None),
        ("0.6.3", "3.10", "needs Python 3.11 or later"),
        ("0.4.31", "3.8", "needs Python 3.10 or later"),
        ("0.4.13", "3.8", None),
        ("0.4.1", "3.7", "use Python 3.8 or later"),
    ],
)
def test_a_python_too_old_for_the_jax_is_refused_with_the_one_that_can(
    jax: str, python: str, needs: str | None
) -> None:
    fault = jax_python_fault(jax, python)
    assert fault == "" if needs is None else needs in fault


def test_the_way_out_names_the_newest_jax_for_the_python_that_is_there() -> None:
    assert "jax_version to 0.6.2 or older" in jax_python_fault("0.10.2", "3.10")


@pytest.mark.parametrize(
    ("asked", "python", "chosen"),
    [
        ("", "3.10", "0.6.2"),
        ("", "3.11", "0.10.2"),
        ("", "3.12", "0.12.0.1"),
        ("", "3.14", "0.12.0.1"),
        ("", "3.15", ""),
        ("", "3.7", ""),
        ("0.9.0", "3.14", "0.9.0"),
        ("0.12.0.1", "3.11", "0.12.0.1"),
    ],
)
def test_without_a_version_the_newest_jax_of_the_python_is_chosen(asked: str, python: str, chosen: str) -> None:
    assert jax_or_newest(asked, python) == chosen


def test_the_description_of_jax_version_says_what_the_table_says() -> None:
    spec = yaml.safe_load((ROOT / "roles/jax/meta/argument_specs.yml").read_text())
    said = spec["argument_specs"]["main"]["options"]["jax_version"]["description"]
    pythons = [dotted(python) for python, newest in NEWEST_JAX.items() if newest == max(NEWEST_JAX.values())]
    assert f"{dotted(max(NEWEST_JAX.values()))} with Python {pythons[0]} to {pythons[-1]}" in said
    for python, newest in NEWEST_JAX.items():
        assert dotted(python) in pythons or f"{dotted(newest)} with {dotted(python)}" in said
    assert NEWEST_JAX_DATE in said


@pytest.mark.index
@pytest.mark.parametrize("python", [dotted(python) for python in NEWEST_JAX])
def test_the_package_index_has_the_newest_jax_of_the_table(python: str, tmp_path: Path) -> None:
    newest = jax_or_newest("", python)
    (tmp_path / "in").write_text(f"jax=={newest}\njaxlib=={newest}\n")
    options = ["--quiet", "--no-deps", "--only-binary", "jaxlib", "--python-version", python]
    command = [UV, "pip", "compile", *options, "--output-file", str(tmp_path / "out"), str(tmp_path / "in")]
    subprocess.run(command, check=True, timeout=120)


VALUES: dict[str, Any] = {
    "jax_constraints": [],
    "jax_exact": False,
    "jax_find_links": [],
    "jax_framework": "torch_xla",
    "jax_lock": "",
    "jax_packages": ["flax"],
    "jax_platform": "tpu",
    "jax_torch_find_links": ["page"],
    "jax_torch_version": "2.9.0+cpu",
    "jax_torch_xla_version": "2.9.0",
    "jax_venv": "/opt/venvs/jax",
    "jax_venv_owner": "root",
    "jax_version": "0.10.2",
}


@pytest.mark.parametrize(
    ("changes", "python", "said"),
    [
        ({}, "3.13", ""),
        ({}, "3.14", "jax_torch_xla_version, python_version: 2.9.0 runs on Python 3.10 to 3.13"),
        ({"jax_torch_xla_version": "2.7.0", "jax_torch_version": "2.7.0+cpu"}, "3.12", "runs on Python 3.9 to 3.11"),
        ({"jax_torch_version": "2.8.0"}, "3.12", "jax_torch_version: 2.8.0 is not the 2.9 that torch_xla 2.9.0 needs"),
        ({"jax_torch_xla_version": "newest"}, "3.12", "jax_torch_xla_version: 'newest' is not a version"),
        ({"jax_framework": "jax"}, "3.10", "jax_version, python_version: JAX 0.10.2 needs Python 3.11 or later"),
        ({"jax_framework": "jax", "jax_version": "newest"}, "3.12", "jax_version: 'newest' is not a version"),
        (
            {"jax_framework": "jax", "jax_version": ""},
            "3.15",
            "for Python 3.15 is not known (on 2026-11-27 there was one",
        ),
        ({"jax_framework": "jax", "jax_version": ""}, "3.7", "Python 3.7 runs no supported JAX"),
    ],
)
def test_a_python_that_cannot_run_what_is_asked_is_refused(changes: dict[str, Any], python: str, said: str) -> None:
    faults = jax_faults(VALUES | changes, python, "uv")
    assert said in "; ".join(faults) if said else faults == []


@pytest.mark.parametrize("framework", ["jax", "torch_xla"])
def test_a_too_old_distribution_python_is_a_fault_of_python_source(framework: str) -> None:
    (fault,) = jax_faults(VALUES | {"jax_framework": framework}, "3.8", "distribution")
    assert fault.partition(": ")[0].endswith("_version, python_source")


@pytest.mark.parametrize(
    ("changes", "requirements", "links"),
    [
        ({}, ["torch_xla[tpu]==2.9.0", "torch==2.9.0+cpu", "flax"], ["page"]),
        ({"jax_platform": "cpu"}, ["torch_xla==2.9.0", "torch==2.9.0+cpu", "flax"], ["page"]),
        ({"jax_framework": "jax", "jax_find_links": ["old"]}, ["jax[tpu]==0.10.2", "flax"], ["old"]),
        ({"jax_framework": "jax", "jax_platform": "cpu"}, ["jax==0.10.2", "flax"], []),
    ],
)
def test_the_environment_holds_what_was_asked(
    changes: dict[str, Any], requirements: list[str], links: list[str]
) -> None:
    (environment,) = jax_environment(VALUES | changes)
    assert (environment["requirements"], environment["find_links"]) == (requirements, links)


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """Return a directory that plays the page with the torch without CUDA: a wheel of its name that needs nothing."""
    with zipfile.ZipFile(tmp_path / "torch-2.9.0+cpu-py3-none-any.whl", "w") as wheel:
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+cpu\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"torch-2.9.0+cpu.dist-info/{name}", text)
    return tmp_path


def resolved(run: Run, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Resolve the role's environment as a worker does, with its defaults but for some; ask the package index."""
    values = yaml.safe_load((ROOT / "roles/jax/defaults/main.yml").read_text())
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    own = {"jax_framework": "torch_xla", "jax_venv": str(tmp_path / "venv"), "jax_version": jax_or_newest("", python)}
    environments = jax_environment(values | own | changes)
    arguments = {
        "step": "resolve",
        "uv": UV,
        "cache_dir": str(tmp_path / "cache"),
        "environments": wanted_environments(environments, {python: {"program": sys.executable}}, python, []),
    }
    return run(uv_environments, arguments)


@pytest.mark.index
def test_jax_for_tpus_is_resolved_with_the_libtpu_that_it_pins(run: Run, tmp_path: Path) -> None:
    pins = pinned_packages(resolved(run, tmp_path, jax_framework="jax")["locks"]["jax"])
    assert pins["jax"] == jax_or_newest("", f"{sys.version_info[0]}.{sys.version_info[1]}")
    alone = ["pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(tmp_path / "jax")]
    subprocess.run([UV, *alone, f"jax=={pins['jax']}"], check=True, timeout=120)
    (jax,) = metadata.distributions(path=[str(tmp_path / "jax")])
    asked = [Requirement(text) for text in jax.requires or []]
    (libtpu,) = [one for one in asked if one.name == "libtpu" and one.marker and one.marker.evaluate({"extra": "tpu"})]
    assert str(libtpu.specifier)
    assert pins["libtpu"] in libtpu.specifier


@pytest.mark.index
def test_torch_xla_is_resolved_with_the_torch_that_has_no_cuda(run: Run, tmp_path: Path, torch: Path) -> None:
    pins = pinned_packages(resolved(run, tmp_path, jax_torch_find_links=[str(torch)])["locks"]["jax"])
    assert (pins["torch-xla"], pins["torch"]) == ("2.9.0", "2.9.0+cpu")
    assert {"libtpu", "numpy", "absl-py"} <= pins.keys()


@pytest.mark.index
def test_the_torch_of_the_package_index_is_refused_for_its_cuda(run: Run, tmp_path: Path) -> None:
    said = resolved(run, tmp_path, jax_torch_version="2.9.0", jax_torch_find_links=[])["msg"]
    assert "would get packages that it must not have: nvidia-" in said
    assert "triton" in said
