"""The zones of a project, with their accelerator types and runtime versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.pages import pages

#: Number of entries on each page of a list: the API's maximum.
PAGE_SIZE = 1000


def accelerator_types(tpu: Tpu, project: str, zone: str) -> list[str]:
    """Return the names of a zone's accelerator types, in the API's order."""
    return _names(tpu, "list_accelerator_types", project, zone, lambda page: [e.type_ for e in page.accelerator_types])


def runtime_versions(tpu: Tpu, project: str, zone: str) -> list[str]:
    """Return the names of a zone's runtime versions, in the API's order."""
    return _names(tpu, "list_runtime_versions", project, zone, lambda page: [e.version for e in page.runtime_versions])


def locations(tpu: Tpu, project: str) -> list[str]:
    """Return the zones that a project can use."""
    where, request = zones_in_words(project), {"name": f"projects/{project}", "page_size": PAGE_SIZE}

    def ask(token: str) -> Any:
        return tpu.call("list_locations", {**request, "page_token": token}, where)

    found = pages(ask, where=where, timeout=tpu.timeout)
    return sorted(location.location_id for page in found for location in page.locations)


def _names(tpu: Tpu, method: str, project: str, zone: str, read: Callable[[Any], Iterable[str]]) -> list[str]:
    return [name for page in pages_of(tpu, method, project, zone) for name in read(page)]


def pages_of(tpu: Tpu, method: str, project: str, zone: str) -> Iterator[Any]:
    """Return the pages of a list for a zone, or for all zones, as raw protobuf messages."""
    where, request = (
        zones_in_words(project, zone),
        {"parent": f"projects/{project}/locations/{zone}", "page_size": PAGE_SIZE},
    )

    def ask(token: str) -> Any:
        # Request each page by `call`: the client library's pager would request the next pages without retries.
        return raw(tpu.call(method, {**request, "page_token": token}, where).pages.__next__())

    return pages(ask, where=where, timeout=tpu.timeout)


def zones_in_words(project: str, *zones: str) -> str:
    """Return a project and some of its zones as words for a message."""
    named = ", ".join(zone for zone in zones if zone != "-")
    return f"project {project}{f', zone {named}' if named else ''}"


def raw(answer: Any) -> Any:
    """Return the protobuf message inside an answer of google-cloud-tpu."""
    return type(answer).pb(answer)
