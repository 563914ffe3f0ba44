"""Long-running operations: how they are started, executed (also after a restart), listed, awaited and cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tpu_ops.lab.api import wire
from tpu_ops.lab.api.errors import ApiError, Code, precondition
from tpu_ops.lab.api.names import split
from tpu_ops.lab.api.records import OperationRecord, Record
from tpu_ops.lab.api.service import Service, paged
from tpu_ops.lab.api.wire import Json, Message
from tpu_ops.lab.backend import BackendError

#: If there are more operations than KEEP_COUNT, those that ended more than KEEP_SECONDS ago are removed.
KEEP_COUNT = 1000
KEEP_SECONDS = 600.0

#: Verb of an operation -> the function that executes the operation and returns the JSON of its result. After a restart,
#: the function of an unfinished operation is called again from the beginning.
Effect = Callable[[Service, OperationRecord], Awaitable[Json]]
EFFECTS: dict[str, Effect] = {}

#: A function that reverts the changes of a request whose operation could not be stored.
Undo = Callable[[], None]

#: Verbs of the operations that have no minimum duration.
AT_ONCE = ("preempt",)

EMPTY: Json = {"@type": "type.googleapis.com/google.protobuf.Empty"}


def effect(verb: str) -> Callable[[Effect], Effect]:
    """Return a decorator that registers the function for operations with this verb."""

    def register(function: Effect) -> Effect:
        EFFECTS[verb] = function
        return function

    return register


def result(api: str, kind: str, record: Record) -> Json:
    """Return a resource as the JSON of an operation's result, in one API version."""
    return {"@type": f"type.googleapis.com/google.cloud.tpu.{api}.{kind}", **wire.to_json(record.pb(api))}


async def start(
    service: Service, api: str, verb: str, target: str, *, args: Json, undo: Undo, request_id: str = ""
) -> Message:
    """Start an operation, and return it once it is in the state file.

    Args:
        service: The API's service.
        api: API version.
        verb: The verb of the operation.
        target: Full name of the resource that the operation changes.
        args: Values that the function of the operation needs to continue after a restart.
        undo: Reverts the changes that the request has made so far.
        request_id: The client's idempotency key.

    Raises:
        ApiError: RESOURCE_EXHAUSTED; the operation cannot be stored, and all changes were reverted.
    """
    _forget_old(service)
    name = service.state.new_operation_name(split(target)[0])
    record = OperationRecord(name, api, verb, target, time.time(), args=args, request_id=request_id)
    service.state.operations.add(record)
    service.store.changed()
    # The operation runs in its own task: if the client disconnects, the stored operation is still executed.
    accepted: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
    service.spawn(name, _accept(service, record, undo, accepted))
    if (failure := await asyncio.shield(accepted)) is not None:
        raise failure
    return record.pb(api)


async def _accept(
    service: Service, record: OperationRecord, undo: Undo, accepted: asyncio.Future[ApiError | None]
) -> None:
    """Store an operation and execute it; if it cannot be stored, revert the changes of its request."""
    try:
        await service.store.flush()
    except ApiError as failure:
        service.state.operations.remove(record.name)
        undo()
        service.store.changed()
        accepted.set_result(failure)
        return
    except asyncio.CancelledError:
        accepted.cancel()
        raise
    accepted.set_result(None)
    await run(service, record)


def repeated(service: Service, api: str, verb: str, target: str, request_id: str) -> Message | None:
    """Return the operation that an earlier request with the same idempotency key has started, or None."""
    if not request_id:
        return None
    for record in service.state.operations.below(split(target)[0]):
        if record.request_id == request_id and record.verb == verb and record.target == target:
            return record.pb(api)
    return None


async def run(service: Service, record: OperationRecord) -> None:
    """Execute an operation after its minimum duration, and store its result or its error."""
    if record.verb not in AT_ONCE:
        await asyncio.sleep(record.created + service.seconds - time.time())
    try:
        response = await EFFECTS[record.verb](service, record)
    except ApiError as failure:
        record.finish(time.time(), failure=failure)
    except BackendError as failure:
        record.finish(time.time(), failure=ApiError(Code.INTERNAL, str(failure)))
    except Exception as failure:
        logging.getLogger(__name__).exception("%s of %s failed", record.verb, record.target)
        record.finish(time.time(), failure=ApiError(Code.INTERNAL, f"{type(failure).__name__}: {failure}"))
    else:
        record.finish(time.time(), response=response)
    service.store.changed()
    await service.store.settle()


def resume(service: Service) -> None:
    """Continue the operations that an earlier process of the API left unfinished."""
    for record in sorted(service.state.operations, key=lambda record: record.created):
        if not record.done:
            service.spawn(record.name, run(service, record))


def _forget_old(service: Service) -> None:
    operations = service.state.operations
    if len(operations) <= KEEP_COUNT:
        return
    for record in [record for record in operations if record.done and record.ended < time.time() - KEEP_SECONDS]:
        operations.remove(record.name)


def _find(service: Service, name: str) -> OperationRecord:
    service.resource(name, "operations")
    return service.state.operations.get(name)


async def get_operation(service: Service, api: str, request: Message) -> Message:
    """Handle google.longrunning.Operations.GetOperation."""
    return _find(service, request.name).pb(api)


async def list_operations(service: Service, api: str, request: Message) -> Message:
    """Handle google.longrunning.Operations.ListOperations; the list is sorted by name."""
    if request.filter:
        raise ApiError(Code.UNIMPLEMENTED, "filter: the lab does not filter operations")
    location = service.location(request.name, wildcard=True)
    page = paged(
        api,
        request,
        lambda last: service.state.operations.below(location, last),
        parent=request.name,
    )
    return operations_pb2.ListOperationsResponse(
        operations=[record.pb(api) for record in page.items], next_page_token=page.token
    )


async def delete_operation(service: Service, api: str, request: Message) -> Message:
    """Handle google.longrunning.Operations.DeleteOperation."""
    record = _find(service, request.name)
    if not record.done:
        raise precondition(f"operation {record.name} is still running")
    service.state.operations.remove(record.name)
    service.store.changed()
    try:
        await service.store.flush()
    except ApiError:
        service.state.operations.add(record)
        raise
    return empty_pb2.Empty()


async def cancel_operation(service: Service, api: str, request: Message) -> Message:
    """Handle google.longrunning.Operations.CancelOperation: only the creation of a node can be cancelled."""
    record = _find(service, request.name)
    if not record.done:
        record.cancel_requested = True
        record.touch()
        service.store.changed()
        await service.store.flush()  # after an error here, the client can repeat the request
    return empty_pb2.Empty()


async def wait_operation(service: Service, api: str, request: Message) -> Message:
    """Handle google.longrunning.Operations.WaitOperation: wait until the operation ends or the timeout expires."""
    record = _find(service, request.name)
    task = service.running.get(record.name)
    if task is not None:
        limit = request.timeout.ToMilliseconds() / 1000 if request.HasField("timeout") else None
        await asyncio.wait({task}, timeout=limit)
    return record.pb(api)
