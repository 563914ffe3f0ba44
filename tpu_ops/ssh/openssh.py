"""OpenSSH's command lines, how its options are written, and what it says when it fails."""

import hashlib
import os
import pwd
import re
import shlex
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tpu_ops.cloud import aliases
from tpu_ops.errors import OpsError

#: What an Include line would take for something else. Which escapes it knows depends on OpenSSH's version (percent
#: signs and variables mean something since 9.9), while `?` stands for any character in all of them.
_SPECIAL = re.compile(r'[*?\[\]\\"%$\x00-\x1f\x7f]')

#: What ssh says at the end whatever a proxy failed from.
_OF_A_PROXY = (
    "Connection closed by UNKNOWN port",
    "Connection to UNKNOWN port",
    "kex_exchange_identification:",
    "stdio forwarding failed",
)

#: What ssh says where it was connected, if only to a proxy, and the worker did not begin to talk in time.
_UNANSWERED = "Connection timed out during banner exchange"

#: What ssh, or Ansible in its place, says where nothing answers at an address, or the connection was lost.
_SILENT = (
    r"connect to host |Could not resolve hostname|Connection (?:closed|reset|timed out|to )|stdio forwarding failed"
    r"|not responding|Broken pipe|Data could not be sent to remote host"
)

#: Where ssh says of which host, or which HostKeyAlias, the key is not known or has changed. Not compiled here, nor is
#: the next: most commands never search for them.
_HOST_KEY = r"[Hh]ost key (?:is known )?for (\S+) (has changed|and you have requested)"

#: What it says of an agent that would not sign, or that it could not ask: ssherr.c of OpenSSH has these words.
_UNSIGNED = r"signing failed.*: (agent refused operation|communication with agent failed)"


#: What is added to what ssh says where not the worker refused the person, but who leads there.
_BY_A_PROXY = "said by what it is reached through"

#: How sshd ends a connection on which as many keys were offered as it takes: six, where nobody has changed that.
_TOO_MANY = "Too many authentication failures"


class Jump(NamedTuple):
    """How ssh reaches whoever others are reached through: its configuration, options before the name, the name."""

    ssh_config: Path
    options: tuple[str, ...]
    name: str


def home() -> Path:
    """Return the home directory that OpenSSH looks into: the one of the password file, whatever HOME says.

    Raises:
        OpsError: This user has no entry there; OpenSSH itself refuses to run, then.
    """
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as exc:
        raise OpsError(
            "this user has no entry in the password file, and so no home directory for ssh",
            where=f"user id {os.getuid()}",
            fix="run this as a user that has one",
        ) from exc


def absent(exc: OSError) -> OpsError:
    """Given why ssh could not be started, return the error."""
    return OpsError(f"cannot start ssh: {exc.strerror}", where="this machine", fix="install an OpenSSH client")


def quoted(path: Path | str) -> str:
    """Return a path as options of ssh take it that expand percent signs: in quotes where it must be."""
    text = str(path).replace("%", "%%")
    if not re.search(r"""[\s#'"\\]""", text):
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def guard(mux: Path, hosts: Iterable[str] = ()) -> list[str]:
    """Return the lines of an ssh config that do without shared connections where their directory cannot be had.

    It may be gone with a person's last session or a reboot, and OpenSSH ends where it cannot make a socket.

    Args:
        mux: The directory of the control sockets, without quotes and percent signs: it is made where it is missing, and
            taken only if it is the person's own.
        hosts: For which hosts; all where none is named.
    """
    path = shlex.quote(str(mux))
    command = f'"test -O {path} || mkdir -p -m 700 {path} && test -O {path}"'
    names = ",".join(hosts)
    return [f"Match {f'originalhost {names} ' if names else ''}!exec {command}", "    ControlPath none"]


def environment() -> dict[str, str]:
    """Return the environment for ssh where no person uses it: its commands of one line run in the plainest shell."""
    return {**os.environ, "SHELL": "/bin/sh"}


def include(file: Path) -> str:
    """Return the line of an ssh config that includes a file."""
    return f'Include "{_SPECIAL.sub("?", str(file))}"'


def base(ssh_config: Path | str) -> list[str]:
    """Return the words that every call of ssh starts with."""
    return ["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"]


def open_master(ssh_config: Path, host: str) -> list[str]:
    """Return the command that opens a master connection and leaves it in the background.

    `auto`, not `yes`: with that, OpenSSH opens none where a killed master has left its socket.
    """
    return [*base(ssh_config), "-o", "ControlMaster=auto", "-f", "-N", "-T", host]


def control(ssh_config: Path, host: str, word: str) -> list[str]:
    """Return the command that tells a master something: ``check``, ``exit`` or ``stop``."""
    return [*base(ssh_config), "-O", word, host]


def control_left(control_path: str, user: str, address: str, word: str) -> list[str]:
    """Return the command that tells something to the master of an address that no configuration names any more.

    Args:
        control_path: Of its socket, as ssh's options take it.
        user: Login name that it was opened with.
        address: Likewise.
        word: As for `control`.
    """
    return [*base("none"), "-o", f"ControlPath={control_path}", "-l", user, "-O", word, address]


def control_socket(control_path: str, user: str, address: str) -> Path:
    """Return the path of a control socket, given a ControlPath of which ssh expands no token but %C.

    Args:
        control_path: As for `control_left`.
        user: Likewise.
        address: Likewise; it is connected to at the usual port.
    """
    digest = hashlib.sha1(f"{socket.gethostname()}{address}22{user}".encode(), usedforsecurity=False)
    return Path(control_path.strip('"').replace("%C", digest.hexdigest()))


