#!/usr/bin/python
"""Module that ends people's processes, removes or keeps their homes and removes their accounts; runs on Python 3.8."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.homes import ownerless, usual_home
from ansible.module_utils.mount_points import parse_mounts, read
from ansible.module_utils.turns import take_turn

DOCUMENTATION = r"""
module: people_leave
short_description: End the processes of people, keep, archive or remove their homes, and remove their accounts
options:
  people:
    description: >-
      The people who leave, each with C(name) and C(home) (keep, archive or remove). A name without an account can still
      have a home that was kept and closed, which is then handled. A name with neither needs no work.
    type: list
    elements: dict
    required: true
  archive_directory:
    description: Directory for archived homes; created if it is missing, and closed to all but root.
    type: path
    required: true
  patience:
    description: Seconds that processes get to end after SIGTERM before they are killed.
    type: int
    default: 5
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Remove an account and archive its home
  people_leave:
    people:
      - {name: charles, home: archive}
    archive_directory: /var/backups/homes
"""

RETURN = r"""
archives:
  description: By login name, the archive of the home that was or would be removed.
  type: dict
  returned: always
"""

#: Time limit in seconds for the end of killed processes. Only a reboot ends a process that waits for a device.
KILL_TIMEOUT = 30
#: Directories with files named after a person, by which systemd and cron start the person's programs (logind's linger
#: files, cron's spool on Debian).
STARTERS = ("/var/lib/systemd/linger", "/var/spool/cron/crontabs")
#: Directories with people's records of their runs (tpu_ops/host/store.py), in which only root can create other files.
RUN_FILES = "/var/lib/tpu_ops/runs/*/files"


class Fault(Exception):
    """An error that stops the removal of a person's account; its text is the message for the user."""


def processes_of(uid: int, proc: str = "/proc") -> list[int]:
    """Return the ids of all processes, except zombies, one of whose user IDs is this one."""
    found = []
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(os.path.join(proc, name, "status"), encoding="utf-8", errors="replace") as stream:
                fields = dict(line.split(":", 1) for line in stream if ":" in line)
        except OSError:
            continue
        if str(uid) in fields.get("Uid", "").split() and not fields.get("State", "").strip().startswith("Z"):
            found.append(int(name))
    return found


def end_processes(uid: int, patience: float) -> None:
    """End all processes of a user: SIGTERM once, then SIGKILL until none is left.

    Raises:
        Fault: Some processes have not ended within `KILL_TIMEOUT` seconds after SIGKILL.
    """

    def send(number: signal.Signals) -> None:
        for process in processes_of(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def wait(until: float) -> bool:
        while processes_of(uid):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)  # the processes are polled until the deadline
        return True

    send(signal.SIGTERM)
    if wait(time.monotonic() + patience):
        return
    until = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < until:
        # SIGSTOP is sent first, so that no process can start another one before it is killed.
        send(signal.SIGSTOP)
        send(signal.SIGKILL)
        if wait(time.monotonic() + 0.5):
            return
    raise Fault("processes %s have survived SIGKILL; reboot the worker and run again" % processes_of(uid))


def mounts_below(path: str, mountinfo: str) -> list[str]:
    """Given the text of /proc/self/mountinfo, return the mounts on a directory or below it."""
    targets = [mounted.target for mounted in parse_mounts(mountinfo)]
    return sorted(target for target in targets if target == path or target.startswith(path + "/"))


def home_fault(name: str, home: str, uid: int) -> str:
    """Return why a home must not be removed, or the empty string."""
    try:
        entry = os.lstat(home)
    except OSError:
        return ""
    if not stat.S_ISDIR(entry.st_mode):
        return "%s is not a directory; set home: keep" % home
    # A directory of another owner may be shared, or not be a home at all.
    if entry.st_uid != uid and not ownerless(name, home):
        return "%s does not belong to %s; set home: keep, or chown it" % (home, name)
    mountinfo = read("/proc/self/mountinfo")
    if not mountinfo:
        return "the mounts below the home cannot be read (/proc/self/mountinfo); set home: keep"
    mounted = mounts_below(home, mountinfo)
    return "%s is mounted there; unmount it first" % ", ".join(mounted) if mounted else ""


