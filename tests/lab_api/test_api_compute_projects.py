"""A project's metadata and firewall rules over REST; `test_api_gcloud.py` has real gcloud use them."""

from __future__ import annotations

from typing import Any

from tests.support.lab_api import LabApi

PROJECT = "compute/v1/projects/lab"
RULES = f"{PROJECT}/global/firewalls"
SSH = {"name": "ssh", "allowed": [{"IPProtocol": "TCP", "ports": ["22"]}], "sourceRanges": ["203.0.113.7/32"]}


def reason(answer: tuple[int, Any]) -> tuple[int, str]:
    """Return an error's HTTP status and reason."""
    return answer[0], answer[1]["error"]["errors"][0]["reason"]


def test_metadata_and_rules_outlive_the_process(lab_api: LabApi) -> None:
    assert lab_api.call("POST", RULES, SSH)[1]["status"] == "DONE"
    fingerprint = lab_api.call("GET", PROJECT)[1]["commonInstanceMetadata"]["fingerprint"]
    change = {"items": [{"key": "a", "value": "b"}], "fingerprint": fingerprint}
    assert lab_api.call("POST", f"{PROJECT}/setCommonInstanceMetadata", change)[0] == 200
    before = [lab_api.call("GET", path)[1] for path in (PROJECT, f"{RULES}/ssh")]
    lab_api.restart()
    after = [lab_api.call("GET", path)[1] for path in (PROJECT, f"{RULES}/ssh")]
    for old, new in zip(before, after, strict=True):
        for one in (old, new):
            one.pop("selfLink")
            one.pop("network", None)
            one.pop("id")
        assert old == new
    assert reason(lab_api.call("POST", f"{PROJECT}/setCommonInstanceMetadata", change)) == (412, "conditionNotMet")


def test_a_repeated_request_makes_its_change_once(lab_api: LabApi) -> None:
    first, second = (lab_api.call("POST", f"{RULES}?requestId=one", SSH) for _ in range(2))
    assert (first[0], first) == (200, second)
    assert reason(lab_api.call("POST", f"{RULES}?requestId=other", SSH)) == (409, "alreadyExists")
    path = first[1]["selfLink"].removeprefix(lab_api.rest)
    assert lab_api.call("GET", path) == first


def test_a_patch_keeps_what_it_does_not_name_and_an_update_does_not(lab_api: LabApi) -> None:
    lab_api.call("POST", RULES, SSH | {"sourceTags": ["web"], "description": "mine"})
    lab_api.call("PATCH", f"{RULES}/ssh", {"sourceRanges": ["10.0.0.0/8"]})
    patched = lab_api.call("GET", f"{RULES}/ssh")[1]
    assert (patched["sourceRanges"], patched["sourceTags"], patched["description"]) == (["10.0.0.0/8"], ["web"], "mine")
    lab_api.call("PUT", f"{RULES}/ssh", SSH)
    updated = lab_api.call("GET", f"{RULES}/ssh")[1]
    assert (updated["sourceRanges"], updated.keys() & {"sourceTags", "description"}) == (SSH["sourceRanges"], set())
    assert lab_api.call("DELETE", f"{RULES}/ssh")[0] == 200
    assert reason(lab_api.call("GET", f"{RULES}/ssh")) == (404, "notFound")


def test_a_rule_without_sources_lets_in_everybody(lab_api: LabApi) -> None:
    lab_api.call("POST", RULES, {"name": "open", "allowed": [{"IPProtocol": "tcp"}]})
    (rule,) = lab_api.call("GET", RULES)[1]["items"]
    assert (rule["sourceRanges"], rule["priority"], rule["direction"]) == (["0.0.0.0/0"], 1000, "INGRESS")
    assert rule["network"].endswith("/projects/lab/global/networks/default")
