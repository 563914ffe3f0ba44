"""The action `profile`: records profiles of a run's processes, as the run's user.

jax.profiler's server in a process of the run is asked for them by `python -m jax.collect_profile`. It has no password,
so only sockets of the run's own processes are used, and only by people who may run commands as the run's user.
"""

from __future__ import annotations

import concurrent.futures
import glob
import os
import shutil
import socket
import subprocess
import tempfile
import time

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import ON
from tpu_ops.protocol.wire import Refused, require_protocol

from . import TYPE_CHECKING, listeners, stacks
from .caller import Caller, Gone
from .child import become
from .grpc_call import CallError, Connection
from .person import asking, by_uid
from .rights import may_run_as, require_root

if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, List, Optional, Tuple

    from .store import Store

#: Where the folders for profiles are created, for the user alone.
PLACE = "/tmp"  # noqa: S108
#: Seconds to find the sockets, seconds that a server has to say whether it is a profiler, maximum size of its answer,
#: and maximum number of ports that are tried.
_SEARCH, _LIMIT, _ANSWER, _MOST = 5.0, 3.0, 65536, 24
#: A method of the profiler that does nothing, and the message by which it says so. Servers that do not have the method
#: answer with the same status, but without a message.
_METHOD, _SAYS = "/tensorflow.ProfilerService/Monitor", b"unimplemented."
#: Variables of the run's process that choose its Python and packages.
_VARIABLES = (b"PATH", b"PYTHONPATH", b"VIRTUAL_ENV", b"LD_LIBRARY_PATH", b"HOME")
#: jax.collect_profile tries three times, and has to import and to convert as well.
_TRIES, _BESIDE = 3, 120.0


