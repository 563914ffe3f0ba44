"""Buckets of the lab's API."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.support.lab_api import LabApi

MIB = 1 << 20
#: What makes the names of buckets unique in one process.
NUMBERS = itertools.count(1)


def client_of(api: LabApi, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return google-cloud-storage's client of an API."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", api.rest)
    return storage.Client(project="lab", credentials=AnonymousCredentials())


def directory(api: LabApi) -> Path:
    """Return where an API keeps its buckets."""
    return api.state.with_name("state.json.buckets")


def put(bucket: Any, *names: str) -> None:
    """Upload objects of these names."""
    for name in names:
        bucket.blob(name).upload_from_string(f"content of {name}")


def names(found: Any) -> list[str]:
    """Return the names of buckets or objects."""
    return [entry.name for entry in found]
