"""One API process, and every client of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from google.cloud import tpu_v2alpha1

from tests.support.lab_api import LabApi
from tests.support.tpu_client import Client

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabApi]:
    """One API process for all tests that only look at nodes of their own."""
    api = LabApi(tmp_path_factory.mktemp("lab") / "state.json", seconds=0.02)
    api.start()
    yield api
    api.close()


@pytest.fixture(params=["grpc", "grpc_asyncio", "rest"])
async def client(shared_api: LabApi, request: pytest.FixtureRequest) -> Any:
    """google.cloud.tpu_v2's client over each of its transports."""
    found = Client(shared_api, request.param)
    yield found
    await found.close()


@pytest.fixture(params=["grpc", "grpc_asyncio"])
async def alpha_client(shared_api: LabApi, request: pytest.FixtureRequest) -> Any:
    """google.cloud.tpu_v2alpha1's client over each of its transports."""
    found = Client(shared_api, request.param, tpu_v2alpha1)
    yield found
    await found.close()


@pytest.fixture
def unique() -> str:
    """A name that no other test uses."""
    return f"n{next(_NUMBERS)}"
