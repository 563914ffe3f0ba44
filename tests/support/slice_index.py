"""The program slice_index.py of the role python in this process, as a package index that counts what it sends."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.support.fleet import ROOT

#: Called before each part of an answer is sent, with the client's User-Agent, the path, and the bytes sent so far.
Hook = Callable[[str, str, int], None]


def program() -> ModuleType:
    """Return the program as a module."""
    path = ROOT / "roles/python/files/slice_index.py"
    spec = importlib.util.spec_from_file_location("slice_index", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Everybody:
    """The set of all addresses."""

    def __contains__(self, address: object) -> bool:
        return True


@contextmanager
def serving(
    address: str,
    upstream: str,
    sent: Counter[str],
    readers: Container[str] | None = None,
    hook: Hook = lambda *_: None,
) -> Iterator[str]:
    """Serve an index's files on a free port, and yield the URL.

    Args:
        address: Where to listen.
        upstream: URL of the index; empty for pip's default.
        sent: Counts bytes by the client's address.
        readers: Addresses of the clients that may read; None means all.
        hook: See `Hook`.
    """
    module = program()
    index = module.Index(upstream or module.default_index(), "http://127.0.0.1:9")
    answering: Any = module.handler(index, readers or Everybody())

    class Counting(answering):  # type: ignore[misc]
        def answer(self, chunks: Iterable[bytes], length: int, kind: str) -> None:
            def counted() -> Iterator[bytes]:
                so_far = 0
                for chunk in chunks:
                    hook(self.headers["User-Agent"] or "", self.path, so_far)
                    so_far += len(chunk)
                    sent[self.client_address[0]] += len(chunk)
                    yield chunk

            super().answer(counted(), length, kind)

    with module.Server((address, 0), Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{address}:{server.server_address[1]}"
        finally:
            server.shutdown()
