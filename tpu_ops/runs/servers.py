"""Starts and stops a person's server on a worker: a notebook server or TensorBoard.

The server listens on a socket that only the person can open. Its packages are in an environment of its own in the
person's home, made with the Python of the fleet's environment. The kernels of notebooks run in the fleet's environment,
which stays as it is.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.protocol.servers import directory_of, socket_of, unit_of
from tpu_ops.runs.control import LIMIT
from tpu_ops.ssh.replies import Reply, Result

#: Seconds to install a server's packages, and seconds until it listens.
_INSTALL_LIMIT, _START_LIMIT = 900.0, 90.0
#: Exit code of `_PREPARE` if the server runs already, with other options.
_DIFFERS = 4
#: Installs a server, writes its start script from standard input, and prints its token; does nothing if the server runs
#: already. Arguments: the unit, the server's directory, the fleet's environment, and packages.
_PREPARE = r"""
set -eu
unit=$1 directory=$HOME/$2 fleet=$3/bin/python
shift 3
umask 077
mkdir -p "$directory"
cd "$directory"
# After Ctrl-C on the controller, an earlier installation may still be running.
exec 9>lock
flock 9
cat >start.new
if systemctl --quiet is-active "$unit"; then
    cmp -s start.new start || exit 4
    exec cat token
fi
export SSL_CERT_FILE="${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}"
version='import sys; print(sys.version_info[:2])'
[ "$(env/bin/python -c "$version" 2>/dev/null)" = "$("$fleet" -c "$version")" ] ||
    /opt/uv/bin/uv venv --quiet --clear --python "$fleet" env
/opt/uv/bin/uv pip install --quiet --python env/bin/python "$@"
# Without a newline, since Jupyter would read it as part of the token.
[ -s token ] || "$fleet" -c 'import secrets; print(secrets.token_hex(16), end="")' >token
mv start.new start
cat token
"""
#: Waits until a server listens. Arguments: the unit, the server's directory, its socket, and the seconds to wait.
_AWAIT = r"""
for ((i = 0; i < 10 * $4; i++)); do
    [ -S "$3" ] && exit
    systemctl --quiet is-active "$1" || break
    sleep 0.1
done
tail -n 3 "$HOME/$2/log" >&2
exit 1
"""
#: Exits with 0 once the unit in its argument has ended, unless the worker shuts down; with 1 when its input ends.
_WATCH = r"""
while read -rt 2 || (($? > 128)); do
    case $(systemctl is-active "$1")-$(systemctl is-system-running) in
        inactive-running | inactive-degraded | failed-running | failed-degraded) exit 0 ;;
    esac
done
exit 1
"""
#: The beginning of a start script. ``VENV`` stands for the fleet's environment.
_BEGIN = """\
cd "${0%/*}"
exec >log 2>&1
directory=$PWD
export LANG=C.UTF-8 VIRTUAL_ENV=VENV PATH=VENV/bin:$PATH:/snap/bin
# Workers may share the home, and files that Jupyter has for its processes are named after their pids.
export JUPYTER_RUNTIME_DIR=$RUNTIME_DIRECTORY/files
export JUPYTER_PATH=$directory JUPYTER_TOKEN_FILE=$directory/token"""
#: Starts a kernel in the fleet's environment; packages that are missing there come from the server's environment.
_KERNEL = """\
import os
import sys

if __name__ == "__main__":
    here = sys.path.pop(0)
    sys.path.append(os.path.join(here, "../../env/lib/python%d.%d/site-packages" % sys.version_info[:2]))
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
"""
#: Starts TensorBoard on a Unix socket, which only its Python interface can do, not its command line.
_BOARD = """\
import os
import sys

from tensorboard import default, program
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler


class Handler(WSGIRequestHandler):
    def log_request(self, *_):
        pass


class Server(ThreadedWSGIServer, program.TensorBoardServer):
    def __init__(self, app, flags):
        super().__init__("unix://" + os.environ["RUNTIME_DIRECTORY"] + "/socket", 0, app, Handler)

    def get_url(self):
        return "http://localhost:6006"

    def print_serving_message(self):
        pass


