"""Program that makes a project's environment on a worker: the packages that its files list, over the fleet's.

The sources of this module and of `protocol/installed_packages.py` are sent to the workers, where the system's Python
(3.8 on the oldest images) executes them as the user, in the home directory. The program reads one request as a line of
JSON, and writes its answer as a line of JSON.

An environment is a directory `~/tpu_ops/.environments/PROJECT/KEY`. The key depends on all packages in it and on the
fleet's environment below, so an environment never changes once it is complete. `RECORD` is the last file written to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpu_ops.protocol.installed_packages import BASE, digest, dist_infos, packages, pinned_packages, python_version

#: Directory of all projects' environments below the user's home.
PLACE = "tpu_ops/.environments"
#: File in a complete environment: what it was made from, as JSON.
RECORD = "tpu_ops.json"
#: Seconds for which an environment over another fleet environment is kept.
KEPT = 30 * 24 * 3600
#: Options in a list of packages that name another index or directory than the default index.
OWN_INDEX = re.compile(r"^--?(?:index-url|extra-index-url|find-links|i|f)\b", re.MULTILINE)
#: Ends of the names of files that are packages.
ARCHIVES = (".whl", ".gz", ".zip")
#: Where the role python installs uv.
UV = "/opt/uv/bin"
#: The certificates that the system trusts. uv has a list of its own, which lacks the certificates of organisations.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class Failed(Exception):
    """The environment could not be made; the text is the message for the user."""


def look(project: str, inputs: str, base: str) -> dict[str, Any]:
    """Return the project's environment that was made from these files over this fleet environment.

    Args:
        project: The name of the project's directory.
        inputs: The digest of the files that list packages.
        base: The fleet's environment.

    Returns:
        ``pins`` and the `facts` of the environment; if there is none, only ``had``: whether the project has another
        environment here.
    """
    place = os.path.abspath(os.path.join(PLACE, project))
    for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
        path = os.path.join(place, name)
        found = recorded(path)
        if found and found["inputs"] == inputs and found["base"] == base_digest(base):
            return {"had": True, "pins": found["pins"], **facts(path, base)}
    return {"had": os.path.isdir(place)}


def resolve(project: str, listing: str, base: str) -> dict[str, Any]:
    """Return the packages that a project's file asks for, with versions and hashes, as pip reads them.

    Versions of the fleet's environment are preferred where the file allows them.

    Args:
        project: The name of the project's directory.
        listing: ``uv.lock``, ``requirements.txt`` or ``pyproject.toml``.
        base: The fleet's environment.
    """
    plain = ["--no-header", "--no-annotate", "--python", base + "/bin/python"]
    if listing == "uv.lock":
        exported = ["export", "--frozen", "--no-dev", "--no-emit-project", "--format=requirements.txt"]
        return {"pins": without_copies(run_uv(project, *exported, *plain))}
    with tempfile.TemporaryDirectory() as scratch:
        pins = os.path.join(scratch, "pins.txt")
        with open(pins, "w", encoding="utf-8") as file:
            # uv prefers the versions in its output file.
            file.writelines("%s==%s\n" % item for item in packages(base).items())
        run_uv(project, "pip", "compile", listing, "--generate-hashes", "--quiet", "--output-file", pins, *plain)
        # uv does not repeat these options in its output.
        with open(os.path.join("tpu_ops", project, listing), encoding="utf-8") as file:
            indexes = "".join(line.strip() + "\n" for line in file if OWN_INDEX.match(line))
        with open(pins, encoding="utf-8") as file:
            return {"pins": indexes + without_copies(file.read())}


def without_copies(pins: str) -> str:
    """Return a list of packages unless it has a directory that would be installed as a copy.

    Later changes of the directory would not reach the environment. uv also writes some directories without ``./``, and
    would then install a package from the index that has the name of the directory.

    Raises:
        Failed: The list has such a directory.
    """
    for line in pins.splitlines():
        if line[:1] in ("", " ", "\t", "#", "-") or pinned_packages(line):
            continue
        words = line.split()
        place = words[2] if words[1:2] == ["@"] else words[0]
        remote = "://" in place and not place.startswith("file:")
        if not remote and not place.partition("#")[0].endswith(ARCHIVES):
            raise Failed(
                "the directory %s would be installed as a copy, which later changes do not reach; install it as"
                " editable: -e %s in requirements.txt, editable = true in tool.uv.sources" % (place, place)
            )
    return pins


def build(project: str, inputs: str, base: str, pins: str, index: str, editable: bool) -> dict[str, Any]:  # noqa: PLR0917 - called with the request's values by name
    """Make the environment of a project with these packages, unless it is complete; remove unused environments.

    Args:
        project: The name of the project's directory.
        inputs: The digest of the files that list packages.
        base: The fleet's environment.
        pins: The packages, from `resolve`.
        index: URL of the index that the slice's first worker serves; empty if there is none.
        editable: Whether the project itself is installed, as an editable package.
    """
    below = base_digest(base)
    key = hashlib.sha256("\0".join([base, below, pins, str(editable)]).encode()).hexdigest()[:12]
    place = os.path.abspath(os.path.join(PLACE, project))
    path = os.path.join(place, key)
    os.makedirs(place, exist_ok=True)
    missed = ""
    with locked(place):
        if not recorded(path):
            shutil.rmtree(path, ignore_errors=True)
            run_uv(project, "venv", "--quiet", "--python", base + "/bin/python", path)
            with open(os.path.join(site_packages(path), BASE), "w", encoding="utf-8") as file:
                # Python looks there for what is missing here. `installed_packages` reads the first line.
                file.write("# %s\nimport site; site.addsitedir(%r)\n" % ((site_packages(base),) * 2))
            missed = fill(project, path, lacking(pins, packages(base)), index)
            if editable:
                into = ["--python", path + "/bin/python", "--no-deps", "--quiet"]
                run_uv(project, "pip", "install", *into, "--editable", ".")
        with open(os.path.join(path, RECORD + ".new"), "w", encoding="utf-8") as file:
            json.dump({"inputs": inputs, "base": below, "pins": pins}, file)
        os.replace(file.name, os.path.join(path, RECORD))
        for other in set(os.listdir(place)) - {key, ".lock"}:
            if is_unused(os.path.join(place, other), below):
                shutil.rmtree(os.path.join(place, other), ignore_errors=True)
    return {"missed": missed, **facts(path, base)}


def is_unused(path: str, below: str) -> bool:
    """Return whether no run can use an environment any more, given the digest of this worker's fleet environment.

    Workers with another fleet environment may share the home directory, and a run may be active on them.
    """
    found = recorded(path)
    age = time.time() - os.path.getmtime(os.path.join(path, RECORD)) if found else 0
    return not found or found["base"] == below or age > KEPT


def fill(project: str, path: str, pins: str, index: str) -> str:
    """Install packages into an environment; return why the slice's index failed, or an empty text."""
    missed = ""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as listed:
        listed.write(pins)
        listed.flush()
        command = ["pip", "install", "--python", path + "/bin/python", "--no-deps", "--requirements", listed.name]
        # Another worker's files are not trusted: they need a hash, and nothing is built from them.
        if index and "--hash" in pins and not OWN_INDEX.search(pins):
            sharing = {
                "UV_DEFAULT_INDEX": index,
                "NO_PROXY": index.split("/")[2].rpartition(":")[0],
                "UV_HTTP_RETRIES": "1",
                "UV_NO_BUILD": "1",
            }
            try:
                run_uv(project, *command, "--require-hashes", **sharing)
            except Failed as exc:
                missed = str(exc)
            else:
                return ""
        run_uv(project, *command)
    return missed


