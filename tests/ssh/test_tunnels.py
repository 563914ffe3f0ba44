"""The port on this machine that leads to a worker: never one at which another user's program listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.ssh import tunnels

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
V4, V6 = "0100007F", "0" * 24 + "01000000"


def _table(folder: Path, address: str, port: int, uid: int, state: str = "0A") -> tuple[Path]:
    """Write a table with one socket, in the form of /proc/net/tcp."""
    line = (
        f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 1 1 x 100\n"
    )
    (folder / "tcp").write_text(HEAD + line)
    return (folder / "tcp",)


@pytest.mark.parametrize("address", [V4, V6])
def test_another_users_listener_is_not_taken_for_the_tunnel(tmp_path: Path, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert tunnels.listens(port)
        tables = _table(tmp_path, address, port, os.getuid() + 1)
        assert not tunnels.listens(port, tables)
    # The browser tries ::1 first for localhost: a port that is free at 127.0.0.1 is not enough.
    with pytest.raises(UsageError, match="another user"):
        tunnels.require_free(port, tables)


def test_own_listeners_and_others_connections_do_not_matter(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert tunnels.listens(port, _table(tmp_path, V4, port, os.getuid()))
        assert tunnels.listens(port, _table(tmp_path, V4, port, os.getuid() + 1, state="01"))
        assert tunnels.listens(port, (tmp_path / "none",))
