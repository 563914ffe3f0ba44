"""Filter that reads what gpg says about a signing key; no effects, so that its tests are tables."""

from __future__ import annotations

from typing import Any


def primary_fingerprints(listing: str) -> list[str]:
    """Given what `gpg --show-keys --with-colons` printed, return the fingerprint of every primary key, not of subkeys.

    Records are described in GnuPG's doc/DETAILS: `pub` or `sec` opens a key, its first `fpr` holds the fingerprint in
    field 10.
    """
    found = []
    awaited = False
    for line in listing.splitlines():
        fields = line.split(":")
        if fields[0] in ("pub", "sec"):
            awaited = True
        elif fields[0] == "fpr" and awaited and len(fields) > 9:
            found.append(fields[9])
            awaited = False
    return found


class FilterModule:
    """Filters of the role python."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"primary_fingerprints": primary_fingerprints}
