"""The spec of a run: everything that a controller tells the launcher of a rank about the run, and the valid values."""

from __future__ import annotations

import json
import os
import re

from . import TYPE_CHECKING, watch
from .wire import Refused, encode, has_type

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: The id of a run. Ids that end in .json are invalid: controllers store run `NAME` in `NAME.json`, beside directories
#: of runs.
_RUN_ID = re.compile(r"(?!.*\.json$)[a-z0-9][a-z0-9._-]{0,78}")
#: The id of a git commit, by SHA-1 or SHA-256.
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Maximum size of a secret's value in bytes. Linux accepts no environment variable longer than 128 KiB.
MAX_SECRET = 64 * 1024
#: Maximum grace period between SIGTERM and SIGKILL, in seconds.
MAX_GRACE = 3600
#: Key of the spec -> minimum and maximum, in seconds.
TIMES = {
    "grace_failure": (0, MAX_GRACE),
    "grace_stop": (0, MAX_GRACE),
    "barrier": (1, 3600),
    "lease": (5, 3600),
    "exit_skew": (1, 86400),
}
#: Keys of the spec's ``stall`` -> minimum and maximum, in seconds; ``after`` 0 means that a run never stands still.
STALL_TIMES = {"after": (0, 10 * 86400), "grace": (0, 10 * 86400)}
#: Variables by which the slices of a run find each other: address of rank 0, number of slices, index of this slice.
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
#: Environment variable that the launcher sets for every rank -> key of the spec that has the variable's value.
RANK_VARIABLES = {
    "TPU_OPS_RUN_ID": "run_id",
    "TPU_OPS_ATTEMPT": "attempt",
    "TPU_OPS_RANK": "rank",
    "TPU_OPS_WORLD_SIZE": "world_size",
    "TPU_OPS_NODE": "node",
    "TPU_OPS_SLICE": "slice",
    "TPU_OPS_SLICES": "slices",
}
#: The first port that users other than root may listen on.
UNPRIVILEGED = 1024
#: Ports that the supervisors of a run may use: below the ephemeral ports of the kernel.
RUN_PORTS = range(UNPRIVILEGED, 32768)
#: Ports that libtpu and Megascale use.
TAKEN_PORTS = (8080, 8431, *range(8470, 8491))
#: Environment variable of every rank with the directory of the run in which the user can write files.
RUN_DIR = "TPU_OPS_RUN_DIR"
#: Environment variable of every rank with the path of a file that says, once the rank gets SIGTERM, why.
REASON_FILE = "TPU_OPS_REASON_FILE"
_KEYS = {
    "run_id": str,
    "attempt": int,
    "rank": int,
    "world_size": int,
    "node": str,
    "slice": int,
    "slices": int,
    "worker": str,
    "workers": list,
    "argv": list,
    "env": dict,
    # Secret environment variables: their values are not in the record; during the run, files contain the values too.
    "secrets": dict,
    # The user that the command runs as; empty means the user who sends the request.
    "user": str,
    "cwd": str,
    "venv": str,
    "grace_failure": (int, float),
    "grace_stop": (int, float),
    "barrier": (int, float),
    "lease": (int, float),
    "exit_skew": (int, float),
    # The number of device files that a worker must have, and whether to start despite faults that --force overrides.
    "chips": int,
    "force": bool,
    "code_digest": str,
    "started_from": str,
    # Addresses, port and key by which the supervisors reach and trust each other; None for a run of one worker.
    "net": (dict, type(None)),
}
#: Keys that a controller leaves out unless their value differs from the default, since launchers of older versions do
#: not have them. ``stall`` has the keys of `stall_of`, without ``chosen``.
_OPTIONAL = {"stall": dict}
_NET = {"address": str, "hub": str, "port": int, "key": str}
_KEY = re.compile(r"[0-9a-f]{64}")
#: Keys of the spec that differ between the ranks of a run. The digest does not cover them, nor the secret in ``net``.
_OWN = ("rank", "worker", "node", "slice", "net")


def check(data: Any) -> dict[str, Any]:
    """Validate the spec of a request and return it.

    Raises:
        Refused: A key is missing, unknown or of the wrong type, or a value is invalid.
    """
    if not isinstance(data, dict):
        raise Refused("invalid", "the spec is not an object")
    if set(data) - set(_OPTIONAL) != set(_KEYS):
        wrong = sorted((set(data) - set(_OPTIONAL)) ^ set(_KEYS))
        raise Refused("invalid", "keys of the spec differ from those of this version: {}".format(", ".join(wrong)))
    for key, kind in _KEYS.items():
        if not has_type(data[key], kind):
            raise Refused("invalid", "the spec's {} is of the wrong type".format(key))
    check_run_id(data["run_id"])
    if not 0 <= data["rank"] < data["world_size"]:
        raise Refused("invalid", "rank {} of {}".format(data["rank"], data["world_size"]))
    for key, (least, most) in TIMES.items():
        if not least <= data[key] <= most:
            raise Refused("invalid", "the spec's {} is not between {} and {} s".format(key, least, most))
    _check_team(data)
    _check_command(data)
    if "stall" in data:
        _check_stall(data["stall"])
    return data


