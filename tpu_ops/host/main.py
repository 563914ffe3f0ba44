"""Entry: one request on standard input, or an internal word: systemd's two, and that of the role that installs it.

Each imports what it needs alone: that is most of what it costs.
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
    if words == ["compile"]:
        from . import compiled

        try:
            compiled.write(os.path.realpath(sys.argv[0]), compiled_copy)
        except OSError as exc:
            sys.stderr.write("tpu-host: cannot write {}: {}\n".format(compiled_copy, exc.strerror))
            return 1
        return 0
    sys.stderr.write("tpu-host: takes one JSON request on standard input and no arguments\n")
    return 2


def program(compiled_copy: str) -> NoReturn:
    """Run this program and end the process.

    What the interpreter takes apart at its end goes with the process anyway, and to do so takes a sixth of a request.
    Nothing here is registered with atexit.

    Args:
        compiled_copy: As for `main`.
    """
    code = main(compiled_copy)
    threading = sys.modules.get("threading")
    if threading is None or threading.active_count() == 1:
        # Before Python 3.9 it is held back where it is no terminal. Nobody may read it any more.
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
