"""Changes of a node's list of data disks, among other machines that change the same list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.tpu_v2.types import cloud_tpu
from hypothesis import given
from hypothesis import strategies as st

from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.data_disks import (
    READ_ONLY,
    READ_WRITE,
    TRIES,
    Attached,
    OfNode,
    change,
    same,
    with_disk,
    without_disk,
)
from tpu_ops.cloud.disks import Place
from tpu_ops.errors import CloudError, UsageError

MINE = Place("lab", "us-central2-b", "mine")


def place(name: str) -> Place:
    return MINE._replace(name=name)


def attached(name: str, mode: str = READ_ONLY) -> Attached:
    return Attached(place(name).source, mode, f"other fields of {name}".encode())


others = st.lists(
    st.builds(attached, st.sampled_from("abcdef"), st.sampled_from([READ_ONLY, READ_WRITE])),
    unique_by=lambda disk: disk.source,
).map(tuple)
mine = st.sampled_from([(), (attached("mine"),)])
edits = st.sampled_from([lambda disks: with_disk(disks, MINE, READ_ONLY), lambda disks: without_disk(disks, MINE)])


@given(others, mine, others)
def test_a_change_keeps_all_other_disks_as_they_are_and_in_order(before, own, after):
    disks = (*before, *own, *(disk for disk in after if disk.source not in {one.source for one in before}))
    rest = [disk for disk in disks if not disk.is_disk(MINE)]
    added, removed = with_disk(disks, MINE, READ_ONLY), without_disk(disks, MINE)
    assert [disk for disk in added if not disk.is_disk(MINE)] == rest == list(removed)
    assert sum(disk.is_disk(MINE) for disk in added) == 1
    # A change that is in place is not sent again.
    assert (with_disk(added, MINE, READ_ONLY), without_disk(removed, MINE)) == (added, removed)
    assert without_disk(with_disk(removed, MINE, READ_ONLY), MINE) == removed


class World:
    """A list that other machines change: at each step of a change, they may replace it, or the answer may be lost.

    Args:
        disks: The list at first.
        between: What other machines write after each of our writes; None leaves the list. Every other one of these
            writes takes until the node is settled.
        lost: Whether the answer to each of our writes is lost.
        refusal: The error of each of our writes; None accepts them.
    """

    def __init__(self, disks, between=(), lost=(), refusal=None) -> None:
        self.refusal = refusal
        self.disks, self.between, self.lost = disks, list(between), list(lost)
        self.reads = self.writes = 0
        self.late = None

    def settle(self) -> None:
        if self.late is not None:
            self.disks, self.late = self.late, None

    def read(self):
        self.reads += 1
        return self.disks

    def write(self, disks) -> None:
        self.writes += 1
        if self.refusal:
            raise self.refusal
        self.disks = disks
        theirs = self.between.pop(0) if self.between else None
        if theirs is not None and self.writes % 2:
            self.disks = theirs
        self.late = None if self.writes % 2 else theirs
        if self.lost and self.lost.pop(0):
            raise ApiError("no answer", status="UNAVAILABLE")


@given(others, mine, edits, st.lists(st.none() | others, max_size=TRIES - 1), st.lists(st.booleans(), max_size=3))
def test_a_change_is_in_place_at_the_end_whatever_others_do_meanwhile(first, own, edit, between, lost):
    world = World((*first, *own), between, lost)
    final = next((theirs for theirs in reversed(between[: TRIES - 1]) if theirs is not None), None)
    change(world, edit, "", pause=lambda _: None)
    assert edit(world.disks) == world.disks
    rest = {disk.source for disk in world.disks if not disk.is_disk(MINE)}
    # Nothing appears that nobody attached, and the disks of the list that was there last are all there.
    known = [first, *(theirs for theirs in between if theirs is not None)]
    assert rest in [{disk.source for disk in each} for each in known]
    assert final is None or world.between or rest == {disk.source for disk in final}


def test_a_change_that_is_in_place_already_writes_nothing():
    world = World((attached("mine"),))
    assert change(world, lambda disks: with_disk(disks, MINE, READ_ONLY), "") is False
    assert (world.reads, world.writes) == (1, 0)


def test_a_change_that_others_undo_each_time_is_given_up():
    world = World((), between=[(attached("a"),)] * (TRIES + 1))
    with pytest.raises(CloudError, match="as another machine sets them"):
        change(world, lambda disks: with_disk(disks, MINE, READ_ONLY), "here")
    assert world.writes == TRIES


def test_a_refusal_ends_a_change_at_once():
    world = World((), refusal=ApiError("no", status="FAILED_PRECONDITION"))
    with pytest.raises(ApiError, match="no"):
        change(world, lambda disks: with_disk(disks, MINE, READ_ONLY), "")
    assert world.writes == 1


def test_a_disk_that_others_attach_in_the_other_mode_meanwhile_is_refused():
    world = World((), between=[(attached("mine", READ_WRITE),)])
    with pytest.raises(UsageError, match="has the disk already, read-write"):
        change(world, lambda disks: with_disk(disks, MINE, READ_ONLY), "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (MINE.source, True),
        (f"https://www.googleapis.com/compute/v1/{MINE.source}", True),
        (MINE.source.replace("lab", "123456789"), True),
        (MINE.source.replace("lab", "other"), False),
        (MINE.source.replace("central2-b", "central1-a"), False),
        (f"{MINE.source}2", False),
        ("mine", False),
    ],
)
def test_a_disk_is_recognized_in_every_form_of_its_name(source, expected):
    assert same(source, MINE) is expected


class _Api:
    """Plays the API for one node: returns it, and keeps the node that an update sends."""

    def __init__(self, node: Any) -> None:
        self.node, self.timeout = node, 1
        self.sent: Any = None

    def call(self, method, request, where, **_):
        if method == "get_operation":
            return SimpleNamespace(done=True, HasField=lambda _: False)
        if method == "list_operations":
            return SimpleNamespace(operations=[], next_page_token="")
        if method == "update_node":
            self.sent = request
            return SimpleNamespace(operation=SimpleNamespace(name="operation"))
        return self.node


def test_fields_that_the_client_library_does_not_know_are_sent_back():
    node = cloud_tpu.Node(name="projects/lab/locations/us-central2-b/nodes/pod")
    # v2alpha1 has a list of workers here, which the library lacks.
    workers = b"\x2a\x013"
    type(node).pb(node).data_disks.add().ParseFromString(attached_message("first") + workers)
    api: Any = _Api(node)
    listed = OfNode(api, node.name, timeout=1, progress=lambda *_: None)
    change(_Once(listed), lambda disks: with_disk(disks, MINE, READ_ONLY), "")
    sent = type(api.sent["node"]).pb(api.sent["node"])
    assert api.sent["update_mask"] == {"paths": ["data_disks"]}
    assert [disk.source_disk for disk in sent.data_disks] == [place("first").source, MINE.source]
    assert sent.data_disks[0].SerializeToString().endswith(workers)
    assert sent.data_disks[1].mode == cloud_tpu.AttachedDisk.DiskMode.READ_ONLY


def attached_message(name: str) -> bytes:
    return bytes(cloud_tpu.AttachedDisk.serialize(cloud_tpu.AttachedDisk(source_disk=place(name).source, mode=2)))


class _Once:
    """A list that is as it was written when it is read again."""

    def __init__(self, listed) -> None:
        self.listed, self.written = listed, None

    def read(self):
        return self.written or self.listed.read()

    def settle(self) -> None:
        self.listed.settle()

    def write(self, disks) -> None:
        self.listed.write(disks)
        self.written = disks
