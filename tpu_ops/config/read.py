"""Reads `Settings` from the mapping of a fleet's file and the environment."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.cloud.auth import KINDS, Auth
from tpu_ops.config import composed
from tpu_ops.config.hosts import USER, USER_AT_HOST, is_loopback
from tpu_ops.config.settings import (
    FLEET_FILE,
    LOCAL_TIMEOUT,
    OWN_KEYS,
    PLUGIN_FLAGS,
    PLUGIN_KEYS,
    PLUGIN_NAMES,
    REQUEST_TIMEOUT,
    STATES,
    Filters,
    Settings,
)
from tpu_ops.config.states import NOT_FOR_SSH, state_name
from tpu_ops.config.templates import evaluated, is_template
from tpu_ops.errors import UsageError
from tpu_ops.options import Options, Value, check_name, did_you_mean, shown

#: Private keys in ~/.ssh that ssh offers, in this order, if no private key is set. gcloud creates the second key.
PRIVATE_KEYS = ("id_ed25519", "google_compute_engine", "id_rsa")

_PROJECT = re.compile(r"^(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]*$")
#: The form of a zone's name.
ZONE = re.compile(r"^[a-z]+(?:-[a-z0-9]+)+$")
_A_PROJECT, _A_ZONE = "a project id, as in my-project", "a zone, as in us-central2-b"
_USER = re.compile(USER)
#: Variables by which a shell can override how workers are reached.
_LOGIN = ("TPU_OPS_USER", "TPU_OPS_PRIVATE_KEY", "TPU_OPS_PROXY_JUMP")
_REST = "TPU_OPS_REST_ENDPOINT"
_OF_STATE = "the directory for state (TPU_OPS_STATE, else below HOME)"
_PATTERN = re.compile(r"^\S+$")
_JUMP = re.compile(rf"{USER_AT_HOST}(?::(?P<port>[0-9]{{1,5}}))?")


def check_zone(text: str, where: str) -> str:
    """Return a zone's name after checking it.

    Raises:
        UsageError: The text is not a zone's name.
    """
    return check_name(text, where, ZONE, _A_ZONE)


def check_project(text: str, where: str) -> str:
    """Return a project id after checking it.

    Raises:
        UsageError: The text is not a project id.
    """
    return check_name(text, where, _PROJECT, _A_PROJECT)


def from_data(data: Mapping[str, Any], file: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings, given the mapping of a fleet's file and the environment.

    Raises:
        UsageError: A key is unknown, or a value has the wrong type or is out of range.
    """
    _check_keys(data, file)
    options = Options(evaluated(data, OWN_KEYS, file), file, environ)
    for key in PLUGIN_FLAGS:
        # Ansible would read any word that is not a boolean as false, so such a word is an error here. Templates are not
        # checked: Ansible evaluates them.
        if not is_template(data.get(key)):
            options.flag(key, default=False)
    composed.check(options)
    folder = file.parent.parent if file.parent.name == FLEET_FILE.parts[0] else file.parent
    endpoint = _endpoint(options)
    snapshot = options.text("snapshot", "TPU_OPS_SNAPSHOT").value
    # The value `api` is kept. Unlike an empty value, it overrides the source of snapshots that an earlier command
    # stored.
    published = snapshot not in ("", "api")
    private_keys = _private_keys(options)
    projects = options.names("projects", _PROJECT, _A_PROJECT, "TPU_OPS_PROJECT")
    zones = options.names("zones", ZONE, _A_ZONE, "TPU_OPS_ZONES")
    own = [*_of_shell(options, projects, "TPU_OPS_PROJECT"), *_of_shell(options, zones, "TPU_OPS_ZONES")]
    found = Settings(
        path=folder,
        file=file,
        projects=projects,
        zones=zones,
        endpoint=endpoint,
        request_timeout=options.seconds("request_timeout", LOCAL_TIMEOUT if endpoint else REQUEST_TIMEOUT),
        states=options.choices("states", STATES, ("READY",)),
        connect_with=options.choices("connect_with", ("external", "internal"), ("external", "internal")),
        user=_user(options),
        private_key=private_keys[0] if private_keys else None,
        more_keys=tuple(private_keys[1:]),
        only_key=bool(options.text("private_key", "TPU_OPS_PRIVATE_KEY").value),
        auth=_auth(options, needed=not (endpoint or published)),
        strict_permissions=options.flag("strict_permissions", default=False),
        snapshot=snapshot,
        filters=Filters(
            names=options.names("names", _PATTERN, "a pattern of node names, as in pod*"),
            labels=_labels(options),
            accelerator_types=options.names(
                "accelerator_types", _PATTERN, "a pattern of accelerator types, as in v4-*"
            ),
        ),
        proxy_jump=_proxy_jump(options),
        iap=options.flag("iap", default=False),
        forward_agent=options.flag("forward_agent", default=False),
        learn_host_keys=options.flag("learn_host_keys", default=True),
        state_dir=_for_ssh(files.state_root(environ), _OF_STATE) / "fleets" / state_name(file, endpoint, own),
        rest_endpoint=_rest_endpoint(environ.get(_REST, "")),
    )
    # If the shell sets an endpoint, its login needs no separate ssh files: it has its own state directory anyway.
    return found if endpoint != (options.data.get("endpoint") or "") else _with_login(found, options)


