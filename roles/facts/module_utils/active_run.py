"""Find the training run that is active on a worker; supports Python 3.8."""

from __future__ import annotations

import os
import subprocess

#: The systemd unit of a training run, and the text before the run's id in the unit's description
#: (tpu_ops/host/unit.py).
UNIT, TITLE = "tpu-run.service", "tpu_ops run "

#: Time limit in seconds for systemctl.
ANSWER = 30.0


class RunUnknown(Exception):
    """It is unknown whether a run is active; the text is the reason."""


def named_run(shown: str) -> str:
    """Given the output of systemctl show for the run's unit, return the run's id; the unit's name if the id is unknown.

    The result is empty if no run is active. A run that waits at its barrier or is being ended counts as active.
    """
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if values.get("ActiveState", "inactive") in ("inactive", "failed"):
        return ""
    title = values.get("Description", "")
    return title[len(TITLE) :] if title.startswith(TITLE) else UNIT


def active_run() -> str:
    """Return the id of the training run that is active on this host; empty if there is none. See `named_run`.

    Raises:
        RunUnknown: systemctl does not answer in time.
    """
    try:
        done = subprocess.run(
            ["systemctl", "show", "--property=ActiveState,Description", UNIT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            timeout=ANSWER,
            check=False,
            env=dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0"),
        )
    except subprocess.TimeoutExpired as exc:
        raise RunUnknown("systemd did not say within %g s whether a run is active; run again" % exc.timeout) from exc
    except OSError:
        return ""
    return named_run(done.stdout)
