"""The sources that `tpu_ops firewall` accepts, and differences between rules."""

from __future__ import annotations

import pytest

from tpu_ops.cloud import firewalls
from tpu_ops.errors import UsageError


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["203.0.113.7"], ["203.0.113.7/32"]),
        (["203.0.113.7/32", "203.0.113.7", "198.51.100.0/24"], ["203.0.113.7/32", "198.51.100.0/24"]),
        (["2001:DB8::/32"], ["2001:db8::/32"]),
        (["0.0.0.0/0"], ["0.0.0.0/0"]),
        (["::/0"], ["::/0"]),
    ],
)
def test_ranges_that_are_accepted(texts, found):
    assert firewalls.sources(texts, "--source") == found


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["me"], "is not a range"),
        (["203.0.113.7/24"], "did you mean 203.0.113.0/24?"),
        (["203.0.113.7/0"], "write addresses as CIDR"),
        (["0/0"], "is not a range"),
        (["0::/0"], "if you mean all addresses, write ::/0"),
        (["0.0.0.0/1", "128.0.0.0/1"], "if you mean all addresses, write 0.0.0.0/0"),
        (["203.0.113.7", "::1"], "one rule cannot have IPv4 and IPv6"),
    ],
)
def test_ranges_that_are_refused(texts, words):
    with pytest.raises(UsageError) as refused:
        firewalls.sources(texts, "--source")
    assert words in str(refused.value)


RULE = firewalls.rule("ssh", "lab", "default", ["198.51.100.0/24", "203.0.113.7/32"])


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({}, {}),
        ({"network": "https://x/compute/v1/projects/lab/global/networks/default", "sourceTags": []}, {}),
        ({"sourceRanges": ["203.0.113.7", "198.51.100.0/24"], "description": "mine"}, {}),
        ({"sourceRanges": ["0.0.0.0/0"]}, {"sourceRanges": ("0.0.0.0/0", "198.51.100.0/24, 203.0.113.7/32")}),
        ({"allowed": [{"IPProtocol": "tcp"}]}, {"allowed": ("tcp:all", "tcp:22")}),
        ({"sourceTags": ["web"]}, {"sourceTags": ("web", "none")}),
        ({"disabled": True}, {"disabled": ("True", "False")}),
        ({"network": "global/networks/other"}, {"network": ("other", "default")}),
    ],
)
def test_differences_are_in_what_a_rule_lets_in(changed, fields):
    assert firewalls.differences(RULE | changed, RULE) == fields


@pytest.mark.parametrize("network", ["default", "n" * 63, f"{'n' * 49}-n"])
@pytest.mark.parametrize("source", ["203.0.113.7/32", "2001:db8::/32"])
def test_a_name_is_never_longer_than_the_api_allows(network, source):
    name = firewalls.rule("mosh", "lab", network, [source])["name"]
    assert name.startswith("tpu-ops-mosh-")
    assert name.endswith("-v6") is (":" in source)
    assert len(name) <= 63
    assert not name.endswith("-")
