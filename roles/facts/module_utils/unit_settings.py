"""Check whether systemd units have applied their configuration files; supports Python 3.8."""

from __future__ import annotations

import contextlib
import os
import time

from ansible.module_utils.mount_points import UNITS

#: The properties to request from systemctl show.
PROPERTIES = "--property=Id,ActiveState,ExecMainStartTimestampMonotonic,LoadState,NeedDaemonReload"


def blocks(shown: str) -> list[dict[str, str]]:
    """Given the output of systemctl show for several units, return the properties of each unit."""
    return [
        dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.split("\n\n") if block.strip()
    ]


def written(path: str) -> float:
    """Return the time of a file's last change; if the file does not exist, that of its directory, or 0 without either.

    Return 0 also for a time in the future: the clock was set back then, and times cannot be compared.
    """
    for place in (path, os.path.dirname(path)):
        with contextlib.suppress(OSError):
            moment = os.stat(place).st_mtime
            return moment if moment <= time.time() else 0.0
    return 0.0


def behind(settings: dict[str, str], shown: str) -> list[str]:
    """Return the units that have not applied the latest version of their configuration file.

    A drop-in of a unit takes effect when systemd has read it, another file when its service is started after the
    change. If the clock was set back after a file was written, the unit can be returned once without need, which costs
    one restart.

    Args:
        settings: Unit -> its configuration file.
        shown: The output of systemctl show for these units with `PROPERTIES`.
    """
    found, boot = [], time.time() - time.monotonic()
    for block in blocks(shown):
        path = settings.get(block["Id"], "")
        if path.startswith(UNITS + "/"):
            # A masked unit is ignored: if it has drop-ins, its NeedDaemonReload is always `yes`.
            late = block["NeedDaemonReload"] == "yes" and block["LoadState"] == "loaded"
        else:
            started = int(block.get("ExecMainStartTimestampMonotonic") or 0) / 1e6 + boot
            late = block["ActiveState"] == "active" and started < written(path)
        found += [block["Id"]] * late
    return found
