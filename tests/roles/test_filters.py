from __future__ import annotations

import pytest

from roles.jax.filter_plugins.jax import jax_python_fault


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