def session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over the master and opens none itself."""
    return [*base(ssh_config), "-o", "ControlMaster=no", "-T", host, command]


def shared_session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over an open master, and fails at once where there is none.

    OpenSSH would connect anew there, which it does through the proxy alone.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-T", host, command]


def through_jump(jump: Jump) -> list[str]:
    """Return the command that asks a jump for something over its open master, and ends at once where there is none."""
    *words, name, _ = shared_session(jump.ssh_config, jump.name, "true")
    return [*words, *jump.options, name, "true"]


def leave_jump(jump: Jump) -> list[str]:
    """Return the command that has the master of a jump take no more sessions, so that the next opens another."""
    *words, name = control(jump.ssh_config, jump.name, "stop")
    return [*words, *jump.options, name]


def attempt(ssh_config: Path, host: str) -> list[str]:
    """Return the command that connects without a master, and so lets a proxy say what its trouble is.

    Where ControlPersist is set, OpenSSH throws away what the ProxyCommand says.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ControlPath=none", "-T", host, "exit"]


def effective(ssh_config: Path, host: str) -> list[str]:
    """Return the command that prints what ssh makes of a configuration for a host, and connects nowhere."""
    return [*base(ssh_config), "-G", host]


def contact(options: Iterable[tuple[str, str]], known_hosts: Path, user: str, address: str) -> list[str]:
    """Return the command that writes down the host key with which a machine answers, and logs in on nothing.

    Args:
        options: How the machine is reached, as (keyword, value).
        known_hosts: File for the key.
        user: Login name; nobody is authenticated.
        address: What to connect to.
    """
    own = (
        ("StrictHostKeyChecking", "accept-new"),
        ("UserKnownHostsFile", quoted(known_hosts)),
        ("GlobalKnownHostsFile", "none"),
        ("PreferredAuthentications", "none"),
        ("BatchMode", "yes"),
        ("ControlMaster", "no"),
        ("ControlPath", "none"),
    )
    words = [word for key, value in (*own, *options) for word in ("-o", f"{key}={value}")]
    return ["ssh", "-F", "none", *words, "-T", "-l", user, address, "exit"]


def rsync_shell(ssh_config: Path) -> str:
    """Return what rsync takes as its remote shell, to go over the same masters."""
    return shlex.join([*base(ssh_config), "-o", "ControlMaster=no", "-T"])


def reason(stderr: str, code: int | None) -> str:
    """Given what ssh said, return the one line that tells why it failed, and what to do about a host key."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("Host key verification failed" in line or "IDENTIFICATION HAS CHANGED" in line for line in lines):
        found = re.search(_HOST_KEY, stderr)
        return _host_key_reason(*found.groups()) if found else "host key verification failed"
    telling = [line for line in lines if not line.startswith(_OF_A_PROXY)] or lines
    gcloud = [line for line in telling if line.startswith("ERROR: ")]
    told = (gcloud or telling[-1:] or [f"ssh ended with {code}"])[0]
    if too_many(stderr):
        # Whose address it is stands before these words: workers with one fault are one.
        return f"{_TOO_MANY}: more keys were offered than it takes"
    if agent := re.search(_UNSIGNED, stderr):
        return f"the agent that holds the key would not sign ({agent[1]}): unlock it; `ssh-add -l` lists its keys"
    # With a proxy's words the way ended before the worker was asked.
    return f"{told} ({_BY_A_PROXY})" if refused(told) and len(telling) < len(lines) else told


def unexplained(stderr: str) -> bool:
    """Given what ssh said, return whether it said no more than that its proxy failed."""
    return all(line.startswith(_OF_A_PROXY) for line in stderr.splitlines() if line.strip())


def unanswered(stderr: str) -> bool:
    """Given what ssh said, return whether nothing came from a worker though ssh was connected, if only to a proxy."""
    return _UNANSWERED in stderr


def without_room(stderr: str) -> bool:
    """Given what a `shared_session` said, return whether there is no master, or one with all the sessions it may have.

    What else it may say is of a master that no longer serves.
    """
    return unexplained(stderr) or "Session open refused by peer" in stderr


def _host_key_reason(name: str, what: str) -> str:
    """Say whose host key was not as expected: that of a worker, which has an alias of ours, or that of a jump."""
    changed = "changed" in what
    if aliases.node_id(name) is None:
        how = "is not the one that you know" if changed else "is not known to you"
        return f"the host key of {name}, through which it is reached, {how}; log in there once yourself: ssh {name}"
    if changed:
        return (
            "host key verification failed: the worker answers with a key other than the known one; "
            "`tpu_ops refresh --verify-keys` compares it with the published one and says what that means"
        )
    return "host key verification failed: no host key is known (`tpu_ops refresh` learns one that is published)"


def silent(reason: str) -> bool:
    """Given what `reason` returned, return whether nothing answered: no fault of this machine or of the worker."""
    return bool(re.search(_SILENT, reason))


def of_options(reason: str) -> bool:
    """Given what `reason` returned, return whether ssh refused an option of its command line."""
    return reason.startswith("command-line")


def of_host_key(reason: str) -> bool:
    """Given what `reason` returned, return whether it is a host key that ssh did not accept."""
    return "host key" in reason


def refused_by_proxy(reason: str) -> bool:
    """Given what `reason` returned, return whether it is the way to a worker on which the person was refused."""
    return _BY_A_PROXY in reason


def unsigned(stderr: str) -> bool:
    """Given what ssh said, return whether the agent that holds a key would not sign with it."""
    return bool(re.search(_UNSIGNED, stderr))


def refused(stderr: str) -> bool:
    """Given what ssh said, return whether the worker answered with its own host key and refused the person."""
    return "Permission denied (" in stderr or too_many(stderr)


def too_many(stderr: str) -> bool:
    """Given what ssh said, return whether the person's own key was not reached among those that were offered."""
    return _TOO_MANY in stderr
