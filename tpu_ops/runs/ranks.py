"""Converts between lists of ranks and their text, as in `--rank 0-2,5`."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_ops.errors import UsageError

#: Maximum number of digits of a rank.
_DIGITS = 9


def parse(text: str, count: int) -> list[int]:
    """Return the ranks that a value of `--rank` means: ``all``, or a list like ``0,3`` or ``0-2``.

    Raises:
        UsageError: The value has another form, or names a rank that the run does not have.
    """
    found: list[int] = []
    for first, end in spans(text):
        if wrong := [number for number in (first, end) if len(number) > _DIGITS or int(number) >= count]:
            fix = f"use 0 to {count - 1}" if count > 1 else "use 0"
            raise UsageError(f"there is no rank {wrong[0][:20]}: the run has {count}", where="--rank", fix=fix)
        found += range(int(first), int(end) + 1)
    return sorted(set(found)) or list(range(count))


def spans(text: str) -> list[tuple[str, str]]:
    """Return the first and last number of each part of a value of `--rank`; an empty list for ``all``.

    Raises:
        UsageError: The value is not a valid list of ranks for any run.
    """
    found: list[tuple[str, str]] = []
    for part in [] if text == "all" else text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"{text!r} is not a list of ranks", where="--rank", fix="use all, or a list like 0,3 or 0-2"
            )
        end = last if dash else first
        if len(end) <= _DIGITS and len(first) <= _DIGITS and int(first) > int(end):
            raise UsageError(f"{part} goes backwards", where="--rank", fix=f"write {end}-{first}")
        found.append((first, end))
    return found


def folded(numbers: Sequence[int]) -> str:
    """Return ranks as text in the form that `parse` accepts, as in ``0-2,5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def titled(text: str) -> str:
    """Return ranks that are text already (see `folded`) with their noun, as in ``rank 3`` and ``ranks 0-2,5``."""
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def named(numbers: Sequence[int]) -> str:
    """Return ranks as text with their noun."""
    return titled(folded(numbers))
