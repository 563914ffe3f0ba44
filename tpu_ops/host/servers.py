"""The actions `server_start` and `server_stop`: a person's own server on this host, such as a notebook server.

The controller writes the script that starts the server into the person's home. The server runs in a transient systemd
unit as the person. The unit outlives the ssh session, and its name contains the person's account.
"""

from __future__ import annotations

import os

from tpu_ops.protocol.servers import NAMES, directory_of, socket_of, unit_of
from tpu_ops.protocol.wire import Refused, require_protocol

from . import TYPE_CHECKING, environment, unit
from .person import Person, asking
from .rights import require_root

if TYPE_CHECKING:
    from typing import Any, Dict

#: Seconds that a server has to end after SIGTERM, and seconds that systemd has to answer.
_STOP_LIMIT, _SYSTEMD_LIMIT = 10, 15


def start(request: Dict[str, Any]) -> Dict[str, Any]:
    """Start a server of the person who asks; ``started`` in the answer is false if the server was running already.

    Raises:
        Refused: There is no such server, or its unit cannot be started.
    """
    name, person = _asked(request)
    files = environment.load_config()["environment_files"]
    environment.from_files(files)  # refuses a file that is missing, with the fix for it
    code, text = unit.call(start_command(name, person, files), _SYSTEMD_LIMIT)
    if code != 0 and "already" not in text:
        fix = "`sudo journalctl -u {}` on this worker shows more".format(unit_of(name, person.name))
        raise Refused("failed", text, fix)
    return {"ok": True, "started": code == 0}


def stop(request: Dict[str, Any]) -> Dict[str, Any]:
    """Stop a server of the person who asks; ``stopped`` in the answer is false if the server was not running.

    Raises:
        Refused: There is no such server, or systemd does not stop its unit.
    """
    name, person = _asked(request)
    code, text = unit.call(["systemctl", "stop", unit_of(name, person.name)], _STOP_LIMIT + _SYSTEMD_LIMIT)
    if code != 0 and "not loaded" not in text:
        raise Refused("failed", text)
    return {"ok": True, "stopped": code == 0}


def _asked(request: Dict[str, Any]) -> tuple[str, Person]:
    """Return the name of the server in a request, and the person who asks."""
    require_root()
    require_protocol(request)
    name = request.get("server")
    if name not in NAMES:
        raise Refused("invalid", "unknown server {!r}".format(name))
    return str(name), asking()


def start_command(name: str, person: Person, environment_files: list[str]) -> list[str]:
    """Return the command that starts the unit of a person's server. The server gets the environment files of runs."""
    runtime = os.path.basename(os.path.dirname(socket_of(name, person.name)))
    properties = [
        "User=" + person.name,
        "WorkingDirectory=" + person.home,
        "RuntimeDirectory=" + runtime,
        "RuntimeDirectoryMode=0700",
        "UMask=0022",
        # Remove a unit that has failed: otherwise the server could not be started again.
        "CollectMode=inactive-or-failed",
        "OOMPolicy=continue",
        "TimeoutStopSec={}".format(_STOP_LIMIT),
        # The limits of runs: a notebook may use the chips.
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "TasksMax=infinity",
        *("EnvironmentFile=" + path for path in environment_files),
    ]
    command = ["systemd-run", "--quiet", "--unit=" + unit_of(name, person.name), "--service-type=exec"]
    command.append("--description=tpu_ops {} of {}".format(name, person.name))
    command += ["--property=" + entry for entry in properties]
    directory = directory_of(name, os.uname().nodename)
    return [*command, "--", "/bin/bash", os.path.join(person.home, directory, "start")]
