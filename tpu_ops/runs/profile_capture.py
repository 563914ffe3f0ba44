"""Records a profile of a run's processes, as the run's user, on a worker that is sent this file: see `profiles`.

It reads a request as JSON from standard input and prints the answer as JSON. Standard library, Python 3.8.

Request: ``folder``, which must not exist; ``cgroup``, the directory of the run's control group; ``venv``, the run's
environment; ``milliseconds``; ``port`` of the profiler, or null: then all ports on which the run listens are tried, but
not those in ``skip``. A request with ``remove`` only removes that folder.

Answer: ``ports``, for each of which ``folder`` has a file ``PORT.xplane.pb``; ``kind`` and ``problem``: empty, or what
failed. ``kind`` is ``server`` if no profiler listens, ``package`` if the environment cannot record, else ``failed``.
"""

from __future__ import annotations

import concurrent.futures
import glob
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from typing import Any

#: Beginning of the names of folders: no other folder is removed.
PREFIX = "/tmp/tpu_ops-profile-"  # noqa: S108 - created with a random name, for the user alone
#: Seconds that a server has to say whether it is a profiler, and number of ports that are tried.
_LIMIT, _MOST = 3.0, 24
#: A method of the profiler that does nothing, and the message by which it says so. Servers that do not have the method
#: answer without a message (gRPC's status 12).
_METHOD, _SAYS = b"/tensorflow.ProfilerService/Monitor", b"unimplemented."
#: Variables of the run's process that choose its Python and packages.
_VARIABLES = (b"PATH", b"PYTHONPATH", b"VIRTUAL_ENV", b"LD_LIBRARY_PATH", b"HOME")
#: jax.collect_profile tries three times, and has to import and to convert as well.
_TRIES, _BESIDE = 3, 120.0
_SETTINGS, _HEADERS, _DATA, _RESET, _GOAWAY = 4, 1, 0, 3, 7


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    if "remove" in request:
        if request["remove"].startswith(PREFIX) and "/" not in request["remove"][len(PREFIX) :]:
            shutil.rmtree(request["remove"], ignore_errors=True)
        return
    print(json.dumps(answer(request)))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    if not request["folder"].startswith(PREFIX):
        return {"ports": [], "kind": "failed", "problem": "the folder's name is not that of a profile"}
    heard = listening(request["cgroup"])
    wanted = request.get("port")
    if wanted is not None and wanted not in heard:
        return {"ports": [], "kind": "server", "problem": "the run does not listen on port {}".format(wanted)}
    ports = [wanted] if wanted is not None else sorted(set(heard) - set(request["skip"]))[:_MOST]
    with concurrent.futures.ThreadPoolExecutor(_MOST) as pool:
        known = [port for port, yes in zip(ports, pool.map(is_profiler, ports)) if yes]
    if not known:
        named = ", ".join(map(str, ports))
        text = "no profiler answers on port {}".format(named) if ports else "the run listens on no port"
        return {"ports": [], "kind": "server", "problem": text}
    os.mkdir(request["folder"], 0o700)
    with concurrent.futures.ThreadPoolExecutor(len(known)) as pool:
        done = list(pool.map(lambda port: record(request, heard[port], port), known))
    failed = [found for found in done if found[1]]
    return {
        "ports": [port for port, found in zip(known, done) if not found[1]],
        "kind": failed[0][0] if failed else "",
        "problem": failed[0][1] if failed else "",
    }


