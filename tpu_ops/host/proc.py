"""Reads facts from the kernel: boot, processes, control groups, and the processes that hold chips."""

from __future__ import annotations

import itertools
import os
import pwd
import re

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Iterator

#: Device files of TPU chips. Every process that uses a chip by vfio also opens /dev/vfio/vfio.
_CHIP = re.compile(r"/dev/(?:accel\d+|vfio/\d+)")
_CHIP_OR_CONTAINER = re.compile(r"/dev/(?:accel\d+|vfio/(?:\d+|vfio))(?: \(deleted\))?")
#: Maximum length of a command line in results, in characters.
_SHOWN_COMMAND = 200
#: Number of open files that are inspected between two calls of `beat`, which takes a few milliseconds.
_FILES_PER_BEAT = 1000
#: States of processes and threads that have ended but whose parent has not collected them yet.
_ENDED = ("Z", "X")


def read_text(path: str, default: str = "") -> str:
    """Return a file's text without surrounding white space, or the default if the file cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return default


def boot_id(root: str = "/") -> str:
    """Return the id of this boot."""
    return read_text(os.path.join(root, "proc/sys/kernel/random/boot_id"))


def parse_stat(text: str) -> dict[str, Any]:
    """Return state, parent and start time (in clock ticks since the kernel's boot) from the text of /proc/PID/stat.

    The process's name in this text is in parentheses, and can itself contain parentheses and spaces.
    """
    fields = text[text.rindex(")") + 2 :].split()
    return {"state": fields[0], "parent": int(fields[1]), "start": int(fields[19])}


def start_time(pid: int, root: str = "/") -> int:
    """Return when a process started, in clock ticks since the kernel's boot; 0 if the process does not exist.

    Pid and start time together identify a process: pids are used again.
    """
    text = read_text(os.path.join(root, "proc", str(pid), "stat"))
    return parse_stat(text)["start"] if ")" in text else 0


def parent(pid: int, root: str = "/") -> int:
    """Return the parent of a process; 0 if the process does not exist."""
    text = read_text(os.path.join(root, "proc", str(pid), "stat"))
    return int(parse_stat(text)["parent"]) if ")" in text else 0


def process_state(pid: int, root: str = "/") -> str:
    """Return the one-letter state of a process; empty if the process does not exist.

    The result is the state of the first thread. If the first thread has ended, it is the state of another thread; D
    takes precedence.
    """
    folder = os.path.join(root, "proc", str(pid))
    state = _state(folder)
    # `min`: D sorts before the other states of a living thread.
    return min((found for _, found in _living(folder)), default=state) if state in _ENDED else state


def is_alive(pid: int, root: str = "/") -> bool:
    """Return whether a process exists and has a thread that has not ended."""
    return process_state(pid, root) not in ("", *_ENDED)


def _state(folder: str) -> str:
    """Return the state of the process or thread with this /proc directory; empty if it does not exist."""
    text = read_text(os.path.join(folder, "stat"))
    return parse_stat(text)["state"] if ")" in text else ""


def _living(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the directory and state of each living thread of the process with this /proc directory."""
    try:
        names = os.listdir(os.path.join(folder, "task"))
    except OSError:
        return
    for name in names:
        thread = os.path.join(folder, "task", name)
        state = _state(thread)
        if state not in ("", *_ENDED):
            yield thread, state


def started_at(pid: int, root: str = "/") -> float:
    """Return when a process started, in seconds since 1970; 0 if the process does not exist."""
    ticks = start_time(pid, root)
    booted = next(
        (line.split()[1] for line in read_text(os.path.join(root, "proc/stat")).splitlines() if line[:6] == "btime "),
        "0",
    )
    return float(booted) + ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def pids(root: str = "/") -> Iterator[int]:
    """Yield the id of every process."""
    for name in os.listdir(os.path.join(root, "proc")):
        if name.isdigit():
            yield int(name)


def person_name(uid: int) -> str:
    """Return the login name of a user id, or the id itself if there is no account."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def chips(root: str = "/") -> list[str]:
    """Return the device files of this host's chips, ordered by number."""
    found = []
    for folder in ("dev", "dev/vfio"):
        try:
            names = os.listdir(os.path.join(root, folder))
        except OSError:
            continue
        found += ["/{}/{}".format(folder, name) for name in names]
    return sorted(filter(_CHIP.fullmatch, found), key=lambda path: (len(path), path))


def command_line(folder: str, place: str = "") -> str:
    """Return the command line of a process, or its name if the command line is empty, as one line of limited length.

    Args:
        folder: The directory of the process.
        place: The directory of another thread to read from, if the first thread has ended.
    """
    # Join lines: the command line of `python -c` can have several.
    command = " ".join(read_text(os.path.join(place or folder, "cmdline")).replace("\0", " ").split())
    return (command or read_text(os.path.join(folder, "comm")))[:_SHOWN_COMMAND]


def holders(
    root: str = "/",
    only: Iterable[int] | None = None,
    paths: Iterable[str] | None = None,
    beat: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the processes that hold a chip, ordered by pid: ``{"pid", "uid", "user", "command", "devices"}`` each.

    Args:
        root: The directory that contains /proc.
        only: Check only these processes.
        paths: Find the processes that have one of these files open, not the processes that hold a chip.
        beat: Called repeatedly during the search, which can take long: any user can have millions of files open.
    """
    looked = _counted(beat)
    wanted = _CHIP_OR_CONTAINER if paths is None else re.compile("|".join(map(re.escape, paths)))
    found = []
    for pid in sorted(pids(root) if only is None else only):
        folder = os.path.join(root, "proc", str(pid))
        try:
            place, numbers = _opened(folder)
            devices = _open_of(place, numbers, wanted, looked)
            uid = os.stat(folder).st_uid
        except OSError:
            continue  # the process has ended
        if devices:
            found.append(
                {
                    "pid": pid,
                    "uid": uid,
                    "user": person_name(uid),
                    "command": command_line(folder, place),
                    "devices": sorted(devices),
                }
            )
    return found


def _opened(folder: str) -> tuple[str, list[str]]:
    """Return the /proc directory, of a process or its thread, that lists the open files, and the files' numbers."""
    numbers = os.listdir(os.path.join(folder, "fd"))
    if not numbers and _state(folder) in _ENDED:
        # If the first thread has ended, its directory does not list the open files.
        for thread, _ in _living(folder):
            try:
                numbers = os.listdir(os.path.join(thread, "fd"))
            except OSError:
                continue
            if numbers:
                return thread, numbers
    return folder, numbers


def _counted(beat: Callable[[], None] | None) -> Callable[[], None]:
    """Return a function to call for each open file; it calls `beat` every _FILES_PER_BEAT files."""
    passed = itertools.count(1)

    def looked() -> None:
        if next(passed) % _FILES_PER_BEAT == 0 and beat is not None:
            beat()

    return looked


def _open_of(folder: str, numbers: Iterable[str], wanted: re.Pattern[str], looked: Callable[[], None]) -> set[str]:
    """Return the paths among these open files of a process or thread that match ``wanted``.

    Raises:
        OSError: The process has ended.
    """
    found = set()
    descriptor = os.open(os.path.join(folder, "fd"), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in numbers:
            looked()
            try:
                target = os.readlink(number, dir_fd=descriptor)
            except OSError:
                continue
            if wanted.fullmatch(target):
                found.add(target.replace(" (deleted)", ""))
    finally:
        os.close(descriptor)
    return found


def parse_cgroup(text: str) -> list[tuple[str, str]]:
    """Return the (controller list, path) pairs in /proc/PID/cgroup that systemd can manage, the most likely first.

    With control groups of version 1, and on hybrid hosts, systemd manages the ``name=systemd`` hierarchy; otherwise the
    unified hierarchy.
    """
    entries: list[tuple[str, str]] = []
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "name=systemd":
            entries.insert(0, (controllers, path))
        elif number == "0" and not controllers:
            entries.append(("", path))
    return entries


def parse_cgroup_mounts(text: str) -> list[tuple[str, str, str]]:
    """Return (controller list, root, mount point) of systemd's hierarchies, from the text of /proc/self/mountinfo."""
    mounts = []
    # Split at spaces only: a path can contain other white space.
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup" and "name=systemd" in tail[2].split(","):
            mounts.append(("name=systemd", fields[3], fields[4]))
        elif tail[0] == "cgroup2":
            mounts.append(("", fields[3], fields[4]))
    return mounts


def cgroup_candidates(cgroup: str, mountinfo: str) -> list[str]:
    """Return the directories that can be a process's control group, the most likely first."""
    found = []
    for controllers, path in parse_cgroup(cgroup):
        for mounted, top, point in parse_cgroup_mounts(mountinfo):
            if mounted != controllers:
                continue
            if top in ("/", path) or path.startswith(top + "/"):
                below = path if top == "/" else path[len(top) :]
                found.append(os.path.normpath(point + "/" + below))
    return found


def own_cgroup() -> str:
    """Return the directory of this process's control group, after checking that its list of processes has this process.

    Raises:
        OSError: No directory is found, so that a run could not be ended completely.
    """
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        cgroup = file.read()
    # Accept any bytes in paths: any user can make a FUSE mount.
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        mountinfo = file.read()
    for directory in cgroup_candidates(cgroup, mountinfo):
        if os.getpid() in cgroup_pids(directory):
            return directory
    raise OSError("no mounted control group lists this process")


def cgroup_pids(directory: str) -> list[int]:
    """Return all processes in a control group and in the groups below it."""
    found = set()
    for folder, _, files in os.walk(directory):
        if "cgroup.procs" in files:
            for word in read_text(os.path.join(folder, "cgroup.procs")).split():
                if word.isdigit() and word != "0":
                    found.add(int(word))
    return sorted(found)


def oom_kills(root: str = "/", cgroup: str | None = None) -> int:
    """Return how often the kernel has killed a process of this process's control group for lack of memory.

    Args:
        root: The directory that contains /proc and the mounted hierarchies.
        cgroup: Text of /proc/self/cgroup; None means to read the file.
    """
    text = read_text(os.path.join(root, "proc/self/cgroup")) if cgroup is None else cgroup
    count = 0
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            name = "sys/fs/cgroup{}/memory.events".format(path)
        elif "memory" in controllers.split(","):
            name = "sys/fs/cgroup/memory{}/memory.oom_control".format(path)
        else:
            continue
        for entry in read_text(os.path.join(root, name)).splitlines():
            word, _, value = entry.partition(" ")
            if word == "oom_kill" and value.isdigit():
                count = max(count, int(value))
    return count