def tar(*arguments: str) -> None:
    """Run tar without a time limit, since homes can be large.

    Raises:
        Fault: tar failed; the text is its output.
    """
    options = ["--gzip", "--acls", "--xattrs", "--numeric-owner", "--warning=no-timestamp"]
    done = subprocess.run(
        ["tar"] + options + list(arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = done.stdout.strip()[-500:] or "exit code %d" % done.returncode
        raise Fault("tar says: %s; the home is untouched: fix this error and run again" % said)


def archive(name: str, home: str, directory: str) -> str:
    """Archive a home, compare the archive with the home byte by byte, and return the path of the archive.

    Raises:
        Fault: The archive is incomplete. It is deleted, and the home is untouched.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    os.chown(directory, 0, 0)
    os.chmod(directory, 0o700)
    base = os.path.join(directory, "%s-%s" % (name, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())))
    path, number = base + ".tar.gz", 1
    while os.path.lexists(path):
        path, number = "%s-%d.tar.gz" % (base, number), number + 1
    partial = os.path.join(directory, ".%s.partial" % name)
    place = ["--file", partial, "--directory", os.path.dirname(home)]
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        tar("--create", *place, "./" + os.path.basename(home))
        tar("--compare", *place)
        with open(partial, "rb") as stream:
            os.fsync(stream.fileno())
        os.rename(partial, path)
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return path


def command(*arguments: str, fails: bool = True) -> None:
    """Run a program of the system.

    Raises:
        Fault: The program failed, and `fails` is true.
    """
    done = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False
    )
    if done.returncode and fails:
        said = done.stdout.decode(errors="replace").strip()
        raise Fault("%s says: %s; fix this error and run again" % (arguments[0], said))


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Put the person's name before the message of a fault."""
    try:
        yield
    except (Fault, OSError, subprocess.TimeoutExpired) as exc:
        raise Fault("%s: %s" % (name, exc)) from exc


def close(path: str, uid: int) -> None:
    """Give a user's directory to root with mode 0700; do nothing if it is missing or has another owner."""
    if not os.path.isdir(path) or os.stat(path).st_uid != uid:
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    os.fchown(handle, 0, 0)
    os.fchmod(handle, 0o700)
    os.close(handle)


def leave(name: str, home_wish: str, directory: str, patience: int) -> str:
    """Remove a person's processes, home and account; return the path of the archive of the home, or the empty string.

    Every step can be repeated, so the next run completes an interrupted removal. The account is removed last, so that
    the next run still finds it. The first step prevents further logins.

    Raises:
        Fault: A step failed; the later steps were not started.
    """
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        account = None
    home = account.pw_dir if account else usual_home(name)
    if account:
        command("usermod", "--expiredate", "1", name)
        for folder in STARTERS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        command("loginctl", "terminate-user", name, fails=False)
        end_processes(account.pw_uid, patience)
    archived = ""
    if home_wish != "keep" and os.path.isdir(home):
        archived = archive(name, home, directory) if home_wish == "archive" else ""
        shutil.rmtree(home)
    if account:
        # root gets these directories, since the next new account may get the same user ID and would own them.
        for path in [home, *glob.glob(RUN_FILES)]:
            close(path, account.pw_uid)
        command("userdel", name)
    return archived


def sharing_fault(account: pwd.struct_passwd, accounts: list[pwd.struct_passwd]) -> str:
    """Return why the removal of an account would affect another person's processes or home, or the empty string."""
    home = os.path.realpath(account.pw_dir)
    for other in accounts:
        if other.pw_name == account.pw_name:
            continue
        if other.pw_uid == account.pw_uid:
            return "uid %d is also the uid of %s; give one of the two accounts another: usermod --uid" % (
                other.pw_uid,
                other.pw_name,
            )
        place = os.path.realpath(other.pw_dir)
        if os.path.isdir(home) and (place + "/").startswith(home.rstrip("/") + "/"):
            return "%s, the home of %s, would be removed as well; give one of them another: usermod --home" % (
                other.pw_dir,
                other.pw_name,
            )
    return ""


def has_left(name: str, home_wish: str) -> bool:
    """Return whether a person has neither an account nor a home that should be removed."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return home_wish == "keep" or not ownerless(name, usual_home(name))
    return False


def faults_of(people: list[dict[str, str]]) -> list[str]:
    """Return the reasons not to remove these people or their homes."""
    faults = []
    for person in people:
        name = person["name"]
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            home, uid = usual_home(name), -1
        else:
            home, uid = entry.pw_dir, entry.pw_uid
            fault = sharing_fault(entry, pwd.getpwall())
            if fault:
                faults.append("%s: state: absent is refused: %s" % (name, fault))
                continue
        fault = "" if person["home"] == "keep" else home_fault(name, home, uid)
        if fault:
            faults.append("%s: home: %s is refused: %s" % (name, person["home"], fault))
    return faults


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "people": {"type": "list", "elements": "dict", "required": True},
            "archive_directory": {"type": "path", "required": True},
            "patience": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    take_turn(module, "people who leave")
    people = [person for person in module.params["people"] if not has_left(person["name"], person["home"])]
    directory = module.params["archive_directory"]
    faults = faults_of(people)
    if faults:
        module.fail_json(msg="users_people: %s" % "; ".join(faults))
    archives: dict[str, str] = {}
    for person in people:
        if module.check_mode:
            continue
        try:
            with named(person["name"]):
                path = leave(person["name"], person["home"], directory, module.params["patience"])
        except Fault as exc:
            module.fail_json(msg="users_people: %s" % exc, archives=archives)
        if path:
            archives[person["name"]] = path
    module.exit_json(changed=bool(people), archives=archives)


if __name__ == "__main__":
    main()
