"""The transient systemd unit of a run on this host, and the notifications of its supervisor."""

from __future__ import annotations

import contextlib
import os

from tpu_ops.protocol.wire import Refused

from . import mounts
from .store import SECRETS

UNIT = "tpu-run.service"
INTERPRETER = ["/usr/bin/python3", "-IS"]
#: Watchdog timeout in seconds: systemd ends the unit if the supervisor does not notify it more often.
WATCHDOG = 20
#: Seconds that the supervisor has until the command is ready to be executed.
START_LIMIT = 30
#: Seconds that systemd has to report why it ends the unit. During this wait, the watchdog is not notified.
_WHY_LIMIT = 2.0
#: Seconds in addition to the grace period that a run may take to end.
STOP_MARGIN = 15


def properties(program: str, run_id: str, grace: float, marker: str) -> list[str]:
    """Return the properties of a run's systemd unit.

    The properties contain no text of the user: systemd expands ``${X}`` and ``%n``, and all users can read properties.

    Args:
        program: Path of this program, which contains its version: an upgrade does not change the program of an active
            run.
        run_id: The run; a valid run id contains nothing that systemd expands.
        grace: Seconds between SIGTERM and SIGKILL when the run is stopped.
        marker: The marker of the request: letters and digits, not a secret.
    """
    after = " ".join([*INTERPRETER, program, "after", run_id, marker])
    return [
        # mixed: systemd sends SIGTERM to the supervisor only, which ends the other processes, and SIGKILL to all
        # processes.
        "KillMode=mixed",
        "Restart=no",
        # Remove a unit that has failed: otherwise its name would stay in use, and the next run would be refused.
        "CollectMode=inactive-or-failed",
        # Do not end the unit if a process runs out of memory: the supervisor reports it.
        "OOMPolicy=continue",
        # Give the unit its own memory control group, which counts how often the kernel kills for lack of memory.
        "MemoryAccounting=yes",
        "OOMScoreAdjust=-900",
        "NotifyAccess=main",
        "WatchdogSec={}".format(WATCHDOG),
        # The default, SIGABRT, could leave a core file that contains the run's key and secrets.
        "WatchdogSignal=SIGKILL",
        "TimeoutStartSec={}".format(START_LIMIT),
        "TimeoutStopSec={:.0f}".format(grace + STOP_MARGIN),
        "After=network-online.target",
        # systemd-run interprets a backslash as quoting, so double it.
        *("After=" + name.replace("\\", "\\\\") for name in mounts.found()),
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "TasksMax=infinity",
        "UMask=0022",
        # systemd removes this directory with the unit, however the unit ends.
        "RuntimeDirectory=" + SECRETS,
        "RuntimeDirectoryMode=0711",
        "ExecStopPost={}".format(after),
    ]


def start_command(program: str, run_id: str, grace: float, marker: str) -> list[str]:
    """Return the command that starts a run's unit, and that ends once the supervisor has reported that it is ready."""
    command = ["systemd-run", "--quiet", "--unit=" + UNIT, "--service-type=notify"]
    command.append("--description=" + _description(run_id))
    command += ["--property=" + entry for entry in properties(program, run_id, grace, marker)]
    return [*command, "--", *INTERPRETER, program, "supervise", run_id]


def _description(run_id: str) -> str:
    return "tpu_ops run {}".format(run_id)


def take_back(run_id: str, limit: float) -> None:
    """Cancel the pending start of a run's unit; do nothing to the unit of another run.

    Args:
        run_id: The run.
        limit: Seconds that systemd has to answer.
    """
    with contextlib.suppress(OSError, Refused):
        code, text = call(["systemctl", "show", "--property=Description", "--value", UNIT], limit)
        if code == 0 and text == _description(run_id):
            call(["systemctl", "stop", "--no-block", UNIT], limit)


def call(command: list[str], limit: float) -> tuple[int, str]:
    """Call one of systemd's programs; return its exit code and output.

    Raises:
        Refused: systemd does not answer.
    """
    import subprocess  # imported late, since most requests and supervisors do not need it

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = "systemd did not answer `{}` within {:.0f} s".format(command[0], limit)
        raise Refused(
            "failed", text, "`systemctl list-jobs` on this worker; reboot the worker if this command hangs too"
        ) from None
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def stopped_by_hand() -> bool:
    """Return whether the unit is being stopped while the host does not shut down; False if systemd does not answer."""
    try:
        code, text = call(["systemctl", "show", "--property=Job,ActiveState", "shutdown.target", UNIT], _WHY_LIMIT)
    except (OSError, Refused):
        return False
    return code == 0 and stops_alone(text)


def stops_alone(text: str) -> bool:
    """Return whether the unit stops but the host does not, from `systemctl show` of shutdown.target and the unit.

    If systemd has no job for the unit, nobody asked systemd to stop it: the start took too long, or the signal came
    from another process.
    """
    facts = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in text.split("\n\n")]
    if len(facts) != 2:
        return False
    # If there is no job, the number is empty or 0, or its line is missing.
    host, own = (block.get("Job") not in (None, "", "0") for block in facts)
    return own and not host and facts[0].get("ActiveState") == "inactive"


def beat() -> None:
    """Tell systemd's watchdog that the supervisor is alive."""
    notify("WATCHDOG=1")


def starting() -> None:
    """Extend the timeout of the unit's start to START_LIMIT from now."""
    notify("EXTEND_TIMEOUT_USEC={:.0f}".format(START_LIMIT * 1e6))


def notify(text: str, limit: float = 0.0) -> None:
    """Send a notification to systemd (READY=1, WATCHDOG=1, STATUS=...); without a socket, do nothing.

    Args:
        text: The notification.
        limit: Seconds to wait if systemd does not read its socket. Only needed for a notification that is not repeated.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    import socket

    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    with sender, contextlib.suppress(OSError):
        # Limit the wait: if systemd does not read its socket, the run's orders must not be delayed.
        sender.settimeout(limit)
        sender.sendto(text.encode("utf-8"), address)
