"""Guest agent of a worker, in the place of Google's guest agent on a TPU VM.

Runs inside the worker with its system Python (3.8 or newer), standard library only. The lab and the agent share one
directory: the lab writes ``metadata.json``; the agent writes ``guest_attributes.json`` (the host keys) and
``status.json`` (the applied metadata, whether the worker accepts logins, errors of its data disks). The agent also
opens the port of libtpu's metrics while a process holds a chip (chip_watch.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # on a worker, Python runs isolated (-I), without this directory on the path
    sys.path.insert(0, str(Path(__file__).parent))
    from chip_watch import ChipWatch, chips  # type: ignore[import-not-found]
    from data_disks import DataDisks  # type: ignore[import-not-found]
else:
    from tpu_ops.lab.image.chip_watch import ChipWatch, chips
    from tpu_ops.lab.image.data_disks import DataDisks

STATE = Path("/var/lib/tpu-lab/worker")
STORAGE = Path("/var/lib/tpu-lab/storage")
ENVIRONMENT = Path("/etc/tpu-lab/environment")
MANAGED_USERS = Path("/var/lib/tpu-lab/users.json")
SSH = Path("/etc/ssh")
KEY_TYPES = ("ed25519", "ecdsa")
HOSTS = Path("/etc/hosts")
MARK = "# Added by Google"
GROUP = "google-sudoers"
POLL_SECONDS = 0.5
#: Names that useradd accepts on Debian and Ubuntu.
USER_NAME = re.compile(r"^[a-z_][a-z0-9_-]{0,31}$")


def parse_ssh_keys(text: str, now: float) -> dict[str, list[str]]:
    """Return each user's keys in the ``ssh-keys`` metadata value, in order, without malformed and expired ones.

    Args:
        text: Lines of the form ``USER:KEYTYPE BASE64 COMMENT``.
        now: Seconds since the epoch, for keys with a ``google-ssh {"expireOn": ...}`` comment.
    """
    users: dict[str, list[str]] = {}
    for line in text.splitlines():
        user, colon, key = line.strip().partition(":")
        words = key.split(None, 2)
        if not colon or len(words) < 2 or not USER_NAME.match(user) or user == "root":
            continue
        if len(words) == 3 and expired(words[2], now):
            continue
        keys = users.setdefault(user, [])
        if key.strip() not in keys:
            keys.append(key.strip())
    return users


def expired(comment: str, now: float) -> bool:
    """Return whether a key has one of Google's comments with an expiry time that is over."""
    if not comment.startswith("google-ssh "):
        return False
    try:
        until = json.loads(comment[len("google-ssh ") :])["expireOn"]
        moment = time.strptime(re.sub(r"(\+00:?00|Z)$", "+0000", until), "%Y-%m-%dT%H:%M:%S%z")
    except (ValueError, KeyError, TypeError):
        return True
    import calendar

    return calendar.timegm(moment) <= now


def with_own_block(text: str, keys: list[str]) -> str:
    """Return an authorized_keys text with the agent's own lines replaced and all others kept."""
    kept: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip() == MARK:
            next(lines, None)
        else:
            kept.append(line)
    for key in keys:
        kept += [MARK, key]
    return "".join(f"{line}\n" for line in kept)


def with_names(text: str, hosts: dict[str, str]) -> str:
    """Return an /etc/hosts text in which these names have exactly these addresses."""
    rows = [(line, line.split("#", 1)[0].split()) for line in text.splitlines()]
    if sorted((name, row[0]) for _, row in rows for name in row[1:] if name in hosts) == sorted(hosts.items()):
        return text
    kept = [line for line, row in rows if not set(row[1:]) & set(hosts)]
    return "".join(f"{line}\n" for line in [*kept, *(f"{address}\t{name}" for name, address in hosts.items())])


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(text)
    partial.chmod(mode)
    partial.replace(path)


@contextlib.contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[None]:
    """Access files with a user's rights, so that a link in the home directory gives no access to other files."""
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def command(*args: str) -> bool:
    """Run a command; if it fails, write this to the journal and return False."""
    done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        say(f"{' '.join(args[:1])} failed for {args[-1]}: {done.stderr.strip() or done.returncode}")
    return done.returncode == 0


def say(text: str) -> None:
    """Write a line to the journal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def apply_user(name: str, keys: list[str]) -> bool:
    """Create a user with sudo rights and these keys, or revoke the rights if there are no keys; return success."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        if not keys:
            return True
        if not command("useradd", "--create-home", "--shell", "/bin/bash", "--groups", GROUP, name):
            return False
        user = pwd.getpwnam(name)
    else:
        change = ("--add", name, GROUP) if keys else ("--delete", name, GROUP)
        done = subprocess.run(["id", "-nG", name], capture_output=True, text=True, timeout=10, check=False)
        if (GROUP in done.stdout.split()) != bool(keys) and not command("gpasswd", *change):
            return False
    try:
        with acting_as(user):
            folder = Path(user.pw_dir) / ".ssh"
            folder.mkdir(mode=0o700, exist_ok=True)
            file = folder / "authorized_keys"
            before = file.read_text() if file.exists() else ""
            after = with_own_block(before, keys)
            if after != before:
                write(file, after, 0o600)
    except (OSError, UnicodeDecodeError) as exc:
        say(f"authorized_keys of {name}: {exc}")
        return False
    return True


