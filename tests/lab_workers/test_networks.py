"""Subnets of a lab collide with nothing on the machine."""

from __future__ import annotations

import itertools
from ipaddress import IPv4Network

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.lab import networks
from tpu_ops.lab.engine import Engine

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_routes_are_read_without_the_default_route() -> None:
    assert networks.parse_routes(ROUTES) == [IPv4Network("172.17.0.0/16"), IPv4Network("192.0.2.0/24")]
    assert networks.default_device(ROUTES) == "eth0"
    assert networks.default_device(ROUTES.replace("00000000\t010200C0", "000000AC\t010200C0")) == ""


def test_a_lab_tends_to_keep_its_subnet_and_another_lab_has_another() -> None:
    assert networks.choose("east", "internal", []) == networks.choose("east", "internal", [])
    assert networks.choose("east", "internal", []) != networks.choose("west", "internal", [])


@pytest.mark.parametrize("kind", networks.KINDS)
def test_a_taken_subnet_is_passed_over(kind: str) -> None:
    first, second = itertools.islice(networks.candidates("lab", kind), 2)
    assert networks.choose("lab", kind, [first]) == second
    assert networks.choose("lab", kind, [IPv4Network((first.network_address + 256, 24))]) == second


def test_a_route_over_the_whole_range_is_named_as_the_reason() -> None:
    with pytest.raises(OpsError, match=r"no free subnet of 198\.18\.0\.0/15"):
        networks.choose("lab", "external", [IPv4Network("198.0.0.0/8")])


@pytest.mark.parametrize(
    ("description", "subnets"),
    [
        ({"IPAM": {"Config": [{"Subnet": "10.1.0.0/22"}, {"Subnet": "fd00::/64"}]}}, ["10.1.0.0/22"]),
        ({"subnets": [{"subnet": "10.2.0.0/22", "gateway": "10.2.0.1"}]}, ["10.2.0.0/22"]),
        ({"IPAM": {"Config": None}}, []),
    ],
)
def test_both_engines_descriptions_of_a_network_are_read(description: dict[str, object], subnets: list[str]) -> None:
    assert networks.subnets_of(description) == [IPv4Network(text) for text in subnets]


@pytest.mark.parametrize(("command", "option"), [("docker", "com.docker.network.driver.mtu"), ("podman", "mtu")])
def test_a_network_is_labelled_and_no_wider_than_the_machines_own(command: str, option: str) -> None:
    args = networks.create_args(Engine((command,)), "west", "external", IPv4Network("198.18.4.0/22"), 1400)
    assert args[-3:] == ["--opt", f"{option}=1400", "tpu-lab-west-external"]
    assert args[args.index("--gateway") :][:2] == ["--gateway", "198.18.4.1"]
    assert "tpu-ops.lab=west" in args
