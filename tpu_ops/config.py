"""The settings of a fleet: `inventory/tpu_vm.yml` and the environment, read once, typed.

The inventory plugin and the command line read the same file. The environment wins over the file, so that a fleet
can be pointed at another endpoint or project without an edit. Every error names the file and the key, or the
variable, that it came from.
"""

from __future__ import annotations

import getpass
import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpu_ops.errors import UsageError
from tpu_ops.options import Options, Value, check_name, did_you_mean, shown

#: Where a fleet directory keeps its file.
FLEET_FILE = Path("inventory/tpu_vm.yml")

#: Keys of the file that say how to reach the API and the workers; `load` turns them into `Settings`.
OWN_KEYS = (
    "projects",
    "zones",
    "endpoint",
    "request_timeout",
    "states",
    "connect_with",
    "user",
    "private_key",
)

#: Keys of the file that only the inventory plugin reads (its own, `constructed` and `inventory_cache`).
PLUGIN_KEYS = (
    "plugin",
    "hostvars_prefix",
    "strict",
    "compose",
    "groups",
    "keyed_groups",
    "leading_separator",
    "use_extra_vars",
    "cache",
    "cache_plugin",
    "cache_timeout",
    "cache_connection",
    "cache_prefix",
)

#: Names of google.cloud.tpu.v2.Node.State that a filter may name.
STATES = (
    "CREATING",
    "READY",
    "RESTARTING",
    "REIMAGING",
    "DELETING",
    "REPAIRING",
    "STOPPED",
    "STOPPING",
    "STARTING",
    "PREEMPTED",
    "TERMINATED",
    "HIDING",
    "HIDDEN",
    "UNHIDING",
    "UNKNOWN",
)

#: Private keys that are looked for, in this order, where none is set. The second is the one gcloud makes.
PRIVATE_KEYS = ("id_ed25519", "google_compute_engine", "id_rsa")

#: Seconds that one API call may take, its retries included.
REQUEST_TIMEOUT = 60.0

#: The same where an endpoint on this machine is set: nothing is far away, and one that hangs should be seen soon.
LOCAL_TIMEOUT = 20.0

_PROJECT = re.compile(r"^(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]*$")
_ZONE = re.compile(r"^[a-z]+(?:-[a-z0-9]+)+$")
_A_PROJECT, _A_ZONE = "a project id", "a zone, as in us-central2-b"
_USER = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.-]*$")


@dataclass(frozen=True)
class Settings:
    """What a fleet's file and the environment say, checked.

    Attributes:
        path: The fleet directory.
        file: The file that was read.
        projects: Project ids, at least one, without repetition.
        zones: Zones to ask; empty means all.
        endpoint: ``host:port`` of a plaintext gRPC endpoint on loopback; empty means the real service.
        request_timeout: Seconds that one API call may take, its retries included; by default less at an endpoint.
        states: States of the nodes that the inventory lists.
        connect_with: ``external`` and ``internal`` in order of preference.
        user: Login name on the workers.
        private_key: The person's private key, or None where the ssh client should find one by itself.
        state_dir: Where this fleet's snapshot, ssh config and known_hosts are kept. A file that is not a fleet
            directory's `inventory/tpu_vm.yml` has a state of its own.
    """

    path: Path
    file: Path
    projects: tuple[str, ...]
    zones: tuple[str, ...]
    endpoint: str
    request_timeout: float
    states: tuple[str, ...]
    connect_with: tuple[str, ...]
    user: str
    private_key: Path | None
    state_dir: Path


def load(fleet: str | None = None) -> Settings:
    """Return the settings of a fleet.

    Args:
        fleet: The fleet directory (`--fleet`); else TPU_OPS_FLEET, else the nearest parent directory that has
            `inventory/tpu_vm.yml`.

    Raises:
        UsageError: No fleet is found, or its settings are wrong; names file and key.
    """
    return load_file(find_fleet(fleet, os.environ, Path.cwd()) / FLEET_FILE)