def listening(cgroup: str) -> dict[int, int]:
    """Return the TCP ports on which this user's processes of a control group listen, each with its process."""
    sockets: dict[str, int] = {}
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        sockets.update({row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"})
    found: dict[int, int] = {}
    for pid in processes(cgroup):
        try:
            for name in os.listdir("/proc/{}/fd".format(pid)):
                target = os.readlink("/proc/{}/fd/{}".format(pid, name))
                if target.startswith("socket:[") and target[8:-1] in sockets:
                    found.setdefault(sockets[target[8:-1]], pid)
        except OSError:
            continue  # the process has ended, or is another user's
    return found


def processes(cgroup: str) -> list[int]:
    """Return the processes of a control group and of those below it."""
    found: list[int] = []
    for folder, _, names in os.walk(cgroup):
        if "cgroup.procs" in names:
            with open(os.path.join(folder, "cgroup.procs")) as file:
                found += [int(word) for word in file.read().split()]
    return sorted(found)


def is_profiler(port: int, limit: float = _LIMIT) -> bool:
    """Return whether the server on a local port is a profiler."""
    try:
        with socket.create_connection(("127.0.0.1", port), limit) as link:
            link.settimeout(limit)
            link.sendall(_call())
            return _tells(link)
    except OSError:
        return False


def _call() -> bytes:
    """Return the bytes of a gRPC call without values, as HTTP/2 sends it."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", _METHOD), (b":authority", b"localhost")]
    fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    head = b"".join(b"\x10" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    body = b"\0" + struct.pack(">I", 0)
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return begin + _frame(_SETTINGS, 0, 0) + _frame(_HEADERS, 4, 1, head) + _frame(_DATA, 1, 1, body)


def _frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def _tells(link: socket.socket) -> bool:
    """Return whether the answer to `_call` is that of a profiler."""
    data = b""
    while len(data) < 2**16:
        came = link.recv(4096)
        if not came:
            return False
        data += came
        while len(data) >= 9:
            size, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
            if len(data) < 9 + size:
                break
            payload, data = data[9 : 9 + size], data[9 + size :]
            if kind == _SETTINGS and not flags & 1:
                link.sendall(_frame(_SETTINGS, 1, 0))
            if kind == _DATA or (kind == _HEADERS and _SAYS in payload):
                return True
            if kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & 1):
                return False
    return False


def record(request: dict[str, Any], pid: int, port: int) -> tuple[str, str]:
    """Record the profile of one server; return the kind and text of the problem, both empty if there is none."""
    environment = variables(pid)
    python = python_of(pid, environment) or os.path.join(request["venv"], "bin/python")
    place = os.path.join(request["folder"], str(port))
    command = command_line(python, port, request["milliseconds"], place)
    limit = _TRIES * request["milliseconds"] / 1000 + _BESIDE
    try:
        # The process must not take a chip.
        done = subprocess.run(
            command,
            env=dict(environment, JAX_PLATFORMS="cpu"),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "failed", "{} did not end within {:.0f} s".format(" ".join(command[:3]), limit)
    except OSError as exc:
        return "failed", "{}: {}".format(python, exc.strerror)
    files = glob.glob(os.path.join(glob.escape(place), "plugins/profile/*/*.xplane.pb"))
    if files:
        os.rename(files[0], "{}.xplane.pb".format(place))
        shutil.rmtree(place, ignore_errors=True)
        return "", ""
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    text = (lines[-1] if lines else "no profile was written")[:500]
    lacks = "No module named" in text or "to be installed" in text
    return "package" if lacks else "failed", "{}: {}".format(python, text)


def command_line(python: str, port: int, milliseconds: int, place: str) -> list[str]:
    """Return the command that records a profile."""
    words = [python, "-m", "jax.collect_profile", str(port), str(milliseconds)]
    return [*words, "--log_dir", place, "--no_perfetto_link", "--host", "127.0.0.1"]


def variables(pid: int) -> dict[str, str]:
    """Return the variables of a process that choose its Python."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return {"PATH": os.defpath}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries if name in _VARIABLES}


def python_of(pid: int, environment: dict[str, str]) -> str:
    """Return the path of the Python that executes a process; empty if it is another program."""
    try:
        with open("/proc/{}/cmdline".format(pid), "rb") as file:
            word = os.fsdecode(file.read().split(b"\0")[0])
        base = os.readlink("/proc/{}/cwd".format(pid))
    except OSError:
        return ""
    if not os.path.basename(word).startswith("python"):
        return ""
    if "/" in word:
        return os.path.join(base, word)
    return shutil.which(word, path=environment.get("PATH")) or ""


if __name__ == "__main__":
    main()
