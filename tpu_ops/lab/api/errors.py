"""The errors that the API answers: a status code and a message, the same for gRPC and REST."""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """Status codes of google.rpc.Code, each with its number and HTTP status."""

    CANCELLED = (1, 499)
    UNKNOWN = (2, 500)
    INVALID_ARGUMENT = (3, 400)
    DEADLINE_EXCEEDED = (4, 504)
    NOT_FOUND = (5, 404)
    ALREADY_EXISTS = (6, 409)
    PERMISSION_DENIED = (7, 403)
    RESOURCE_EXHAUSTED = (8, 429)
    FAILED_PRECONDITION = (9, 400)
    ABORTED = (10, 409)
    OUT_OF_RANGE = (11, 400)
    UNIMPLEMENTED = (12, 501)
    INTERNAL = (13, 500)
    UNAVAILABLE = (14, 503)
    DATA_LOSS = (15, 500)
    UNAUTHENTICATED = (16, 401)

    @property
    def number(self) -> int:
        """The code's number in google.rpc.Code."""
        return self.value[0]

    @property
    def http(self) -> int:
        """The HTTP status of a REST answer with this code."""
        return self.value[1]


class ApiError(Exception):
    """An error that the API answers to a request.

    Args:
        code: Status code of google.rpc.Code.
        message: One sentence that names the resource or the field.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(Code.INVALID_ARGUMENT, message)


def not_found(name: str) -> ApiError:
    """Return the error for a resource that does not exist."""
    return ApiError(Code.NOT_FOUND, f"Resource '{name}' was not found")


def already_exists(name: str) -> ApiError:
    """Return the error for a resource that already exists."""
    return ApiError(Code.ALREADY_EXISTS, f"Resource '{name}' already exists")


def precondition(message: str) -> ApiError:
    """Return the error for a request that the resource's current state does not allow."""
    return ApiError(Code.FAILED_PRECONDITION, message)
