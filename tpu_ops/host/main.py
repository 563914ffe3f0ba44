"""Entry point: handles one request on standard input, or an internal command line of systemd or the role launcher.

Each kind of call imports only the modules that it needs: imports take most of a request's time.
"""

from __future__ import annotations

import contextlib
import os
import sys

from tpu_ops.protocol.spec import check_run_id

from . import TYPE_CHECKING
from .store import Store

if TYPE_CHECKING:
    from typing import NoReturn


def main(compiled_copy: str) -> int:
    """Run this program and return its exit code.

    Args:
        compiled_copy: Path of this program's compiled copy, which may be missing.
    """
    words = sys.argv[1:]
    if not words:
        from .requests import serve

        return serve(Store())
    if len(words) == 2 and words[0] == "supervise":
        from .supervise import Supervisor

        return Supervisor(Store(), check_run_id(words[1])).run()
    if len(words) == 3 and words[0] == "after":
        from .after import after

        return after(Store(), check_run_id(words[1]), words[2])
    if len(words) == 3 and words[0] == "stacks":
        from .stacks import take

        return take(Store(), check_run_id(words[1]), float(words[2]))
    if words == ["compile"]:
        return _compile(compiled_copy)
    sys.stderr.write("tpu-host: takes one JSON request on standard input and no arguments\n")
    return 2


def _compile(compiled_copy: str) -> int:
    from . import compiled

    try:
        compiled.write(os.path.realpath(sys.argv[0]), compiled_copy)
    except OSError as exc:
        sys.stderr.write("tpu-host: cannot write {}: {}\n".format(compiled_copy, exc.strerror))
        return 1
    return 0


def program(compiled_copy: str) -> NoReturn:
    """Run this program and end the process.

    Skipping the interpreter's cleanup saves a sixth of a request's time. No atexit handlers are registered here.

    Args:
        compiled_copy: Path of the compiled copy; see `main`.
    """
    code = main(compiled_copy)
    threading = sys.modules.get("threading")
    if threading is None or threading.active_count() == 1:
        # Before Python 3.9, stderr is buffered if it is not a terminal. Ignore errors: the reader of stderr may have
        # gone.
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