def apply_users(text: str) -> bool:
    """Apply the ``ssh-keys`` metadata, also to users that it no longer names. Return whether all succeeded."""
    users = parse_ssh_keys(text, time.time())
    managed: list[str] = json.loads(MANAGED_USERS.read_text()) if MANAGED_USERS.exists() else []
    worked = True
    for name in sorted({*users, *managed}):
        worked = apply_user(name, users.get(name, [])) and worked
    if sorted(users) != managed:
        write(MANAGED_USERS, json.dumps(sorted(users)))
    return worked


def bind_names(hosts: dict[str, str]) -> None:
    """Keep the workers' names in /etc/hosts, which the container engine also writes when an address changes."""
    before = HOSTS.read_text()
    after = with_names(before, hosts)
    # The engine writes the file in place as well: an empty file is being written now.
    if before and after != before:
        HOSTS.write_text(after)  # in place, because the file is a mount of the engine


def open_storage(directory: Path, opened: list[str]) -> bool:
    """Listen on 127.0.0.1:PORT for each socket ``PORT.sock`` of the lab's Cloud Storage, and forward to the socket.

    Args:
        directory: The directory of the sockets.
        opened: The ports that this process has opened before; new ones are added.

    Returns:
        Whether there was a new one.
    """
    new = sorted({path.stem for path in directory.glob("*.sock")} - set(opened))
    for port in new:
        opened.append(port)
        command("systemctl", "start", f"tpu-lab-storage@{port}.socket")
    return bool(new)


def apply(data: dict[str, Any], storage: list[str]) -> bool:
    """Apply one version of the metadata. Return whether all succeeded.

    Args:
        data: The metadata.
        storage: The ports of the lab's Cloud Storage, newest last.
    """
    emulator = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{storage[-1]}"} if storage else {}
    lines = "".join(f"{key}={value}\n" for key, value in {**data["environment"], **emulator}.items())
    if not ENVIRONMENT.exists() or ENVIRONMENT.read_text() != lines:
        write(ENVIRONMENT, lines)
    bind_names(data["hosts"])
    return apply_users(data["metadata"].get("ssh-keys", ""))


def host_keys() -> dict[str, str]:
    """Create missing host keys; return the public keys by type."""
    found = {}
    for kind in KEY_TYPES:
        path = SSH / f"ssh_host_{kind}_key"
        public = path.with_name(path.name + ".pub")
        if not (path.exists() and public.exists()):
            path.unlink() if path.exists() else None
            made = ("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path))
            subprocess.run(made, stdin=subprocess.DEVNULL, timeout=60, check=True)
        name, blob = public.read_text().split()[:2]
        found[name] = blob
    return found


def serves_logins() -> bool:
    """Return whether sshd answers and logins are allowed (systemd blocks them in the first part of the boot)."""
    if os.path.lexists("/run/nologin") or os.path.lexists("/etc/nologin"):
        return False
    try:
        with socket.create_connection(("127.0.0.1", 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def notify(text: str) -> None:
    """Send the state of this service to systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(text.encode())


def read_metadata() -> tuple[bytes, tuple[int, int]]:
    """Return the metadata file's content, and values that identify its version."""
    with (STATE / "metadata.json").open("rb") as file:
        details = os.fstat(file.fileno())
        return file.read(), (details.st_ino, details.st_mtime_ns)


def stop(_signal: int, _frame: object) -> None:
    """End the process with the usual cleanup."""
    raise SystemExit(0)


def serve(status: Path) -> None:
    """Apply the metadata whenever it changes, and report the worker's state, forever."""
    seen: tuple[int, int] | None = None
    applied, ready, retries = "", False, 0
    said: tuple[str, bool, str] | None = None
    data: dict[str, Any] = {}
    disks, disk_fault = DataDisks(), ""
    metrics = ChipWatch(chips())
    storage: list[str] = []
    while True:
        if open_storage(STORAGE, storage):
            seen = None  # runs get the new port as well
        with contextlib.suppress(OSError, ValueError, KeyError):
            details = (STATE / "metadata.json").stat()
            changed = (details.st_ino, details.st_mtime_ns) != seen
            if changed or retries:
                raw, seen = read_metadata()
                retries = 5 if changed else retries - 1
                data = json.loads(raw)
                disk_fault = disks.sync(data.get("disks", []))
                if apply(data, storage):
                    retries = 0
                if not retries:
                    if not applied:
                        notify("READY=1")
                    applied = hashlib.sha256(raw).hexdigest()
            bind_names(data["hosts"])
            disk_fault = disks.sync(data.get("disks", []))
        ready = ready or serves_logins()
        if said != (applied, ready, disk_fault):
            said = (applied, ready, disk_fault)
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            state = {"boot_id": boot_id, "applied": applied, "ready": ready, "disk_fault": disk_fault}
            write(status, json.dumps(state))
        metrics.wait(POLL_SECONDS if ready and not retries else 0.1)  # polls for new metadata


def main() -> None:
    """Serve until the worker shuts down; the status file exists only while the agent runs."""
    signal.signal(signal.SIGTERM, stop)
    status = STATE / "status.json"
    with contextlib.suppress(FileNotFoundError):
        status.unlink()
    MANAGED_USERS.parent.mkdir(parents=True, exist_ok=True)
    write(STATE / "guest_attributes.json", json.dumps({"hostkeys": host_keys()}))
    try:
        serve(status)
    finally:
        with contextlib.suppress(FileNotFoundError):
            status.unlink()


if __name__ == "__main__":
    main()
