"""Changes of parts of a node, among other programs that change the same parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning.operations_pb2 import ListOperationsResponse, Operation
from hypothesis import given
from hypothesis import strategies as st

from tpu_ops import config
from tpu_ops.cloud import data_disks
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.data_disks import READ_ONLY, READ_WRITE, same
from tpu_ops.cloud.disks import DiskPlace
from tpu_ops.cloud.operations import Failed
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import changing
from tpu_ops.fleet.changing import DATA_DISKS, LABELS, TRIES, Change, Edit

NODE = "projects/lab/locations/us-central2-b/nodes/pod"
MINE = DiskPlace("lab", "us-central2-b", "mine")
#: Field 5 of a data disk: v2alpha1 has a list of workers there, which the client library does not know.
WORKERS = b"\x2a\x013"
ATTACH = Edit(DATA_DISKS, lambda node: data_disks.attach(node, MINE, READ_ONLY))
DETACH = Edit(DATA_DISKS, lambda node: data_disks.detach(node, lambda disk: same(disk.source_disk, MINE)))


def place(name: str) -> DiskPlace:
    return MINE._replace(name=name)


def attached(name: str, mode: str = READ_ONLY, unknown: bytes = WORKERS) -> bytes:
    disk = cloud_tpu.AttachedDisk(source_disk=place(name).source, mode=mode)
    return bytes(cloud_tpu.AttachedDisk.serialize(disk)) + unknown


def with_disks(disks) -> Any:
    node = cloud_tpu.Node.pb(cloud_tpu.Node(name=NODE, labels={"theirs": "x"}))
    for disk in disks:
        node.data_disks.add().ParseFromString(disk)
    return node


def disks_of(node) -> list[bytes]:
    return [disk.SerializeToString(deterministic=True) for disk in node.data_disks]


def names(disks) -> list[str]:
    return [cloud_tpu.AttachedDisk.deserialize(disk).source_disk.rpartition("/")[2] for disk in disks]


others = st.lists(
    st.builds(attached, st.sampled_from("abcdef"), st.sampled_from([READ_ONLY, READ_WRITE])),
    unique_by=lambda disk: names([disk])[0],
)
mine = st.sampled_from([[], [attached("mine")]])
edits = st.sampled_from([ATTACH, DETACH])


class World:
    """A node in place of the API. Other programs change its disks after each update, or the answer may be lost.

    Args:
        disks: The disks at first.
        between: What other programs write after each of our updates; None writes nothing. Every other one of these
            writes takes until the changes of the node are waited for.
        lost: Whether the answer to each of our updates is lost.
        refusal: The error of each of our updates; None accepts them.
    """

    def __init__(self, disks=(), between=(), lost=(), refusal=None) -> None:
        self.node, self.refusal, self.timeout = with_disks(disks), refusal, 1.0
        self.between, self.lost, self.late = list(between), list(lost), None
        self.requests: list[Any] = []
        self.reads = 0

    @property
    def disks(self) -> list[bytes]:
        return disks_of(self.node)

    def call(self, method: str, request: Any, where: str, *, repeat: bool = True) -> Any:
        if method == "get_node":
            self.reads += 1
            return cloud_tpu.Node.deserialize(self.node.SerializeToString())
        if method == "list_operations":
            if self.late is not None:
                self.node, self.late = with_disks(self.late), None
            return ListOperationsResponse()
        if method == "get_operation":
            return Operation(done=True)
        self.update(request)

        class Begun:
            operation = Operation(name="operation")

        return Begun

    def update(self, request: Any) -> None:
        self.requests.append(request)
        if self.refusal:
            raise self.refusal
        sent = cloud_tpu.Node.pb(request["node"])
        for part in request["update_mask"]["paths"]:
            self.node.ClearField(part)
            getattr(self.node, part).MergeFrom(getattr(sent, part))
        theirs, is_late = self.between.pop(0) if self.between else None, len(self.requests) % 2 == 0
        if theirs is not None and not is_late:
            self.node = with_disks(theirs)
        self.late = theirs if is_late else None
        if self.lost and self.lost.pop(0):
            raise ApiError("no answer", status="UNAVAILABLE")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file: Path = tmp_path_factory.mktemp("fleet") / "inventory" / "tpu_vm.yml"
    file.parent.mkdir()
    file.write_text("plugin: tpu_vm\nprojects: [lab]\n")
    return config.load_file(file)


@pytest.fixture(scope="module")
def change(settings: Settings) -> Any:
    """Returns the function that changes the node of a world."""

    def changed(world: Any, *wanted: Edit) -> bool:
        return changing.change(world, settings, NODE, wanted, timeout=1, progress=lambda *_: None, pause=lambda _: None)

    return changed


@given(before=others, own=mine, after=others)
def test_a_change_keeps_all_other_disks_as_they_are_and_in_order(change, before, own, after):
    disks = [*before, *own, *(disk for disk in after if names([disk])[0] not in names(before))]
    rest = [disk for disk in disks if names([disk]) != ["mine"]]
    world = World(disks)
    assert change(world, ATTACH) is not bool(own)
    assert [disk for disk in world.disks if names([disk]) != ["mine"]] == rest
    assert names(world.disks).count("mine") == 1
    # A change that is in place is not sent again.
    assert change(world, ATTACH) is False
    assert change(world, DETACH) is True
    assert (world.disks, change(world, DETACH), dict(world.node.labels)) == (rest, False, {"theirs": "x"})


@given(
    first=others,
    own=mine,
    edit=edits,
    between=st.lists(st.none() | others, max_size=TRIES - 1),
    lost=st.lists(st.booleans(), max_size=3),
)
def test_a_change_is_in_place_at_the_end_whatever_others_do_meanwhile(change, first, own, edit, **troubles):
    between = troubles["between"]
    world = World([*first, *own], **troubles)
    final = next((theirs for theirs in reversed(between) if theirs is not None), None)
    change(world, edit)
    assert ("mine" in names(world.disks)) is (edit is ATTACH)
    rest = {name for name in names(world.disks) if name != "mine"}
    # Nothing appears that nobody attached, and the disks of the list that was there last are all there.
    known = [first, *(theirs for theirs in between if theirs is not None)]
    assert rest in [set(names(each)) for each in known]
    assert final is None or world.between or rest == set(names(final))


def test_a_change_that_is_in_place_already_writes_nothing(change):
    world = World([attached("mine")])
    assert change(world, ATTACH) is False
    assert (world.reads, world.requests) == (1, [])


def test_a_change_that_others_undo_each_time_is_given_up(change):
    world = World(between=[[attached("a")]] * (TRIES + 1))
    with pytest.raises(CloudError, match="after 5 tries, the node's data disks are still as another program sets"):
        change(world, ATTACH)
    assert len(world.requests) == TRIES


@pytest.mark.parametrize(
    ("refusal", "times"),
    [
        (ApiError("no", status="FAILED_PRECONDITION"), 1),
        (ApiError("no", status="ABORTED"), TRIES),
        (ApiError("no", status="INTERNAL"), TRIES),
        (Failed("no", status="INTERNAL"), 1),
        (Failed("no", status="ABORTED"), TRIES),
    ],
)
def test_only_an_error_that_may_pass_is_tried_again(change, refusal, times):
    world = World(refusal=refusal)
    with pytest.raises(ApiError, match="no"):
        change(world, ATTACH)
    assert len(world.requests) == times


def test_a_disk_that_others_attach_in_the_other_mode_meanwhile_is_refused(change):
    world = World(between=[[attached("mine", READ_WRITE)]])
    with pytest.raises(UsageError, match="has the disk already, read-write"):
        change(world, ATTACH)


def test_fields_that_the_client_library_does_not_know_are_sent_back(change):
    world = World([attached("first")])
    change(world, ATTACH)
    (request,) = world.requests
    assert request["update_mask"] == {"paths": ["data_disks"]}
    assert disks_of(cloud_tpu.Node.pb(request["node"])) == [attached("first"), attached("mine", unknown=b"")]
    assert not request["node"].labels


RO, RW = READ_ONLY, READ_WRITE


@pytest.mark.parametrize(
    ("now", "attach", "detach", "expected"),
    [
        ([], {}, (), []),
        ([("a", RO)], {"a": "ro"}, (), []),
        ([], {"a": "ro"}, (), [[("a", RO)]]),
        ([("b", RW)], {"a": "ro"}, (), [[("b", RW), ("a", RO)]]),
        ([("a", RO), ("b", RW)], {"a": "rw"}, (), [[("b", RW)], [("b", RW), ("a", RW)]]),
        ([("a", RO), ("b", RW)], {"c": "rw"}, ("a",), [[("b", RW)], [("b", RW), ("c", RW)]]),
        ([("b", RW)], {"c": "rw"}, ("a",), [[("b", RW), ("c", RW)]]),
    ],
)
def test_a_declared_change_of_disks_keeps_others_and_changes_a_mode_in_two_steps(change, now, attach, detach, expected):
    world = World([attached(name, mode) for name, mode in now])
    assert change(world, *Change(disks=attach, detach=detach).edits(NODE)) is bool(expected)
    sent = [disks_of(cloud_tpu.Node.pb(request["node"])) for request in world.requests]
    # A disk that stays keeps its unknown fields; a new one has none.
    assert sent == [
        [attached(name, mode, WORKERS if (name, mode) in now else b"") for name, mode in disks] for disks in expected
    ]


def test_labels_and_metadata_are_added_to_those_that_are_there(change):
    world = World([attached("first")])
    assert change(world, *Change(labels={"a": "b"}, metadata={"secret": "s"}).edits(NODE)) is True
    assert (dict(world.node.labels), dict(world.node.metadata)) == ({"theirs": "x", "a": "b"}, {"secret": "s"})
    assert [request["update_mask"]["paths"] for request in world.requests] == [[LABELS], ["metadata"]]
    assert world.disks == [attached("first")]


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
