"""Handlers that list what the lab's cloud offers: locations, accelerator types, runtime versions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.cloud.location import locations_pb2

from tpu_ops.lab.api import wire
from tpu_ops.lab.api.catalogue import RUNTIME_VERSIONS, ZONES, types_of
from tpu_ops.lab.api.errors import ApiError, Code, invalid, not_found
from tpu_ops.lab.api.names import Location
from tpu_ops.lab.api.service import Service, paged
from tpu_ops.lab.api.wire import Json, Message, Page


@dataclass(frozen=True)
class Offer:
    """A location, accelerator type or runtime version that the lab's cloud offers."""

    name: str
    kind: str
    body: Json

    def pb(self, api: str) -> Message:
        """Return the offer as a protobuf message of one API version."""
        into = locations_pb2.Location() if self.kind == "Location" else wire.message(api, self.kind)()
        return wire.parse({"name": self.name, **self.body}, into)

    def text(self, api: str) -> str:
        """Return the offer as JSON text of one API version."""
        return wire.json_text(self.pb(api))


def _accelerator_types(location: Location) -> list[Offer]:
    return [
        Offer(
            location.child("acceleratorTypes", name),
            "AcceleratorType",
            {"type": name, "acceleratorConfigs": [{"type": entry.api_version, "topology": entry.topology}]},
        )
        for name, entry in sorted(types_of(location.zone).items())
    ]


def _runtime_versions(location: Location) -> list[Offer]:
    return [
        Offer(location.child("runtimeVersions", version), "RuntimeVersion", {"version": version})
        for version in RUNTIME_VERSIONS
    ]


def _locations(project: str) -> list[Offer]:
    return [
        Offer(
            f"projects/{project}/locations/{zone}",
            "Location",
            {"locationId": zone, "labels": {"cloud.googleapis.com/region": zone.rsplit("-", 1)[0]}},
        )
        for zone in sorted(ZONES)
    ]


def _after(offers: list[Offer]) -> Callable[[str], Iterator[Offer]]:
    return lambda last: (offer for offer in sorted(offers, key=lambda offer: offer.name) if offer.name > last)


def _list(service: Service, api: str, request: Message, kind: str, field: str) -> Page:
    if request.filter or request.order_by:
        raise ApiError(Code.UNIMPLEMENTED, "filter and order_by: the lab neither filters nor orders this list")
    location = service.location(request.parent)
    offers = _accelerator_types(location) if kind == "AcceleratorType" else _runtime_versions(location)
    return paged(api, request, _after(offers), response=f"List{kind}sResponse", field=field)


def _get(service: Service, api: str, name: str, collection: str) -> Message:
    location, _ = service.resource(name, collection)
    offers = _accelerator_types(location) if collection == "acceleratorTypes" else _runtime_versions(location)
    for offer in offers:
        if offer.name == name:
            return offer.pb(api)
    raise not_found(name)


async def list_accelerator_types(service: Service, api: str, request: Message) -> Page:
    """Handle ListAcceleratorTypes."""
    return _list(service, api, request, "AcceleratorType", "accelerator_types")


async def get_accelerator_type(service: Service, api: str, request: Message) -> Message:
    """Handle GetAcceleratorType."""
    return _get(service, api, request.name, "acceleratorTypes")


async def list_runtime_versions(service: Service, api: str, request: Message) -> Page:
    """Handle ListRuntimeVersions."""
    return _list(service, api, request, "RuntimeVersion", "runtime_versions")


async def get_runtime_version(service: Service, api: str, request: Message) -> Message:
    """Handle GetRuntimeVersion."""
    return _get(service, api, request.name, "runtimeVersions")


async def generate_service_identity(service: Service, api: str, request: Message) -> Message:
    """Handle GenerateServiceIdentity: return an invented email address in Google's form."""
    location = service.location(request.parent)
    number = int(hashlib.sha256(location.project.encode()).hexdigest()[:10], 16)
    response = wire.message(api, "GenerateServiceIdentityResponse")()
    response.identity.email = f"service-{number}@cloud-tpu.iam.gserviceaccount.com"
    return response


async def list_reservations(service: Service, api: str, request: Message) -> Message:
    """Handle ListReservations (v2alpha1): return an empty list, since the lab has no reservations."""
    service.location(request.parent, wildcard=True)
    return wire.message(api, "ListReservationsResponse")()


async def list_locations(service: Service, api: str, request: Message) -> Message:
    """Handle google.cloud.location.Locations.ListLocations."""
    if request.filter:
        raise ApiError(Code.UNIMPLEMENTED, "filter: the lab does not filter locations")
    head, _, project = request.name.partition("/")
    if head != "projects" or not project or "/" in project:
        raise invalid(f"name: {request.name!r} does not have the form projects/PROJECT")
    service.check_project(project)
    page = paged(api, request, _after(_locations(project)), parent=request.name)
    return locations_pb2.ListLocationsResponse(
        locations=[offer.pb(api) for offer in page.items], next_page_token=page.token
    )


async def get_location(service: Service, api: str, request: Message) -> Message:
    """Handle google.cloud.location.Locations.GetLocation."""
    location = service.location(request.name)
    return next(offer.pb(api) for offer in _locations(location.project) if offer.name == location.name)
