"""A private directory for one run of a playbook, removed after the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpu_ops.files import take

_PREFIX = "tpu_ops-configure-"
#: File in the directory that the process keeps locked. The kernel releases the lock however the process ends.
_OWNER = "owner"
#: Age in seconds from which a directory without the locked file counts as abandoned. Right after its creation, a
#: directory has no locked file yet.
_OLD = 86400.0


@contextlib.contextmanager
def directory(environ: Mapping[str, str]) -> Iterator[Path]:
    """Create a directory for the length of a `with` block; first remove directories that killed processes left behind.

    The directory is in the user's runtime directory, thus in memory, if there is one: Ansible's environment, which is
    written there, contains secrets.

    Args:
        environ: The environment; XDG_RUNTIME_DIR is the runtime directory.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    _sweep(Path(base))
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        # Lock the file before it gets its final name, so that a concurrent `_sweep` never finds it unlocked.
        new = made / f"{_OWNER}.new"
        owner = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take(owner)
            new.rename(made / _OWNER)
            yield made
        finally:
            os.close(owner)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove the directories of this user's processes that have ended."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _is_left(path, found.st_mtime):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path, since: float) -> bool:
    """Return whether a directory is abandoned: no process holds its lock. ``since`` is the time of its last change."""
    try:
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - since > _OLD
    try:
        return take(owner)
    finally:
        os.close(owner)
