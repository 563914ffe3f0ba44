"""Paginated lists of the Cloud TPU API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tpu_ops.cloud.client import ApiError

#: Maximum time for all pages of a list, as a multiple of the timeout of one call.
PATIENCE = 5


def pages(
    ask: Callable[[str], Any], *, where: str, timeout: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Any]:
    """Yield the pages of a list; each page is requested at most once, and for a limited time.

    Args:
        ask: Requests one page, given its token; the token of the first page is empty.
        where: Subject of errors: what is listed.
        timeout: Seconds for one call.
        clock: Returns the monotonic time in seconds.

    Raises:
        ApiError: A page's token occurs twice, or the list has not ended in time.
    """
    limit, token = PATIENCE * timeout, ""
    start, seen = clock(), {token}
    while True:
        page = ask(token)
        yield page
        token = page.next_page_token
        if not token:
            return
        if token in seen:
            what = "the API's list does not end: one of its pages leads back to an earlier one"
            raise ApiError(what, status="INTERNAL", where=where, fix="try again later")
        if clock() - start > limit:
            what = f"the API's list had not ended after {limit:g} s and {len(seen)} pages"
            fix = "name the zones, or raise request_timeout in inventory/tpu_vm.yml"
            raise ApiError(what, status="DEADLINE_EXCEEDED", where=where, fix=fix)
        seen.add(token)
