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

#: Characters with a special meaning in an Include line. They are replaced by `?`, which matches any character in all
#: versions of OpenSSH. Which escapes are accepted depends on the version (percent signs and variables are expanded
#: since 9.9).
_SPECIAL = re.compile(r'[*?\[\]\\"%$\x00-\x1f\x7f]')

#: Beginnings of the last lines that ssh prints after any failure of its proxy.
_OF_A_PROXY = (
    "Connection closed by UNKNOWN port",
    "Connection to UNKNOWN port",
    "kex_exchange_identification:",
    "stdio forwarding failed",
)

#: Message of ssh if a connection, perhaps only to a proxy, was open and the worker sent no banner in time.
_UNANSWERED = "Connection timed out during banner exchange"

#: Messages of ssh, or of Ansible, if nothing answers at an address or the connection was lost.
_SILENT = (
    r"connect to host |Could not resolve hostname|Connection (?:closed|reset|timed out|to )|stdio forwarding failed"
    r"|not responding|Broken pipe|Data could not be sent to remote host"
)

#: Message of ssh that names the host, or the HostKeyAlias, with an unknown or changed key. This pattern and the next
#: one are compiled when they are used, which most commands never do.
_HOST_KEY = r"[Hh]ost key (?:is known )?for (\S+) (has changed|and you have requested)"

#: Messages of ssh if an agent refused to sign or could not be asked (ssherr.c of OpenSSH).
_UNSIGNED = r"signing failed.*: (agent refused operation|communication with agent failed)"


#: Text that is added to ssh's message if the jump host, not the worker, refused the user.
_BY_A_PROXY = "said by the jump, not by the worker"

#: Message of sshd after the client has offered the maximum number of wrong keys, six by default.
_TOO_MANY = "Too many authentication failures"


class Jump(NamedTuple):
    """How ssh reaches a jump host: the ssh configuration, the options before the host's name, and the name."""

    ssh_config: Path
    options: tuple[str, ...]
    name: str


def home() -> Path:
    """Return the home directory that OpenSSH uses: that of the password file, not $HOME.

    Raises:
        OpsError: This user has no entry in the password file: OpenSSH would not run either.
    """
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as exc:
        raise OpsError(
            "this user has no entry in the password file, and so no home directory for ssh",
            where=f"user id {os.getuid()}",
            fix="run this command as a user with an entry",
        ) from exc


def absent(exc: OSError) -> OpsError:
    """Return the error to raise if ssh could not be started."""
    return OpsError(f"cannot start ssh: {exc.strerror}", where="this machine", fix="install an OpenSSH client")


def quoted(path: Path | str) -> str:
    """Return a path in the syntax of ssh options that expand percent signs, quoted if necessary."""
    text = str(path).replace("%", "%%")
    if not re.search(r"""[\s#'"\\]""", text):
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def guard(mux: Path, hosts: Iterable[str] = ()) -> list[str]:
    """Return lines of an ssh config that turn off shared connections if their directory cannot be used.

    The user's last logout or a reboot can delete the directory, and OpenSSH would fail if it cannot create a socket.

    Args:
        mux: The directory of the control sockets, without quotes and percent signs. The lines create a missing
            directory, and use it only if it belongs to the user.
        hosts: The hosts that the lines apply to; empty means all hosts.
    """
    path = shlex.quote(str(mux))
    command = f'"test -O {path} || mkdir -p -m 700 {path} && test -O {path}"'
    names = ",".join(hosts)
    return [f"Match {f'originalhost {names} ' if names else ''}!exec {command}", "    ControlPath none"]


def environment() -> dict[str, str]:
    """Return the environment for ssh without a terminal: /bin/sh runs the one-line commands in its configuration."""
    return {**os.environ, "SHELL": "/bin/sh"}


def include(file: Path) -> str:
    """Return the line of an ssh config that includes a file."""
    return f'Include "{_SPECIAL.sub("?", str(file))}"'


def base(ssh_config: Path | str) -> list[str]:
    """Return the first words of every ssh command."""
    return ["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"]


def open_master(ssh_config: Path, host: str) -> list[str]:
    """Return the command that opens a master connection in the background.

    The option is `auto`, not `yes`: with `yes`, OpenSSH opens no master if a killed master has left its socket.
    """
    return [*base(ssh_config), "-o", "ControlMaster=auto", "-f", "-N", "-T", host]


def control(ssh_config: Path, host: str, word: str) -> list[str]:
    """Return the command that sends a master a control command: ``check``, ``exit`` or ``stop``."""
    return [*base(ssh_config), "-O", word, host]


def control_left(control_path: str, user: str, address: str, word: str) -> list[str]:
    """Return the command that sends a control command to the master of an address that is in no ssh config.

    Args:
        control_path: Path of the master's control socket, in the syntax of ssh options.
        user: Login name of the master connection.
        address: Address of the master connection.
        word: The control command: ``check``, ``exit`` or ``stop``.
    """
    return [*base("none"), "-o", f"ControlPath={control_path}", "-l", user, "-O", word, address]


def control_socket(control_path: str, user: str, address: str) -> Path:
    """Return the path of a control socket, given a ControlPath with no token except %C.

    Args:
        control_path: The ControlPath, in the syntax of ssh options.
        user: Login name of the connection.
        address: Address of the connection, at port 22.
    """
    digest = hashlib.sha1(f"{socket.gethostname()}{address}22{user}".encode(), usedforsecurity=False)
    return Path(control_path.strip('"').replace("%C", digest.hexdigest()))


