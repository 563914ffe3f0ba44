"""Connections to a hub that do not belong to its run: none takes the place of a rank or blocks others."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.star import HERE, KEY, Star
from tpu_ops.host import hub
from tpu_ops.host.frames import Reader, Writer
from tpu_ops.host.handshake import Handshake


def knock(made: Star, data: bytes = b"") -> socket.socket:
    stranger = socket.create_connection((HERE, made.hub.port), 5)
    stranger.sendall(data)
    return stranger


def is_closed(stranger: socket.socket, seconds: float) -> bool:
    stranger.settimeout(seconds)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def message(value: dict[str, Any]) -> bytes:
    return Writer().frame(value)


def hello(**changes: Any) -> bytes:
    return message(Handshake(KEY, "r1", 1).hello(1) | changes)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2 * 2**30) + b"x" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        hello(attempt=2),
        hello(run_id="other"),
        hello(rank=0),
        hello(rank=7),
        hello(nonce="short"),
        hello() + message({"proof": "00" * 32}),
        message({}),
    ],
    ids=["2 GB", "http", "attempt", "run", "rank 0", "rank 7", "nonce", "proof", "empty"],
)
def test_a_stranger_is_thrown_out_and_takes_no_place(star: Callable[..., Star], data: bytes) -> None:
    made = star(2)
    made.hub.start()
    stranger = knock(made, data)
    if data.startswith(hello()[:4]) and data.endswith(message({"proof": "00" * 32})):
        assert stranger.recv(1)  # the hub's challenge comes first
        while not is_closed(stranger, 3):
            pass
    else:
        assert is_closed(stranger, 3)
    made.add(1)
    for each in made.links:
        made.await_(each, "go")


def test_strangers_who_only_wait_keep_nobody_out(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    crowd = [knock(made, hello()[:7]) for _ in range(hub.UNPROVED_COUNT + 40)]
    made.add(1)
    for each in made.links:
        made.await_(each, "go")
    assert all(is_closed(one, 3) for one in crowd)


def test_strangers_who_talk_while_others_make_room_for_them_break_nothing(star: Callable[..., Star]) -> None:
    """Many sockets are ready at once, and the first one served replaces others."""
    made = star(2)
    crowd = [knock(made, message({})) for _ in range(3 * hub.UNPROVED_COUNT)]  # the hub does not serve yet
    made.hub.start()
    late = [knock(made, message({})) for _ in range(hub.UNPROVED_COUNT)]
    made.add(1)
    for each in made.links:
        made.await_(each, "go")
    assert all(is_closed(one, 3) for one in crowd + late)


def test_an_event_of_a_socket_that_is_gone_is_no_event(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub._selector.register(made.hub._listener, 1, None)
    stranger = knock(made, message({}))
    made.hub._accept()
    gone = made.hub._unproved[0]
    made.hub._refuse(gone)
    made.hub._shake_hands(gone)
    assert is_closed(stranger, 3)
    made.hub._selector.unregister(made.hub._listener)


def test_a_slow_stranger_has_a_few_seconds(star: Callable[..., Star]) -> None:
    made = star(2)
    made.hub.start()
    stranger = knock(made, b"\0")
    begun = time.monotonic()
    assert is_closed(stranger, 5)
    assert 0.5 < time.monotonic() - begun < 3


def test_a_place_is_given_once(star: Callable[..., Star]) -> None:
    made = star(3)
    made.hub.start()
    made.add(1)
    made.await_ready({0, 1})
    handshake = Handshake(KEY, "r1", 1)
    second = knock(made, message(handshake.hello(1)))
    reader = Reader()
    while (challenge := reader.take()) is None:
        reader.feed(second.recv(4096))
    second.sendall(message(handshake.answer(challenge)))
    assert is_closed(second, 3)
    made.add(2)
    for each in made.links:
        made.await_(each, "go")
