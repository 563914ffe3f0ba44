"""What a client and OpenSSH's master say to each other over the master's control socket: version 4 of the protocol.

OpenSSH's source has it: PROTOCOL.mux tells of it, the client's side is in mux.c.
"""

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

HELLO, VERSION = 0x00000001, 4
NEW_SESSION, ALIVE_CHECK = 0x10000002, 0x10000004
EXIT_MESSAGE, ALIVE, SESSION_OPENED = 0x80000004, 0x80000005, 0x80000006
#: The id of a request: every control socket carries one.
REQUEST = 0
#: Longest message that is accepted, in bytes: as long as a master accepts.
LONGEST = 256 * 1024
#: Bytes before each message, which say how long it is.
HEAD = 4

_NO_ESCAPES = 0xFFFFFFFF


class Unavailable(Exception):
    """A master did not do what it was asked for, and nothing was started."""


class Master(NamedTuple):
    """Where the master of a worker listens, if there is one.

    Attributes:
        path: Of its control socket.
        agent: Whether sessions have the person's ssh agent, where the master forwards it.
    """

    path: Path
    agent: bool = False

    def must_be_own(self) -> None:
        """See to it that the control socket is in a directory of this user.

        Raises:
            Unavailable: It is in somebody else's.
            OSError: There is no such directory.
        """
        # The written ssh config does not share connections there either (`openssh.guard`).
        if self.path.parent.stat().st_uid != os.geteuid():
            raise Unavailable("the directory of the control sockets is not this user's own")


def packed(kind: int, *values: int | bytes) -> bytes:
    """Return a message as it is sent."""
    body = b"".join(
        struct.pack(">I", value) if isinstance(value, int) else struct.pack(">I", len(value)) + value
        for value in (kind, *values)
    )
    return struct.pack(">I", len(body)) + body


def new_session(master: Master, command: str) -> bytes:
    """Return the request to run a remote command line without a terminal; three files are to follow it."""
    words = (b"", 0, 0, int(master.agent), 0, _NO_ESCAPES, b"", os.fsencode(command))
    return packed(NEW_SESSION, REQUEST, *words)


def length(head: bytes | bytearray) -> int:
    """Given the `HEAD` of a message, return how many bytes follow.

    Raises:
        Unavailable: They are more than anybody sends.
    """
    (found,) = struct.unpack_from(">I", head)
    if found > LONGEST:
        raise Unavailable(f"a message of {found} bytes")
    return int(found)


def numbers(body: bytes) -> tuple[int, int, int]:
    """Return the kind of a message and its first two numbers, 0 for what it does not have."""
    return struct.unpack(">III", body[:12].ljust(12, b"\0"))


def taken(said: bytearray) -> tuple[int, int, int] | None:
    """Take the first message, as of `numbers`, out of what a master said; None where it has not come whole.

    Raises:
        Unavailable: It is longer than anybody's.
    """
    if len(said) < HEAD or len(said) < (end := HEAD + length(said)):
        return None
    found = numbers(bytes(said[HEAD:end]))
    del said[:end]
    return found


def must_greet(message: tuple[int, int, int]) -> None:
    """See to it that a message is the hello of a master that speaks this version.

    Raises:
        Unavailable: It is not.
    """
    kind, version, _ = message
    if (kind, version) != (HELLO, VERSION):
        raise Unavailable(f"message {kind:#x} ({version}) in place of a hello of version {VERSION}")


def must_answer(message: tuple[int, int, int], wanted: int) -> None:
    """See to it that a message is the wanted answer to the request.

    Raises:
        Unavailable: It is not.
    """
    kind, request, _ = message
    if (kind, request) != (wanted, REQUEST):
        raise Unavailable(f"message {kind:#x} in place of {wanted:#x}")


def pass_file(control: socket.socket, file: int) -> None:
    """Give the master one of the files of a session."""
    socket.send_fds(control, [b"\0"], [file])
