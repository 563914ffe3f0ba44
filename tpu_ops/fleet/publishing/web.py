"""Reads a published snapshot from a web server, over https, with a time limit and a maximum size."""

from __future__ import annotations

import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from tpu_ops.errors import CloudError

_CHUNK = 1024 * 1024
_FAILED = "the published snapshot cannot be read"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https only."""

    def redirect_request(  # noqa: PLR0917 - urllib calls it so
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Return the request that follows a redirect; reject a redirect to another scheme than https."""
        if urlsplit(newurl).scheme != "https":
            raise CloudError(
                f"the web server redirects to {newurl.partition('?')[0]!r:.100}, which is not https",
                where=req.full_url.partition("?")[0],
                fix="use the new address directly, if you trust it",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def read(url: str, where: str, *, limit: int, timeout: float) -> bytes:
    """Return the content of a web address.

    Args:
        url: ``https://...``, or ``http://...`` on this machine.
        where: The address as errors show it.
        limit: Maximum size of the content, in bytes.
        timeout: Seconds for the whole request.

    Raises:
        CloudError: The address cannot be read in time, or its content is larger.
    """
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(_read(url, where, limit=limit, timeout=timeout))
        except Exception as exc:  # the waiting thread raises the exception
            answers.put(exc)

    # Limit the whole request in the caller's thread: a socket's timeout applies to each read only, and name resolution
    # has no timeout.
    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise CloudError(
            f"{_FAILED}: the download took longer than {timeout:g} s",
            where=where,
            fix="check the address and the network",
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _read(url: str, where: str, *, limit: int, timeout: float) -> bytes:
    handlers: list[Any] = [_Redirects()]
    if url.startswith("http://"):
        # An http address is on this machine: use no proxy.
        handlers.append(urllib.request.ProxyHandler({}))
    deadline, data = time.monotonic() + timeout, bytearray()
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout) as answer:
            while piece := answer.read1(_CHUNK):
                data += piece
                if len(data) > limit:
                    raise CloudError(
                        f"the published snapshot is larger than {limit // 2**20} MiB",
                        where=where,
                        fix="is it a snapshot?",
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the download took longer than {timeout:g} s")
    except urllib.error.HTTPError as exc:
        with exc:
            raise CloudError(f"{_FAILED}: HTTP {exc.code}", where=where, fix="ask the snapshot's publisher") from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = getattr(exc, "reason", "") or exc
        raise CloudError(f"{_FAILED}: {reason}", where=where, fix="check the address and the network") from exc
    return bytes(data)
