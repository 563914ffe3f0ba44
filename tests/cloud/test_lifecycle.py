"""Errors of nodes that cannot be created (`tests/cli/test_fleet_commands.py` covers the others)."""

from __future__ import annotations

from tpu_ops.cloud import lifecycle


def test_names_with_numbers_stand_in_their_natural_order():
    types = [f"{kind}-{size}" for kind in ("v2", "v3", "v4", "v5p") for size in (8, 16, 32, 64, 128, 256, 512)]
    assert lifecycle.nearest("v4-8192", types, 7).startswith("v4-8, v4-16, v4-32, v4-64, v4-128, v4-256, v4-512 and")
    assert lifecycle.nearest("v4-12", ["v4-128", "v4-16", "v4-8", "v2-8"]) == "v2-8, v4-8, v4-16, v4-128"
