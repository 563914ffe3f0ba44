"""Merging of an ssh key into metadata, and changes by several programs at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from google.cloud import tpu_v2
from google.longrunning.operations_pb2 import ListOperationsResponse, Operation
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nodes import key
from tpu_ops.cloud import compute, nodes
from tpu_ops.errors import CloudError
from tpu_ops.fleet import login_keys, origin
from tpu_ops.fleet.login_keys import ENTRY, merged

ADA, BOB = f"ada:ssh-ed25519 {key('ada')} ada", f"bob:ssh-ed25519 {key('bob')} bob"
CLEO = BOB.replace("bob", "cleo")
EXPIRING = f'ada:ssh-ed25519 {key("ada")} google-ssh {{"userName":"ada","expireOn":"2030-01-01T00:00:00+0000"}}'

#: Lines as people and programs leave them: valid, expiring, malformed, blank, and with odd characters.
LINES = st.one_of(
    st.sampled_from([ADA, BOB, EXPIRING, f" {ADA} ", f"{BOB}\r", "", "no key", "# ada", f"bob:ssh-rsa {key('x')}"]),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=40),
)
VALUES = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINES, max_size=8), st.sampled_from(["", "\n"]))


@given(VALUES, st.sampled_from([ADA, BOB]))
def test_merging_adds_at_most_one_line_and_changes_nothing_else(text, line):
    found = merged(text, line)
    assert found == text or found in (f"{text}{line}", f"{text}\n{line}")
    assert found.split("\n")[: len(text.rstrip("\n").split("\n"))] == text.rstrip("\n").split("\n") or not text
    assert line.split()[:2] in [entry.split()[:2] for entry in found.split("\n")]


@given(VALUES, st.sampled_from([ADA, BOB]))
def test_merging_twice_is_merging_once(text, line):
    assert merged(merged(text, line), line) == merged(text, line)


@given(VALUES)
def test_the_order_of_two_people_does_not_matter(text):
    both = merged(merged(text, ADA), BOB), merged(merged(text, BOB), ADA)
    assert sorted(filter(None, both[0].split("\n"))) == sorted(filter(None, both[1].split("\n")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ADA),
        (BOB, f"{BOB}\n{ADA}"),
        (f"{BOB}\n", f"{BOB}\n{ADA}"),
        (f"\n{BOB}\n\n", f"\n{BOB}\n\n{ADA}"),
        (ADA, ADA),
        (f"{ADA}@laptop\n{BOB}", f"{ADA}@laptop\n{BOB}"),
        (ADA.replace("ada:", "eve:"), f"{ADA.replace('ada:', 'eve:')}\n{ADA}"),
        (EXPIRING, f"{EXPIRING}\n{ADA}"),
    ],
)
def test_what_counts_as_the_same_key(text, found):
    assert merged(text, ADA) == found


class Memory:
    """A node in memory, in place of the API.

    Args:
        others: Values of `ssh-keys` that another program writes, one after each of the first updates.
    """

    def __init__(self, others: list[str]) -> None:
        self.metadata, self._others, self.updates = {ENTRY: BOB, "secret": "s3cr3t"}, others, 0
        self.timeout = 5.0

    def call(self, method, request, where, *, repeat=True):
        if method == "get_node":
            return tpu_v2.Node(name=request["name"], metadata=self.metadata)
        if method == "get_operation":
            return Operation(done=True)
        if method == "list_operations":
            return ListOperationsResponse()
        assert (method, request["update_mask"]) == ("update_node", {"paths": ["metadata"]})
        self.metadata = dict(request["node"].metadata)
        self.updates += 1
        if self._others:
            self.metadata = {**self.metadata, ENTRY: self._others.pop(0)}

        class Begun:
            operation = Operation(name="operation")

        return Begun


def push(memory, settings):
    name = "projects/lab/locations/us-central2-b/nodes/pod"
    return login_keys.push_to_node(memory, settings, name, ADA, timeout=5, progress=lambda *_: None)


def test_a_key_that_another_program_overwrites_is_pushed_again(fleet):
    memory = Memory([BOB, f"{BOB}\n{CLEO}"])
    assert push(memory, fleet.settings()) is True
    assert memory.metadata == {ENTRY: f"{BOB}\n{CLEO}\n{ADA}", "secret": "s3cr3t"}
    assert memory.updates == 3


def test_a_key_that_is_overwritten_again_and_again_is_an_error(fleet):
    with pytest.raises(CloudError, match="after 5 tries, the node's metadata are still as another program sets them"):
        push(Memory([BOB] * 6), fleet.settings())


def test_commands_on_one_machine_change_a_node_one_after_the_other(fleet):
    fleet.create("pod", metadata={ENTRY: BOB, "secret": "s3cr3t"})
    name, settings = f"{fleet.location()}/nodes/pod", fleet.settings()
    lines = [BOB.replace("bob", person) for person in ("ada", "cleo", "dan")]
    fleet.api.fault(method="UpdateNode", seconds=0.1, times=3, project=fleet.project)

    def add(line):
        with origin.api(settings) as tpu:
            return login_keys.push_to_node(tpu, settings, name, line, timeout=20, progress=lambda *_: None)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, lines)) == [True] * 3
    with origin.api(settings) as tpu:
        metadata = nodes.node_metadata(tpu, name)
    assert (sorted(metadata[ENTRY].split("\n")), metadata["secret"]) == (sorted([BOB, *lines]), "s3cr3t")
    # Each change was made once: no command has overwritten another one's.
    assert fleet.api.requests(fleet.project)["UpdateNode"] == 3


def test_a_change_by_another_machine_that_ends_later_is_waited_for(slow_fleet):
    slow_fleet.create("pod", metadata={ENTRY: BOB})
    name, settings = f"{slow_fleet.location()}/nodes/pod", slow_fleet.settings()
    begun: list[tuple[int, object]] = []

    def write_what_was_there_before(elapsed, _):
        if elapsed > 1 and not begun:
            stale = {"metadata": {ENTRY: f"{BOB}\n{CLEO}"}}
            begun.append(slow_fleet.api.call("PATCH", f"v2/{name}?updateMask=metadata", stale))

    with origin.api(settings) as tpu:
        assert login_keys.push_to_node(tpu, settings, name, ADA, timeout=20, progress=write_what_was_there_before)
        assert begun[0][0] == 200
        assert nodes.node_metadata(tpu, name)[ENTRY] == f"{BOB}\n{CLEO}\n{ADA}"


def test_programs_that_change_a_project_at_the_same_time_lose_nothing(fleet):
    lines = [BOB.replace("bob", person) for person in ("ada", "cleo", "dan")]
    # All have read the metadata before the first one may write it.
    change = "compute.projects.setCommonInstanceMetadata"
    fleet.api.fault(method=change, seconds=0.5, times=3, project=fleet.project)
    fleet.api.forget_requests()

    def add(line):
        with compute.connect(fleet.api.rest, 20) as client:
            return login_keys.push_to_project(client, fleet.project, line, timeout=20, progress=lambda *_: None)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, lines)) == [True] * 3
    (item,) = fleet.api.call("GET", f"compute/v1/projects/{fleet.project}")[1]["commonInstanceMetadata"]["items"]
    assert (item["key"], sorted(item["value"].split("\n"))) == (ENTRY, sorted(lines))
    assert fleet.api.requests(fleet.project)[change] > 3
