"""All failures of the API: the nodes that are still listed, the errors, and their messages."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fleet import ZONE, FleetDir
from tests.support.lab_api import PATIENCE
from tests.support.proxy import Proxy
from tpu_ops.cloud import client
from tpu_ops.cloud.client import Abandoned, ApiError, connect
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.cloud.zones import locations
from tpu_ops.errors import CloudError
from tpu_ops.fleet import view

WEST = "us-west4-a"
HERE = [f"n{index}" for index in range(4)]

#: Longer than any test lasts.
FOREVER = 600


@pytest.fixture(scope="module")
def stock(fleet_api, tmp_path_factory):
    """Two projects of nodes that no test changes: four and one in two zones of the first, one in the second."""
    made = FleetDir(fleet_api, tmp_path_factory.mktemp("stock"))
    for name in HERE:
        made.create(name)
    made.create("west", "v5litepod-4", zone=WEST)
    made.create("theirs", project=made.second)
    return made


@pytest.fixture(scope="module")
def proxy(fleet_api):
    """A proxy before the API."""
    with Proxy(fleet_api.grpc) as made:
        yield made


@pytest.fixture(autouse=True)
def _quick_and_mended(fleet_api, proxy, monkeypatch):
    """Retries come soon; no fault outlives its test."""
    monkeypatch.setattr(client, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(client, "LONGEST_DELAY", 0.1)
    fleet_api.forget_requests()
    yield
    fleet_api.clear_faults()
    proxy.pass_on()


@pytest.fixture
def tpu(fleet_api):
    """A client with time enough for what is expected to succeed."""
    with connect(fleet_api.grpc, timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def hurried(fleet_api):
    """A client that gives up soon."""
    with connect(fleet_api.grpc, timeout=1.2) as made:
        yield made


def names(listing):
    return sorted(node.name for node in listing.nodes)


def await_(condition):
    """Wait until a condition holds that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)  # polls the condition until the deadline


def test_a_forbidden_project_is_a_warning_and_the_others_are_listed(tpu, stock):
    stock.api.fault(project=stock.second, code="PERMISSION_DENIED", message="not yours")
    listing = list_nodes(tpu, [stock.project, stock.second])
    assert names(listing) == [*HERE, "west"]
    assert listing.unanswered == ((stock.second, "-"),)
    assert len(listing.warnings) == 1
    assert f"project {stock.second}: not listed: not yours" in listing.warnings[0]
    with pytest.raises(ApiError, match=f"project {stock.second} .*not yours"):
        list_nodes(tpu, [stock.project, stock.second], strict_permissions=True)


@pytest.mark.parametrize("zones", [[], [ZONE], [ZONE, WEST]])
@pytest.mark.parametrize("strict_permissions", [False, True])
def test_a_wrong_project_alone_is_an_error_and_never_an_empty_fleet(tpu, zones, strict_permissions):
    with pytest.raises(ApiError, match="nobodys") as caught:
        list_nodes(tpu, ["nobodys"], zones, strict_permissions=strict_permissions)
    assert (caught.value.exit_code, caught.value.status) == (3, "PERMISSION_DENIED")
    assert "project's name" in caught.value.fix


def test_a_wrong_zone_is_an_error_alone_and_a_warning_beside_others(tpu, stock):
    # The service says the same of a zone that does not exist and of one that the project may not use.
    wrong = "us-central9-z"
    with pytest.raises(ApiError, match=wrong) as caught:
        list_nodes(tpu, [stock.project], [wrong])
    assert f"project {stock.project} has no such zone: see `zones`" in caught.value.fix
    assert f" {ZONE}" in caught.value.fix
    stock.api.fault(method="ListNodes", project=stock.project, zone=ZONE, code="PERMISSION_DENIED")
    with pytest.raises(ApiError) as caught:
        list_nodes(tpu, [stock.project], [ZONE])
    assert "TPU Viewer" in caught.value.fix
    stock.api.clear_faults()
    listing = list_nodes(tpu, [stock.project], [ZONE, wrong])
    assert (names(listing), listing.unanswered) == (HERE, ((stock.project, wrong),))
    assert f"zone {wrong}: not listed" in listing.warnings[0]


