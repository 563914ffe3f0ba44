"""The text of known_hosts: host keys under each worker's alias, and which keys were trusted on first contact."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Container, Mapping

from tpu_ops.cloud import aliases

#: Host keys of one alias: key type -> base64 blob.
Keys = dict[str, str]

#: Comment of a key in known_hosts that the node has not published: the worker presented it on first contact.
TRUSTED_FIRST = "trusted-on-first-contact"

_KEY_TYPE = re.compile(r"^[a-z0-9@.-]{3,64}$")


def valid_key(key_type: str, blob: str) -> bool:
    """Return whether a host key is valid: complete base64 data that begins with the name of the key's type."""
    if not _KEY_TYPE.fullmatch(key_type):
        return False
    try:
        raw = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError):
        return False
    fields = _fields(raw)
    return len(fields) > 1 and fields[0] == key_type.encode()


def _fields(raw: bytes) -> list[bytes]:
    """Return the length-prefixed fields of a key (RFC 4251, section 5); empty if the last field is incomplete."""
    fields, at = [], 0
    while at < len(raw):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "big")
        if begin > len(raw) or at > len(raw):
            return []
        fields.append(raw[begin:at])
    return fields


def fingerprint(blob: str) -> str:
    """Return the fingerprint of a key, as ssh-keygen shows it, given the key's base64 blob."""
    digest = hashlib.sha256(base64.b64decode(blob)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def text_of(keys: Mapping[str, Keys], trusted_first: Container[str] = ()) -> str:
    """Return the text of known_hosts, in a fixed order.

    Args:
        keys: Alias -> host keys.
        trusted_first: Aliases whose keys were trusted on first contact only.
    """
    lines = []
    for alias in sorted(keys):
        comment = f" {TRUSTED_FIRST}" if alias in trusted_first else ""
        lines += [f"{alias} {key_type} {blob}{comment}" for key_type, blob in sorted(keys[alias].items())]
    return "".join(f"{line}\n" for line in lines)


def parse(text: str) -> dict[str, Keys]:
    """Return the keys of each alias in the text of known_hosts; ignore lines that tpu_ops does not write.

    An alias without a node id is ignored too, since all nodes without an id would share the alias.
    """
    keys: dict[str, Keys] = {}
    for line in text.splitlines():
        match line.split():
            case [alias, key_type, blob, *_] if aliases.node_id(alias) and valid_key(key_type, blob):
                keys.setdefault(alias, {})[key_type] = blob
    return keys


def trusted_first(text: str) -> set[str]:
    """Return the aliases in the text of known_hosts whose keys were trusted on first contact only."""
    return {line.split()[0] for line in text.splitlines() if line.split()[3:] == [TRUSTED_FIRST]}
