"""OpenSSH's command lines, the syntax of its options, and the meaning of its error messages."""

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

#: Characters with a special meaning in an Include line. Which escapes it accepts depends on OpenSSH's version (percent
#: signs and variables are expanded since 9.9), but `?` matches any character in all versions.
_SPECIAL = re.compile(r'[*?\[\]\\"%$\x00-\x1f\x7f]')

#: Last lines of ssh after any failure of its proxy.
_OF_A_PROXY = (
    "Connection closed by UNKNOWN port",
    "Connection to UNKNOWN port",
    "kex_exchange_identification:",
    "stdio forwarding failed",
)

#: Message of ssh if it was connected, perhaps only to a proxy, and the worker sent no banner in time.
_UNANSWERED = "Connection timed out during banner exchange"

#: Messages of ssh, or of Ansible, if nothing answers at an address or the connection was lost.
_SILENT = (
    r"connect to host |Could not resolve hostname|Connection (?:closed|reset|timed out|to )|stdio forwarding failed"
    r"|not responding|Broken pipe|Data could not be sent to remote host"
)

#: Message of ssh that names the host, or the HostKeyAlias, with an unknown or changed key. This pattern and the next
#: are compiled on use: most commands never search for them.
_HOST_KEY = r"[Hh]ost key (?:is known )?for (\S+) (has changed|and you have requested)"

#: Messages of ssh if an agent refused to sign or could not be asked (ssherr.c of OpenSSH).
_UNSIGNED = r"signing failed.*: (agent refused operation|communication with agent failed)"


#: Added to ssh's message if the jump, and not the worker, refused the user.
_BY_A_PROXY = "said by the jump, not by the worker"

#: Message of sshd after the last key that it accepts for trial: the sixth, by default.
_TOO_MANY = "Too many authentication failures"


class Jump(NamedTuple):
    """How ssh reaches a jump: its configuration, the options before its name, and its name."""

    ssh_config: Path
    options: tuple[str, ...]
    name: str


def home() -> Path:
    """Return the home directory that OpenSSH uses: the one in the password file, not $HOME.

    Raises:
        OpsError: This user has no entry in the password file; OpenSSH itself refuses to run then.
    """
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as exc:
        raise OpsError(
            "this user has no entry in the password file, and so no home directory for ssh",
            where=f"user id {os.getuid()}",
            fix="run this as a user with an entry",
        ) from exc


def absent(exc: OSError) -> OpsError:
    """Return the error for an ssh that could not be started."""
    return OpsError(f"cannot start ssh: {exc.strerror}", where="this machine", fix="install an OpenSSH client")


def quoted(path: Path | str) -> str:
    """Return a path in the syntax of ssh options that expand percent signs, quoted if necessary."""
    text = str(path).replace("%", "%%")
    if not re.search(r"""[\s#'"\\]""", text):
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def guard(mux: Path, hosts: Iterable[str] = ()) -> list[str]:
    """Return lines of an ssh config that turn off shared connections if their directory does not exist.

    The user's last logout or a reboot may delete the directory, and OpenSSH fails if it cannot create a socket.

    Args:
        mux: The directory of the control sockets, without quotes and percent signs. ssh creates it if it is missing,
            and uses it only if it belongs to the user.
        hosts: The hosts that the lines apply to; all if empty.
    """
    path = shlex.quote(str(mux))
    command = f'"test -O {path} || mkdir -p -m 700 {path} && test -O {path}"'
    names = ",".join(hosts)
    return [f"Match {f'originalhost {names} ' if names else ''}!exec {command}", "    ControlPath none"]


def environment() -> dict[str, str]:
    """Return the environment for ssh without a terminal: a plain shell runs its one-line commands."""
    return {**os.environ, "SHELL": "/bin/sh"}


def include(file: Path) -> str:
    """Return the line of an ssh config that includes a file."""
    return f'Include "{_SPECIAL.sub("?", str(file))}"'


def base(ssh_config: Path | str) -> list[str]:
    """Return the first words of every ssh command."""
    return ["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"]


def open_master(ssh_config: Path, host: str) -> list[str]:
    """Return the command that opens a master connection in the background.

    `auto` instead of `yes`: with `yes`, OpenSSH opens none if a killed master has left its socket.
    """
    return [*base(ssh_config), "-o", "ControlMaster=auto", "-f", "-N", "-T", host]


def control(ssh_config: Path, host: str, word: str) -> list[str]:
    """Return the command that sends a master a control command: ``check``, ``exit`` or ``stop``."""
    return [*base(ssh_config), "-O", word, host]


def control_left(control_path: str, user: str, address: str, word: str) -> list[str]:
    """Return the command that sends a control command to the master of an address outside the configuration.

    Args:
        control_path: Path of its socket, in the syntax of ssh options.
        user: Login name with which it was opened.
        address: Address to which it was opened.
        word: See `control`.
    """
    return [*base("none"), "-o", f"ControlPath={control_path}", "-l", user, "-O", word, address]


