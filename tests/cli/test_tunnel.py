"""What `tpu_ops tunnel`, `jupyter` and `tensorboard` refuse before they open a connection."""

from __future__ import annotations

import socket

from tests.support.commands import failed


def test_a_port_that_is_used_here_is_refused_with_another_one(fleet, tpu_ops):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        failed(tpu_ops("tunnel", "pod", "8888", str(port)), 2, f"port {port} cannot be used here", "name another one")


def test_what_is_no_port_is_refused(fleet, tpu_ops):
    for word in ("0", "65536", "http", "-1"):
        failed(tpu_ops("tunnel", "pod", word), 2, "PORT")


def test_a_node_that_is_not_running_is_named(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.act("stop", "pod")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    failed(tpu_ops("tunnel", "pod", "8888", port), 4, "its node is STOPPED")


def test_the_commands_of_servers_refuse_what_is_wrong_before_they_connect(fleet, tpu_ops):
    failed(tpu_ops("tensorboard", "pod"), 2, "--logdir", "as in --logdir runs")
    failed(tpu_ops("jupyter", "pod", "--stop", "--detach"), 2, "not allowed with")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        failed(tpu_ops("jupyter", "pod", str(port)), 2, f"port {port} cannot be used here", "name another one")
