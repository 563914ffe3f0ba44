"""A project's quotas for TPUs, from the Cloud Quotas API.

Source of paths and fields: the API's reference for ``projects.locations.services.quotaInfos``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.compute import Compute, Page
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.pages import pages

_SERVICE = "cloudquotas.googleapis.com"
#: The API's value for a quota without a limit.
_NO_LIMIT = "-1"


class Quota(NamedTuple):
    """One quota in one place.

    Attributes:
        name: Google's id of the quota, as in ``TPUV6EPreemptiblePerProjectPerZoneForTPUAPI``.
        place: A zone or region, or ``global``.
        value: How much is allowed, as text; ``no limit`` if there is none.
    """

    name: str
    place: str
    value: str


def of_project(project: str, auth: Auth, *, timeout: float) -> list[Quota]:
    """Return the quotas of a project for TPUs whose limit is not 0.

    Raises:
        CloudError: There are no credentials.
        ApiError: The API refused the request, as when it is not enabled in the project, or did not answer.
    """
    from google.auth.transport.requests import AuthorizedSession

    with AuthorizedSession(credentials(auth)) as session:
        service = Compute(session, f"https://{_SERVICE}/v1/", _SERVICE, timeout)
        path = f"projects/{project}/locations/global/services/tpu.googleapis.com/quotaInfos"

        def ask(query: Mapping[str, str]) -> Json:
            return service.call("GET", path, f"quotas of project {project}", query=query)

        return read(ask, project, timeout)


def read(ask: Callable[[Mapping[str, str]], Json], project: str, timeout: float) -> list[Quota]:
    """Return the quotas whose limit is not 0, sorted.

    Args:
        ask: Requests one page, given the parameters of the query.
        project: The project, for errors.
        timeout: Seconds for one page.

    Raises:
        ApiError: The list has an unexpected form, or does not end.
    """
    where = f"quotas of project {project}"

    def page(token: str) -> Page:
        body = ask({"pageSize": "500", **({"pageToken": token} if token else {})})
        return Page(body, str(body.get("nextPageToken") or ""))

    try:
        found = [quota for each in pages(page, where=where, timeout=timeout) for quota in _of_page(each.body)]
    except (AttributeError, KeyError, TypeError) as exc:
        raise ApiError(f"the answer has an unexpected form: {exc!r}", status="INTERNAL", where=where) from exc
    return sorted(set(found))


def _of_page(body: Json) -> Iterator[Quota]:
    for info in body.get("quotaInfos", ()):
        for part in info.get("dimensionsInfos", ()):
            value = str(part.get("details", {}).get("value", "0"))
            given = part.get("dimensions", {})
            # A value without a zone or region applies to all places that have no value of their own.
            places = [given[key] for key in ("zone", "region") if key in given] or part.get("applicableLocations", ())
            if value != "0":
                yield from (
                    Quota(info["quotaId"], place, "no limit" if value == _NO_LIMIT else value) for place in places
                )
