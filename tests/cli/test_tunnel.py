"""What `tpu_ops tunnel`, `jupyter` and `tensorboard` refuse before they open a connection."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from tests.support.commands import failed
from tpu_ops.ssh import background


def test_a_port_that_is_used_here_is_refused_with_another_one(fleet, tpu_ops):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        failed(tpu_ops("tunnel", "pod", "8888", str(port)), 2, f"port {port} cannot be used here", "name another one")


def test_a_port_with_another_server_s_tunnel_is_refused_with_its_name(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    state = fleet.settings().state_dir
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with background.kept(state, port, "jupyter", "pod-w1"):
            refused = tpu_ops("tensorboard", "pod", str(port), "--logdir", "runs", "--detach")
        said = (f"port {port} leads to jupyter on pod-w1", "--detach", "`tpu_ops jupyter pod-w1 --stop`")
        failed(refused, 2, *said)
        # The process of the tunnel was killed: the port belongs to something else.
        failed(tpu_ops("jupyter", "pod-w1", str(port), "--detach"), 2, f"port {port} cannot be used here")


def test_stop_ends_the_tunnel_also_if_the_worker_does_not_run(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    fleet.act("stop", "pod")
    state = fleet.settings().state_dir
    program = "import sys; from pathlib import Path; from tpu_ops.ssh import background\n"
    program += "with background.kept(Path(sys.argv[1]), 8888, 'jupyter', 'pod-w0'): print('kept', flush=True); input()"
    command = [sys.executable, "-c", program, str(state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout
        assert keeper.stdout.readline() == "kept\n"
        result = tpu_ops("jupyter", "pod", "--stop")
        assert keeper.wait(10) == -signal.SIGTERM
    failed(result, 4, "the tunnel at port 8888 has ended", "its node is STOPPED")


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