def _with_login(found: Settings, options: Options) -> Settings:
    """Return the settings, with `login` and `shared` set if the environment sets another login than the file."""
    environ = {name: value for name, value in options.environ.items() if name not in _LOGIN}
    if len(environ) == len(options.environ):
        return found
    shared = None
    # Without the shell's variables, the file can be invalid here, for example if only another user has its private key.
    with contextlib.suppress(UsageError):
        shared = from_data(options.data, options.file, environ)
    login, others = (
        one and (one.user, one.private_key, one.more_keys, one.only_key, one.proxy_jump) for one in (found, shared)
    )
    if login == others:
        return found
    return found._replace(login=hashlib.sha256(repr(login).encode()).hexdigest()[:8], shared=shared)


def _check_keys(data: Mapping[str, Any], file: Path) -> None:
    known = OWN_KEYS + PLUGIN_KEYS
    for key in data:
        if key not in known:
            raise UsageError(
                f"unknown key {shown(key)}{did_you_mean(str(key), known)}",
                where=str(file),
                fix="`ansible-doc -t inventory tpu_vm` lists the keys",
            )
    if data.get("plugin") not in PLUGIN_NAMES:
        raise UsageError(
            "the file does not say which inventory plugin reads it",
            where=f"{file}, key 'plugin'",
            fix="begin it with `plugin: tpu_vm`",
        )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536


def _endpoint(options: Options) -> str:
    """Return the endpoint, or "". Its connection is plaintext without credentials, so it must be on this machine."""
    endpoint = options.text("endpoint", "TPU_OPS_ENDPOINT")
    if not endpoint.value:
        return ""
    fix = "use HOST:PORT of this machine's loopback, as in 127.0.0.1:18470; leave the endpoint out for the real service"
    host, colon, port = endpoint.value.rpartition(":")
    if not colon or not _is_port(port) or "/" in host:
        raise UsageError(f"{shown(endpoint.value)} is not of the form HOST:PORT", where=endpoint.where, fix=fix)
    if not is_loopback(host):
        raise UsageError(
            f"endpoint {shown(endpoint.value)} is not on loopback; the connection would be plaintext",
            where=endpoint.where,
            fix=fix,
        )
    return endpoint.value


def _rest_endpoint(text: str) -> str:
    """Return the URL of the REST endpoint, or "". It must be on this machine, as the other endpoint."""
    if not text:
        return ""
    host, _, port = text.rstrip("/").removeprefix("http://").rpartition(":")
    if not text.startswith("http://") or not _is_port(port) or not is_loopback(host):
        fix = "use a URL of this machine's loopback, as in http://127.0.0.1:18471, or unset the variable"
        raise UsageError(f"{shown(text)} is not such a URL", where=f"environment variable {_REST}", fix=fix)
    return text.rstrip("/")


def _user(options: Options) -> str:
    """Return the login name on the workers; the default is the login name on this machine, as for gcloud."""
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


def _private_keys(options: Options) -> list[Path]:
    """Return the private key that is set; else those of PRIVATE_KEYS that exist in ~/.ssh."""
    key = options.text("private_key", "TPU_OPS_PRIVATE_KEY")
    if not key.value:
        usual = (_home(options) / ".ssh" / name for name in PRIVATE_KEYS)
        return [_for_ssh(path, "HOME") for path in usual if path.is_file()]
    path = _for_ssh(_path(key, options), key.where)
    if not path.is_file():
        make = f"create it (ssh-keygen -t ed25519 -f {shlex.quote(str(path))}) or name another"
        # An old variable of the shell might name a key that was deleted: do not suggest creating the key.
        old = "unset the variable, or set the variable to a key that you have"
        if endpoint := options.environ.get("TPU_OPS_ENDPOINT"):
            old = (
                f"this shell uses the API at {endpoint} (TPU_OPS_ENDPOINT); if that API was taken down together with "
                f"the key, open a new shell; otherwise {old}"
            )
        fix = old if key.from_environment else make
        if path.exists():
            raise UsageError(f"the private key {path} is not a file", where=key.where, fix="name the key's own file")
        raise UsageError(f"the private key {path} does not exist", where=key.where, fix=fix)
    if path.suffix == ".pub":
        raise UsageError(
            f"{path} is the public half of a key", where=key.where, fix=f"name the private one, {path.with_suffix('')}"
        )
    if '"' in str(path):
        raise UsageError("the private key's path contains a quote", where=key.where, fix="name another")
    return [path]


def _for_ssh(path: Path, where: str) -> Path:
    """Return a path that can be written into an ssh config.

    Raises:
        UsageError: The path contains a control character, or text that ssh would replace by a variable.
    """
    if NOT_FOR_SSH.search(str(path)):
        what = f"ssh cannot use {shown(str(path))}: a path with ${{ or a control character in it"
        raise UsageError(what, where=where, fix="rename it, or name another")
    return files.expanded(str(path), where)