def profile(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """Record profiles of a rank's processes. This process then is the run's user for good.

    Request: ``run_id``; ``milliseconds``; ``port`` of the profiler, or null: then all ports on which the run listens
        are tried, but not those that libtpu and the launcher use.

    Returns:
        ``ports``; ``folder``, which has a file ``PORT.xplane.pb`` for each of them, and which the caller has to remove;
        empty if there are none. ``kind`` and ``problem``: empty, or what failed. ``kind`` is ``server`` if no profiler
        listens, ``package`` if the environment cannot record, else ``failed``.

    Raises:
        Refused: The rank is not active, or the user who asks may not run commands as the run's user.
        Gone: The caller has gone, and nobody would remove the folder: it is removed here.
    """
    require_root()
    require_protocol(request)
    run_id = spec.check_run_id(request.get("run_id"))
    milliseconds = request.get("milliseconds")
    if not milliseconds:
        raise Refused("invalid", "the request has no length of the profile")
    record = store.observe(run_id)
    if record is None or record["state"] not in ON:
        raise Refused("missing", "run {} is not active on this worker".format(run_id))
    asker, owner = asking(), by_uid(record["person"]["uid"])
    if asker.uid != owner.uid and not may_run_as(asker, owner.name):
        fix = "ask {0} to record the profile: this needs the right to run commands as {0} by sudo"
        text = "the run belongs to {}, and {} may not run commands as this user"
        raise Refused("denied", text.format(owner.name, asker.name), fix.format(owner.name))
    pids = stacks.processes_of(record)
    become(owner)
    found = recorded(pids, record["venv"], milliseconds, request.get("port"))
    require_caller(caller, found["folder"])
    return dict(found, ok=True)


def require_caller(caller: Caller, folder: str) -> None:
    """Remove a folder and raise `Gone` if the caller has gone."""
    try:
        caller.pause(0)
    except Gone:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def recorded(
    pids: Iterable[int], venv: str, milliseconds: int, wanted: Optional[int], place: str = PLACE
) -> Dict[str, Any]:
    """Record the profiles of these processes, with the rights of this process; return the answer of `profile`.

    Args:
        pids: The processes of the rank.
        venv: The environment of the run, for processes that are no Python.
        milliseconds: The length of the profiles.
        wanted: The port of the profiler; None if all ports are tried.
        place: Where the folder for the profiles is created.
    """
    heard = listening(pids)
    if wanted is not None and wanted not in heard:
        return _without("server", "the run does not listen on port {}".format(wanted))
    ports = [wanted] if wanted is not None else sorted(set(heard) - set(spec.TAKEN_PORTS))[:_MOST]
    with concurrent.futures.ThreadPoolExecutor(_MOST) as pool:
        answers = pool.map(lambda port: port if is_profiler(heard[port][1], port) else None, ports)
        known = [port for port in answers if port is not None]
    if not known:
        named = ", ".join(map(str, ports))
        text = "no profiler answers on port {}".format(named) if ports else "the run listens on no port"
        return _without("server", text)
    try:
        folder = tempfile.mkdtemp(prefix="tpu_ops-profile-", dir=place)
    except OSError as exc:
        return _without("failed", "no folder for the profile can be created in {}: {}".format(place, exc.strerror))
    with concurrent.futures.ThreadPoolExecutor(len(known)) as pool:
        done = list(pool.map(lambda port: (port, *_record(folder, heard[port], port, venv, milliseconds)), known))
    found = [port for port, _, problem in done if not problem]
    kind, problem = next(((kind, problem) for _, kind, problem in done if problem), ("", ""))
    if not found:
        shutil.rmtree(folder, ignore_errors=True)
        return _without(kind, problem)
    return {"ports": found, "folder": folder, "kind": kind, "problem": problem}


def _without(kind: str, problem: str) -> Dict[str, Any]:
    return {"ports": [], "folder": "", "kind": kind, "problem": problem}


def listening(pids: Iterable[int]) -> Dict[int, Tuple[int, str]]:
    """Return the TCP ports on which processes listen, each with its process and IPv4 address: JAX connects by IPv4.

    Processes in other network namespaces and of other users are left out. Of several processes with the same socket,
    the first one counts.
    """
    here, tables = listeners.namespace(os.getpid()), listeners.Tables()
    reached = [pid for pid in pids if listeners.namespace(pid) == here]
    found: Dict[int, Tuple[int, str]] = {}
    for pid, own in listeners.of_processes(reached, tables, time.monotonic() + _SEARCH).items():
        for each in own:
            address = listeners.by_ipv4(each, tables.of(os.getpid()))
            if address:
                found.setdefault(each.port, (pid, address))
    return found


def is_profiler(address: str, port: int, limit: float = _LIMIT) -> bool:
    """Return whether the server at an address of this host is a profiler."""
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with made, Connection(made, (address, port), time.monotonic() + limit, _ANSWER) as connection:
            connection.call(_METHOD, b"")
    except CallError as exc:
        return exc.message == _SAYS
    except OSError:
        return False
    return True


def _record(folder: str, heard: Tuple[int, str], port: int, venv: str, milliseconds: int) -> Tuple[str, str]:
    """Record the profile of one server; return the kind and text of the problem, both empty if there is none."""
    pid, address = heard
    environment = variables(pid)
    python = python_of(pid, environment) or os.path.join(venv, "bin/python")
    place = os.path.join(folder, str(port))
    command = command_line(python, address, port, milliseconds, place)
    limit = _TRIES * milliseconds / 1000 + _BESIDE
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


def command_line(python: str, address: str, port: int, milliseconds: int, place: str) -> List[str]:
    """Return the command that records a profile."""
    words = [python, "-m", "jax.collect_profile", str(port), str(milliseconds)]
    return [*words, "--log_dir", place, "--no_perfetto_link", "--host", address]


def variables(pid: int) -> Dict[str, str]:
    """Return the variables of a process that choose its Python."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return {"PATH": os.defpath}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries if name in _VARIABLES}


def python_of(pid: int, environment: Dict[str, str]) -> str:
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
