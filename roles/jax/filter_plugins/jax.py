"""Filters that choose and check versions of JAX and PyTorch/XLA; no side effects, so that their tests are tables."""

from __future__ import annotations

import re
from typing import Any

#: Python version -> the newest JAX with wheels for it, resolved from the package index on the date below with `uv pip
#: compile --python-version 3.8 --only-binary jaxlib` and so on. A Python cannot run a newer JAX than its row says,
#: unless its row has the newest JAX of the table. When you change the table, also change the date and the description
#: of jax_version.
NEWEST_JAX: dict[tuple[int, ...], tuple[int, ...]] = {
    (3, 8): (0, 4, 13),
    (3, 9): (0, 4, 30),
    (3, 10): (0, 6, 2),
    (3, 11): (0, 10, 2),
    (3, 12): (0, 12, 0, 1),
    (3, 13): (0, 12, 0, 1),
    (3, 14): (0, 12, 0, 1),
}
NEWEST_JAX_DATE = "2026-11-27"

#: Oldest torch_xla of a range -> oldest and newest Python with wheels of it, resolved on 2026-11-21 in the same way as
#: the table of JAX. Each range ends before the next row; the newest version was 2.9.0.
TORCH_XLA_PYTHONS = {(2, 5): ((3, 9), (3, 11)), (2, 8): ((3, 10), (3, 13))}

#: Packages that PyTorch's build for GPUs needs, as a regular expression: gigabytes that are useless on a TPU VM.
CUDA = "nvidia-.*|cuda-.*|triton"


def numbers(version: str) -> tuple[int, ...]:
    """Given a version such as 0.10.2, return its numbers as a tuple."""
    return tuple(int(part) for part in version.split("."))


def dotted(version: tuple[int, ...]) -> str:
    """Given a version as a tuple of numbers, return it as text."""
    return ".".join(map(str, version))


def jax_or_newest(jax_version: str, python_version: str) -> str:
    """Given jax_version and a Python version (major.minor), return the version of JAX to install.

    The result is empty if neither jax_version nor the table gives a version; `jax_python_fault` then says why.
    """
    return jax_version or dotted(NEWEST_JAX.get(numbers(python_version), ()))


def jax_python_fault(jax_version: str, python_version: str) -> str:
    """Given jax_version and a Python version (major.minor), return why they are incompatible, or the empty string."""
    python = numbers(python_version)
    first, last, newest = min(NEWEST_JAX), max(NEWEST_JAX), max(NEWEST_JAX.values())
    if python < first:
        return f"Python {python_version} runs no supported JAX; use Python {dotted(first)} or later"
    if not jax_version:
        return (
            f"the newest JAX for Python {python_version} is not known (on {NEWEST_JAX_DATE} there was one for Python"
            f" {dotted(first)} to {dotted(last)}); set jax_version, or use Python {dotted(last)}"
        )
    jax = numbers(jax_version)
    if NEWEST_JAX.get(python, newest) == newest or jax <= NEWEST_JAX[python]:
        return ""
    oldest = min(version for version, there in NEWEST_JAX.items() if there == newest or jax <= there)
    return (
        f"JAX {jax_version} needs Python {dotted(oldest)} or later, and this worker's is {python_version}; set"
        f" python_source to deadsnakes or uv with python_version {dotted(oldest)} or later, or jax_version to"
        f" {dotted(NEWEST_JAX[python])} or older"
    )


def torch_faults(torch_xla_version: str, torch_version: str, python_version: str, chosen_by: str) -> list[str]:
    """Given versions of torch_xla, torch and Python (major.minor), return the faults that make them incompatible.

    The last argument is the name of the variable that sets the Python version.
    """
    faults = []
    for name, version in (("jax_torch_xla_version", torch_xla_version), ("jax_torch_version", torch_version)):
        if not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+(\+[a-z0-9.]+)?", version):
            faults.append(f"{name}: '{version}' is not a version such as 2.9.0")
    if faults:
        return faults
    xla, torch = (numbers(version.partition("+")[0])[:2] for version in (torch_xla_version, torch_version))
    if xla != torch:
        faults.append(
            f"jax_torch_version: {torch_version} is not the {dotted(xla)} that torch_xla {torch_xla_version} needs"
        )
    rows = [pythons for first, pythons in sorted(TORCH_XLA_PYTHONS.items()) if first <= xla]
    if not rows:
        oldest = dotted(min(TORCH_XLA_PYTHONS))
        return [*faults, f"jax_torch_xla_version: {torch_xla_version} is older than {oldest}, the first known version"]
    first, last = rows[-1]
    if not first <= numbers(python_version) <= last:
        faults.append(
            f"jax_torch_xla_version, {chosen_by}: {torch_xla_version} runs on Python {dotted(first)} to {dotted(last)},"
            f" and this worker's is {python_version}; set python_source to deadsnakes or uv with python_version"
            f" {dotted(last)}"
        )
    return faults


def jax_faults(values: dict[str, Any], python_version: str, python_source: str) -> list[str]:
    """Given the role's variables, and version and source of the worker's Python, return why they are incompatible."""
    # The message names this variable as well as the version's, so that the user can change either.
    chosen_by = "python_source" if python_source == "distribution" else "python_version"
    if values["jax_framework"] == "torch_xla":
        return torch_faults(values["jax_torch_xla_version"], values["jax_torch_version"], python_version, chosen_by)
    if values["jax_version"] and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", values["jax_version"]):
        return [f"jax_version: '{values['jax_version']}' is not a version such as 0.12.0.1"]
    fault = jax_python_fault(values["jax_version"], python_version)
    return [f"jax_version, {chosen_by}: {fault}"] if fault else []


def jax_environment(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Given the role's variables, return a list with one entry, its environment in the form of python_environments."""
    extra = "[tpu]" if values["jax_platform"] == "tpu" else ""
    links = list(values["jax_find_links"])
    if values["jax_framework"] == "torch_xla":
        version, torch = values["jax_torch_xla_version"], values["jax_torch_version"]
        requirements = [f"torch_xla{extra}=={version}", f"torch=={torch}"]
        links += values["jax_torch_find_links"]
        module, package = "torch_xla", "torch_xla"
    else:
        version = values["jax_version"]
        # If no version is known, `jax_faults` ends the role, but until then this list must be valid.
        requirements = [f"jax{extra}=={version}" if version else f"jax{extra}"]
        module, package = "jax, jaxlib", "jax"
    return [
        {
            "name": "jax",
            "variable": "jax_venv",
            "path": values["jax_venv"],
            "owner": values["jax_venv_owner"],
            "requirements": [*requirements, *values["jax_packages"]],
            "constraints": list(values["jax_constraints"]),
            "find_links": links,
            "lock": values["jax_lock"],
            "exact": values["jax_exact"],
            "forbidden": CUDA if values["jax_framework"] == "torch_xla" else "",
            "proof": f"import {module}; found = {package}.__version__.partition('+')[0];"
            f" assert found == '{version}', 'it is version ' + found",
        }
    ]


class FilterModule:
    """Filters of the role jax."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"jax_faults": jax_faults, "jax_environment": jax_environment, "jax_or_newest": jax_or_newest}