def test_an_unreachable_zone_is_a_warning_and_the_others_are_listed(tpu, stock):
    stock.api.fault(unreachable=True, zone=WEST, project=stock.project)
    for zones in ([], [ZONE, WEST]):
        listing = list_nodes(tpu, [stock.project], zones)
        assert names(listing) == HERE
        assert listing.unanswered == ((stock.project, WEST),)
        assert listing.warnings[0].startswith(f"project {stock.project}, zone {WEST}: not listed")
        with pytest.raises(ApiError, match=f"project {stock.project}, zone {WEST}"):
            list_nodes(tpu, [stock.project], zones, strict_permissions=True)


def test_the_only_zone_unreachable_is_an_error(tpu, stock):
    stock.api.fault(unreachable=True, zone=WEST, project=stock.project)
    with pytest.raises(ApiError, match=f"zone {WEST}: the API could not reach this location"):
        list_nodes(tpu, [stock.project], [WEST])


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED"])
def test_a_burst_of_passing_failures_is_sat_out(tpu, stock, code):
    stock.api.fault(project=stock.project, code=code, times=4)
    listing = list_nodes(tpu, [stock.project])
    assert (names(listing), listing.warnings) == ([*HERE, "west"], ())
    assert stock.api.requests(stock.project) == {"ListNodes": 5}


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_a_failure_that_stays_is_an_error_within_the_time_out(fleet_api, stock, monkeypatch, code):
    # With delays that grow, the last attempt has what is left of the time, and not next to nothing.
    monkeypatch.setattr(client, "LONGEST_DELAY", 8.0)
    stock.api.fault(project=stock.project, code=code, message="come back later")
    with connect(fleet_api.grpc, timeout=2.0) as short:
        list_nodes(short, [stock.second])  # the connection is there
        with pytest.raises(ApiError, match=f"project {stock.project} .*come back later") as caught:
            list_nodes(short, [stock.project])
        assert (caught.value.status, bool(caught.value.fix)) == (code, True)
        assert stock.api.requests(stock.project)["ListNodes"] > 2
        listing = list_nodes(short, [stock.project, stock.second])
    assert names(listing) == ["theirs"]
    assert listing.unanswered == ((stock.project, "-"),)
    assert f"project {stock.project}: not listed" in listing.warnings[0]


def test_the_wait_for_a_slow_answer_is_reported(tpu, stock, monkeypatch, caplog):
    monkeypatch.setattr(client, "TELL_AFTER", 0.05)
    stock.api.fault(project=stock.project, zone=WEST, seconds=FOREVER)
    with caplog.at_level("INFO"), ThreadPoolExecutor(1) as pool:
        listing = pool.submit(list_nodes, tpu, [stock.project], [WEST])
        await_(lambda: caplog.messages)
        stock.api.clear_faults()
        assert names(listing.result()) == ["west"]
    (said,) = caplog.messages
    assert f"{stock.api.grpc} (project {stock.project}, zone {WEST}), at most {PATIENCE:g} s" in said


def test_a_timeout_names_project_zone_and_setting(hurried, stock):
    stock.api.fault(project=stock.project, zone=WEST, seconds=FOREVER)
    with pytest.raises(ApiError) as caught:
        list_nodes(hurried, [stock.project], [WEST])
    text = str(caught.value)
    for words in (f"project {stock.project}, zone {WEST}", "no answer within 1.2 s", "request_timeout"):
        assert words in text
    listing = list_nodes(hurried, [stock.project], [ZONE, WEST])
    assert (names(listing), listing.unanswered) == (HERE, ((stock.project, WEST),))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("size", [0, 40, 300, 900, 1300])
def test_a_connection_that_is_cut_anywhere_loses_no_node_and_doubles_none(stock, proxy, monkeypatch, size, times):
    monkeypatch.setattr("tpu_ops.cloud.zones.PAGE_SIZE", 2)
    proxy.cut_after(size, times)
    before = proxy.connections
    with connect(proxy.address, timeout=PATIENCE) as tpu:
        listing = list_nodes(tpu, [stock.project])
    assert (names(listing), listing.unanswered) == ([*HERE, "west"], ())
    assert proxy.connections - before > times


