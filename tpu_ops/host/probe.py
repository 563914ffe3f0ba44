"""What a controller wants to know of a host before a run, as one JSON object; read from files, nothing is started."""

from __future__ import annotations

import glob
import os
import re
import sys
import time

from tpu_ops.protocol.wire import PROTOCOL, Refused

from . import TYPE_CHECKING, ending, environment, fitness, mounts, proc
from .person import Person, acting_as
from .rank_record import occupant
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict

#: Where LD_PRELOAD may have been set for everybody on a TPU VM.
PRELOAD_FILES = (
    "/etc/environment",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/security/pam_env.conf",
    "/etc/ld.so.preload",
    "/etc/environment.d/*",
    "/etc/profile.d/*",
)
_DIST_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.dist-info")
_SHOWN_PACKAGES = ("jax", "jaxlib", "libtpu", "libtpu-nightly", "torch", "torch_xla", "numpy", "flax")


def venv_facts(venv: str) -> Dict[str, Any]:
    """Return what a virtual environment holds: ``path``, ``exists``, ``python``, ``digest`` and two lists of packages.

    The digest is of Python's minor version and of every installed package's name and version, so that two hosts can be
    compared by one word. ``packages`` are those that are shown, ``installed`` are all.
    """
    import hashlib  # loads OpenSSL

    facts: Dict[str, Any] = {
        "path": venv,
        "exists": os.path.exists(os.path.join(venv, "bin/python")) if venv else False,
    }
    found = {}
    for path in glob.glob(os.path.join(glob.escape(venv), "lib/python3*/site-packages/*.dist-info")) if venv else ():
        match = _DIST_INFO.fullmatch(os.path.basename(path))
        if match:
            found[re.sub(r"[-_.]+", "-", match.group("name")).lower()] = match.group("version")
    version = ""
    for line in proc.read_text(os.path.join(venv, "pyvenv.cfg")).splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            version = value.strip()
    # Its last part is what there was on the day it was installed.
    minor = ".".join(version.split(".")[:2])
    listed = "\n".join(["python=" + minor] + ["{}={}".format(*item) for item in sorted(found.items())])
    shown = [name.replace("_", "-") for name in _SHOWN_PACKAGES]
    facts["python"] = version
    facts["packages"] = {name: found[name] for name in shown if name in found}
    facts["installed"] = found
    facts["digest"] = hashlib.sha256(listed.encode("utf-8")).hexdigest()[:12] if facts["exists"] else ""
    return facts


def preloads() -> list[Dict[str, str]]:
    """Return where LD_PRELOAD is set: ``{"file", "line"}`` each."""
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
    """Return everything about this host that a run of this person depends on.

    Args:
        store: The runs of this host.
        asker: Who wants to know.
        person: Who the command is to run as.
        venv: The environment that was asked for; empty is the configured one.
        chips: How many chips there are to be.

    Raises:
        Refused: Nobody answers for the mount that the environment or the home is on.
    """
    boot, init_start = store.boot()
    config = environment.load_config()
    needed = [path for path in (venv or config["venv"], person.home, "/home", *config["environment_files"]) if path]
    broken = mounts.unfit(person.uid, needed)
    for entry in broken:
        if any(mounts.is_on(path, entry["path"]) for path in needed):
            # Whoever looks at these waits for the server as well.
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
