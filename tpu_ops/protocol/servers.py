"""A person's servers on a worker, such as a notebook server: the names of their units, directories and sockets."""

from __future__ import annotations

#: The servers that a launcher starts.
NAMES = ("jupyter", "tensorboard")


def directory_of(name: str, hostname: str) -> str:
    """Return the path of a server's directory below the person's home. The script ``start`` in it starts the server.

    Workers may share the homes, so that each has a directory of its own.
    """
    return ".local/share/tpu_ops/{}/{}".format(name, hostname)


def unit_of(name: str, user: str) -> str:
    """Return the name of the systemd unit of a person's server."""
    return "tpu-{}-{}.service".format(name, user)


def socket_of(name: str, user: str) -> str:
    """Return the path of the socket of a person's server. Only the person can enter its directory."""
    return "/run/tpu-{}-{}/socket".format(name, user)
