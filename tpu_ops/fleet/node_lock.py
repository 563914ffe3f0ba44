"""The lock by which one command on this machine at a time changes the properties of a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tpu_ops import files
from tpu_ops.cloud.client import told
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.config import Settings
from tpu_ops.files import UnwritableError


@contextmanager
def locked(settings: Settings, name: str, timeout: float) -> Iterator[None]:
    """Keep other commands on this machine from changing a node, for the length of a `with` block.

    Args:
        settings: The fleet's settings: the lock file is in the fleet's state directory.
        name: The node's resource name.
        timeout: Seconds to wait for another command.

    Raises:
        UnwritableError: Another command did not end in time, or the lock file cannot be written.
    """
    _, project, _, zone, _, short = name.split("/")
    path = settings.state_dir / "node-locks" / f"{project}.{zone}.{short}.lock"
    with ExitStack() as held:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with told(f"waiting for another command that changes {node_in_words(name)}"):
                held.enter_context(files.locked(path, timeout))
        except TimeoutError as exc:
            fix = "find the process with `fuser` on that file, and run this command again when the process has ended"
            what = f"another command has been changing the node for more than {timeout:.0f} s"
            raise UnwritableError(what, where=str(path), fix=fix) from exc
        except OSError as exc:
            raise files.unwritable(path, exc) from exc
        yield