@pytest.mark.parametrize("state", ["hangs", "is closed"])
def test_an_endpoint_that_never_answers_is_named_within_the_time_out(stock, monkeypatch, state):
    monkeypatch.setattr(client, "LONGEST_DELAY", 8.0)
    with Proxy(stock.api.grpc) as proxy, connect(proxy.address, timeout=1.0) as tpu:
        if state == "hangs":
            proxy.hang()
        else:
            proxy.close()
        with pytest.raises(ApiError, match=f"project {stock.project}") as caught:
            list_nodes(tpu, [stock.project])
    assert proxy.address in str(caught.value)
    assert "TPU_OPS_ENDPOINT" in caught.value.fix
    assert caught.value.status == ("DEADLINE_EXCEEDED" if state == "hangs" else "UNAVAILABLE")


def test_a_failure_after_the_first_page_is_never_a_whole_fleet(tpu, stock, monkeypatch):
    monkeypatch.setattr("tpu_ops.cloud.zones.PAGE_SIZE", 2)

    def fail_on_page_2():
        stock.api.fault(project=stock.project, seconds=0.001, times=1)
        stock.api.fault(project=stock.project, code="INTERNAL", message="lost the thread", times=1)

    fail_on_page_2()
    with pytest.raises(ApiError, match="lost the thread"):
        list_nodes(tpu, [stock.project])
    assert stock.api.requests(stock.project) == {"ListNodes": 2}
    fail_on_page_2()
    listing = list_nodes(tpu, [stock.project, stock.second])
    assert names(listing) == ["theirs"]
    assert listing.unanswered == ((stock.project, "-"),)
    assert "lost the thread" in listing.warnings[0]


@pytest.mark.parametrize(("size", "pages"), [(1, 5), (2, 3), (4, 2), (5, 1), (1000, 1)])
def test_a_list_costs_one_request_for_each_page_of_each_place(tpu, stock, monkeypatch, size, pages):
    monkeypatch.setattr("tpu_ops.cloud.zones.PAGE_SIZE", size)
    assert names(list_nodes(tpu, [stock.project])) == [*HERE, "west"]
    assert stock.api.requests(stock.project) == {"ListNodes": pages}
    stock.api.forget_requests()
    list_nodes(tpu, [stock.project, stock.second], [ZONE, WEST, "us-east5-a"])
    assert stock.api.requests(stock.project) == {"ListNodes": -(-4 // size) + 2}
    assert stock.api.requests(stock.second) == {"ListNodes": 3}


def test_all_projects_and_zones_are_asked_at_once(tpu, stock):
    zones = [ZONE, WEST, "us-east5-a", "us-east5-b", "us-east1-d", "us-south1-a", "us-west1-c", "europe-west4-a"]
    stock.api.fault(method="ListNodes", seconds=FOREVER)
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(list_nodes, tpu, [stock.project, stock.second], zones)
        # Every answer is held back: what has arrived was sent before any was there.
        await_(lambda: stock.api.requests().get("ListNodes") == 16)
        stock.api.clear_faults()
        assert names(listing.result()) == [*HERE, "theirs", "west"]


def test_an_interrupt_ends_the_calls_in_flight(tpu, stock):
    stock.api.fault(project=stock.project, seconds=FOREVER)
    ends = []

    def ask(interrupted):
        if interrupted:
            await_(lambda: "ListNodes" in stock.api.requests(stock.project))
            raise KeyboardInterrupt
        try:
            ends.append(names(list_nodes(tpu, [stock.project])))
        except Abandoned:
            ends.append("abandoned")

    with pytest.raises(KeyboardInterrupt):
        tpu.concurrently(ask, [True, False])
    assert ends == ["abandoned"], "no answer of the API that may be told or tried again"


def test_an_interrupt_just_before_the_wait_for_calls_is_not_lost(tpu):
    main, ended = threading.get_ident(), []

    def waits():
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return codes[0] is threading.Condition.wait.__code__ and futures.wait.__code__ in codes

    def ask(_):
        await_(waits)
        # As in that moment, it does not wake whoever waits.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        ended.append(tpu.closed.wait(PATIENCE))

    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tpu.concurrently(ask, ["pod"])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ended == [True]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("INVALID_ARGUMENT", "no wildcards here"),
        ("NOT_FOUND", "no wildcards here"),
        ("UNIMPLEMENTED", "no wildcards here"),
        ("PERMISSION_DENIED", "Location - is not found or access is unauthorized."),
        ("PERMISSION_DENIED", "Permission denied on 'locations/-' (or it may not exist)."),
    ],
)
def test_each_zone_is_asked_if_the_api_refuses_all_zones_at_once(tpu, stock, code, message):
    stock.api.fault(method="ListNodes", zone="-", code=code, message=message)
    listing = list_nodes(tpu, [stock.project, stock.second])
    assert (names(listing), listing.warnings) == ([*HERE, "theirs", "west"], ())
    zones = len(locations(tpu, stock.project))
    assert stock.api.requests(stock.project) == {"ListNodes": 1 + zones, "ListLocations": 2}


