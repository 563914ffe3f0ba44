"""Whether units have applied the files of their settings; runs on Python 3.8."""

from __future__ import annotations

import contextlib
import os
import time

from ansible.module_utils.mount_points import UNITS

#: The properties to request from systemctl show.
PROPERTIES = "--property=Id,ActiveState,ExecMainStartTimestampMonotonic,LoadState,NeedDaemonReload"


def blocks(shown: str) -> list[dict[str, str]]:
    """Given what systemctl show prints of several units, return the properties of each."""
    return [
        dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.split("\n\n") if block.strip()
    ]


def written(path: str) -> float:
    """Return the time when a file was written, or removed from its directory; 0 if it never existed.

    A time in the future means that the clock was set back, so that times cannot be compared.
    """
    for place in (path, os.path.dirname(path)):
        with contextlib.suppress(OSError):
            moment = os.stat(place).st_mtime
            return moment if moment <= time.time() else 0.0
    return 0.0


def behind(settings: dict[str, str], shown: str) -> list[str]:
    """Given units with the files of their settings and what systemctl show prints, return those that lack them.

    A drop-in of a unit takes effect once systemd has read it, another file once its service has been started. After a
    clock was set back, an older file may be reported once for nothing when its time is reached again: neither clock
    tells whether it was written before the service was started or after the change, and one restart too many does no
    harm.
    """
    found, boot = [], time.time() - time.monotonic()
    for block in blocks(shown):
        path = settings.get(block["Id"], "")
        if path.startswith(UNITS + "/"):
            # For a masked unit with drop-ins systemd always says so.
            late = block["NeedDaemonReload"] == "yes" and block["LoadState"] == "loaded"
        else:
            started = int(block.get("ExecMainStartTimestampMonotonic") or 0) / 1e6 + boot
            late = block["ActiveState"] == "active" and started < written(path)
        found += [block["Id"]] * late
    return found
