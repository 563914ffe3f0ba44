"""The workers that runs are tested on: two that are quick to make, four with JAX, and three slices of two with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.world import run
from tests.support.runs import Bench, made

__all__ = ["run"]

SIZE = 2
BOTH = range(SIZE)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two workers of one node."""
    with made("runs", tmp_path_factory.mktemp("runs"), packages=["", "zsh"]) as workers:
        yield workers


@pytest.fixture(scope="session")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Four workers of one node, with JAX."""
    folder = tmp_path_factory.mktemp("pod")
    with made("pod", folder, packages=["iptables", "", "iptables", ""], jax="0.10.2") as workers:
        yield workers


@pytest.fixture(scope="session")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Three nodes of two workers each, `a`, `b` and `c`, with JAX."""
    folder = tmp_path_factory.mktemp("slices")
    with made("slices", folder, packages=[""] * 2, jax="0.10.2", nodes=["a", "b", "c"]) as workers:
        yield workers


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clean up behind a test on workers."""
    yield
    for name in ("bench", "pod", "slices"):
        if name in request.fixturenames:
            request.getfixturevalue(name).sweep()
