"""List prices of Cloud TPU for each chip and hour, from the file prices.toml beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("prices.toml")

#: Accelerator type or generation -> region -> US dollars for each chip and hour.
Table = Mapping[str, Mapping[str, float]]


class Prices(NamedTuple):
    """List prices in US dollars, without discounts.

    Attributes:
        date: When the prices were valid, as in ``July 2026``.
        source: Where they are from.
        tables: The prices of each tier, ``on-demand`` and ``spot``.
    """

    date: str
    source: str
    tables: Mapping[str, Table]

    def of(self, accelerator_type: str, region: str, tier: str) -> float | None:
        """Return the price of one chip for one hour; None if it is unknown.

        Args:
            accelerator_type: As in ``v4-32``. A price for the type itself precedes the price of its generation.
            region: As in ``us-central2``.
            tier: ``on-demand``, ``spot`` or ``reserved``; what a reservation costs is in its contract.
        """
        table = self.tables.get(tier, {})
        generation = accelerator_type.partition("-")[0]
        return table.get(accelerator_type, table.get(generation, {})).get(region)


def read() -> Prices:
    """Return the prices in the file."""
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return Prices(found["date"], found["source"], {tier: found[tier] for tier in ("on-demand", "spot")})
