"""The workers that runs are tested on: two that are quick to make, four with JAX, and three slices of four with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.world import run
from tests.support.desk import Desk, lab_up
from tests.support.recovery import launcher_fleet
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
    """Three nodes of four workers each, `a`, `b` and `c`, with JAX."""
    folder = tmp_path_factory.mktemp("slices")
    with made("slices", folder, packages=[""] * 4, jax="0.10.2", nodes=["a", "b", "c"]) as workers:
        yield workers


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab is up, with no node, and whose site.yml has the launcher alone."""
    fleet = launcher_fleet(tmp_path_factory.mktemp("recover") / "fleet")
    with lab_up("recover", tmp_path_factory.mktemp("state"), TPU_OPS_FLEET=str(fleet)) as shell:
        yield shell


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clean up behind a test on workers."""
    yield
    for name in ("bench", "pod", "slices"):
        if name in request.fixturenames:
            request.getfixturevalue(name).sweep()
