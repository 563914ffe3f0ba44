"""Fingerprints of OpenPGP keys, without gpg; runs on Python 3.8."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

#: A text block of public keys: BEGIN line, headers, empty line, base64, optional checksum (RFC 9580, section 6.2).
ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[^\n]*\n(?:[^\n]*:[^\n]*\n)*\s*\n(.*?)(?:\n=[^\n]*)?\n-----END", re.DOTALL
)
#: The packet type of a primary public key (RFC 9580, section 5); subkeys have another packet type.
PUBLIC_KEY = 6


def packets(data: bytes) -> list[tuple[int, bytes]]:
    """Given a sequence of OpenPGP packets, return the type and body of each packet (RFC 9580, section 4.2).

    Raises:
        ValueError: The data are not a sequence of OpenPGP packets.
    """
    found = []
    position = 0
    while position < len(data):
        head = data[position]
        position += 1
        if not head & 0x80:
            raise ValueError("no OpenPGP packet")
        if head & 0x40:
            kind, first = head & 0x3F, data[position]
            if first < 192:
                size, length = 1, first
            elif first < 224:
                size, length = 2, ((first - 192) << 8) + data[position + 1] + 192
            elif first == 255:
                size, length = 5, int.from_bytes(data[position + 1 : position + 5], "big")
            else:
                raise ValueError("a key in parts")
        else:
            kind, size = (head >> 2) & 0x0F, (1, 2, 4, 0)[head & 0x03]
            if not size:
                raise ValueError("a packet without a length")
            length = int.from_bytes(data[position : position + size], "big")
        position += size
        if position + length > len(data):
            raise ValueError("a packet is cut short")
        found.append((kind, data[position : position + length]))
        position += length
    return found


def fingerprints(data: bytes) -> list[str]:
    """Given a file of public keys, text or binary, return the fingerprints of all primary keys in hexadecimal digits.

    Only keys of version 4 are supported (RFC 9580, section 5.5.4.2). A key of another version is returned as "unknown",
    so that the caller sees that the file has one more key. Other packets are ignored.
    """
    try:
        blocks = [base64.b64decode(b"".join(match.split())) for match in ARMOR.findall(data.replace(b"\r\n", b"\n"))]
        if not blocks and data.lstrip().startswith(b"-----"):
            return []
        keys = [body for block in blocks or [data] for kind, body in packets(block) if kind == PUBLIC_KEY]
    except (ValueError, IndexError, binascii.Error):
        return []
    return [
        # OpenPGP defines SHA-1 for the names of version 4 keys; here no security depends on it.
        hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
        if body[:1] == b"\x04" and len(body) < 1 << 16
        else "unknown"
        for body in keys
    ]
