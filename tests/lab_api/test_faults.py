"""Faults asked of the API, as google-cloud-tpu's own clients see them, and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from google.api_core import exceptions
from google.api_core.retry import AsyncRetry, if_exception_type

from tests.support.lab_api import PATIENCE, LabApi
from tests.support.proxy import Proxy
from tests.support.tpu_client import Client

#: Zones of the project ``lab`` in which only these tests have nodes.
ZONES = ("us-central1-b", "us-central1-f")
NODES = [f"projects/lab/locations/{zone}/nodes/fault{number}" for zone in ZONES for number in range(2)]
ALL = "projects/lab/locations/-"


@pytest.fixture
def api(shared_api: LabApi) -> Iterator[LabApi]:
    """The shared API with nodes in two zones, without faults before and after."""
    for name in NODES:
        if shared_api.call("GET", f"v2/{name}")[0] == 404:
            parent, _, short = name.rsplit("/", 2)
            shared_api.create(short, "v2-8", parent)
    shared_api.forget_requests()
    yield shared_api
    shared_api.clear_faults()


async def listed(client: Client, parent: str = ALL, **request: Any) -> tuple[list[str], set[str]]:
    """Return these tests' nodes in a list, and what could not be reached."""
    pages = await client.pages("list_nodes", parent=parent, **request)
    found = [node.name for page in pages for node in page.nodes if node.name in NODES]
    return found, {name for page in pages for name in page.unreachable}


@pytest.mark.parametrize(
    ("code", "rpc", "http"),
    [
        ("PERMISSION_DENIED", exceptions.PermissionDenied, exceptions.Forbidden),
        ("RESOURCE_EXHAUSTED", exceptions.ResourceExhausted, exceptions.TooManyRequests),
        ("UNAVAILABLE", exceptions.ServiceUnavailable, exceptions.ServiceUnavailable),
        ("ABORTED", exceptions.Aborted, exceptions.Conflict),
        ("DEADLINE_EXCEEDED", exceptions.DeadlineExceeded, exceptions.GatewayTimeout),
        ("INTERNAL", exceptions.InternalServerError, exceptions.InternalServerError),
    ],
)
async def test_a_code_arrives_as_the_services_own(
    client: Client, api: LabApi, code: str, rpc: type[Exception], http: type[Exception]
) -> None:
    api.fault(method="ListNodes", code=code, message="the words of the fault")
    with pytest.raises(http if client.transport == "rest" else rpc, match="the words of the fault"):
        await listed(client)
    await client.call("get_node", name=NODES[0])


async def test_a_fault_hits_as_often_as_was_asked_and_then_no_more(client: Client, api: LabApi) -> None:
    api.fault(code="UNAVAILABLE", times=2)
    for left in (2, 1):
        assert api.call("GET", "lab/faults")[1] == {"faults": [{"code": "UNAVAILABLE", "times": left}]}
        with pytest.raises(exceptions.ServiceUnavailable):
            await client.call("get_node", name=NODES[0])
    assert api.call("GET", "lab/faults")[1] == {"faults": []}
    await client.call("get_node", name=NODES[0])


async def test_a_fault_holds_until_it_is_removed(client: Client, api: LabApi) -> None:
    api.fault(code="UNAVAILABLE")
    for _ in range(3):
        with pytest.raises(exceptions.ServiceUnavailable):
            await client.call("get_node", name=NODES[0])
    api.clear_faults()
    await client.call("get_node", name=NODES[0])


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        ({"method": "GetNode"}, True),
        ({"method": "ListNodes"}, False),
        ({"project": "lab"}, True),
        ({"project": "other"}, False),
        ({"zone": ZONES[0]}, True),
        ({"zone": ZONES[1]}, False),
        ({"zone": "-"}, False),
        ({"method": "GetNode", "project": "lab", "zone": ZONES[0]}, True),
        ({"method": "GetNode", "project": "other", "zone": ZONES[0]}, False),
    ],
)
async def test_only_requests_that_it_names_are_hit(
    client: Client, api: LabApi, fault: dict[str, str], hit: bool
) -> None:
    api.fault(code="UNAVAILABLE", **fault)
    if hit:
        with pytest.raises(exceptions.ServiceUnavailable):
            await client.call("get_node", name=NODES[0])
    else:
        await client.call("get_node", name=NODES[0])


