"""The text of known_hosts: host keys under each worker's alias, and which of them were trusted on first contact."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Container, Mapping

from tpu_ops.cloud import aliases

#: Host keys of one alias: key type -> base64 blob.
Keys = dict[str, str]

#: Comment of a key in known_hosts that was not published but accepted from the worker itself.
TRUSTED_FIRST = "trusted-on-first-contact"

_KEY_TYPE = re.compile(r"^[a-z0-9@.-]{3,64}$")


def valid_key(key_type: str, blob: str) -> bool:
    """Return whether a host key is one: a blob of base64 that begins with the name of its type and is whole."""
    if not _KEY_TYPE.fullmatch(key_type):
        return False
    try:
        raw = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError):
        return False
    fields = _fields(raw)
    return len(fields) > 1 and fields[0] == key_type.encode()


def _fields(raw: bytes) -> list[bytes]:
    """Return the fields that a key consists of, each behind its length (RFC 4251, section 5); none where one is cut."""
    fields, at = [], 0
    while at < len(raw):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "big")
        if begin > len(raw) or at > len(raw):
            return []
        fields.append(raw[begin:at])
    return fields


def fingerprint(blob: str) -> str:
    """Given a key's base64 blob, return its fingerprint as ssh-keygen shows it."""
    digest = hashlib.sha256(base64.b64decode(blob)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def text_of(keys: Mapping[str, Keys], trusted_first: Container[str] = ()) -> str:
    """Given the keys of each alias, return the text of known_hosts, in a fixed order.

    Args:
        keys: Of each alias.
        trusted_first: Aliases whose keys nothing but the first contact vouches for.
    """
    lines = []
    for alias in sorted(keys):
        comment = f" {TRUSTED_FIRST}" if alias in trusted_first else ""
        lines += [f"{alias} {key_type} {blob}{comment}" for key_type, blob in sorted(keys[alias].items())]
    return "".join(f"{line}\n" for line in lines)


def parse(text: str) -> dict[str, Keys]:
    """Return the keys of each alias; lines that this program does not write are passed over.

    So are those of an alias without a node's id: all nodes that have none would share it.
    """
    keys: dict[str, Keys] = {}
    for line in text.splitlines():
        match line.split():
            case [alias, key_type, blob, *_] if aliases.node_id(alias) and valid_key(key_type, blob):
                keys.setdefault(alias, {})[key_type] = blob
    return keys


def trusted_first(text: str) -> set[str]:
    """Given the text of known_hosts, return the aliases whose keys nothing but the first contact vouches for."""
    return {line.split()[0] for line in text.splitlines() if line.split()[3:] == [TRUSTED_FIRST]}
