"""What is said of nodes that cannot be made (`tests/cli/test_fleet_commands.py` has the life of those that can)."""

from __future__ import annotations

from tpu_ops.fleet import lifecycle


def test_names_with_numbers_stand_in_their_natural_order():
    assert lifecycle.nearest("v4-12", ["v4-128", "v4-16", "v4-8", "v2-8"]) == "v2-8, v4-8, v4-16, v4-128"