def _home(options: Options) -> Path:
    return files.expanded(options.environ.get("HOME") or "~", "HOME")


def _path(value: Value, options: Options) -> Path:
    """Return an option's path: relative to the home after ~, else to the working directory or the file's directory."""
    if value.value.startswith("~/"):
        return _home(options) / value.value[2:]
    return (Path.cwd() if value.from_environment else options.file.parent) / value.value


def _labels(options: Options) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the labels that a node must have. In the file, each label has no value, one value or a list of values."""
    data = options.data.get("labels")
    if data is None:
        return ()
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise options.wrong("labels", "a mapping of labels to values")
    found = []
    for key, value in data.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str) or _is_short_number(entry) for entry in values):
            raise UsageError(
                f"expected a string or a list of strings, found {shown(value)}",
                where=f"{options.at('labels')}, label {shown(key)}",
                fix="put it in quotes",
            )
        found.append((key, tuple(str(entry) for entry in values)))
    return tuple(found)


def _is_short_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18


def _proxy_jump(options: Options) -> str:
    jump = options.text("proxy_jump", "TPU_OPS_PROXY_JUMP")
    if not jump.value:
        return ""
    if options.flag("iap", default=False):
        raise UsageError("proxy_jump and iap exclude each other", where=jump.where, fix="remove one of them")
    match = _JUMP.fullmatch(jump.value)
    if match is None or (match["port"] and not _is_port(match["port"])):
        raise UsageError(
            f"{shown(jump.value)} is not a host to jump through",
            where=jump.where,
            fix="name a worker, as in pod-w0, or another host, as in ada@bastion.example.org:22",
        )
    return jump.value


def _auth(options: Options, *, needed: bool) -> Auth:
    """Return the credentials. The options have the names that the google.cloud collection of Ansible uses.

    Args:
        options: The options of the file and the environment.
        needed: Whether credentials are required, because the real service will be asked.
    """
    kind = options.choice("auth_kind", KINDS, "GCP_AUTH_KIND")
    file, contents = _service_account(options)
    token = options.text("access_token", "GCP_ACCESS_TOKEN", secret=True)
    fixes = {
        "serviceaccount": "set service_account_file (GCP_SERVICE_ACCOUNT_FILE) or service_account_contents",
        "accesstoken": "set GCP_ACCESS_TOKEN, as in GCP_ACCESS_TOKEN=$(gcloud auth print-access-token)",
    }
    for owner, given in {"serviceaccount": file if file.value else contents, "accesstoken": token}.items():
        if owner == kind.value and needed and not given.value:
            what = f"auth_kind is {owner}, and the credentials of this kind are not set"
            raise UsageError(what, where=kind.where, fix=fixes[owner])
        # Ignore unused credentials in variables: other programs might need them, or `auth_kind` overrides the file.
        if owner != kind.value and given.value and not (given.from_environment or kind.from_environment):
            raise UsageError(
                f"this key is set, but auth_kind is {kind.value}", where=given.where, fix=f"set auth_kind: {owner}"
            )
    return Auth(kind.value, _path(file, options) if file.value else None, contents.value, token.value)


def _service_account(options: Options) -> tuple[Value, Value]:
    """Return the file or the contents of a service account's key, not both; a variable overrides the file's key."""
    file = options.text("service_account_file", "GCP_SERVICE_ACCOUNT_FILE")
    contents = _service_account_contents(options)
    if not (file.value and contents.value):
        return file, contents
    if file.from_environment == contents.from_environment:
        raise UsageError(
            "service_account_file and service_account_contents exclude each other",
            where=contents.where,
            fix="remove one of them",
        )
    nothing = Value("", "")
    return (file, nothing) if file.from_environment else (nothing, contents)


def _service_account_contents(options: Options) -> Value:
    """Return the key of a service account as JSON text; in the fleet's file, it can be a mapping."""
    key, variable = "service_account_contents", "GCP_SERVICE_ACCOUNT_CONTENTS"
    data = options.data.get(key)
    if not isinstance(data, dict) or options.environ.get(variable):
        return options.text(key, variable, secret=True)
    if not all(isinstance(entry, str) for pair in data.items() for entry in pair):
        raise options.wrong(key, "a mapping of strings, or JSON text", secret=True)
    return Value(json.dumps(data), options.at(key))


def _of_shell(options: Options, names: Sequence[str], variable: str) -> list[str]:
    """Return the sorted projects, or zones, that the environment sets; empty if the file has the same ones."""
    if not options.environ.get(variable):
        return []
    key, form, what = {
        "TPU_OPS_PROJECT": ("projects", _PROJECT, _A_PROJECT),
        "TPU_OPS_ZONES": ("zones", ZONE, _A_ZONE),
    }[variable]
    with contextlib.suppress(UsageError):
        if set(options.names(key, form, what)) == set(names):
            return []
    return sorted(names)
