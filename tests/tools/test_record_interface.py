"""The recorder keeps the form of the commands' output, without values that change between runs."""

from __future__ import annotations

import pytest

from tools.record_interface import form


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"since": 1.5, "node": "pod"}, {"node": "str", "since": "float"}),
        ([{"a": 1}, {"a": 2}], [{"a": "int"}]),
        ([{"a": None}, {"a": 2}], [{"a": "NoneType"}, {"a": "int"}]),
        ({"workers": {"pod-w0": {"copied": []}, "pod-w1": {"copied": []}}}, {"workers": [{"copied": []}]}),
    ],
)
def test_the_form_of_json_is_its_keys_and_types(value, expected):
    assert form(value) == expected


def test_a_key_that_is_gone_changes_the_form():
    assert form([{"a": 1, "b": 2}]) != form([{"a": 1}])