def stall_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return when a run counts as standing still, from its spec.

    Returns:
        ``after`` and ``grace`` in seconds (see `watch`), ``on`` (one of `watch.STALL_ACTIONS`), and ``chosen``: whether
        the user chose these values.
    """
    chosen = data.get("stall")
    if chosen is None:
        return {"after": watch.STALL_AFTER, "grace": watch.STALL_GRACE, "on": watch.TELL, "chosen": False}
    return dict(chosen, chosen=True)


def _check_stall(stall: Any) -> None:
    if not isinstance(stall, dict) or set(stall) != {*STALL_TIMES, "on"} or stall["on"] not in watch.STALL_ACTIONS:
        raise Refused("invalid", "the spec's stall does not have the keys and values of this version")
    for key, (least, most) in STALL_TIMES.items():
        if not has_type(stall[key], (int, float)) or not least <= stall[key] <= most:
            raise Refused("invalid", "the spec's stall: {} is not between {} and {} s".format(key, least, most))


def _check_team(data: dict[str, Any]) -> None:
    if len(data["workers"]) != data["world_size"] or not all(isinstance(name, str) for name in data["workers"]):
        raise Refused("invalid", "the spec does not name {} workers".format(data["world_size"]))
    if not 0 < data["slices"] <= data["world_size"] or data["world_size"] % data["slices"]:
        raise Refused("invalid", "{} ranks in {} slices".format(data["world_size"], data["slices"]))
    if data["slice"] != data["rank"] // (data["world_size"] // data["slices"]):
        raise Refused("invalid", "rank {} in slice {}".format(data["rank"], data["slice"]))
    if (data["net"] is None) != (data["world_size"] == 1):
        raise Refused("invalid", "the spec must have net if the run has several workers, and no net otherwise")
    if data["net"] is not None:
        _check_net(data["net"], data["rank"])


def _check_command(data: dict[str, Any]) -> None:
    if not data["argv"] or not data["argv"][0]:
        raise Refused("invalid", "the command is empty")
    texts = list(data["argv"]) + list(data["env"].values()) + list(data["secrets"].values())
    for text in [*texts, data["user"], data["cwd"], data["venv"]]:
        if not isinstance(text, str) or "\0" in text:
            raise Refused("invalid", "arguments and environment are text without NUL bytes")
    for name in list(data["env"]) + list(data["secrets"]):
        if not ENV_NAME.fullmatch(name):
            raise Refused("invalid", "{!r} is not a name of an environment variable".format(name))
    for name, value in data["secrets"].items():
        if len(encode(value)) > MAX_SECRET:
            raise Refused("invalid", "the secret {} has more than {} bytes".format(name, MAX_SECRET))


def _check_net(net: dict[str, Any], rank: int) -> None:
    if set(net) != set(_NET) or not all(type(net[key]) is kind for key, kind in _NET.items()):
        raise Refused("invalid", "the spec's net does not have the keys of this version")
    import ipaddress

    try:
        addresses = [ipaddress.ip_address(net[key]) for key in ("address", "hub")]
    except ValueError as exc:
        raise Refused("invalid", "the spec's net: {}".format(exc)) from exc
    if any(address.is_unspecified or address.is_multicast for address in addresses):
        raise Refused("invalid", "the spec's net: an address is not that of a worker")
    if not _KEY.fullmatch(net["key"]) or not (net["port"] == 0 if rank == 0 else 0 < net["port"] < 65536):
        raise Refused("invalid", "the spec's net has no key or no port")


def grace_of(value: Any) -> float | None:
    """Return the grace period in another supervisor's message; None if it is not a number from 0 to `MAX_GRACE`.

    Any program of the run's user can send such a message. A longer grace period would keep stops from ending the run.
    """
    return value if isinstance(value, (int, float)) and 0 <= value <= MAX_GRACE else None


def is_run_id(text: str) -> bool:
    """Return whether a text is a valid id of a run."""
    return bool(_RUN_ID.fullmatch(text))


def check_run_id(text: Any) -> str:
    """Check that a value is a valid run id, which becomes part of paths, and return it.

    Raises:
        Refused: The value is not a run id.
    """
    if not isinstance(text, str) or not is_run_id(text):
        raise Refused("invalid", "{!r} is not a run id".format(text))
    return text


def digest(spec: dict[str, Any]) -> str:
    """Return the digest of the values that all ranks of a run have in common.

    The values of secrets are not covered, since records show the digest: it would confirm a guessed value.
    """
    import hashlib

    common = {key: value for key, value in spec.items() if key not in _OWN}
    common["secrets"] = sorted(spec["secrets"])
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode("ascii")).hexdigest()[:12]


def commit(spec: dict[str, Any]) -> str:
    """Return the commit that must be checked out in the command's directory; empty if no commit is required.

    The directory is a project's clone if its path is absolute. Synced code is below the user's home, and has a digest.
    """
    named = os.path.isabs(spec["cwd"]) and COMMIT.fullmatch(spec["code_digest"])
    return str(spec["code_digest"]) if named else ""


def copied(spec: dict[str, Any]) -> str:
    """Return the digest of the synced code in the command's directory; empty if the directory has no synced code."""
    return "" if os.path.isabs(spec["cwd"]) or not spec["cwd"] else str(spec["code_digest"])