board = program.TensorBoard(plugins=default.get_plugins(), server_class=Server)
board.configure(sys.argv)
sys.exit(board.main())
"""


class Workers(Protocol):
    """Runs commands and sends requests on workers, as `Fanout` does."""

    async def run(
        self, hosts: Iterable[str], argv: Sequence[str], *, limit: float, stdin: bytes = b""
    ) -> dict[str, Result]:
        """Return the result of a command on each worker."""

    async def call(self, requests: Mapping[str, Mapping[str, Any]], action: str, *, limit: float) -> dict[str, Reply]:
        """Return the reply of each worker's launcher."""


class Server(NamedTuple):
    """A server to start.

    Attributes:
        name: Its name in the protocol.
        packages: The requirements of its environment.
        script: Its start script. Servers with other options have other scripts.
    """

    name: str
    packages: tuple[str, ...]
    script: str


class Started(NamedTuple):
    """A server that listens.

    Attributes:
        token: The token that the server asks for, if it asks for one.
        anew: Whether it was started now; otherwise it was running already.
    """

    token: str
    anew: bool


def jupyter(venv: str, *, pages: bool = True, more: Sequence[str] = ()) -> Server:
    """Return the notebook server.

    Args:
        venv: The environment of its kernels.
        pages: Whether to install JupyterLab, and not only the server that an editor needs.
        more: More packages for the server's environment.
    """
    kernel = {
        "argv": [f"{venv}/bin/python", "{resource_dir}/kernel.py", "-f", "{connection_file}"],
        "display_name": f"Python of {venv}",
        "language": "python",
    }
    module = "jupyterlab" if pages else "jupyter_server"
    return _server(
        "jupyter",
        venv,
        (module, "ipykernel", *more),
        {"kernels/python3/kernel.json": json.dumps(kernel), "kernels/python3/kernel.py": _KERNEL},
        f"-m {module} --no-browser --ServerApp.sock=$RUNTIME_DIRECTORY/socket --ServerApp.sock_mode=0600",
    )


def tensorboard(venv: str, logdir: str, *, more: Sequence[str] = ()) -> Server:
    """Return TensorBoard.

    Args:
        venv: The fleet's environment.
        logdir: The directory of the event files: an absolute path, a path relative to the person's home, or ``gs://``.
        more: More packages for its environment.
    """
    # With load_fast, TensorBoard would start a second server, which listens on a port for all users of the worker.
    return _server(
        "tensorboard",
        venv,
        ("tensorboard", *(["gcsfs"] if logdir.startswith("gs://") else []), *more),
        {"board.py": _BOARD},
        f"$directory/board.py --load_fast=false --logdir={shlex.quote(logdir)}",
    )


def _server(name: str, venv: str, packages: tuple[str, ...], files: Mapping[str, str], command: str) -> Server:
    """Return a server.

    Args:
        name: Its name.
        venv: The fleet's environment.
        packages: The requirements of its environment.
        files: Path below the server's directory -> text; the start script writes these files.
        command: The arguments of Python, as a shell reads them.
    """
    lines = [f"# packages: {shlex.join(packages)}", _BEGIN.replace("VENV", shlex.quote(venv))]
    lines += [
        f"mkdir -p {path.rpartition('/')[0] or '.'}\ncat >{path} <<'end of file'\n{text}\nend of file"
        for path, text in files.items()
    ]
    return Server(name, packages, "\n".join([*lines, "cd", f"exec $directory/env/bin/python {command}", ""]))


def log(name: str, facts: Mapping[str, Any]) -> str:
    """Return the path of a server's log below the person's home, given the `facts` of the worker."""
    return f"{directory_of(name, facts['hostname'])}/log"


def watch(name: str, user: str) -> list[str]:
    """Return a command for the worker that exits with 0 once the server has ended, unless the worker shuts down."""
    return ["bash", "-c", _WATCH, "bash", unit_of(name, user)]


