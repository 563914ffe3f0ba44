"""Checks the JSON of the requests that only the lab offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_ops.lab.api.catalogue import ZONES
from tpu_ops.lab.api.errors import invalid
from tpu_ops.lab.api.wire import Json

#: Name of each field -> the types that its value can have.
Kinds = Mapping[str, tuple[type, ...]]


def check_fields(body: Any, kinds: Kinds, what: str) -> Json:
    """Return a JSON object that has no other fields than these, with values of these types.

    Args:
        body: The JSON.
        kinds: The fields.
        what: What the object describes, for messages.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    if not isinstance(body, dict):
        raise invalid(f"{what}: {body!r} is not a JSON object")
    for key, value in body.items():
        allowed = kinds.get(key)
        if allowed is None:
            raise invalid(f"{key}: {what} has no such field; the fields are {', '.join(kinds)}")
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise invalid(f"{key}: {value!r} is not of type {' or '.join(kind.__name__ for kind in allowed)}")
    return body


def check_zone(zone: str, *more: str) -> str:
    """Return a zone of the lab, or one of the further values.

    Raises:
        ApiError: INVALID_ARGUMENT; it is neither.
    """
    if zone not in (*more, *ZONES):
        raise invalid(f"zone: {zone!r} is not a zone of the lab; the zones are {', '.join(sorted(ZONES))}")
    return zone
