"""The spec of a run: what the launcher of one rank is asked to do, within which limits."""

from __future__ import annotations

import json
import os
import re

from . import TYPE_CHECKING
from .wire import Refused, encode, has_type

if TYPE_CHECKING:
    from typing import Any

#: A name that ends in .json is excluded: controllers keep run `NAME` in `NAME.json`, beside directories of runs.
_RUN_ID = re.compile(r"(?!.*\.json$)[a-z0-9][a-z0-9._-]{0,78}")
#: Commit ids, by SHA-1 and by SHA-256.
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Maximum size of a secret's value in bytes: Linux accepts no variable longer than 128 KiB.
MAX_SECRET = 64 * 1024
#: Maximum grace, in seconds.
MAX_GRACE = 3600
#: Minimum and maximum of a run's times, in seconds.
TIMES = {
    "grace_failure": (0, MAX_GRACE),
    "grace_stop": (0, MAX_GRACE),
    "barrier": (1, 3600),
    "lease": (5, 3600),
    "exit_skew": (1, 86400),
}
#: Variables by which the slices of a run find each other: rank 0's address, the number of slices, this slice's index.
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
#: Variables that the launcher sets for every rank, and the keys of the spec whose values they have.
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
#: Ports of libtpu and of Megascale.
TAKEN_PORTS = (8080, 8431, *range(8470, 8491))
#: The variable, also set for every rank, with a directory of the run that its user can write to.
RUN_DIR = "TPU_OPS_RUN_DIR"
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
    # Variables whose values are not in the record; while the run is active, files contain them too.
    "secrets": dict,
    # The user that the command runs as; empty for the one who sends the request.
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
    # How the supervisors reach and trust each other; None for a run of one worker.
    "net": (dict, type(None)),
}
_NET = {"address": str, "hub": str, "port": int, "key": str}
_KEY = re.compile(r"[0-9a-f]{64}")
#: Keys that differ between the ranks of a run. The digest leaves them out, and so the key of the run in ``net``.
_OWN = ("rank", "worker", "node", "slice", "net")


def check(data: Any) -> dict[str, Any]:
    """Validate the spec of a request and return it.

    Raises:
        Refused: A key is missing, unknown or of the wrong type, or a value is invalid.
    """
    if not isinstance(data, dict):
        raise Refused("invalid", "the spec is not an object")
    if set(data) != set(_KEYS):
        wrong = sorted(set(data) ^ set(_KEYS))
        raise Refused("invalid", "the spec's keys are not those of this version: {}".format(", ".join(wrong)))
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
    return data


def _check_team(data: dict[str, Any]) -> None:
    if len(data["workers"]) != data["world_size"] or not all(isinstance(name, str) for name in data["workers"]):
        raise Refused("invalid", "the spec does not name {} workers".format(data["world_size"]))
    if not 0 < data["slices"] <= data["world_size"] or data["world_size"] % data["slices"]:
        raise Refused("invalid", "{} ranks in {} slices".format(data["world_size"], data["slices"]))
    if data["slice"] != data["rank"] // (data["world_size"] // data["slices"]):
        raise Refused("invalid", "rank {} in slice {}".format(data["rank"], data["slice"]))
    if (data["net"] is None) != (data["world_size"] == 1):
        raise Refused("invalid", "the spec's net is for runs of several workers")
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
        raise Refused("invalid", "the spec's net: the supervisors of a run meet at addresses of their workers")
    if not _KEY.fullmatch(net["key"]) or not (net["port"] == 0 if rank == 0 else 0 < net["port"] < 65536):
        raise Refused("invalid", "the spec's net has no key or no port")


def grace_of(value: Any) -> float | None:
    """Return the grace in a message from another supervisor; None if it is not a number from 0 to `MAX_GRACE`.

    Any program of the run's user may send that message. A longer grace would keep every stop from ending the run.
    """
    return value if isinstance(value, (int, float)) and 0 <= value <= MAX_GRACE else None


def is_run_id(text: str) -> bool:
    """Return whether a run may have this id."""
    return bool(_RUN_ID.fullmatch(text))


def check_run_id(text: Any) -> str:
    """Return a run id, which becomes part of a path.

    Raises:
        Refused: The value is not a run id.
    """
    if not isinstance(text, str) or not is_run_id(text):
        raise Refused("invalid", "{!r} is not a run id".format(text))
    return text


def digest(spec: dict[str, Any]) -> str:
    """Return the digest of the values that all ranks of a run have in common.

    Records show it, so the values of secrets are not part of it: a guessed value could be tried against it.
    """
    import hashlib

    common = {key: value for key, value in spec.items() if key not in _OWN}
    common["secrets"] = sorted(spec["secrets"])
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode("ascii")).hexdigest()[:12]


def commit(spec: dict[str, Any]) -> str:
    """Return the commit that the clone in the command's directory has to be at; empty if this is not checked.

    Clones of projects have an absolute path; synced code is below the user's home, and has a digest.
    """
    named = os.path.isabs(spec["cwd"]) and COMMIT.fullmatch(spec["code_digest"])
    return str(spec["code_digest"]) if named else ""


def copied(spec: dict[str, Any]) -> str:
    """Return the digest of the synced code in the command's directory; empty if there is none."""
    return "" if os.path.isabs(spec["cwd"]) or not spec["cwd"] else str(spec["code_digest"])
