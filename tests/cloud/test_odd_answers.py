"""Answers that no API should give: lists without end, and guest attributes of other workers than were asked for."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
from google.cloud import tpu_v2
from google.cloud.location import locations_pb2

from tpu_ops.cloud import nodes, zones
from tpu_ops.cloud.client import REAL_SERVICE, ApiError, Tpu
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.cloud.pages import PATIENCE, pages

NAME = "projects/lab/locations/us-central2-b/nodes/pod"


class Odd:
    """The methods of a client; a list's pages have the tokens that it is made with, one after the other."""

    def __init__(self, tokens=("",), entries=1):
        self.tokens, self.entries, self.asked = iter(tokens), entries, []

    def _page(self, kind, request):
        self.asked.append(request["page_token"])
        return SimpleNamespace(pages=iter([kind(next_page_token=next(self.tokens))]))

    def list_nodes(self, request, **options):
        return self._page(tpu_v2.ListNodesResponse, request)

    def list_accelerator_types(self, request, **options):
        return self._page(tpu_v2.ListAcceleratorTypesResponse, request)

    def list_locations(self, request, **options):
        self.asked.append(request["page_token"])
        return locations_pb2.ListLocationsResponse(next_page_token=next(self.tokens))

    def get_guest_attributes(self, request, **options):
        workers = request["worker_ids"]
        self.asked.append(workers)
        entry = {"namespace": "hostkeys", "key": "ssh-ed25519", "value": f"key {workers}"}
        attributes = [{"query_value": {"items": [entry]}}] * self.entries
        return tpu_v2.GetGuestAttributesResponse(guest_attributes=attributes)


def client(odd):
    return Tpu(odd, REAL_SERVICE, 1.0, threading.Event())


@pytest.mark.parametrize("tokens", ["aaaa", "abab", "abcdc"])
@pytest.mark.parametrize(
    "list_",
    [
        lambda tpu: list_nodes(tpu, ["lab"]),
        lambda tpu: zones.accelerator_types(tpu, "lab", "us-central2-b"),
        lambda tpu: zones.locations(tpu, "lab"),
    ],
)
def test_a_list_whose_pages_lead_back_is_an_error(list_, tokens):
    odd = Odd(tokens)
    with pytest.raises(ApiError, match="leads back") as caught:
        list_(client(odd))
    assert (caught.value.where.split(",")[0], caught.value.exit_code) == ("project lab", 3)
    assert odd.asked == ["", *dict.fromkeys(tokens)], "no page is asked for twice"


def test_a_list_of_ever_new_pages_ends_in_time():
    hour = itertools.count(0, 3600)
    endless = (SimpleNamespace(next_page_token=str(number)) for number in itertools.count(1))
    found = pages(lambda token: next(endless), where="project lab", timeout=3600, clock=lambda: next(hour))
    with pytest.raises(ApiError, match=r"had not ended after 18000 s") as caught:
        list(found)
    assert (caught.value.where, next(endless).next_page_token) == ("project lab", str(PATIENCE + 2))


def test_a_project_with_endless_pages_is_a_warning_beside_the_others():
    class Mixed(Odd):
        def list_nodes(self, request, **options):
            return Odd("xx" if "bad" in request["parent"] else [""]).list_nodes(request)

    listing = list_nodes(client(Mixed()), ["lab", "bad"])
    assert listing.unanswered == (("bad", "-"),)
    assert "leads back" in listing.warnings[0]


def test_nodes_of_the_first_version_of_the_api_are_none_of_the_fleet():
    """They have no workers to log in to; a version that the client does not know may have workers."""
    versions = ["V1", "V2", "V1_ALPHA1", "V2_ALPHA1", "API_VERSION_UNSPECIFIED", 9]
    made = [tpu_v2.Node(name=f"{NAME}-{at}", id=at + 1, api_version=version) for at, version in enumerate(versions)]

    class Old(Odd):
        def list_nodes(self, request, **options):
            return SimpleNamespace(pages=iter([tpu_v2.ListNodesResponse(nodes=made)]))

    listing = list_nodes(client(Old()), ["lab"])
    assert [node.full_name for node in listing.nodes] == [f"{NAME}-{at}" for at in (1, 3, 4, 5)]
    assert listing.warnings == ()


@pytest.mark.parametrize(("entries", "keys"), [(0, None), (1, "key ['{}']"), (2, None), (3, "key ['']"), (4, None)])
def test_host_keys_are_taken_from_as_many_entries_as_workers_were_asked_for(entries, keys):
    """Otherwise one worker's key would be recorded for others."""
    odd = Odd(entries=entries)
    expected = [{"ssh-ed25519": keys.format(index)} if keys else {} for index in range(3)]
    assert [worker.host_keys for worker in nodes.guest_attributes(client(odd), NAME, 3)] == expected
    assert odd.asked == ([[""]] if entries == 3 else [[""], ["0"], ["1"], ["2"]])
