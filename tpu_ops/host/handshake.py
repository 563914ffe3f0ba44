"""The handshake by which two supervisors of a run prove that they have the run's key, without sending the key.

The peer sends its rank and a nonce; the hub answers with its own nonce and a proof; the peer sends its proof. Both
proofs cover both nonces, the run, the attempt and the rank. The labels of the two proofs differ, so that a proof cannot
be reflected or replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any, Dict, NamedTuple

#: Version of the protocol between supervisors.
VERSION = 1
_NONCE = 32


class NotTrusted(Exception):
    """The other supervisor does not belong to this run. The text has the reason, which must not be sent to it."""


class Keys(NamedTuple):
    """The keys that sign the frames of one connection, one for each direction."""

    to_peer: bytes
    to_hub: bytes


class Handshake:
    """One side of one handshake.

    Args:
        key: The secret of the run's attempt.
        run_id: The run.
        attempt: The attempt of the run.
    """

    def __init__(self, key: bytes, run_id: str, attempt: int) -> None:
        self._key = key
        self._run_id = run_id
        self._attempt = attempt
        self._own = os.urandom(_NONCE)
        self._transcript = b""
        self.rank = -1

    def hello(self, rank: int) -> Dict[str, Any]:
        """Return the peer's first message."""
        self.rank = rank
        return {
            "version": VERSION,
            "run_id": self._run_id,
            "attempt": self._attempt,
            "rank": rank,
            "nonce": self._own.hex(),
        }

    def challenge(self, hello: Dict[str, Any], world_size: int) -> Dict[str, Any]:
        """Return the hub's answer to a peer's first message.

        Raises:
            NotTrusted: The version, run or attempt in the message differs from this supervisor's, or the rank is
                invalid.
        """
        if (hello.get("version"), hello.get("run_id"), hello.get("attempt")) != (VERSION, self._run_id, self._attempt):
            raise NotTrusted("another version, run or attempt")
        rank = hello.get("rank")
        if type(rank) is not int or not 0 < rank < world_size:
            raise NotTrusted("not a rank of this run")
        self.rank = rank
        self._write_down(_nonce(hello), self._own)
        return {"nonce": self._own.hex(), "proof": self._mac(b"hub").hex()}

    def answer(self, challenge: Dict[str, Any]) -> Dict[str, Any]:
        """Return the peer's proof, from the hub's answer.

        Raises:
            NotTrusted: The hub does not have the key.
        """
        self._write_down(self._own, _nonce(challenge))
        self._check(b"hub", challenge)
        return {"proof": self._mac(b"peer").hex()}

    def confirm(self, proof: Dict[str, Any]) -> None:
        """Check the peer's proof.

        Raises:
            NotTrusted: The peer does not have the key.
        """
        self._check(b"peer", proof)

    def keys(self) -> Keys:
        """Return the keys of the connection. After the handshake, both supervisors compute the same keys."""
        return Keys(self._mac(b"frames to the peer"), self._mac(b"frames to the hub"))

    def _write_down(self, of_peer: bytes, of_hub: bytes) -> None:
        parts = [self._run_id.encode("ascii"), str(self._attempt).encode(), str(self.rank).encode(), of_peer, of_hub]
        self._transcript = b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def _mac(self, label: bytes) -> bytes:
        return hmac.new(self._key, label + b"\0" + self._transcript, hashlib.sha256).digest()

    def _check(self, label: bytes, message: Dict[str, Any]) -> None:
        proof = str(message.get("proof", "")).encode("ascii", "replace")
        if not hmac.compare_digest(proof, self._mac(label).hex().encode("ascii")):
            raise NotTrusted("a wrong proof")


def _nonce(message: Dict[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(str(message.get("nonce")))
    except ValueError:
        raise NotTrusted("no nonce") from None
    if len(nonce) != _NONCE:
        raise NotTrusted("a nonce of another length")
    return nonce
