"""Checks of values that other machines or the programs of users have sent."""

from __future__ import annotations

import math

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; JSON can also have NaN, infinity and integers of any size."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # the integer is too large for a float
        return False
