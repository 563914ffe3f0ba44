"""The list of quotas of a project, in the form of the API's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tpu_ops.cloud import quotas
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.quotas import Quota

SPOT, V4 = "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI", "TPUV4PodPerProjectPerZoneForTPUAPI"
PAGES: dict[str, dict[str, Any]] = {
    "": {
        "quotaInfos": [
            {
                "quotaId": SPOT,
                "dimensionsInfos": [
                    {"dimensions": {"zone": "us-east1-d"}, "details": {"value": "64"}},
                    {"details": {"value": "0"}, "applicableLocations": ["us-east5-a", "us-east5-b"]},
                ],
            }
        ],
        "nextPageToken": "2",
    },
    "2": {
        "quotaInfos": [
            {
                "quotaId": V4,
                "dimensionsInfos": [{"details": {"value": "-1"}, "applicableLocations": ["us-central2-b"]}],
            },
            {"quotaId": "ReadsPerMinute", "dimensionsInfos": [{"details": {}}]},
        ]
    },
}


def test_every_page_counts_and_what_allows_nothing_is_left_out() -> None:
    asked: list[Mapping[str, str]] = []

    def ask(query: Mapping[str, str]) -> dict[str, Any]:
        asked.append(query)
        return PAGES[query.get("pageToken", "")]

    assert quotas.read(ask, "lab", 1.0) == [Quota(V4, "us-central2-b", "no limit"), Quota(SPOT, "us-east1-d", "64")]
    assert asked == [{"pageSize": "500"}, {"pageSize": "500", "pageToken": "2"}]


def test_an_answer_in_another_form_is_an_error_of_the_api() -> None:
    with pytest.raises(ApiError, match="the answer has an unexpected form"):
        quotas.read(lambda _: {"quotaInfos": ["x"]}, "lab", 1.0)
