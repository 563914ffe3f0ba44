"""Which Python can run what is asked of the role jax, and what its environment holds."""

from __future__ import annotations

from typing import Any

import pytest

from roles.jax.filter_plugins.jax import jax_environment, jax_faults, jax_python_fault


@pytest.mark.parametrize(
    ("jax", "python", "needs"),
    [
        ("0.10.2", "3.11", None),
        ("0.10.2", "3.12", None),
        ("0.10.2", "3.13", None),
        ("0.10.2", "3.10", "needs Python 3.11 or later"),
        ("0.12.0.1", "3.11", "needs Python 3.12 or later"),
        ("0.12.0.1", "3.12", None),
        ("0.6.2", "3.10", None),
        ("0.6.3", "3.10", "needs Python 3.11 or later"),
        ("0.4.31", "3.8", "needs Python 3.10 or later"),
        ("0.4.13", "3.8", None),
        ("0.4.1", "3.7", "use Python 3.8 or later"),
        ("newest", "3.12", "is not a version"),
    ],
)
def test_a_python_too_old_for_the_jax_is_refused_with_the_one_that_can(
    jax: str, python: str, needs: str | None
) -> None:
    fault = jax_python_fault(jax, python)
    assert fault == "" if needs is None else needs in fault


def test_the_way_out_names_the_newest_jax_for_the_python_that_is_there() -> None:
    assert "jax_version to 0.6.2 or older" in jax_python_fault("0.10.2", "3.10")


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
        ({}, "3.14", "jax_torch_xla_version: 2.9.0 runs on Python 3.10 to 3.13, and this worker's is 3.14"),
        ({"jax_torch_xla_version": "2.7.0", "jax_torch_version": "2.7.0+cpu"}, "3.12", "runs on Python 3.9 to 3.11"),
        ({"jax_torch_version": "2.8.0"}, "3.12", "jax_torch_version: 2.8.0 is not the 2.9 that torch_xla 2.9.0 needs"),
        ({"jax_torch_xla_version": "newest"}, "3.12", "jax_torch_xla_version: 'newest' is not a version"),
        ({"jax_framework": "jax"}, "3.10", "jax_version: JAX 0.10.2 needs Python 3.11 or later"),
    ],
)
def test_a_python_that_cannot_run_what_is_asked_is_refused(changes: dict[str, Any], python: str, said: str) -> None:
    faults = jax_faults(VALUES | changes, python)
    assert said in "; ".join(faults) if said else faults == []


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
