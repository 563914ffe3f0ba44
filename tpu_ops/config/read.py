"""Reads `Settings` out of the mapping of a fleet's file and the environment."""

from __future__ import annotations

import getpass
import hashlib
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.cloud import auth
from tpu_ops.cloud.auth import Auth
from tpu_ops.config.settings import LOCAL_TIMEOUT, OWN_KEYS, PLUGIN_KEYS, REQUEST_TIMEOUT, STATES, Filters, Settings
from tpu_ops.config.templates import evaluated
from tpu_ops.errors import UsageError
from tpu_ops.options import Options, Value, check_name, did_you_mean, shown

#: Where a fleet directory keeps its file.
FLEET_FILE = Path("inventory/tpu_vm.yml")

#: Private keys that are looked for, in this order, where none is set. The second is the one gcloud makes.
PRIVATE_KEYS = ("id_ed25519", "google_compute_engine", "id_rsa")

_PROJECT = re.compile(r"^(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]*$")
_ZONE = re.compile(r"^[a-z]+(?:-[a-z0-9]+)+$")
_A_PROJECT, _A_ZONE = "a project id", "a zone, as in us-central2-b"
_USER = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.-]*$")
_PATTERN = re.compile(r"^\S+$")
_JUMP = re.compile(
    r"^(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?$"
)


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
    options = Options(evaluated(data, OWN_KEYS, file), file, environ)
    in_fleet = file.parts[-2:] == FLEET_FILE.parts
    origin = file.parent.parent if in_fleet else file
    endpoint = options.text("endpoint", "TPU_OPS_ENDPOINT")
    if endpoint.value:
        _check_endpoint(endpoint)
    snapshot = options.text("snapshot", "TPU_OPS_SNAPSHOT").value
    return Settings(
        path=origin if in_fleet else file.parent,
        file=file,
        projects=_projects(options, needed=not snapshot),
        zones=options.names("zones", "TPU_OPS_ZONES", _ZONE, _A_ZONE),
        endpoint=endpoint.value,
        request_timeout=options.seconds("request_timeout", LOCAL_TIMEOUT if endpoint.value else REQUEST_TIMEOUT),
        states=options.choices("states", STATES, ("READY",)),
        connect_with=options.choices("connect_with", ("external", "internal"), ("external", "internal")),
        user=_user(options),
        private_key=_private_key(options, environ),
        auth=_auth(options),
        strict_permissions=options.flag("strict_permissions", default=False),
        snapshot=snapshot,
        filters=Filters(
            names=options.names("names", "", _PATTERN, "a pattern of node names, as in pod-*"),
            labels=_labels(options),
            accelerator_types=options.names(
                "accelerator_types", "", _PATTERN, "a pattern of accelerator types, as in v4-*"
            ),
        ),
        proxy_jump=_proxy_jump(options),
        iap=options.flag("iap", default=False),
        forward_agent=options.flag("forward_agent", default=False),
        learn_host_keys=options.flag("learn_host_keys", default=True),
        state_dir=files.state_root(environ) / "fleets" / _state_name(origin, endpoint.value),
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


def _projects(options: Options, *, needed: bool) -> tuple[str, ...]:
    projects = options.names("projects", "TPU_OPS_PROJECT", _PROJECT, _A_PROJECT)
    if needed and not projects:
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
    path = _path(key, options, environ, from_environment=bool(environ.get("TPU_OPS_PRIVATE_KEY")))
    if not path.is_file():
        raise UsageError(
            f"the private key {path} does not exist",
            where=key.where,
            fix=f"make it (ssh-keygen -t ed25519 -f {path}) or name another",
        )
    if any(char in str(path) for char in '"\n\r'):
        raise UsageError("the private key's path holds a quote or a line end", where=key.where, fix="name another")
    return path


def _path(value: Value, options: Options, environ: Mapping[str, str], *, from_environment: bool) -> Path:
    """The path that an option means: below the home, else relative to where it was written."""
    home = str(Path(environ.get("HOME") or Path.home()))
    text = home + value.value[1:] if value.value.startswith("~/") else value.value
    return (Path.cwd() if from_environment else options.file.parent) / text


def _labels(options: Options) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The labels a node must have: a mapping of each to nothing, a value or a list of values."""
    data = options.data.get("labels")
    if data is None:
        return ()
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise options.wrong("labels", "a mapping of labels to values")
    found = []
    for key, value in data.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str | int) and not isinstance(entry, bool) for entry in values):
            raise UsageError(
                f"expected a text or a list of texts, found {shown(value)}",
                where=f"{options.at('labels')}, label {key!r}",
                fix="put it in quotes",
            )
        found.append((key, tuple(str(entry) for entry in values)))
    return tuple(found)


def _proxy_jump(options: Options) -> str:
    jump = options.text("proxy_jump", "TPU_OPS_PROXY_JUMP")
    if not jump.value:
        return ""
    if options.flag("iap", default=False):
        raise UsageError("proxy_jump and iap exclude each other", where=jump.where, fix="remove one of them")
    return check_name(jump.value, jump.where, _JUMP, "a host to jump through, as in pod-w0 or ada@bastion.example.org")


def _auth(options: Options) -> Auth:
    """The credentials, under the names that google.cloud's modules have for them."""
    kind = options.text("auth_kind", "GCP_AUTH_KIND")
    if kind.value and kind.value not in auth.KINDS:
        raise UsageError(
            f"unknown value {shown(kind.value)}{did_you_mean(kind.value, auth.KINDS)}",
            where=kind.where,
            fix=f"use one of {', '.join(auth.KINDS)}",
        )
    name = kind.value or auth.KINDS[0]
    file = options.text("service_account_file", "GCP_SERVICE_ACCOUNT_FILE")
    contents = options.text("service_account_contents", "GCP_SERVICE_ACCOUNT_CONTENTS")
    token = options.text("access_token", "GCP_ACCESS_TOKEN")
    needed = {"serviceaccount": (file, contents), "accesstoken": (token,)}
    for owner, values in needed.items():
        if owner == name and not any(value.value for value in values):
            raise UsageError(
                f"auth_kind is {name}, and its credentials are not set",
                where=kind.where,
                fix="set service_account_file (GCP_SERVICE_ACCOUNT_FILE) or service_account_contents"
                if owner == "serviceaccount"
                else "set GCP_ACCESS_TOKEN, as in GCP_ACCESS_TOKEN=$(gcloud auth print-access-token)",
            )
        for value in values:
            if owner != name and value.value and ", key " in value.where:
                raise UsageError(
                    f"this is set, but auth_kind is {name}", where=value.where, fix=f"set auth_kind: {owner}"
                )
    variable = bool(options.environ.get("GCP_SERVICE_ACCOUNT_FILE"))
    path = _path(file, options, options.environ, from_environment=variable) if file.value else None
    return Auth(name, path, contents.value, token.value)


def _state_name(path: Path, endpoint: str) -> str:
    """Name of a fleet's state: its own for each endpoint, so that a test service and the real one never mix."""
    digest = hashlib.sha256(f"{path}\n{endpoint}".encode()).hexdigest()[:8]
    return f"{path.name}-{digest}"
