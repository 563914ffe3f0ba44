"""Which training run is active on a worker; runs on Python 3.8."""

from __future__ import annotations

import os
import subprocess

#: The unit that is a training run, and what the launcher puts before a run's id in its description
#: (tpu_ops/host/unit.py).
UNIT, TITLE = "tpu-run.service", "tpu_ops run "

#: Seconds that systemd may take to answer.
ANSWER = 30.0


class RunUnknown(Exception):
    """Nobody says whether a run is active; the text says why."""


def named_run(shown: str) -> str:
    """Given what systemctl shows of the unit, return the run's id, or the unit where that is not known.

    Empty where no run is active; one that waits at its barrier or is being ended is.
    """
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if values.get("ActiveState", "inactive") in ("inactive", "failed"):
        return ""
    title = values.get("Description", "")
    return title[len(TITLE) :] if title.startswith(TITLE) else UNIT


def active_run() -> str:
    """Return what `named_run` does of this host; empty where systemd does not run.

    Raises:
        RunUnknown: systemd does not answer.
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
