"""Reads the Python stacks of one process with py-spy, which gets no rights of root but the one to read a process."""

from __future__ import annotations

import json
import os
import re

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

    Thread = Dict[str, Any]

#: Where the role launcher installs py-spy; only root can write there.
PROGRAM = "/usr/local/lib/tpu_ops/py-spy"
#: Fix for a worker without py-spy.
MISSING = "py-spy is not installed on this worker: `tpu_ops configure --tags launcher` installs it"
#: Maximum seconds for one process. py-spy takes about 10 ms; a process that it cannot stop keeps it waiting.
LIMIT = 5.0
#: Limits of the program, in bytes and seconds: a process can have any data where py-spy looks for its stacks.
_OUTPUT, _MEMORY, _PROCESSOR_TIME = 8 * 1024 * 1024, 4 * 1024 * 1024 * 1024, 10
#: The user and group for processes of root, whose files py-spy must not be able to change.
_NOBODY = 65534
_NAMES = re.compile(r"(?:python|pypy)[\d.]*[a-z]*(?: \(deleted\))?")
#: Maximum size of the part of a process's list of mapped files in which libpython is looked for.
_MAPS = 1024 * 1024
#: States in which a thread does not stop for a tracer: waiting inside the kernel, and stopped already.
_UNSTOPPABLE = "DTt"
#: Maximum length of a name or path in results, in characters.
LONGEST = 300


def is_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter, by its program or the libraries that it has loaded."""
    folder = "/proc/{}".format(pid)
    try:
        if _NAMES.fullmatch(os.path.basename(os.readlink(folder + "/exe"))):
            return True
        with open(folder + "/maps", "rb") as file:
            return b"/libpython" in file.read(_MAPS)
    except OSError:
        return False


def command(pid: int, status: Dict[str, str], program: str, *, stops: bool, as_root: bool) -> List[str]:
    """Return the command that prints the stacks of a process as JSON.

    As root, py-spy becomes the user of the process, since a Python in a user's home is often readable by this user
    only. It keeps one capability, with which it can read any process, and which it cannot extend. The user cannot
    control it: the kernel lets nobody trace a process with more capabilities than their own.

    Args:
        pid: The process.
        status: What the kernel says of the process; see `status_of`.
        program: Path of py-spy.
        stops: Whether py-spy stops the process while it reads, so that the stacks are of one moment.
        as_root: Whether this program runs as root.
    """
    words = [program, "dump", "--json", "--pid", str(pid)] + ([] if stops else ["--nonblocking"])
    if not as_root:
        return words
    uid, gid = (int(status.get(name, "0").split()[0]) for name in ("Uid", "Gid"))
    groups = ",".join(status.get("Groups", "").split()[:64])
    known = ["--groups=" + groups] if uid and groups else ["--clear-groups"]
    limits = ["--fsize={}".format(_OUTPUT), "--as={}".format(_MEMORY), "--cpu={}".format(_PROCESSOR_TIME), "--core=0"]
    return [
        "/usr/bin/prlimit",
        *limits,
        "/usr/bin/setpriv",
        "--reuid={}".format(uid or _NOBODY),
        "--regid={}".format(gid if uid else _NOBODY),
        *known,
        "--no-new-privs",
        "--inh-caps=-all,+sys_ptrace",
        "--ambient-caps=-all,+sys_ptrace",
        "--bounding-set=-all,+sys_ptrace",
        *words,
    ]


def status_of(pid: int) -> Dict[str, str]:
    """Return the lines of a process's status in /proc, by name; empty if the process does not exist."""
    lines = (line.partition(":") for line in proc.read_text("/proc/{}/status".format(pid)).splitlines())
    return {name: value.strip() for name, _, value in lines}


def read(pid: int, states: str, limit: float, program: str = PROGRAM) -> Tuple[List[Thread], str]:
    """Return the threads of a Python process with their stacks, or no threads and the reason.

    Args:
        pid: The process.
        states: The states of its threads, a letter each.
        limit: Seconds that py-spy may take.
        program: Path of py-spy.
    """
    if not os.access(program, os.X_OK):
        return [], MISSING
    status, as_root = status_of(pid), os.geteuid() == 0
    stops = not any(state in _UNSTOPPABLE for state in states) and status.get("TracerPid", "0") == "0"
    found, why = _called(command(pid, status, program, stops=stops, as_root=as_root), min(limit, LIMIT))
    if stops and "Failed to suspend" in why:
        # The process was stopped by somebody else since its states were read.
        return _called(command(pid, status, program, stops=False, as_root=as_root), min(limit, LIMIT))
    return found, why


def _called(words: List[str], limit: float) -> Tuple[List[Thread], str]:
    """Return the threads that py-spy prints, or no threads and the reason."""
    import subprocess  # imported late, since most requests do not need it

    # Files in memory take the output: reading pipes would need threads, and the disk can be full.
    output, errors = os.memfd_create("stacks"), os.memfd_create("errors")
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            cwd="/",
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            return [], "py-spy gave no answer within {:.1f} s".format(limit)
        # Not the exit status decides: in a supervisor, another thread collects the child processes.
        threads = parse(_content(output))
        return threads, "" if threads else refusal(_content(errors).decode("utf-8", "replace"), _scope())
    except OSError as exc:
        return [], "py-spy cannot be executed: {}".format(exc.strerror or exc)
    finally:
        os.close(output)
        os.close(errors)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, _OUTPUT, 0)


def _scope() -> str:
    return proc.read_text("/proc/sys/kernel/yama/ptrace_scope")


def parse(text: bytes) -> List[Thread]:
    """Return the threads in py-spy's output, the main thread first; empty if the output is something else.

    The frames of a thread are ``[function, file, line]``, the innermost first.
    """
    try:
        found = [
            {
                "name": _name(thread),
                "active": bool(thread["active"]),
                "frames": [
                    [str(frame["name"])[:LONGEST], str(frame["filename"])[-LONGEST:], int(frame["line"])]
                    for frame in thread["frames"]
                ],
            }
            for thread in json.loads(text.decode("utf-8", "replace"))
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return sorted(found, key=lambda thread: thread["name"] != "MainThread")


def _name(thread: Thread) -> str:
    """Return a thread's name. A Python that has not loaded `threading` knows none."""
    first = thread["os_thread_id"] == thread["pid"]
    return str(thread["thread_name"] or ("MainThread" if first else "thread {}".format(thread["os_thread_id"])))[
        :LONGEST
    ]


def refusal(errors: str, scope: str) -> str:
    """Return why py-spy could not read a process.

    Args:
        errors: What it has printed.
        scope: The kernel's setting kernel.yama.ptrace_scope; empty if the kernel has no such setting.
    """
    lines = errors.partition("Stack backtrace")[0].split("\n")
    causes = [re.sub(r"^\d+: ", "", line.strip()) for line in lines]
    said = "; ".join(cause for cause in causes if cause and cause != "Caused by:")[:LONGEST]
    if "denied" in said.lower() or "not permitted" in said.lower():
        if scope == "3":
            return "the kernel forbids to read processes: kernel.yama.ptrace_scope is 3 until the worker is restarted"
        return "the kernel forbids to read this process, or only another user can read the files of its Python"
    return "py-spy failed: {}".format(said or "it was ended by a signal or printed nothing")