async def facts(workers: Workers, host: str, venv: str) -> Mapping[str, Any]:
    """Return the launcher's description of a worker; ``venv`` is the environment that the user named, or empty.

    Raises:
        OpsError: The launcher does not answer, or the worker has no environment.
    """
    reply = (await workers.call({host: {"venv": venv}}, "probe", limit=LIMIT))[host]
    found: Mapping[str, Any] = _value(reply)["probe"]
    if not found["venv"]["exists"]:
        path = found["venv"]["path"]
        what = f"no environment at {path}" if path else "the worker has no environment"
        raise HostError(what, where=host, fix="name one with --venv, or `tpu_ops configure` makes the fleet's")
    return found


async def is_running(workers: Workers, host: str, user: str, name: str) -> bool:
    """Return whether a person's server is running on a worker; False as well if the worker does not answer."""
    argv = ["systemctl", "--quiet", "is-active", unit_of(name, user)]
    return (await workers.run([host], argv, limit=LIMIT))[host].ok


async def start(workers: Workers, host: str, user: str, server: Server, facts: Mapping[str, Any]) -> Started:
    """Start a server on a worker and return once it listens; a server with the same options may be running already.

    Args:
        workers: Reaches the worker.
        host: The worker.
        user: The person's account on the worker.
        server: The server.
        facts: The `facts` of the worker.

    Raises:
        UsageError: The server is running with other options.
        OpsError: The server could not be started.
    """
    unit, directory = unit_of(server.name, user), directory_of(server.name, facts["hostname"])
    argv = ["bash", "-c", _PREPARE, "bash", unit, directory, facts["venv"]["path"], *server.packages]
    prepared = (await workers.run([host], argv, limit=_INSTALL_LIMIT, stdin=server.script.encode()))[host]
    if prepared.code == _DIFFERS:
        raise UsageError(
            f"{server.name} runs there already, with other options",
            where=host,
            fix=f"end it with `tpu_ops {server.name} {host} --stop`",
        )
    if not prepared.ok:
        fix = "uv, which `tpu_ops configure` brings, installs it from the package index (base_pip_index_url)"
        raise _failed(prepared, f"{server.name} could not be installed", fix)
    reply = (await workers.call({host: {"server": server.name}}, "server_start", limit=LIMIT))[host]
    anew = bool(_value(reply)["started"])
    try:
        await _listens(workers, host, server.name, user, facts)
    except BaseException:  # also after Ctrl-C
        if anew:
            await stop(workers, host, server.name)
        raise
    return Started(prepared.stdout.decode().strip(), anew)


async def _listens(workers: Workers, host: str, name: str, user: str, facts: Mapping[str, Any]) -> None:
    """Return once a server listens."""
    unit, socket, directory = unit_of(name, user), socket_of(name, user), directory_of(name, facts["hostname"])
    argv = ["bash", "-c", _AWAIT, "bash", unit, directory, socket, f"{_START_LIMIT:.0f}"]
    found = (await workers.run([host], argv, limit=_START_LIMIT + LIMIT))[host]
    if not found.ok:
        raise _failed(found, f"{name} did not start", f"~/{log(name, facts)} there has its messages")


async def stop(workers: Workers, host: str, name: str) -> bool:
    """End a server on a worker; return whether it was running.

    Raises:
        OpsError: The launcher does not answer or refuses.
    """
    reply = (await workers.call({host: {"server": name}}, "server_stop", limit=LIMIT))[host]
    return bool(_value(reply)["stopped"])


def _failed(result: Result, what: str, fix: str) -> OpsError:
    """Return the error for a command that failed on a worker."""
    if not result.reached:
        return UnreachableError(result.problem, where=result.host)
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    said = result.problem or "; ".join(lines[-3:]) or f"exit code {result.code}"
    return HostError(f"{what}: {said}", where=result.host, fix=fix)


def _value(reply: Reply) -> Mapping[str, Any]:
    """Return the answer in a launcher's reply; raise an error if there is none."""
    if reply.ok:
        return reply.value
    if not reply.reached:
        raise UnreachableError(reply.problem, where=reply.host, fix=reply.fix)
    raise HostError(reply.problem, where=reply.host, fix=reply.fix)