def control_socket(control_path: str, user: str, address: str) -> Path:
    """Return the path of a control socket, given a ControlPath with no token except %C.

    Args:
        control_path: See `control_left`.
        user: Login name of the connection.
        address: Address of the connection, at port 22.
    """
    digest = hashlib.sha1(f"{socket.gethostname()}{address}22{user}".encode(), usedforsecurity=False)
    return Path(control_path.strip('"').replace("%C", digest.hexdigest()))


def session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over the open master; it never becomes a master itself."""
    return [*base(ssh_config), "-o", "ControlMaster=no", "-T", host, command]


def shared_session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over an open master, and fails at once without one.

    ProxyCommand=false makes it fail, since OpenSSH without a master would open a new connection.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-T", host, command]


def through_jump(jump: Jump) -> list[str]:
    """Return the command that runs `true` on a jump over its open master, and fails at once without one."""
    *words, name, _ = shared_session(jump.ssh_config, jump.name, "true")
    return [*words, *jump.options, name, "true"]


def leave_jump(jump: Jump) -> list[str]:
    """Return the command that closes the master of a jump for new sessions, so that the next one opens another."""
    *words, name = control(jump.ssh_config, jump.name, "stop")
    return [*words, *jump.options, name]


def attempt(ssh_config: Path, host: str) -> list[str]:
    """Return the command that connects without a master, so that ssh shows the proxy's error messages.

    With ControlPersist, OpenSSH discards the output of the ProxyCommand.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ControlPath=none", "-T", host, "exit"]


def effective(ssh_config: Path, host: str) -> list[str]:
    """Return the command that prints ssh's effective configuration for a host, without connecting."""
    return [*base(ssh_config), "-G", host]


def contact(options: Iterable[tuple[str, str]], known_hosts: Path, user: str, address: str) -> list[str]:
    """Return the command that records the host key of a machine without logging in.

    Args:
        options: The machine's way, as (keyword, value).
        known_hosts: File for the key.
        user: Login name; no authentication takes place.
        address: The address to connect to.
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
    """Return the remote shell for rsync, which uses the same masters."""
    return shlex.join([*base(ssh_config), "-o", "ControlMaster=no", "-T"])


def reason(stderr: str, code: int | None) -> str:
    """Return one line that says why ssh failed, given its error output; for a host key it includes the fix."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("Host key verification failed" in line or "IDENTIFICATION HAS CHANGED" in line for line in lines):
        found = re.search(_HOST_KEY, stderr)
        return _host_key_reason(*found.groups()) if found else "host key verification failed"
    telling = [line for line in lines if not line.startswith(_OF_A_PROXY)] or lines
    gcloud = [line for line in telling if line.startswith("ERROR: ")]
    told = (gcloud or telling[-1:] or [f"ssh ended with {code}"])[0]
    if too_many(stderr):
        # sshd's line contains the address: without it, workers with the same fault are reported together.
        return f"{_TOO_MANY}: more keys were offered than its sshd accepts"
    if agent := re.search(_UNSIGNED, stderr):
        return f"the agent that holds the key would not sign ({agent[1]}): unlock it; `ssh-add -l` lists its keys"
    # ssh also printed the failure of its proxy: the connection ended before the worker was asked.
    return f"{told} ({_BY_A_PROXY})" if refused(told) and len(telling) < len(lines) else told


def unexplained(stderr: str) -> bool:
    """Return whether ssh's error output says only that its proxy failed."""
    return all(line.startswith(_OF_A_PROXY) for line in stderr.splitlines() if line.strip())


def unanswered(stderr: str) -> bool:
    """Return whether ssh was connected, perhaps only to a proxy, and the worker sent nothing."""
    return _UNANSWERED in stderr


def without_room(stderr: str) -> bool:
    """Return whether a `shared_session` failed because there is no master, or because the master has no free session.

    Any other error output means that the master is stale.
    """
    return unexplained(stderr) or "Session open refused by peer" in stderr


def _host_key_reason(name: str, what: str) -> str:
    """Return why a host key was not accepted: a worker's, whose name is an alias of this fleet, or a jump's."""
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
    """Return whether a result of `reason` says that nothing answered, which is no fault of this machine or worker."""
    return bool(re.search(_SILENT, reason))


def of_options(reason: str) -> bool:
    """Return whether a result of `reason` says that ssh rejected an option of its command line."""
    return reason.startswith("command-line")


def of_host_key(reason: str) -> bool:
    """Return whether a result of `reason` says that ssh did not accept a host key."""
    return "host key" in reason


def refused_by_proxy(reason: str) -> bool:
    """Return whether a result of `reason` says that the jump, not the worker, refused the user."""
    return _BY_A_PROXY in reason


def unsigned(stderr: str) -> bool:
    """Return whether ssh's error output says that the agent that holds a key refused to sign."""
    return bool(re.search(_UNSIGNED, stderr))


def refused(stderr: str) -> bool:
    """Return whether the worker answered with its own host key and refused the user."""
    return "Permission denied (" in stderr or too_many(stderr)


def too_many(stderr: str) -> bool:
    """Return whether the worker refused further keys before the user's own key was offered."""
    return _TOO_MANY in stderr
