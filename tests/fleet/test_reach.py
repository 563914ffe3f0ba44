"""How each worker is reached."""

from __future__ import annotations

import pytest

from tests.support.nodes import node
from tpu_ops.fleet import reach
from tpu_ops.fleet.model import workers_of


@pytest.mark.parametrize(
    ("connect_with", "address"),
    [(("external",), "34.0.1.0"), (("internal", "external"), "10.0.1.0"), (("external", "internal"), "34.0.1.0")],
)
def test_the_preferred_address_is_taken(connect_with, address):
    assert reach.address(workers_of([node()])[0], connect_with) == address


def test_the_other_address_is_taken_where_the_preferred_is_missing():
    worker = workers_of([node(external_ips=("", ""))])[0]
    assert reach.address(worker, ("external", "internal")) == "10.0.1.0"
    assert reach.address(worker, ("external",)) == ""
