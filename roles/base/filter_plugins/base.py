"""Filters of the role base; no effects, so that their tests are tables."""

from __future__ import annotations

from typing import Any

#: Generations before v5e. JAX asks for transparent hugepages on v5e and newer (jax/_src/cloud_tpu_init.py, JAX 0.10.2).
EARLIER = ("v2-", "v3-", "v4-")

#: Units that keep the clock, by the name of their package; chrony is what Google's images bring.
CLOCKS = {
    "chrony": "chrony.service",
    "ntpsec": "ntpsec.service",
    "ntp": "ntp.service",
    "openntpd": "openntpd.service",
    "systemd-timesyncd": "systemd-timesyncd.service",
}


def hugepages_wanted(setting: str, accelerator_type: str) -> str:
    """Return what transparent hugepages are to be on a worker of this accelerator type; empty leaves them alone."""
    if setting != "auto":
        return "" if setting == "keep" else setting
    return "always" if accelerator_type and not accelerator_type.startswith(EARLIER) else ""


def clock(units: dict[str, dict[str, str]]) -> dict[str, str]:
    """Given the units that are there, return package and unit of what keeps the clock, or is to keep it."""
    package = next((package for package, unit in CLOCKS.items() if unit in units), "systemd-timesyncd")
    return {"package": package, "unit": CLOCKS[package]}


class FilterModule:
    """Filters of the role base."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"hugepages_wanted": hugepages_wanted, "clock": clock}
