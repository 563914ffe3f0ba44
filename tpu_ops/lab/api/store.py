"""The API's state file: one JSON file, written atomically and locked by the API's process."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tpu_ops.errors import UsageError
from tpu_ops.lab.api.errors import ApiError, Code

#: Value of the field ``format`` in a state file, which distinguishes state files from other JSON files.
FORMAT = "tpu-ops-lab-api"
FORMAT_VERSION = 1


class Store:
    """Reads and writes the API's state file.

    Changes that are made during one write are written together by the next write (group commit).

    Args:
        path: The state file; ``<name>.lock`` in the same directory is the lock file.

    Raises:
        UsageError: Another process has the lock, or the lock file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._render: Callable[[], str] = str
        self._wanted = self._written = 0
        self._writing = asyncio.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise UsageError(
                "another process of the lab's API uses this state file",
                where=str(path),
                fix="stop the other process, or set another state file with --state",
            ) from failure
        except OSError as failure:
            fix = "make the file writable, or set another state file with --state"
            raise UsageError(f"cannot use the state file: {failure.strerror}", where=str(path), fix=fix) from failure

    def read(self) -> dict[str, Any] | None:
        """Return the content of the state file; None if the file does not exist yet.

        Raises:
            UsageError: The file cannot be read, is not JSON, or is not a state file.
        """
        try:
            data = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except OSError as failure:
            fix = "make the file readable, or set another state file with --state"
            raise UsageError(
                f"cannot read the state file: {failure.strerror}", where=str(self.path), fix=fix
            ) from failure
        except ValueError as failure:
            raise self.damaged(f"the file is not JSON ({failure})") from failure
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self.damaged(f"the file is not a state of the lab's API (no format {FORMAT!r})")
        if data.get("version") != FORMAT_VERSION:
            raise self.damaged(
                f"the file has format version {data.get('version')!r}, this program reads {FORMAT_VERSION}"
            )
        return data

    def damaged(self, why: str) -> UsageError:
        """Return the error for a state file that cannot be used; the file is left unchanged."""
        return UsageError(
            f"cannot use the state file: {why}",
            where=str(self.path),
            fix="move the file away to start with an empty lab, or set another state file with --state",
        )

    def bind(self, render: Callable[[], str]) -> None:
        """Set the function that returns the current state as the text of the state file."""
        self._render = render

    def changed(self) -> None:
        """Record that the state in memory has changed and has to be written."""
        self._wanted += 1

    async def flush(self) -> None:
        """Return when the state file has all changes that were recorded before this call.

        Raises:
            ApiError: RESOURCE_EXHAUSTED; the file cannot be written. The next call tries again.
        """
        wanted = self._wanted
        while self._written < wanted:
            async with self._writing:
                if self._written < wanted:
                    including, text = self._wanted, self._render()
                    try:
                        await _to_the_end(asyncio.to_thread(self._write, text))
                    except OSError as failure:
                        why = failure.strerror or failure
                        raise ApiError(
                            Code.RESOURCE_EXHAUSTED, f"the lab's state cannot be written to {self.path}: {why}"
                        ) from failure
                    self._written = including

    async def settle(self) -> None:
        """Write the state file like `flush`, but only log an error: the next call tries again."""
        try:
            await self.flush()
        except ApiError as failure:
            logging.getLogger(__name__).warning("%s", failure.message)

    def close(self) -> None:
        """Release the lock of the state file."""
        os.close(self._lock)

    def _write(self, text: str) -> None:
        new = self.path.with_name(self.path.name + ".new")
        try:
            with new.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            new.replace(self.path)
        except OSError:
            new.unlink(missing_ok=True)  # on a full disk, the incomplete file would use the remaining space
            raise


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait until a coroutine has ended, even if the caller is cancelled; then raise the caller's cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