def session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over an open master; the command never becomes a master."""
    return [*base(ssh_config), "-o", "ControlMaster=no", "-T", host, command]


def shared_session(ssh_config: Path, host: str, command: str) -> list[str]:
    """Return the command that runs a remote command line over an open master, and fails at once without one.

    ProxyCommand=false makes the command fail without a master: OpenSSH would otherwise open a new connection.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-T", host, command]


def through_jump(jump: Jump) -> list[str]:
    """Return the command that runs `true` on a jump host over an open master, and fails at once without a master."""
    *words, name, _ = shared_session(jump.ssh_config, jump.name, "true")
    return [*words, *jump.options, name, "true"]


def leave_jump(jump: Jump) -> list[str]:
    """Return the command that closes a jump host's master for new sessions: the next session opens another master."""
    *words, name = control(jump.ssh_config, jump.name, "stop")
    return [*words, *jump.options, name]


def attempt(ssh_config: Path, host: str) -> list[str]:
    """Return the command that connects to a worker without a master, so that ssh shows the proxy's error messages.

    With a master (ControlPersist), OpenSSH discards the output of the ProxyCommand.
    """
    return [*base(ssh_config), "-o", "ControlMaster=no", "-o", "ControlPath=none", "-T", host, "exit"]


def effective(ssh_config: Path, host: str) -> list[str]:
    """Return the command that prints ssh's effective configuration for a host, without connecting."""
    return [*base(ssh_config), "-G", host]


def contact(options: Iterable[tuple[str, str]], known_hosts: Path, user: str, address: str) -> list[str]:
    """Return the command that records the host key of a machine without logging in.

    Args:
        options: ssh options for the machine, as (keyword, value).
        known_hosts: File into which ssh writes the host key.
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
    """Return the remote shell for rsync: an ssh command that uses the open masters."""
    return shlex.join([*base(ssh_config), "-o", "ControlMaster=no", "-T"])


def reason(stderr: str, code: int | None) -> str:
    """Return one line that says why ssh failed, given its error output. For a host key, the line includes the fix."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("Host key verification failed" in line or "IDENTIFICATION HAS CHANGED" in line for line in lines):
        found = re.search(_HOST_KEY, stderr)
        return _host_key_reason(*found.groups()) if found else "host key verification failed"
    telling = [line for line in lines if not line.startswith(_OF_A_PROXY)] or lines
    gcloud = [line for line in telling if line.startswith("ERROR: ")]
    told = (gcloud or telling[-1:] or [f"ssh ended with {code}"])[0]
    if too_many(stderr):
        # Leave out sshd's line, which contains the address: workers with the same problem are reported together.
        return f"{_TOO_MANY}: more keys were offered than the worker's sshd accepts"
    if agent := re.search(_UNSIGNED, stderr):
        return f"the agent that holds the key did not sign ({agent[1]}): unlock the agent; `ssh-add -l` lists its keys"
    # If ssh also printed the failure of its proxy, the connection ended before it reached the worker.
    return f"{told} ({_BY_A_PROXY})" if refused(told) and len(telling) < len(lines) else told


def unexplained(stderr: str) -> bool:
    """Return whether ssh's error output says only that its proxy failed."""
    return all(line.startswith(_OF_A_PROXY) for line in stderr.splitlines() if line.strip())


def unanswered(stderr: str) -> bool:
    """Return whether ssh's error output says that the worker sent nothing over an open connection."""
    return _UNANSWERED in stderr


def without_room(stderr: str) -> bool:
    """Return whether a `shared_session` failed because there is no master, or the master has no free session.

    Any other error output means that the master is stale.
    """
    return unexplained(stderr) or "Session open refused by peer" in stderr


def _host_key_reason(name: str, what: str) -> str:
    """Return why ssh did not accept the host key of a worker (``name`` is its alias) or of a jump host."""
    changed = "changed" in what
    if aliases.node_id(name) is None:
        how = "is not the key that you know" if changed else "is not known to you"
        return (
            f"the host key of {name}, through which the worker is reached, {how}; "
            f"log in there once yourself: ssh {name}"
        )
    if changed:
        return (
            "host key verification failed: the worker answers with a key other than the known one; "
            "`tpu_ops refresh --verify-keys` compares this key with the published key and says what the difference "
            "means"
        )
    return "host key verification failed: no host key is known (`tpu_ops refresh` learns a published key)"


def silent(reason: str) -> bool:
    """Return whether a result of `reason` says that nothing answered, or the connection was lost."""
    return bool(re.search(_SILENT, reason))


def of_options(reason: str) -> bool:
    """Return whether a result of `reason` says that ssh rejected an option of its command line."""
    return reason.startswith("command-line")


def of_host_key(reason: str) -> bool:
    """Return whether a result of `reason` says that ssh did not accept a host key."""
    return "host key" in reason


def refused_by_proxy(reason: str) -> bool:
    """Return whether a result of `reason` says that the jump host, not the worker, refused the user."""
    return _BY_A_PROXY in reason


def unsigned(stderr: str) -> bool:
    """Return whether ssh's error output says that the ssh agent that holds the key did not sign."""
    return bool(re.search(_UNSIGNED, stderr))


def refused(stderr: str) -> bool:
    """Return whether ssh's error output says that the worker, after its host key was accepted, refused the user."""
    return "Permission denied (" in stderr or too_many(stderr)


def too_many(stderr: str) -> bool:
    """Return whether ssh's error output says that the worker refused to try more keys of the user."""
    return _TOO_MANY in stderr
