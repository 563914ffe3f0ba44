"""A directory for one run of a playbook, which nobody else sees and which goes with it."""

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
#: File in it that is locked for as long as its process lives: the kernel lets go of it, however that ends.
_OWNER = "owner"
#: Seconds after which a directory without such a file counts as left behind; one that is just being made has none yet.
_OLD = 86400.0


@contextlib.contextmanager
def directory(environ: Mapping[str, str]) -> Iterator[Path]:
    """Make a directory for as long as the block lasts, and remove those of processes that were killed.

    It is in memory if the person has a directory of their own there: Ansible's environment stands in it for a while.

    Args:
        environ: Names that directory.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    _sweep(Path(base))
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        # It has its name once it is locked: whoever sweeps at that moment finds none that is free.
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
    """Remove the directories of this person's processes that are dead."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _is_left(path, found.st_mtime):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path, since: float) -> bool:
    """Return whether no process uses a directory any more, given when it was changed last."""
    try:
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - since > _OLD
    try:
        return take(owner)
    finally:
        os.close(owner)
