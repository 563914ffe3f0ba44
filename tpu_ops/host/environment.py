"""Builds the environment of the command. Variables of the launcher's own environment are not inherited."""

from __future__ import annotations

import json
import os

# playbooks/library/slice_worker.py imports MEGASCALE and Refused from here, where launchers of all versions have them.
from tpu_ops.protocol.spec import MEGASCALE as MEGASCALE  # noqa: PLC0414
from tpu_ops.protocol.spec import RANK_VARIABLES, RUN_DIR, RUN_PORTS, TAKEN_PORTS, UNPRIVILEGED
from tpu_ops.protocol.wire import Refused as Refused  # noqa: PLC0414
from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING, private
from .person import Person

if TYPE_CHECKING:
    from typing import Any, Mapping

CONFIG = "/etc/tpu_ops/launcher.json"
#: Fix for an environment file that the configuration names and that is missing.
FILES_FIX = "run site.yml again on this host; you have to provide the files that launcher_environment_files names"
#: First and last port for the supervisors of a run if the configuration names none: below the ephemeral ports of the
#: kernel.
PORTS = (8500, 8519)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"


def load_config(path: str = CONFIG) -> dict[str, Any]:
    """Return this host's configuration: ``environment_files``, ``venv`` (a path or empty) and ``ports`` (a range)."""
    config: dict[str, Any] = {"environment_files": [], "venv": "", "ports": range(PORTS[0], PORTS[1] + 1)}
    try:
        found = private.content(path)
        data = {} if found is None else json.loads(found.decode("utf-8"))
        config["environment_files"] = [str(entry) for entry in data.get("environment_files") or []]
        config["venv"] = str(data.get("venv") or "")
        if data.get("ports"):
            config["ports"] = _ports(*data["ports"])
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise Refused("failed", "{}: {}".format(path, exc), "apply the role launcher to this host again") from exc
    return config


def _ports(first: int, last: int) -> range:
    """Return the range of ports for the supervisors of a run.

    Raises:
        ValueError: The range is invalid, or TPU software uses a port of the range.
    """
    ports = range(first, last + 1)
    if not RUN_PORTS[0] <= first <= last <= RUN_PORTS[-1] or any(port in ports for port in TAKEN_PORTS):
        text = "ports: [{}, {}] is not a range within {} to {} without {}"
        taken = ", ".join(map(str, TAKEN_PORTS))
        raise ValueError(text.format(first, last, RUN_PORTS[0], RUN_PORTS[-1], taken))
    return ports


def coordinator_port(env: Mapping[bytes, bytes]) -> int:
    """Return the port on which JAX's coordinator listens on rank 0, from a rank's environment.

    Raises:
        Refused: The port in the environment is invalid, or only root may listen on it.
    """
    text = env.get(b"JAX_COORDINATOR_PORT", b"8482").decode("ascii", "replace")
    if not text.isdigit() or not 0 < int(text) < 65536:
        fix = "set a port from {} to 65535, or do not set this variable".format(UNPRIVILEGED)
        raise Refused("invalid", "JAX_COORDINATOR_PORT={} is not a port".format(text), fix)
    # Check this here: the supervisor runs as root, so reserving a privileged port for the user would succeed.
    if int(text) < UNPRIVILEGED:
        fix = "set a port from {} to 65535".format(UNPRIVILEGED)
        raise Refused("invalid", "JAX_COORDINATOR_PORT={} is a privileged port".format(text), fix)
    return int(text)


def parse_file(text: str) -> dict[str, str]:
    """Return the variables in an environment file: KEY=VALUE lines, # comments, optional quotes."""
    found = {}
    # Do not use `splitlines`: it also splits at form feeds and other characters that a value can contain.
    for line in text.split("\n"):
        name, sign, value = line.strip().partition("=")
        name, value = name.strip(), value.strip()
        # Accept `export` before the name, as pam_env does, which reads the same files.
        if name.startswith(("export ", "export\t")):
            name = name[len("export ") :].strip()
        if not sign or name.startswith("#") or not name or "\0" in line:
            continue
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def from_files(paths: list[str]) -> dict[str, str]:
    """Return the variables of all these environment files; later files override earlier files."""
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

    The user's variables override the variables in the host's files; TPU_OPS_* always have their true values. No TPU_*
    variable is set or inherited here: on a TPU VM, JAX finds its slice by itself. The variables by which the slices of
    one run find each other (`MEGASCALE`) are set for each attempt: values of an earlier attempt would name hosts that
    are gone. A host's files may only set these variables to the empty string.

    Args:
        spec: The run, as `protocol.spec.check` returned it.
        person: The user that the command runs as.
        venv: The virtual environment that comes first on PATH; may be empty.
        from_host: Variables from the environment files in this host's configuration and from the run's secrets.
        run_files: The directory of this run in which the user can write files.
    """
    env = {
        "HOME": person.home,
        "USER": person.name,
        "LOGNAME": person.name,
        "SHELL": person.shell,
        "LANG": "C.UTF-8",
        "PATH": SYSTEM_PATH,
        # The command's output is a pipe: without this variable, Python would buffer the lines.
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
    """Return the working directory of the command: an absolute path, or a path below the user's home."""
    return os.path.join(person.home, spec["cwd"]) if spec["cwd"] else person.home
