"""What the lab shares with its workers: files that a worker's root may write, and the kernel's limits."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from tpu_ops.lab import shared
from tpu_ops.lab.backend import BackendError


def test_a_link_or_a_flood_that_a_worker_planted_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "status.json").symlink_to(secret)
    assert shared.read(tmp_path / "status.json") == ""
    os.mkfifo(tmp_path / "fifo")
    assert shared.read(tmp_path / "fifo") == ""
    (tmp_path / "flood").write_bytes(b"x" * (shared.MAX_BYTES + 1))
    assert len(shared.read(tmp_path / "flood")) == shared.MAX_BYTES


def test_metadata_is_replaced_at_once_for_its_owner_only_and_not_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "workers" / "w0" / "metadata.json"
    shared.replace(path, b"one")
    first = path.stat()
    assert first.st_mode & 0o777 == 0o600
    shared.replace(path, b"one")
    assert path.stat().st_ino == first.st_ino
    (path.parent / ".metadata.json.new").write_text("left by a lab that was killed")
    shared.replace(path, b"two")
    assert path.read_text() == "two"
    assert shared.entries(path.parent) == [path]


@pytest.mark.parametrize(
    ("workers", "limit", "wanted"), [(2, 128, None), (5, 128, 1024), (16, 1024, None), (64, 1024, 2304)]
)
def test_the_inotify_limit_follows_the_number_of_workers(workers: int, limit: int, wanted: int | None) -> None:
    assert shared.inotify_limit(workers, limit) == wanted


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that allows 128 inotify instances and no change of that."""
    limit = tmp_path / "max_user_instances"
    limit.write_text("128\n")
    monkeypatch.setattr(shared, "INOTIFY", limit)
    for name in ("sysctl", "sudo"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("refused")
def test_more_workers_than_the_machine_allows_are_refused_with_the_command_that_helps() -> None:
    with pytest.raises(BackendError, match=r"30 workers need more than the 128 .*`sudo sysctl -w fs\.inotify"):
        shared.allow_inotify(30)


@pytest.mark.usefixtures("refused")
def test_workers_that_just_fit_are_booted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shared.allow_inotify(10)
    assert "stays at 128" in caplog.text


async def test_only_an_ssh_banner_is_an_answer() -> None:
    async def speak(text: bytes) -> bool:
        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(text)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await shared.ssh_answers("127.0.0.1", server.sockets[0].getsockname()[1])

    assert await speak(b"SSH-2.0-test\r\n")
    assert not await speak(b"HTTP/1.1 400\r\n")
    assert not await speak(b"")