async def test_an_update_is_hit_by_the_project_of_its_node(client: Client, api: LabApi) -> None:
    api.fault(method="UpdateNode", project="lab", zone=ZONES[0], code="UNAVAILABLE")
    with pytest.raises(exceptions.ServiceUnavailable):
        await client.call("update_node", node={"name": NODES[0], "description": "d"}, update_mask={"paths": ["labels"]})


async def test_the_first_fault_that_hits_wins(client: Client, api: LabApi) -> None:
    api.fault(project="other", code="INTERNAL")
    api.fault(code="PERMISSION_DENIED", times=1)
    api.fault(code="UNAVAILABLE")
    for expected in (exceptions.Forbidden, exceptions.ServiceUnavailable):
        with pytest.raises(expected):
            await client.call("get_node", name=NODES[0])


@pytest.mark.parametrize("code", [None, "UNAVAILABLE"])
async def test_an_answer_comes_later(client: Client, api: LabApi, code: str | None) -> None:
    api.fault(method="GetNode", seconds=0.2, **({"code": code} if code else {}))
    before = time.monotonic()
    if code:
        with pytest.raises(exceptions.ServiceUnavailable):
            await client.call("get_node", name=NODES[0])
    else:
        await client.call("get_node", name=NODES[0])
    assert time.monotonic() - before >= 0.2


async def test_a_client_that_gives_up_before_is_told_by_its_own_clock(client: Client, api: LabApi) -> None:
    api.fault(seconds=30)
    with pytest.raises((exceptions.DeadlineExceeded, exceptions.RetryError, TimeoutError, ConnectionError, OSError)):
        await client._invoke("get_node", {"name": NODES[0]}, patience=0.2)


async def test_an_answer_that_is_held_back_goes_out_when_the_fault_is_removed(client: Client, api: LabApi) -> None:
    api.fault(method="GetNode", seconds=30)
    asking = asyncio.ensure_future(client.call("get_node", name=NODES[0]))
    async with asyncio.timeout(10):
        while "GetNode" not in api.requests("lab"):  # noqa: ASYNC110 - there is no event, only polling
            await asyncio.sleep(0.01)
    api.clear_faults()
    assert (await asking).name == NODES[0]


async def test_a_list_of_all_zones_names_those_that_it_cannot_reach(client: Client, api: LabApi) -> None:
    api.fault(unreachable=True, zone=ZONES[0], project="lab")
    names, unreachable = await listed(client)
    assert (names, unreachable) == (NODES[2:], {f"projects/lab/locations/{ZONES[0]}"})
    # Pages are cut before: what is lost leaves short ones, as the service may send them.
    assert await listed(client, page_size=1) == (names, unreachable)
    assert await listed(client, f"projects/lab/locations/{ZONES[0]}") == ([], unreachable)
    assert await listed(client, f"projects/lab/locations/{ZONES[1]}") == (NODES[2:], set())
    api.fault(unreachable=True, zone=ZONES[1])
    assert await listed(client) == ([], {f"projects/lab/locations/{zone}" for zone in ZONES})
    api.clear_faults()
    assert await listed(client) == (NODES, set())


