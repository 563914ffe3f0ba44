"""Answers of the Compute Engine API that its stand-in does not give, and the credentials of requests."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter

from tpu_ops.cloud import client, compute, disks
from tpu_ops.cloud.auth import Auth
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.disks import Disk

TOKEN = Auth("accesstoken", access_token="secret-token")
PARTLY = {
    "items": {
        "regions/us-central1": {
            "disks": [
                {
                    "name": "r",
                    "region": "https://compute.example/regions/us-central1",
                    "sizeGb": "200",
                    "type": "https://compute.example/regions/us-central1/diskTypes/pd-ssd",
                    "status": "READY",
                }
            ]
        },
        "zones/us-east1-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}},
        "zones/us-east1-b": {"warning": {"code": "UNREACHABLE"}},
    },
    "unreachables": ["zones/us-east1-c"],
}


class Service(BaseAdapter):
    """Plays the service: gives its answers (HTTP status, body) one after the other, the last one again and again."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        super().__init__()
        self.answers, self.requests = list(answers), list[PreparedRequest]()

    def send(self, request: PreparedRequest, *_: Any, **__: Any) -> Response:
        self.requests.append(request)
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer = Response()
        answer.status_code, answer.request, answer.url = status, request, str(request.url)
        answer.raw = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        return answer

    def close(self) -> None:
        pass


def listed(*answers: tuple[int, Any]) -> tuple[Service, Any]:
    """Return the service after a list of disks, and the list or its error."""
    service = Service(*answers)
    with compute.connect("", 2.0, TOKEN) as found:
        found.session.mount("https://", service)
        try:
            return service, disks.list_disks(found, "p")
        except ApiError as exc:
            return service, exc


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Retries come soon."""
    monkeypatch.setattr(client, "FIRST_DELAY", 0.02)


def test_requests_to_the_real_service_have_the_credentials():
    service, _ = listed((200, {}))
    (request,) = service.requests
    assert str(request.url).startswith("https://compute.googleapis.com/compute/v1/projects/p/aggregated/disks?")
    assert request.headers["Authorization"] == "Bearer secret-token"


def test_a_zone_that_does_not_answer_is_named_and_hides_no_other():
    _, (found, warnings) = listed((200, PARTLY))
    assert found == [Disk("r", "p", "us-central1", 200, "pd-ssd", regional=True)]
    assert [word for text in warnings for word in text.split() if word.startswith("zones/")] == [
        "zones/us-east1-b:",
        "zones/us-east1-c:",
    ]


def error(code: int, reason: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": f"because of {reason}", "errors": [{"reason": reason}]}}


@pytest.mark.parametrize(
    ("status", "body", "expected", "words"),
    [
        (403, error(403, "forbidden"), "PERMISSION_DENIED", "Compute Viewer"),
        (403, error(403, "quotaExceeded"), "RESOURCE_EXHAUSTED", "quota"),
        (400, error(400, "invalid"), "INVALID_ARGUMENT", "because of invalid"),
        (418, error(418, "tea"), "UNKNOWN", "because of tea"),
        (500, b"<html>", "INTERNAL", "HTTP status 500, and no JSON"),
        (200, b"[]", "UNKNOWN", "HTTP status 200, and no JSON"),
        (401, error(401, "expired"), "UNAUTHENTICATED", "gcloud auth application-default login"),
    ],
)
def test_a_refusal_has_the_status_and_the_fix_of_its_cause(status, body, expected, words):
    _, refusal = listed((status, body))
    assert refusal.status == expected
    assert words in str(refusal)
    assert "secret-token" not in str(refusal)


def test_a_busy_service_is_asked_again():
    service, (found, _) = listed((503, b""), (429, error(429, "rateLimitExceeded")), (200, {}))
    assert (len(service.requests), found) == (3, [])
