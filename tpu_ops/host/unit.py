"""The transient systemd unit that is a run on this host, and the notifications its supervisor sends."""

from __future__ import annotations

import contextlib
import os

from tpu_ops.protocol.wire import Refused

from . import mounts
from .store import SECRETS

UNIT = "tpu-run.service"
INTERPRETER = ["/usr/bin/python3", "-IS"]
#: The supervisor reports more often than every this many seconds, or systemd ends the unit.
WATCHDOG = 20
#: How long the supervisor may take until the command is ready to be executed, in seconds.
START_LIMIT = 30
#: How long systemd may take to say why it ends the unit, in seconds: the watchdog hears nothing meanwhile.
_WHY_LIMIT = 2.0
#: How much longer than the grace the end of a run may take, in seconds.
STOP_MARGIN = 15


def properties(program: str, run_id: str, grace: float, marker: str) -> list[str]:
    """Return the unit's properties.

    Nothing that the person gave stands in them: systemd expands ``${X}`` and ``%n``, and everyone can read them.

    Args:
        program: Path of this program; a versioned one, so that an upgrade never touches a running one.
        run_id: The run; a checked run id is free of whatever systemd would expand.
        grace: Seconds between SIGTERM and SIGKILL when the run is stopped.
        marker: That of the request, which is letters and digits; it is no secret.
    """
    after = " ".join([*INTERPRETER, program, "after", run_id, marker])
    return [
        # mixed: SIGTERM reaches the supervisor alone, which ends the tree in order; SIGKILL reaches everything.
        "KillMode=mixed",
        "Restart=no",
        # A failed unit would keep its name, and the next run would be refused.
        "CollectMode=inactive-or-failed",
        # One process that runs out of memory is the supervisor's to report, not a reason to end the unit.
        "OOMPolicy=continue",
        # A group of its own in the memory hierarchy counts the run's own kills for want of memory.
        "MemoryAccounting=yes",
        "OOMScoreAdjust=-900",
        "NotifyAccess=main",
        "WatchdogSec={}".format(WATCHDOG),
        # By default SIGABRT, which may leave a core with the run's key and its secrets.
        "WatchdogSignal=SIGKILL",
        "TimeoutStartSec={}".format(START_LIMIT),
        "TimeoutStopSec={:.0f}".format(grace + STOP_MARGIN),
        "After=network-online.target",
        # systemd-run takes a backslash away, as of a quoted character.
        *("After=" + name.replace("\\", "\\\\") for name in mounts.found()),
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "TasksMax=infinity",
        "UMask=0022",
        # Goes with the unit, however that ends.
        "RuntimeDirectory=" + SECRETS,
        "RuntimeDirectoryMode=0711",
        "ExecStopPost={}".format(after),
    ]


def start_command(program: str, run_id: str, grace: float, marker: str) -> list[str]:
    """Return the command that starts the unit and returns once the supervisor has said that it is ready."""
    command = ["systemd-run", "--quiet", "--unit=" + UNIT, "--service-type=notify"]
    command.append("--description=" + _description(run_id))
    command += ["--property=" + entry for entry in properties(program, run_id, grace, marker)]
    return [*command, "--", *INTERPRETER, program, "supervise", run_id]


def _description(run_id: str) -> str:
    return "tpu_ops run {}".format(run_id)


def take_back(run_id: str, limit: float) -> None:
    """Have systemd forget the start of a run's unit that it does not get to; the unit of another run stays.

    Args:
        run_id: The run.
        limit: Seconds that systemd may take to answer.
    """
    with contextlib.suppress(OSError, Refused):
        code, text = call(["systemctl", "show", "--property=Description", "--value", UNIT], limit)
        if code == 0 and text == _description(run_id):
            call(["systemctl", "stop", "--no-block", UNIT], limit)


def call(command: list[str], limit: float) -> tuple[int, str]:
    """Call one of systemd's programs; return its exit code and what it said.

    Raises:
        Refused: systemd does not answer.
    """
    import subprocess  # most requests, and a supervisor whose command ends by itself, do without it

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
        raise Refused("failed", text, "`systemctl list-jobs` on this worker; a reboot if that hangs too") from None
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def stopped_by_hand() -> bool:
    """Return whether somebody has the unit stopped and no host shuts down; False where systemd does not say."""
    try:
        code, text = call(["systemctl", "show", "--property=Job,ActiveState", "shutdown.target", UNIT], _WHY_LIMIT)
    except (OSError, Refused):
        return False
    return code == 0 and stops_alone(text)


def stops_alone(text: str) -> bool:
    """Given what `systemctl show` tells of shutdown.target and of the unit, return whether the unit alone is stopped.

    Where it has no job of its own systemd has not been asked to stop it: its start took too long, or the signal came
    from elsewhere.
    """
    facts = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in text.split("\n\n")]
    if len(facts) != 2:
        return False
    # A job that is none has an empty number, or no line at all.
    host, own = (block.get("Job") not in (None, "", "0") for block in facts)
    return own and not host and facts[0].get("ActiveState") == "inactive"


def beat() -> None:
    """Keep the watchdog quiet."""
    notify("WATCHDOG=1")


def starting() -> None:
    """Have systemd give the start of the unit as long from now as it gives one in all."""
    notify("EXTEND_TIMEOUT_USEC={:.0f}".format(START_LIMIT * 1e6))


def notify(text: str, limit: float = 0.0) -> None:
    """Tell systemd something (READY=1, WATCHDOG=1, STATUS=...); nothing happens where nobody listens.

    Args:
        text: What to tell.
        limit: How long to wait where systemd does not read what it has been told, in seconds; what is told but once
            needs some, anything else is told again soon.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    import socket

    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    with sender, contextlib.suppress(OSError):
        # Without it a systemd that does not read would hold up every order of the run.
        sender.settimeout(limit)
        sender.sendto(text.encode("utf-8"), address)
