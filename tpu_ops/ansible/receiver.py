"""Program for a worker's own Python: receives Ansible and the playbooks, and starts the play of this worker.

The controller (`on_workers`) passes the source of this file on python3's command line, so it is never installed. It
supports Python 3.8 and uses only the standard library. Its arguments are the directory of the archives, the oldest
suitable version of Python, such as 3.11, and the digests of the archives. It writes one line of JSON:

    {"tpu_ops": "receiver", "python": "/usr/bin/python3.12", "found": "3.12", "missing": ["1f0c..."]}

Then it reads one line with the sizes of the missing archives in bytes, and these archives, and becomes `worker_play`.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile

#: Where a Python may be: the system's own, deadsnakes' beside it, one that somebody has compiled, and uv's.
PLACES = ("/usr/bin/python3", "/usr/bin/python3.*", "/usr/local/bin/python3.*", "/opt/python/*/bin/python3.*")
#: Prints the version of a Python if it has what Ansible needs of the standard library.
PROBE = "import ctypes, ssl, sys; print('{}.{}'.format(*sys.version_info))"
#: File in an unpacked archive: a line for each of its files, with size and path.
CONTENTS = ".contents"
#: Program that ansible-runner starts.
PLAYBOOK = """#!{}
import sys
from ansible.cli.playbook import main
sys.exit(main())
"""


def main() -> None:
    """Receive what is missing; then become the program that runs the play."""
    kept, oldest, wanted = sys.argv[1], numbers(sys.argv[2]), sys.argv[3:]
    python, found = suitable(oldest)
    paths = [os.path.join(kept, digest) for digest in wanted]
    missing = [path for path in paths if not whole(path)]
    answer = {
        "tpu_ops": "receiver",
        "python": python,
        "found": found,
        "missing": [os.path.basename(path) for path in missing],
    }
    os.write(1, json.dumps(answer).encode() + b"\n")
    # Unbuffered: what follows the archives is for the next program.
    source = io.FileIO(0, closefd=False)
    line = read_line(source)
    if not line:
        return  # the controller has gone, or some worker's Python is too old
    for path, size in zip(missing, line.split()):
        try:
            unpack(read_all(source, int(size)), path)
        except OSError as exc:
            sys.exit("cannot keep the playbooks in {}: {}".format(kept, exc.strerror))
    # The locks last until this process and its children have ended, so that no other receiver removes these archives.
    held = [lock(path, fcntl.LOCK_SH) for path in paths]
    remove_others(kept, wanted)
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    environment = {
        "ANSIBLE_NOCOLOR": "1",
        "HOME": os.path.expanduser("~"),
        "LC_ALL": "C.UTF-8",
        "PATH": os.pathsep.join(["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    program = entry(paths[0], python or "")
    os.chdir("/")
    os.execve(program, [program, "-m", "tpu_ops.ansible.worker_play", *paths], environment)


def numbers(version: str) -> tuple[int, ...]:
    """Return the version as a tuple of integers."""
    return tuple(int(part) for part in version.split("."))


def suitable(oldest: tuple[int, ...], places: tuple[str, ...] = PLACES) -> tuple[str | None, str]:
    """Return path and version of a Python that is at least as new; without one, None and the newest version."""
    newest = "{}.{}".format(*sys.version_info)
    for path in (path for pattern in places for path in sorted(glob.glob(pattern))):
        if not path[-1].isdigit():
            continue  # a program such as python3.12-config
        done = subprocess.run([path, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            version = done.stdout.decode().strip()
            if numbers(version) >= oldest:
                return path, version
            newest = max(newest, version, key=numbers)
    return None, newest


def read_line(source: io.FileIO) -> bytes:
    """Return one line, without reading further."""
    line = b""
    while not line.endswith(b"\n"):
        byte = source.read(1)
        if not byte:
            return b""
        line += byte
    return line


def read_all(source: io.FileIO, size: int) -> bytes:
    """Return exactly this many bytes."""
    parts = []
    while size:
        part = source.read(min(size, 2**20))
        if not part:
            sys.exit("the connection ended while the archives were sent")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def whole(place: str) -> bool:
    """Return whether an archive is unpacked here, and none of its files is missing or has another size."""
    try:
        with open(os.path.join(place, CONTENTS)) as listed:
            files = [line.rstrip("\n").partition(" ") for line in listed]
        return all(os.stat(os.path.join(place, name)).st_size == int(size) for size, _, name in files)
    except OSError:
        return False


def unpack(archive: bytes, place: str) -> None:
    """Unpack an archive into a new directory, which gets its name only when it is complete."""
    kept, digest = os.path.split(place)
    if not hashlib.sha256(archive).hexdigest().startswith(digest):
        sys.exit("an archive arrived damaged")
    os.makedirs(kept, mode=0o755, exist_ok=True)
    fresh = tempfile.mkdtemp(prefix="new-", dir=kept)
    used = lock(fresh, fcntl.LOCK_SH)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(fresh, filter="data")  # newer versions of Python warn without a filter
            else:
                opened.extractall(fresh)
            with open(os.path.join(fresh, CONTENTS), "w") as listed:
                listed.writelines("{} {}\n".format(each.size, each.name) for each in opened if each.isfile())
        os.chmod(fresh, 0o755)
        os.sync()  # after a power cut, a directory with the final name is whole
        turn = lock(kept, fcntl.LOCK_EX)
        if not whole(place):  # else another controller was faster
            if os.path.isdir(place):
                # Damaged. A process may still use it, so it is only renamed here; `remove_others` removes it.
                os.rename(place, tempfile.mkdtemp(prefix="old-", dir=kept))
            os.rename(fresh, place)
        os.close(turn)
    finally:
        if os.path.isdir(fresh):
            shutil.rmtree(fresh, ignore_errors=True)
    os.close(used)


def lock(path: str, how: int) -> int:
    """Lock a directory; return its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, how)
    return descriptor


def remove_others(kept: str, wanted: list[str]) -> None:
    """Remove other archives, and those that were not unpacked completely, unless a process uses them."""
    for name in set(os.listdir(kept)) - set(wanted):
        path = os.path.join(kept, name)
        try:
            descriptor = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def entry(place: str, python: str) -> str:
    """Return a link to Python that has `ansible-playbook` beside it, as in a virtual environment: make it if needed."""
    programs = os.path.join(place, "programs-" + hashlib.sha256(python.encode()).hexdigest()[:8])
    link, playbook = os.path.join(programs, "python3"), os.path.join(programs, "ansible-playbook")
    if not os.path.exists(playbook):
        fresh = tempfile.mkdtemp(dir=place)
        os.chmod(fresh, 0o755)
        os.symlink(python, os.path.join(fresh, "python3"))
        with open(os.path.join(fresh, "ansible-playbook"), "w") as file:
            file.write(PLAYBOOK.format(link))
        os.chmod(file.name, 0o755)
        try:
            os.rename(fresh, programs)
        except OSError:
            shutil.rmtree(fresh)
    return link


if __name__ == "__main__":
    main()
