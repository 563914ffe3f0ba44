"""Checks whether this host is fit for a run: before a start, and again in the supervisor of the started run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

from . import TYPE_CHECKING, ending, environment, proc
from . import space as disks
from .person import Person, acting_as, way_past

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

#: Minimum free space of a file system, in bytes.
SMALLEST_SPACE = 256 * 1024 * 1024
#: Path -> minimum free space in bytes, for small file systems that hold only a few small files of each run.
SMALL = {"/run": 8 * 1024 * 1024}
#: Names of the checks that a user may override: the run can succeed all the same, and disturbs no other user.
FORCIBLE = ("space",)
#: In messages, the time when a run ends is rounded up to a multiple of this many seconds.
_ROUND = 10


def space() -> Dict[str, Dict[str, int]]:
    """Return path -> free space (`space.facts`), with one path for each file system that a run writes to."""
    found: Dict[str, Dict[str, int]] = {}
    seen = set()
    for path in ("/", "/home", "/tmp", "/var/lib", "/var/lib/tpu_ops", "/dev/shm", "/run"):  # noqa: S108 - only their size is read
        try:
            device = os.stat(path).st_dev
            facts = disks.facts(path)
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            found[path] = facts
    return found


def look(
    config: Dict[str, Any], person: Person, venv: str, turns_dir: str, beat: Callable[[], None] | None = None
) -> Dict[str, Any]:
    """Return the facts that `faults` checks for a run of this user.

    Args:
        config: This host's configuration.
        person: The user that the command runs as. A virtual environment that this user cannot see counts as missing.
        venv: The virtual environment in the request; empty means the configured environment.
        turns_dir: The directory of the locks that Ansible's modules hold; see `changes`.
        beat: Called from time to time during the search; see `proc.holders`.
    """
    path = venv or config["venv"]
    with acting_as(person):
        exists = bool(path) and os.path.exists(os.path.join(path, "bin/python"))
    return {
        "venv": {"path": path, "exists": exists, "asked": bool(venv)},
        "environment_files": {name: os.path.exists(name) for name in config["environment_files"]},
        "chips": proc.chips(),
        "holders": proc.holders(beat=beat),
        "in_the_way": ending.in_the_way(),
        "space": space(),
        "changes": changes(turns_dir),
    }


def changes(turns_dir: str) -> list[Dict[str, Any]]:
    """Return the changes that Ansible is making on this host now: ``who``, ``pid``, ``since`` and ``changing`` (paths).

    Ansible's modules hold a lock while they change what runs use, and describe themselves in the lock's file
    (roles/facts/module_utils/turns.py). If a module was killed, the file remains but the lock does not.

    Args:
        turns_dir: The directory of the lock files.
    """
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(turns_dir)):
            with open(os.path.join(turns_dir, name), encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    # Skip files without a description: other files, and the file of a module that has just taken the
                    # lock.
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        known = json.load(file)
                        change = {key: known[key] for key in ("who", "pid", "since", "changing")}
                        # The description can be that of the last holder of the lock, whose process has ended.
                        if proc.start_time(change["pid"]):
                            found.append(change)
    return found


def in_use(holder: Dict[str, Any], what: str = "this worker", form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Return a message that names the run that holds this host.

    Args:
        holder: The run, from `rank_record.occupant`.
        what: What the run holds, in words.
        form: Format of the start time. Without seconds, workers whose ranks began at slightly different times print the
            same.
    """
    ends = holder.get("ends")
    if ends:
        # Rounded up, so that all workers print the same time.
        at = time.strftime("%H:%M:%S UTC", time.gmtime(-(-ends["kill_at"] // _ROUND) * _ROUND))
        return "run {run_id} of {person} is ending: {why}; SIGKILL follows at {at} at the latest".format(
            why=ends["why"], at=at, **holder
        )
    since = time.strftime(form, time.gmtime(holder["since"]))
    return "run {} of {} has held {} since {}".format(holder["run_id"], holder["person"], what, since)


def past_run(asker: Person, holder: Dict[str, Any]) -> str:
    """Return what a user can do about a run that holds this host; ``holder`` is from `rank_record.occupant`."""
    if holder.get("ends"):
        return "start again once the run has ended: `tpu_ops status {}` shows its end".format(holder["run_id"])
    stop = "`tpu_ops stop {}{{}}`".format(holder["run_id"])
    # Every user is allowed to see the state and the output of a run.
    wait = "wait for the run (`tpu_ops attach {}` follows it), or ".format(holder["run_id"])
    return wait + way_past(asker, holder, stop.format(""), stop.format(" --force"))


def _past_process(asker: Person, process: Dict[str, Any]) -> str:
    owner = {"uid": process.get("uid"), "person": process["user"]}
    unlock = "tpu_ops unlock WORKER"
    return way_past(asker, owner, unlock, "`{} --force --user {}`".format(unlock, process["user"]))


def faults(
    facts: Dict[str, Any], chips: int, *, force: bool = False, asker: Person | None = None
) -> list[Dict[str, str]]:
    """Return the reasons, from this host's facts, why no run can start: ``check``, ``problem`` and ``fix`` each.

    An empty fix means that configuring this host is the fix. ``WORKER`` in a fix stands for this host's name in the
    fleet.

    Args:
        facts: The result of `look`, to which the caller can add ``holder``, another run that holds this host
            (`rank_record.occupant`), and ``mounts``, unfit mounts (`mounts.unfit`).
        chips: The expected number of chips.
        force: Whether the user overrides the checks of `FORCIBLE`.
        asker: The user that the fixes are for; None if no user asks.
    """
    found: list[Dict[str, str]] = []

    def add(check: str, problem: str, fix: str = "") -> None:
        if not (force and check in FORCIBLE):
            found.append({"check": check, "problem": problem, "fix": fix})

    venv = facts["venv"]
    if venv["path"] and not venv["exists"]:
        fix = "name an existing environment with --venv, or leave --venv out" if venv["asked"] else ""
        add("environment", "no environment at {}".format(venv["path"]), fix)
    for path, there in facts["environment_files"].items():
        if not there:
            problem = "the launcher's environment file {} is missing".format(path)
            add("environment", problem, environment.FILES_FIX)
    there = len(facts["chips"])
    if there < chips:
        shown = "no chip device files" if not there else "device files of {} chip{}".format(there, "s" * (there > 1))
        add("chips", "{}, {} expected".format(shown, chips), "reboot it, or recreate the node")
    holder = facts.get("holder")
    if holder:
        add("free", in_use(holder), past_run(asker, holder) if asker else "")
    for process in facts["holders"] if not holder else ():
        problem = "its chips are held by pid {pid} of {user}: {command}".format(**process)
        add("free", problem, _past_process(asker, process) if asker else "")
    for strange in facts.get("in_the_way", ()) if chips else ():
        add("lockfile", "{path} would make libtpu fail: {problem}".format(**strange), strange["fix"])
    for change in facts.get("changes", ()):
        since = time.strftime("%H:%M UTC", time.gmtime(change["since"]))
        problem = "{} has been changing {} since {}".format(change["who"], " and ".join(change["changing"]), since)
        add("changing", problem, "wait until the change has ended (pid {}), and start again".format(change["pid"]))
    for mount in facts.get("mounts", ()):
        add("mounts", mount["problem"], mount["fix"])
    for path, size in facts["space"].items():
        least = SMALL.get(path, SMALLEST_SPACE)
        look = "remove files that are not needed there: `sudo du -xh{} -d 2 {}` shows what uses the space"
        if size["free"] < least:
            text = "{} has {:.0f} of {:.0f} MiB free, and a start needs {:.0f}"
            sizes = (size["free"] // 2**20, size["total"] / 2**20, least / 2**20)
            add("space", text.format(path, *sizes), look.format("", path))
        elif size.get("files") == 0:
            add(
                "space",
                "{} cannot hold more files: the file system has no inodes left".format(path),
                look.format(" --inodes", path),
            )
    return found


def told(fault: Dict[str, str], worker: str) -> str:
    """Return a fault (see `faults`) as text: the problem of a worker, and the fix."""
    fix = fault["fix"] or "tpu_ops configure WORKER"
    if fix.startswith("tpu_ops "):
        fix = "`{}`".format(fix)
    return "{} ({})".format(fault["problem"], fix.replace("WORKER", worker))