async def test_requests_are_counted_by_method_and_project_whatever_their_end(client: Client, api: LabApi) -> None:
    api.fault(method="GetNode", code="UNAVAILABLE", times=1)
    with pytest.raises(exceptions.ServiceUnavailable):
        await client.call("get_node", name=NODES[0])
    await client.call("get_node", name=NODES[0])
    with pytest.raises(exceptions.Forbidden):
        await client.call("list_nodes", parent="projects/nobodys/locations/-")
    assert len(await client.pages("list_nodes", parent=f"projects/lab/locations/{ZONES[0]}", page_size=1)) == 2
    assert api.call("GET", "lab/requests")[1] == {
        "methods": {"GetNode": 2, "ListNodes": 3},
        "projects": {"lab": {"GetNode": 2, "ListNodes": 2}, "nobodys": {"ListNodes": 1}},
    }
    assert api.requests("lab") == {"GetNode": 2, "ListNodes": 2}
    api.forget_requests()
    assert api.requests() == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "needs one of these fields"),
        ({"method": "ListNode", "code": "INTERNAL"}, "not a method of the API; the methods are CancelOperation"),
        ({"code": "FORBIDDEN"}, "'FORBIDDEN' is not a status code; the codes are CANCELLED"),
        ({"code": 7}, "code: 7 is not of type str"),
        ({"zone": "nowhere", "code": "INTERNAL"}, "not a zone of the lab"),
        ({"code": "INTERNAL", "times": 0}, "times: 0 must be 1 or more"),
        ({"code": "INTERNAL", "times": True}, "times: True is not of type int"),
        ({"seconds": -1}, "seconds: -1 must be between 0 and 3600"),
        ({"seconds": float("nan")}, "seconds: nan"),
        ({"unreachable": True}, "with a zone"),
        ({"unreachable": True, "zone": ZONES[0], "method": "GetNode"}, "only for the method ListNodes"),
        ({"unreachable": True, "zone": ZONES[0], "code": "INTERNAL"}, "without code"),
        ({"message": "m", "seconds": 1}, "message: allowed only together with code"),
        ({"codes": "INTERNAL"}, "codes: a fault has no such field"),
        (["list"], "not an object"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_in_words(api: LabApi, body: Any, words: str) -> None:
    status, answer = api.call("POST", "lab/faults", body)
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert words in answer["error"]["message"]
    assert api.call("GET", "lab/faults")[1] == {"faults": []}


@pytest.fixture
def proxy(api: LabApi) -> Iterator[Proxy]:
    """A proxy before the API's gRPC port."""
    with Proxy(api.grpc) as made:
        yield made


@pytest.fixture
async def behind(api: LabApi, proxy: Proxy) -> AsyncIterator[Client]:
    """A client that goes through the proxy."""
    client = Client(api, "grpc_asyncio", address=proxy.address)
    yield client
    await client.close()


async def test_a_proxy_that_is_asked_nothing_changes_nothing(behind: Client, proxy: Proxy) -> None:
    assert await listed(behind) == (NODES, set())
    assert proxy.connections == 1


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_proxy_cuts_an_answer_to_the_byte(api: LabApi, size: int) -> None:
    with Proxy(api.rest.removeprefix("http://")) as proxy:
        host, port = proxy.address.split(":")
        proxy.cut_after(size, times=2)
        answers = []
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"GET /lab/info HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                answers.append(connection.makefile("rb").read())
    assert [len(answer) for answer in answers[:2]] == [size, size]
    assert answers[2].startswith(answers[0])
    assert answers[2].endswith(b"}")


@pytest.mark.parametrize("size", [100, 700])
async def test_a_client_whose_connection_is_cut_in_a_page_gets_it_from_the_next(
    behind: Client, proxy: Proxy, size: int
) -> None:
    await behind.call("get_node", name=NODES[0])
    proxy.cut_after(size, times=1)
    with pytest.raises(exceptions.ServiceUnavailable):
        await listed(behind)
    # gRPC may give the next request to the dying connection as well.
    again = AsyncRetry(if_exception_type(exceptions.ServiceUnavailable), initial=0.01, timeout=PATIENCE)
    assert await again(listed)(behind) == (NODES, set())
    assert proxy.connections == 2


async def test_a_proxy_that_hangs_gives_no_answer_until_it_passes_on(behind: Client, proxy: Proxy, api: LabApi) -> None:
    await behind.call("get_node", name=NODES[0])
    proxy.hang()
    asking = asyncio.ensure_future(listed(behind))
    async with asyncio.timeout(10):
        while "ListNodes" not in api.requests("lab"):  # noqa: ASYNC110 - there is no event, only polling
            await asyncio.sleep(0.01)
    assert not (await asyncio.wait({asking}, timeout=0.1))[0]
    proxy.pass_on()
    assert await asking == (NODES, set())


async def test_a_closed_proxy_refuses(behind: Client, proxy: Proxy) -> None:
    await behind.call("get_node", name=NODES[0])
    proxy.close()
    with pytest.raises(exceptions.ServiceUnavailable):
        await listed(behind)
    host, port = proxy.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