def test_zones_that_the_api_itself_named_may_fail_and_the_rest_is_listed(tpu, stock):
    stock.api.fault(method="ListNodes", zone="-", code="INVALID_ARGUMENT")
    stock.api.fault(method="ListNodes", zone=WEST, code="NOT_FOUND", message="no such zone")
    stock.api.fault(method="ListNodes", zone="us-east5-a", code="PERMISSION_DENIED")
    listing = list_nodes(tpu, [stock.project])
    assert names(listing) == HERE
    assert set(listing.unanswered) == {(stock.project, WEST), (stock.project, "us-east5-a")}
    assert any(f"zone {WEST}: not listed: no such zone" in text for text in listing.warnings)


def test_zones_of_a_forbidden_project_are_not_asked_one_by_one(tpu, stock):
    stock.api.fault(project=stock.project, code="PERMISSION_DENIED")
    with pytest.raises(ApiError):
        list_nodes(tpu, [stock.project])
    assert stock.api.requests(stock.project) == {"ListNodes": 1}


def test_if_listing_the_zones_fails_too_the_first_refusal_is_raised(tpu, stock):
    stock.api.fault(method="ListNodes", zone="-", code="INVALID_ARGUMENT", message="no wildcards here")
    stock.api.fault(method="ListLocations", code="PERMISSION_DENIED")
    with pytest.raises(ApiError, match="no wildcards here"):
        list_nodes(tpu, [stock.project])


def test_guest_attributes_are_asked_of_unknown_nodes_only_and_at_once(fleet):
    for name in HERE:
        fleet.create(name)
    settings = fleet.settings()
    fleet.api.forget_requests()
    fleet.api.fault(method="GetGuestAttributes", seconds=FOREVER)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(view.refresh, settings)
        await_(lambda: fleet.api.requests(fleet.project).get("GetGuestAttributes") == len(HERE))
        fleet.api.clear_faults()
        assert seen.result()[0].warnings == ()
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1, "GetGuestAttributes": 4}
    fleet.create("young")
    for extra in (1, 0):
        fleet.api.forget_requests()
        view.refresh(settings)
        asked = {"ListNodes": 1, "GetGuestAttributes": extra}
        assert fleet.api.requests(fleet.project) == {method: count for method, count in asked.items() if count}


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "NOT_FOUND", "INTERNAL"])
def test_a_node_without_readable_keys_is_explained_and_others_are_learnt(fleet, code):
    fleet.create("pod", "v4-16")
    fleet.create("west", "v5litepod-4", zone=WEST)
    fleet.api.fault(method="GetGuestAttributes", zone=WEST, code=code, message="guests are away")
    seen, _ = view.refresh(fleet.settings())
    assert [worker.host for worker in seen.workers] == ["pod-w0", "pod-w1", "west-w0"]
    known = seen.known_hosts.read_text()
    assert [worker.host_key_alias in known for worker in seen.workers] == [True, True, False]
    (warning,) = seen.warnings
    assert all(words in warning for words in ("node west", "west-w0", "guests are away"))
    fleet.api.clear_faults()
    assert view.refresh(fleet.settings())[0].warnings == ()


def test_a_fleet_that_cannot_be_listed_stays_as_it_was_known(fleet):
    fleet.create("pod", "v4-16")
    settings = fleet.settings()
    before, _ = view.refresh(settings)
    fleet.api.fault(method="ListNodes", code="PERMISSION_DENIED")
    with pytest.raises(CloudError):
        view.refresh(settings)
    assert view.current(settings).nodes == before.nodes


def test_quick_answers_are_not_reported_as_waits(tpu, stock, caplog):
    with caplog.at_level("INFO"):
        list_nodes(tpu, [stock.project])
    assert caplog.messages == []
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    # One that was cancelled may take a moment to end.
    assert [timer for timer in timers if not timer.finished.is_set()] == []
