"""Frames and the handshake, piece by piece and with every piece wrong."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from tpu_ops.host.frames import LIMIT, UNPROVED_LIMIT, BadFrame, Reader, Writer
from tpu_ops.host.handshake import Handshake, NotTrusted

KEY = bytes(range(32))


def raw(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


# --- frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_values_arrive_in_whatever_pieces(size: int) -> None:
    values: list[dict[str, Any]] = [{"a": 1}, {}, {"text": "\udcff\n'"}]
    writer, reader = Writer(), Reader()
    writer.seal(KEY)
    reader.seal(KEY)
    data = b"".join(map(writer.frame, values))
    found = []
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
        while (value := reader.take()) is not None:
            found.append(value)
    assert found == values


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2 * 2**30),
        struct.pack(">I", UNPROVED_LIMIT + 1),
        raw(b"\xff"),
        raw(b"[1]"),
        raw(b"{"),
        raw(b"[" * UNPROVED_LIMIT),
        raw(b""),
    ],
)
def test_an_invalid_frame_is_refused_before_it_is_read_completely(data: bytes) -> None:
    reader = Reader()
    reader.feed(data)
    with pytest.raises(BadFrame):
        reader.take()


def sealed(*values: dict[str, Any], key: bytes = KEY) -> list[bytes]:
    writer = Writer()
    writer.seal(key)
    return [writer.frame(value) for value in values]


@pytest.mark.parametrize(
    "frames",
    [
        sealed({"a": 1}, key=b"x" * 32),
        sealed({"a": 1}, {"b": 2})[1:],
        sealed({"a": 1}) * 2,
        [sealed({"a": 1})[0].replace(b'"a"', b'"b"')],
        [raw(json.dumps({"a": 1}).encode())],
        [struct.pack(">I", LIMIT + 1)],
    ],
    ids=["other key", "one lost", "one repeated", "changed", "not sealed", "too long"],
)
def test_a_frame_that_is_not_this_connections_next_is_refused(frames: list[bytes]) -> None:
    reader = Reader()
    reader.seal(KEY)
    reader.feed(b"".join(frames))
    with pytest.raises(BadFrame):
        list(iter(reader.take, None))


# --- handshake ----------------------------------------------------------------------------------------------


def shake(peer: Handshake, hub: Handshake, rank: int = 2, size: int = 4) -> None:
    proof = peer.answer(hub.challenge(peer.hello(rank), size))
    hub.confirm(proof)


def test_both_sides_of_one_run_trust_each_other_and_share_keys_of_their_own() -> None:
    peer, hub = Handshake(KEY, "r1", 1), Handshake(KEY, "r1", 1)
    shake(peer, hub)
    assert peer.keys() == hub.keys()
    assert len(set(peer.keys())) == 2
    assert set(peer.keys()).isdisjoint({KEY})
    assert hub.rank == 2
    other = Handshake(KEY, "r1", 1)
    shake(other, Handshake(KEY, "r1", 1))
    assert other.keys() != peer.keys(), "the same rank again has other keys"


@pytest.mark.parametrize(
    ("key", "run_id", "attempt", "rank"),
    [(b"x" * 32, "r1", 1, 2), (KEY, "r2", 1, 2), (KEY, "r1", 2, 2), (KEY, "r1", 1, 0), (KEY, "r1", 1, 4)],
    ids=["key", "run", "attempt", "the hub's own rank", "no rank"],
)
def test_peers_of_another_run_are_not_trusted(key: bytes, run_id: str, attempt: int, rank: int) -> None:
    with pytest.raises(NotTrusted):
        shake(Handshake(key, run_id, attempt), Handshake(KEY, "r1", 1), rank)


def test_a_hub_without_the_key_learns_no_proof() -> None:
    peer, hub = Handshake(KEY, "r1", 1), Handshake(b"x" * 32, "r1", 1)
    with pytest.raises(NotTrusted, match="wrong proof"):
        peer.answer(hub.challenge(peer.hello(2), 4))


def test_a_replayed_proof_is_not_trusted() -> None:
    peer, hub = Handshake(KEY, "r1", 1), Handshake(KEY, "r1", 1)
    hello = peer.hello(2)
    challenge = hub.challenge(hello, 4)
    proof = peer.answer(challenge)
    again = Handshake(KEY, "r1", 1)
    again.challenge(hello, 4)
    with pytest.raises(NotTrusted):
        again.confirm(proof)
    with pytest.raises(NotTrusted):
        hub.confirm({"proof": challenge["proof"]})


@pytest.mark.parametrize("nonce", [None, 7, "", "zz" * 32, "00" * 31, "00" * 33, ["00"]])
def test_a_nonce_has_its_form(nonce: object) -> None:
    hello = Handshake(KEY, "r1", 1).hello(2) | {"nonce": nonce}
    with pytest.raises(NotTrusted):
        Handshake(KEY, "r1", 1).challenge(hello, 4)


@pytest.mark.parametrize("change", [{"rank": "2"}, {"rank": True}, {"rank": 2.0}, {"version": 2}, {"run_id": None}])
def test_a_first_message_has_its_form(change: dict[str, object]) -> None:
    hello = Handshake(KEY, "r1", 1).hello(2) | change
    with pytest.raises(NotTrusted):
        Handshake(KEY, "r1", 1).challenge(hello, 4)


@pytest.mark.parametrize("proof", [None, 1, "", "\u20ac" * 64, "00" * 32])
def test_a_proof_has_its_form(proof: object) -> None:
    hub = Handshake(KEY, "r1", 1)
    hub.challenge(Handshake(KEY, "r1", 1).hello(2), 4)
    with pytest.raises(NotTrusted):
        hub.confirm({"proof": proof})
