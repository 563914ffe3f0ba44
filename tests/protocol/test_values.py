"""Numbers in what other machines send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tpu_ops.protocol.values import is_number


@pytest.mark.parametrize("value", [0, -1, 2**64, 0.0, -1.5, 1e308])
def test_finite_numbers(value: Any) -> None:
    assert is_number(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", "null", '"1"', "[1]", "{}"]
)
def test_values_that_are_no_finite_numbers(text: str) -> None:
    assert not is_number(json.loads(text))
