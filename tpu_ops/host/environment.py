"""The environment of the command: built from nothing, so that no variable arrives that nobody asked for."""

from __future__ import annotations

import json
import os

# MEGASCALE and Refused are exported: playbooks/library/slice_worker.py finds them here in launchers of every version.
from tpu_ops.protocol.spec import MEGASCALE as MEGASCALE  # noqa: PLC0414
from tpu_ops.protocol.spec import RANK_VARIABLES, RUN_DIR, RUN_PORTS, TAKEN_PORTS, UNPRIVILEGED
from tpu_ops.protocol.wire import Refused as Refused  # noqa: PLC0414
from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING, private
from .person import Person

if TYPE_CHECKING:
    from typing import Any, Mapping

CONFIG = "/etc/tpu_ops/launcher.json"
#: What helps where a file is missing that the configuration names.
FILES_FIX = "run site.yml again on this host; you provide the files of launcher_environment_files yourself"
#: Where the supervisors of a run meet unless the configuration says otherwise, first and last port.
PORTS = (8500, 8519)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"


def load_config(path: str = CONFIG) -> dict[str, Any]:
    """Return this host's configuration: ``environment_files``, ``venv`` (a path or empty) and ``ports`` (a range).

    Raises:
        Refused: The file is there and cannot be understood.
    """
    config: dict[str, Any] = {"environment_files": [], "venv": "", "ports": range(PORTS[0], PORTS[1] + 1)}
    try:
        found = private.content(path)
        data = {} if found is None else json.loads(found.decode("utf-8"))
        config["environment_files"] = [str(entry) for entry in data.get("environment_files") or []]
        config["venv"] = str(data.get("venv") or "")
        if data.get("ports"):
            config["ports"] = _ports(*data["ports"])
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise Refused("failed", "{}: {}".format(path, exc), "run the role launcher again on this host") from exc
    return config


def _ports(first: int, last: int) -> range:
    """Return a range of ports that the supervisors of a run may use.

    Raises:
        ValueError: It is none, or TPU software uses one of them itself.
    """
    ports = range(first, last + 1)
    if not RUN_PORTS[0] <= first <= last <= RUN_PORTS[-1] or any(port in ports for port in TAKEN_PORTS):
        text = "ports: [{}, {}] is not a range within {} to {} without {}"
        taken = ", ".join(map(str, TAKEN_PORTS))
        raise ValueError(text.format(first, last, RUN_PORTS[0], RUN_PORTS[-1], taken))
    return ports


def coordinator_port(env: Mapping[bytes, bytes]) -> int:
    """Given a rank's environment, return the port on which JAX's coordinator listens on rank 0.

    Raises:
        Refused: The environment names one that is none, or one on which root alone may listen.
    """
    text = env.get(b"JAX_COORDINATOR_PORT", b"8482").decode("ascii", "replace")
    if not text.isdigit() or not 0 < int(text) < 65536:
        fix = "name one from {} to 65535, or leave it out".format(UNPRIVILEGED)
        raise Refused("invalid", "JAX_COORDINATOR_PORT={} is not a port".format(text), fix)
    # The supervisor, which is root, keeps it for whoever asks.
    if int(text) < UNPRIVILEGED:
        fix = "name one from {} to 65535".format(UNPRIVILEGED)
        raise Refused("invalid", "JAX_COORDINATOR_PORT={} is a privileged port".format(text), fix)
    return int(text)


def parse_file(text: str) -> dict[str, str]:
    """Given the text of an environment file (KEY=VALUE lines, # comments, optional quotes), return its variables."""
    found = {}
    # Not `splitlines`, which takes a form feed and others for line ends: they may stand in a value.
    for line in text.split("\n"):
        name, sign, value = line.strip().partition("=")
        name, value = name.strip(), value.strip()
        # As pam_env has it, which reads such files, too.
        if name.startswith(("export ", "export\t")):
            name = name[len("export ") :].strip()
        if not sign or name.startswith("#") or not name or "\0" in line:
            continue
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def from_files(paths: list[str]) -> dict[str, str]:
    """Return the variables of all these files, later files over earlier ones.

    Raises:
        Refused: A file that this host's configuration names cannot be read.
    """
    found: dict[str, str] = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                found.update(parse_file(file.read()))
        except OSError as exc:
            raise Refused(
                "failed",
                "{}: {}".format(path, exc.strerror),
                "{} names this file: {}".format(CONFIG, FILES_FIX),
            ) from exc
    return found


def build(
    spec: dict[str, Any], person: Person, venv: str, from_host: dict[str, str], run_files: str
) -> dict[bytes, bytes]:
    """Return the environment of one rank's command.

    What the host's files say is overridden by what the person asked for; TPU_OPS_* always tell the truth. No TPU_*
    variable is set or inherited here: on a TPU VM JAX finds its slice by itself. How slices of one run find each other
    (`MEGASCALE`) is told from this attempt alone, since what an earlier one left would lead to hosts that are gone; a
    host's files may only say that there are none.

    Args:
        spec: The run, as `protocol.spec.check` returned it.
        person: Who the command runs as.
        venv: The virtual environment that comes first on PATH, or empty.
        from_host: Variables of the files that this host's configuration names, and those of the run's secrets.
        run_files: A directory of this run that the person may write to.
    """
    env = {
        "HOME": person.home,
        "USER": person.name,
        "LOGNAME": person.name,
        "SHELL": person.shell,
        "LANG": "C.UTF-8",
        "PATH": SYSTEM_PATH,
        # Output goes to a pipe; without this its lines would wait in Python's buffer.
        "PYTHONUNBUFFERED": "1",
    }
    if venv:
        env["VIRTUAL_ENV"] = venv
        env["PATH"] = os.path.join(venv, "bin") + ":" + SYSTEM_PATH
    env.update({name: value for name, value in from_host.items() if name not in MEGASCALE or not value})
    env.update(spec["env"])
    env.update({name: str(spec[key]) for name, key in RANK_VARIABLES.items()})
    env[RUN_DIR] = run_files
    if spec["slices"] > 1:
        address, count, index = MEGASCALE
        env.update({address: spec["net"]["hub"], count: str(spec["slices"]), index: str(spec["slice"])})
    return {encode(name): encode(value) for name, value in env.items()}


def working_directory(spec: dict[str, Any], person: Person) -> str:
    """Return where the command starts: absolute as asked, else below the person's home."""
    return os.path.join(person.home, spec["cwd"]) if spec["cwd"] else person.home
