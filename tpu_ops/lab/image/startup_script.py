"""Runs the ``startup-script`` of the node's metadata, in the place of Google's metadata script runner.

Runs as root inside the worker, at each boot, with its system Python (3.8 or newer), standard library only. The output
of the script goes to the journal of the unit google-startup-scripts.service. As on a TPU VM, the unit does not fail
with the script.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

METADATA = Path("/var/lib/tpu-lab/worker/metadata.json")
KEY = "startup-script"
#: Characters that Google's runner removes before the script's first line.
BLANK = " \n\v\f\t\r"


def say(line: str) -> None:
    """Write a line to the journal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(script: str, say: Callable[[str], None]) -> int:
    """Run a script and return its exit code; each line of its output gets the name of the metadata entry in front.

    The interpreter of the first line is used if the line begins with ``#!``, else bash.
    """
    with tempfile.TemporaryDirectory(prefix="metadata-scripts") as folder:
        file = Path(folder, KEY)
        file.write_text(script, encoding="utf-8")
        file.chmod(0o755)
        with subprocess.Popen(
            ["/bin/bash", "-c", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                say(f"{KEY}: {line.rstrip()}")
        return process.returncode


def main() -> None:
    """Run the startup script if the node's metadata has one."""
    script = json.loads(METADATA.read_text())["metadata"].get(KEY, "").lstrip(BLANK)
    if script:
        say(f"{KEY} exit status {run(script, say)}")
    else:
        say("No startup scripts to run.")


if __name__ == "__main__":
    main()
