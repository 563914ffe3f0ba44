"""Filters that know which JAX runs on which Python; no effects, so that their tests are tables."""

from __future__ import annotations

from typing import Any

#: Newest JAX for each Python that newer ones have left behind, as resolved from the package index on 2026-11-20
#: (uv pip compile --python-version 3.8 and so on). Python 3.12 and later have no such end yet.
NEWEST_JAX = {(3, 8): (0, 4, 13), (3, 9): (0, 4, 30), (3, 10): (0, 6, 2), (3, 11): (0, 10, 2)}


def numbers(version: str) -> tuple[int, ...]:
    """Given a version as dotted numbers, return the numbers.

    Raises:
        ValueError: It is something else.
    """
    return tuple(int(part) for part in version.split("."))


def dotted(version: tuple[int, ...]) -> str:
    """Return the version as text."""
    return ".".join(map(str, version))


def jax_python_fault(jax_version: str, python_version: str) -> str:
    """Given a version of JAX and of Python (major.minor), return why they do not go together, or the empty string."""
    try:
        jax = numbers(jax_version)
    except ValueError:
        return f"jax_version '{jax_version}' is not a version such as 0.10.2"
    python = numbers(python_version)
    if python < min(NEWEST_JAX):
        return f"Python {python_version} runs no supported JAX; use Python {dotted(min(NEWEST_JAX))} or later"
    if python not in NEWEST_JAX or jax <= NEWEST_JAX[python]:
        return ""
    able = [version for version, newest in sorted(NEWEST_JAX.items()) if jax <= newest]
    oldest = able[0] if able else (3, max(NEWEST_JAX)[1] + 1)
    return (
        f"JAX {jax_version} needs Python {dotted(oldest)} or later, and this worker's is {python_version}; set"
        f" python_source to deadsnakes or uv with python_version {dotted(oldest)} or later, or jax_version to"
        f" {dotted(NEWEST_JAX[python])} or older"
    )


class FilterModule:
    """Filters of the role jax."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"jax_python_fault": jax_python_fault}
