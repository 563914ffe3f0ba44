"""The values that the spec of a run may have, and its digest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.specs import good, good_net
from tpu_ops.protocol import spec
from tpu_ops.protocol.wire import Refused


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "../x"},
        {"run_id": "Upper"},
        {"run_id": "a b"},
        {"run_id": "x\n"},
        {"run_id": "x.json"},
        {"rank": 4},
        {"rank": True},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"argv": [1]},
        {"argv": "ls"},
        {"env": {"A=B": "1"}},
        {"env": {"A": None}},
        {"secrets": {"../x": "1"}},
        {"secrets": {"A": 1}},
        {"secrets": {"A": "a\0b"}},
        {"secrets": {"A": "x" * (spec.MAX_SECRET + 1)}},
        {"grace_stop": -1},
        {"grace_stop": float("nan")},
        {"lease": 4},
        {"barrier": float("inf")},
        {"exit_skew": "1"},
        {"workers": ["pod-w0"]},
        {"workers": [0, 1, 2, 3]},
        {"net": None},
        {"world_size": 1, "rank": 0, "workers": ["pod-w0"]},
        {"net": good_net(key="0f")},
        {"net": good_net(address="pod-w1")},
        {"net": good_net(address="::")},
        {"net": good_net(hub="224.0.0.1")},
        {"net": good_net(port=0)},
        {"net": good_net(port=True)},
        {"net": good_net(uid=0)},
        {"rank": 0},
        {"slice": 1},
        {"slices": 0},
        {"slices": 2, "slice": 1},
        {"slices": 3},
        {"slices": 8},
        {"uid": 0},
        {"stall": None},
        {"stall": {"after": 900, "grace": 0}},
        {"stall": {"after": 900, "grace": 0, "on": "kill"}},
        {"stall": {"after": -1, "grace": 0, "on": "tell"}},
        {"stall": {"after": float("nan"), "grace": 0, "on": "tell"}},
        {"stall": {"after": True, "grace": 0, "on": "tell"}},
    ],
)
def test_a_spec_that_cannot_be_carried_out_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        spec.check(good(**changes))


def test_a_spec_without_rules_for_stalls_has_the_defaults() -> None:
    assert spec.stall_of(spec.check(good())) == {"after": 900, "grace": 1800, "on": "tell", "chosen": False}
    chosen = {"after": 0, "grace": 5.0, "on": "stop"}
    assert spec.stall_of(spec.check(good(stall=chosen))) == {**chosen, "chosen": True}


def test_all_ranks_of_a_run_have_one_digest() -> None:
    assert spec.digest(good()) == spec.digest(good(rank=2, worker="pod-w2", net=None))
    assert spec.digest(good()) != spec.digest(good(argv=["other"]))


def test_the_digest_does_not_depend_on_the_value_of_a_secret() -> None:
    other = good(secrets={"S": "other"})
    assert spec.digest(good()) == spec.digest(other) != spec.digest(good(secrets={}))
