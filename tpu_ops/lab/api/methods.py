"""Tables of all API methods and the functions that handle them."""

from __future__ import annotations

from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tpu_ops.lab.api import nodes, offers, operations, queued
from tpu_ops.lab.api.service import Handler

#: Method of google.cloud.tpu.<version>.Tpu -> its handler.
TPU: dict[str, Handler] = {
    "ListNodes": nodes.list_nodes,
    "GetNode": nodes.get_node,
    "CreateNode": nodes.create_node,
    "DeleteNode": nodes.delete_node,
    "StopNode": nodes.stop_node,
    "StartNode": nodes.start_node,
    "UpdateNode": nodes.update_node,
    "GetGuestAttributes": nodes.get_guest_attributes,
    "SimulateMaintenanceEvent": nodes.simulate_maintenance_event,
    "PerformMaintenance": nodes.perform_maintenance,
    "ListQueuedResources": queued.list_queued_resources,
    "GetQueuedResource": queued.get_queued_resource,
    "CreateQueuedResource": queued.create_queued_resource,
    "DeleteQueuedResource": queued.delete_queued_resource,
    "ResetQueuedResource": queued.reset_queued_resource,
    "PerformMaintenanceQueuedResource": queued.perform_maintenance_queued_resource,
    "ListAcceleratorTypes": offers.list_accelerator_types,
    "GetAcceleratorType": offers.get_accelerator_type,
    "ListRuntimeVersions": offers.list_runtime_versions,
    "GetRuntimeVersion": offers.get_runtime_version,
    "GenerateServiceIdentity": offers.generate_service_identity,
    "ListReservations": offers.list_reservations,
}

#: gRPC services other than Tpu: full name -> method -> (request class, response class, handler).
MIXINS: dict[str, dict[str, tuple[type, type, Handler]]] = {
    "google.longrunning.Operations": {
        "GetOperation": (operations_pb2.GetOperationRequest, operations_pb2.Operation, operations.get_operation),
        "ListOperations": (
            operations_pb2.ListOperationsRequest,
            operations_pb2.ListOperationsResponse,
            operations.list_operations,
        ),
        "DeleteOperation": (
            operations_pb2.DeleteOperationRequest,
            empty_pb2.Empty,
            operations.delete_operation,
        ),
        "CancelOperation": (
            operations_pb2.CancelOperationRequest,
            empty_pb2.Empty,
            operations.cancel_operation,
        ),
        "WaitOperation": (operations_pb2.WaitOperationRequest, operations_pb2.Operation, operations.wait_operation),
    },
    "google.cloud.location.Locations": {
        "ListLocations": (
            locations_pb2.ListLocationsRequest,
            locations_pb2.ListLocationsResponse,
            offers.list_locations,
        ),
        "GetLocation": (locations_pb2.GetLocationRequest, locations_pb2.Location, offers.get_location),
    },
}

#: Names of all API methods, without the names of their services.
NAMES = frozenset(TPU).union(*MIXINS.values())