def serve(address: str, readers: list[str], program: str) -> dict[str, Any]:
    """Start an index of packages for the workers of a slice. It ends by itself.

    Args:
        address: This worker's address in the slice's network.
        readers: The addresses of the workers.
        program: The source of the server (the role python's slice_index.py).

    Returns:
        ``port``: its port; 0 if it cannot serve.
    """
    upstream = default_index()
    if upstream is None:
        return {"port": 0}
    try:
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
    except OSError:
        return {"port": 0}
    with tempfile.TemporaryFile() as source:
        source.write(program.encode())
        source.seek(0)
        subprocess.Popen(
            [sys.executable, "-", address, str(port), upstream, "", *readers],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
            return {"port": port}
        time.sleep(0.05)  # polls the server until the deadline
    return {"port": 0}


def default_index() -> str | None:
    """Return the URL of uv's index, empty for the public one; None if there are several, or it has a password."""
    found = [os.environ[name] for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL") if os.environ.get(name)][:1]
    for path in ("/etc/uv/uv.toml", os.path.expanduser("~/.config/uv/uv.toml")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            found += re.findall(r'^\s*(?:url|index-url)\s*=\s*"([^"]+)"', file.read(), re.MULTILINE)
    if len(found) > 1 or "@" in "".join(found):
        return None
    return found[0] if found else ""


def run_uv(project: str, *arguments: str, **variables: str) -> str:
    """Run uv in the project's directory; return its output.

    Raises:
        Failed: uv is missing, or failed.
    """
    uv = shutil.which("uv", path=os.environ.get("PATH", "") + os.pathsep + UV)
    if not uv:
        raise Failed("uv is not installed; site.yml installs it (role python)")
    environment = dict(os.environ, UV_NO_PROGRESS="1", NO_COLOR="1", UV_PYTHON_DOWNLOADS="never", **variables)
    done = subprocess.run(
        [uv, *arguments],
        cwd=os.path.join("tpu_ops", project),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        check=False,
    )
    if done.returncode:
        # The error is at the end of the output, after warnings.
        raise Failed("uv %s: %s" % (arguments[0], " ".join(done.stderr.split())[-2000:]))
    return done.stdout


def lacking(pins: str, installed: Mapping[str, str]) -> str:
    """Return a list of packages without those that are installed in the same version."""
    kept, skip = [], False
    for line in pins.splitlines(True):
        if not line[:1].isspace():
            skip = any(installed.get(name) == version for name, version in pinned_packages(line).items())
        if not skip:
            kept.append(line)
    return "".join(kept)


def recorded(path: str) -> Any:
    """Return what an environment was made from; None if it is not complete."""
    try:
        with open(os.path.join(path, RECORD), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def facts(path: str, base: str) -> dict[str, Any]:
    """Return the paths of an environment and of the fleet's, the number of own packages, and the digest of all."""
    whole = digest(python_version(path), packages(path))
    return {"path": path, "base": base, "packages": len(dist_infos(path)), "digest": whole}


def base_digest(base: str) -> str:
    """Return the digest of the fleet's environment."""
    return digest(python_version(base), packages(base))


def site_packages(path: str) -> str:
    """Return the directory of an environment's packages."""
    (name,) = (name for name in os.listdir(path + "/lib") if name.startswith("python3"))
    return "%s/lib/%s/site-packages" % (path, name)


@contextlib.contextmanager
def locked(place: str) -> Iterator[None]:
    """Hold the lock of a project's environments: workers may share the home directory."""
    with open(os.path.join(place, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Execute the request on standard input and print the answer as a line of JSON."""
    if os.path.exists(CERTIFICATES):
        os.environ.setdefault("SSL_CERT_FILE", CERTIFICATES)
    request = json.loads(sys.stdin.readline())
    actions: dict[str, Callable[..., dict[str, Any]]]
    actions = {"look": look, "resolve": resolve, "build": build, "serve": serve}
    try:
        answer = actions[request.pop("action")](**request)
    except Failed as exc:
        answer = {"failed": str(exc)}
    except OSError as exc:
        answer = {"failed": "%s: %s" % (exc.filename or "the environment", exc.strerror)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
