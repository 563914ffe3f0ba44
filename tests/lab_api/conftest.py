"""One API process, and every client of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud import tpu_v2alpha1

from tests.support.buckets import NUMBERS, client_of
from tests.support.lab_api import LabApi
from tests.support.lab_service import Lab
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


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """The lab's service in this process."""
    found = Lab(tmp_path / "state.json")
    yield found
    found.backend.gate.set()
    await found.close()


@pytest.fixture
def storage_client(shared_api: LabApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """google-cloud-storage's client."""
    made = client_of(shared_api, monkeypatch)
    yield made
    made.close()
    shared_api.clear_faults()


@pytest.fixture
def bucket(storage_client: Any) -> Any:
    """A new bucket."""
    return storage_client.create_bucket(f"bucket{next(NUMBERS)}", location="us-central2")