def load_file(file: Path) -> Settings:
    """Return the settings that a fleet's file and the environment give.

    Raises:
        UsageError: The file cannot be read or its settings are wrong; names file and key.
    """
    file = file.parent.resolve() / file.name
    return from_data(read_file(file), file, os.environ)


def find_fleet(fleet: str | None, environ: Mapping[str, str], start: Path) -> Path:
    """Given `--fleet`, the environment and the working directory, return the fleet directory.

    Raises:
        UsageError: There is none.
    """
    named = fleet or environ.get("TPU_OPS_FLEET", "")
    if named:
        path = Path(named).expanduser().resolve()
        if not (path / FLEET_FILE).is_file():
            raise UsageError(
                f"the fleet directory has no {FLEET_FILE}",
                where=f"{path} (from {'--fleet' if fleet else 'TPU_OPS_FLEET'})",
                fix=f"name a directory that holds {FLEET_FILE}",
            )
        return path
    if found := nearest_fleet(start):
        return found
    raise UsageError(
        f"no fleet: neither this directory nor one above it has {FLEET_FILE}",
        where=str(start),
        fix="change to the fleet directory, or name it by --fleet or TPU_OPS_FLEET",
    )


def nearest_fleet(start: Path) -> Path | None:
    """Return the nearest directory upwards that is a fleet directory, or None."""
    folders = (start.resolve(), *start.resolve().parents)
    return next((folder for folder in folders if (folder / FLEET_FILE).is_file()), None)


