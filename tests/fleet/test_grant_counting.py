"""How nodes are counted against the lines of a grant, whatever lines and nodes there are."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tpu_ops.cloud import accelerators
from tpu_ops.fleet import grant
from tpu_ops.fleet.grant import Grant, Line, Use

ZONES = ("us-central2-b", "europe-west4-b")
TYPES = sorted(one.name for one in accelerators.catalogue())
LINES = st.builds(
    Line,
    st.integers(1, 128),
    st.sampled_from([*accelerators.generations(), *TYPES]),
    st.sampled_from(ZONES),
    st.booleans(),
)
USES = st.builds(
    lambda number, kind, zone, spot, created: Use(f"n-{number}", kind, zone, spot, "READY", created),
    st.integers(0, 10**6),
    st.sampled_from(TYPES),
    st.sampled_from(ZONES),
    st.booleans(),
    st.sampled_from(["", "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"]),
)


def granted(lines: list[Line]) -> Grant:
    return Grant(Path("grant.yml"), dt.datetime(2027, 2, 1, tzinfo=dt.UTC), tuple(lines))


@given(st.lists(LINES, max_size=4), st.lists(USES, max_size=12))
def test_no_line_has_more_than_its_amount_and_each_node_counts_once(lines: list[Line], uses: list[Use]) -> None:
    held, outside = grant.shares(granted(lines), uses)
    key = repr
    assert sorted([use for members in held for use in members] + outside, key=key) == sorted(uses, key=key)
    for line, members in zip(lines, held, strict=True):
        assert all((use.zone, use.spot) == (line.zone, line.spot) for use in members)
        used = sum(accelerators.accelerator_type(use.kind).chips if line.counts_chips else 1 for use in members)
        assert used <= line.amount
        assert grant.free(line, members) == line.amount - used


@given(st.lists(LINES, max_size=4), st.lists(USES, max_size=12))
def test_a_node_is_outside_only_if_no_line_has_room_for_it(lines: list[Line], uses: list[Use]) -> None:
    held, outside = grant.shares(granted(lines), uses)
    # Later nodes only take more room, so a line that has room at the end had it before.
    for use in outside:
        for line, members in zip(lines, held, strict=True):
            fits = line.kind in (use.kind, accelerators.accelerator_type(use.kind).generation)
            if fits and (line.zone, line.spot) == (use.zone, use.spot):
                assert line.cost(use.kind) > grant.free(line, members)
