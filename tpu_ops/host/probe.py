"""Collects the facts about a host that a controller needs before a run, as one JSON object, from files only."""

from __future__ import annotations

import glob
import os
import sys
import time

from tpu_ops.protocol.wire import PROTOCOL, Refused

from . import TYPE_CHECKING, ending, environment, fitness, mounts, proc
from .person import Person, acting_as
from .rank_record import occupant
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict

#: Files in which LD_PRELOAD may be set for all users of a TPU VM.
PRELOAD_FILES = (
    "/etc/environment",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/security/pam_env.conf",
    "/etc/ld.so.preload",
    "/etc/environment.d/*",
    "/etc/profile.d/*",
)
_SHOWN_PACKAGES = ("jax", "jaxlib", "libtpu", "libtpu-nightly", "torch", "torch-xla", "numpy", "flax")


def venv_facts(venv: str) -> Dict[str, Any]:
    """Return facts about a virtual environment: ``path``, ``exists``, ``python``, ``digest`` and the packages in it.

    Two hosts with the same digest have the same minor version of Python, and the same packages with the same versions.
    ``packages`` has only the packages that messages show, ``installed`` has all.
    """
    from tpu_ops.protocol import installed_packages  # imported late, since only this request needs it

    exists = bool(venv) and os.path.exists(os.path.join(venv, "bin/python"))
    found = installed_packages.packages(venv) if venv else {}
    version = installed_packages.python_version(venv) if venv else ""
    return {
        "path": venv,
        "exists": exists,
        "python": version,
        "packages": {name: found[name] for name in _SHOWN_PACKAGES if name in found},
        "installed": found,
        "digest": installed_packages.digest(version, found) if exists else "",
    }


def preloads() -> list[Dict[str, str]]:
    """Return the places where LD_PRELOAD is set: ``{"file", "line"}`` each."""
    found = []
    for pattern in PRELOAD_FILES:
        for path in sorted(glob.glob(pattern)):
            for line in proc.read_text(path).splitlines():
                text = line.strip()
                if text.startswith("#") or not text:
                    continue
                if "LD_PRELOAD" in text or path == "/etc/ld.so.preload":
                    found.append({"file": path, "line": text[:200]})
    return found


def describe(store: Store, asker: Person, person: Person, venv: str = "", chips: int = 0) -> Dict[str, Any]:
    """Return all facts about this host that a run of this user depends on.

    Args:
        store: The runs of this host.
        asker: The user who sends the request.
        person: The user that the command runs as.
        venv: The virtual environment in the request; empty means the configured environment.
        chips: The expected number of chips.

    Raises:
        Refused: The environment or the home is on a mount whose server does not answer.
    """
    boot, init_start = store.boot()
    config = environment.load_config()
    needed = [path for path in (venv or config["venv"], person.home, "/home", *config["environment_files"]) if path]
    broken = mounts.unfit(person.uid, needed)
    for entry in broken:
        if any(mounts.is_on(path, entry["path"]) for path in needed):
            # Stop here: reading paths on this mount would block.
            raise Refused("failed", entry["problem"], entry["fix"])
    facts = dict(fitness.look(config, person, venv, store.turns_dir), holder=occupant(store), mounts=broken)
    found = fitness.faults(facts, chips, asker=asker)
    with acting_as(person):
        facts["venv"] = venv_facts(facts["venv"]["path"])
    return {
        **facts,
        "faults": found,
        "protocol": PROTOCOL,
        "program": os.path.realpath(sys.argv[0]),
        "hostname": os.uname().nodename,
        "boot_id": boot,
        "init_start": init_start,
        "clock": time.time(),
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "lockfiles": [path for path in ending.LOCKFILES if os.path.lexists(path)],
        "preloads": preloads(),
    }
