"""All tests run without access to the real service and without the state of the user who runs them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

# By its own name: a test may replace it in the module.
from signal import pthread_sigmask

import pytest

# No test forks to speak gRPC in the child, and gRPC's own handlers of a fork do harm while its threads are at work.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

pytest_plugins = ["tests.support.lab_api", "tests.support.fleet", "tests.support.skips"]


@pytest.fixture(autouse=True)
def _no_real_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Void credentials, and directories of the test's own for state and control sockets."""
    for name in list(os.environ):
        # Of a shell with an agent, a fleet or a lab, only the choice of the container engine holds for tests as well.
        if name in ("ANSIBLE_INVENTORY", "STORAGE_EMULATOR_HOST", "SSH_AUTH_SOCK") or (
            name.startswith("TPU_OPS_") and name != "TPU_OPS_ENGINE"
        ):
            monkeypatch.delenv(name)
    # Short enough for sockets; without it they would be in the one directory of the person.
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as own:
        monkeypatch.setenv("XDG_RUNTIME_DIR", own)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"{own}/void.json")
        monkeypatch.setenv("CLOUDSDK_CONFIG", f"{own}/gcloud")
        monkeypatch.setenv("TPU_OPS_STATE", f"{own}/state")
        yield


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A test that leaves signals blocked fails itself, and not a later one that waits for them for ever."""
    before = pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, "signals are blocked that were not before"


@pytest.fixture(autouse=True)
def _log_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the log after each test: a command that runs in this process adds a handler and stops propagation."""
    log = logging.getLogger("tpu_ops")
    monkeypatch.setattr(log, "handlers", list(log.handlers))
    monkeypatch.setattr(log, "propagate", log.propagate)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the messages that this project logs."""
    caplog.set_level(logging.INFO, "tpu_ops")
    return caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs gcloud where it is not installed: it comes from no package index this project uses."""
    if shutil.which("gcloud"):
        return
    for item in items:
        if item.get_closest_marker("gcloud"):
            item.add_marker(pytest.mark.skip(reason="gcloud is not installed"))