def read_file(file: Path) -> Mapping[str, Any]:
    """Return the mapping that a fleet's file holds.

    Raises:
        UsageError: The file cannot be read, is no YAML, or is no mapping.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the fleet's file: {reason}", where=str(file)) from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
        raise UsageError(f"not valid YAML: {getattr(exc, 'problem', exc)}", where=place) from exc
    except RecursionError as exc:
        raise UsageError("not valid YAML for a fleet: nested too deeply", where=str(file)) from exc
    except ValueError as exc:
        raise UsageError(f"not valid YAML: {shown(str(exc))}", where=str(file)) from exc
    if not isinstance(data, dict):
        raise UsageError("the file is no mapping of options", where=str(file), fix="begin it with `plugin: tpu_vm`")
    return data


def check_zone(text: str, where: str) -> str:
    """Return a zone's name.

    Raises:
        UsageError: It has another form.
    """
    return check_name(text, where, _ZONE, _A_ZONE)


def check_project(text: str, where: str) -> str:
    """Return a project id.

    Raises:
        UsageError: It has another form.
    """
    return check_name(text, where, _PROJECT, _A_PROJECT)


def from_data(data: Mapping[str, Any], file: Path, environ: Mapping[str, str]) -> Settings:
    """Given the mapping of a fleet's file and the environment, return the settings.

    Raises:
        UsageError: An unknown key, a wrong type, a value out of range, or no project.
    """
    _check_keys(data, file)
    options = Options(data, file, environ)
    in_fleet = file.parts[-2:] == FLEET_FILE.parts
    origin = file.parent.parent if in_fleet else file
    endpoint = options.text("endpoint", "TPU_OPS_ENDPOINT")
    if endpoint.value:
        _check_endpoint(endpoint)
    return Settings(
        path=origin if in_fleet else file.parent,
        file=file,
        projects=_projects(options),
        zones=options.names("zones", "TPU_OPS_ZONES", _ZONE, _A_ZONE),
        endpoint=endpoint.value,
        request_timeout=options.seconds("request_timeout", LOCAL_TIMEOUT if endpoint.value else REQUEST_TIMEOUT),
        states=options.choices("states", STATES, ("READY",)),
        connect_with=options.choices("connect_with", ("external", "internal"), ("external", "internal")),
        user=_user(options),
        private_key=_private_key(options, environ),
        state_dir=_state_root(environ) / "fleets" / _state_name(origin, endpoint.value),
    )


def _check_keys(data: Mapping[str, Any], file: Path) -> None:
    known = OWN_KEYS + PLUGIN_KEYS
    for key in data:
        if key not in known:
            raise UsageError(
                f"unknown key {shown(key)}{did_you_mean(str(key), known)}",
                where=str(file),
                fix="`ansible-doc -t inventory tpu_vm` lists the keys",
            )
    if data.get("plugin") != "tpu_vm":
        raise UsageError(
            "the file does not say which inventory plugin reads it",
            where=f"{file}, key 'plugin'",
            fix="begin it with `plugin: tpu_vm`",
        )


def _projects(options: Options) -> tuple[str, ...]:
    projects = options.names("projects", "TPU_OPS_PROJECT", _PROJECT, _A_PROJECT)
    if not projects:
        raise UsageError(
            "no project is set",
            where=options.at("projects"),
            fix="list your Google Cloud project ids there, or set TPU_OPS_PROJECT",
        )
    return projects


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536


def _check_endpoint(endpoint: Value) -> None:
    """A plaintext endpoint carries no credentials and so must be on this machine."""
    fix = "use HOST:PORT of this machine's loopback, as in 127.0.0.1:18470; unset it for the real service"
    host, colon, port = endpoint.value.rpartition(":")
    if not colon or not _is_port(port) or "/" in host:
        raise UsageError(f"{shown(endpoint.value)} is not of the form HOST:PORT", where=endpoint.where, fix=fix)
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise UsageError(
            f"endpoint {shown(endpoint.value)} is not on loopback; it would be spoken to in plaintext",
            where=endpoint.where,
            fix=fix,
        )


def _user(options: Options) -> str:
    """The login name, by default the local one: the same that gcloud takes."""
    user = options.text("user", "TPU_OPS_USER")
    if not user.value:
        try:
            user = Value(getpass.getuser(), "this machine's login name")
        except (KeyError, OSError) as exc:
            raise UsageError("no login name for the workers", where=options.at("user"), fix="set it") from exc
    if not _USER.fullmatch(user.value):
        raise UsageError(
            f"{shown(user.value)} is not a login name", where=user.where, fix="set key 'user' or TPU_OPS_USER"
        )
    return user.value


def _private_key(options: Options, environ: Mapping[str, str]) -> Path | None:
    """The key that is set, else the first of PRIVATE_KEYS below ~/.ssh, else none."""
    home = Path(environ.get("HOME") or Path.home())
    key = options.text("private_key", "TPU_OPS_PRIVATE_KEY")
    if not key.value:
        return next((path for name in PRIVATE_KEYS if (path := home / ".ssh" / name).is_file()), None)
    text = str(home) + key.value[1:] if key.value.startswith("~/") else key.value
    base = Path.cwd() if environ.get("TPU_OPS_PRIVATE_KEY") else options.file.parent
    path = base / text
    if not path.is_file():
        raise UsageError(
            f"the private key {path} does not exist",
            where=key.where,
            fix=f"make it (ssh-keygen -t ed25519 -f {path}) or name another",
        )
    if any(char in str(path) for char in '"\n\r'):
        raise UsageError("the private key's path holds a quote or a line end", where=key.where, fix="name another")
    return path


def _state_root(environ: Mapping[str, str]) -> Path:
    """The directory below which everything of this machine's fleets is kept."""
    if own := environ.get("TPU_OPS_STATE", ""):
        return Path(own).expanduser().absolute()
    home = Path(environ.get("HOME") or Path.home())
    return Path(environ.get("XDG_STATE_HOME") or home / ".local/state").absolute() / "tpu_ops"


def _state_name(path: Path, endpoint: str) -> str:
    """Name of a fleet's state: its own for each endpoint, so that a test service and the real one never mix."""
    digest = hashlib.sha256(f"{path}\n{endpoint}".encode()).hexdigest()[:8]
    return f"{path.name}-{digest}"
