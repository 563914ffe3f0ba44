"""The ports of a hub and of the coordinator beside it."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.support.star import HERE, Star, free_ports, team
from tpu_ops.host import hub
from tpu_ops.host.command import NotReady
from tpu_ops.host.hub import Hub

TAKEN = (
    "`sudo ss -ltnp` on this worker shows the processes that use the ports; end these, or set other ports in "
    "launcher_ports"
)


def test_nothing_listens_once_all_go_and_the_coordinators_port_is_free(star: Callable[..., Star]) -> None:
    made = star(3)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HERE, made.coordinator))
    made.running()
    for port in (made.hub.port, made.coordinator):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
    # Without reuse: not even a closed connection may stay behind on it.
    with socket.socket() as listener:
        listener.bind((HERE, made.coordinator))
        listener.listen()


def test_a_taken_port_is_passed_over_and_none_is_an_error() -> None:
    ports = free_ports(2)
    with socket.create_server((HERE, ports[0])):
        listener = hub.listen_within(HERE, ports)
        assert listener.getsockname() == (HERE, ports[1])
        with pytest.raises(NotReady, match=rf"no port of {ports[0]}-{ports[1]} can be used on 127\.0\.0\.1") as raised:
            hub.listen_within(HERE, ports)
        assert str(raised.value).endswith("Address already in use; " + TAKEN), raised.value
        listener.close()


def test_a_coordinators_port_that_is_taken_is_said() -> None:
    ports = free_ports(3)
    with (
        socket.create_server((HERE, ports[2])),
        pytest.raises(NotReady, match=f"port {ports[2]}, where the coordinator is to listen, cannot be used") as raised,
    ):
        Hub(team(0, 2), lambda: None, ports=ports[:2], coordinator=ports[2], ending_limit=1)
    assert "shows the process; --env JAX_COORDINATOR_PORT=PORT sets another port" in str(raised.value)
    socket.create_server((HERE, ports[0])).close()  # nobody has it


def test_an_address_that_this_worker_does_not_have_is_no_matter_of_ports() -> None:
    elsewhere = team(0, 2)._replace(address="192.0.2.1")
    for call in (
        lambda: hub.listen_within("192.0.2.1", range(8500, 8520)),
        lambda: Hub(elsewhere, lambda: None, ports=range(8500, 8520), coordinator=8482, ending_limit=1),
    ):
        with pytest.raises(NotReady, match=r"lists 192\.0\.2\.1 .* but the worker .* have it: `tpu_ops refresh`$"):
            call()


def test_a_coordinators_port_among_those_of_the_hub_is_left_to_it() -> None:
    ports = free_ports(2)
    made = Hub(team(0, 2), lambda: None, ports=ports, coordinator=ports[0], ending_limit=1)
    assert (made.port, made._held.getsockname()[1]) == (ports[1], ports[0])
    for listener in (made._listener, made._held):
        listener.close()
    with pytest.raises(NotReady, match="no port of"):
        Hub(team(0, 2), lambda: None, ports=ports[:1], coordinator=ports[0], ending_limit=1)
    socket.create_server((HERE, ports[0])).close()  # given back


def test_a_coordinators_port_that_cannot_be_reached_is_said(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub._coordinator += 1000  # what it tells the peers; nobody listens there
    made.hub.start()
    made.add(1)
    reason = made.await_(made.hub, "abort")["reason"]
    assert f"port {made.coordinator + 1000} of w0, where the coordinator will listen, cannot be reached" in reason
    assert reason.endswith(f"internal addresses at TCP port {made.coordinator + 1000}")
