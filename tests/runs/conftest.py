"""The workers that runs are tested on: two that are quick to make, and four with JAX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.runs import Bench, made

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


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clean up behind a test on workers."""
    yield
    for name in ("bench", "pod"):
        if name in request.fixturenames:
            request.getfixturevalue(name).sweep()
